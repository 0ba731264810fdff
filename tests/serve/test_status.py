"""Errors as clients see them: every status has a code, and a defect tells nothing but where to look."""

import grpc
import pytest

from jaxserve.errors import (
    DeadlineExceeded,
    EngineStopped,
    InvalidRequest,
    JaxserveError,
    MissingBucket,
    NotFinite,
    QueueFull,
    Status,
    Unauthenticated,
)
from jaxserve.serve.status import GRPC_CODES, HTTP_CODES, public_message, status_of, status_of_call, status_of_grpc


def test_every_status_has_its_own_code_and_the_way_back() -> None:
    assert set(GRPC_CODES) == set(Status)
    assert len(set(GRPC_CODES.values())) == len(Status)
    for status, code in GRPC_CODES.items():
        assert status_of_grpc(code) is status


def test_every_status_has_its_own_http_code() -> None:
    assert set(HTTP_CODES) == set(Status)
    assert len(set(HTTP_CODES.values())) == len(Status)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest("x"), grpc.StatusCode.INVALID_ARGUMENT),
        (Unauthenticated("x"), grpc.StatusCode.UNAUTHENTICATED),
        (DeadlineExceeded("x"), grpc.StatusCode.DEADLINE_EXCEEDED),
        (QueueFull("x"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (EngineStopped("x"), grpc.StatusCode.UNAVAILABLE),
        (MissingBucket("x"), grpc.StatusCode.INTERNAL),
        (ZeroDivisionError("x"), grpc.StatusCode.INTERNAL),
    ],
)
def test_codes(error: Exception, code: grpc.StatusCode) -> None:
    assert GRPC_CODES[status_of(error)] is code


def test_a_code_of_no_status_is_internal() -> None:
    assert status_of_grpc(grpc.StatusCode.UNIMPLEMENTED) is Status.INTERNAL


@pytest.mark.parametrize(
    "error", [KeyError("/etc/secret"), JaxserveError("/etc/secret"), AssertionError("/etc/secret")]
)
def test_defects_keep_their_text_to_themselves(error: Exception) -> None:
    message = public_message(error, "error 12ab")
    assert "secret" not in message
    assert "error 12ab" in message


def test_numbers_that_are_not_finite_are_told_and_are_a_defect_for_clients_too() -> None:
    message = public_message(NotFinite("token 3 is not finite"), "error 12ab")
    assert "token 3 is not finite" in message and "error 12ab" in message
    assert status_of_call(grpc.StatusCode.INTERNAL, message) is Status.INTERNAL


def test_internal_is_a_defect_of_the_server_or_the_end_of_something_before_it() -> None:
    defect = public_message(KeyError("x"), "error 12ab")
    broke_off = f"the answer broke off after 3 tokens: {defect}"  # an ingress on Ray
    assert status_of_call(grpc.StatusCode.INTERNAL, defect) is Status.INTERNAL
    assert status_of_call(grpc.StatusCode.INTERNAL, broke_off) is Status.INTERNAL
    assert status_of_call(grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2") is Status.UNAVAILABLE
    assert status_of_call(grpc.StatusCode.INTERNAL, "The actor died unexpectedly") is Status.UNAVAILABLE
    assert status_of_call(grpc.StatusCode.NOT_FOUND, "no model") is Status.NOT_FOUND


def test_long_messages_are_cut_at_a_character() -> None:
    message = public_message(InvalidRequest("ы" * 5000), "")
    assert message.startswith("ы" * 900)
    assert message.endswith("(shortened)")
    assert len(message.encode()) < 2100
