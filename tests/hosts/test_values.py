"""Frames, digests, facts and silence: the values of the channel, without a network."""

import re

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.config.schema import Config, HostsConfig, ModelConfig, RuntimeConfig, SchedConfig
from jaxserve.errors import PlanCorrupt
from jaxserve.hosts.digest import DigestBook, StepDigest
from jaxserve.hosts.fingerprint import config_facts, device_facts, differences
from jaxserve.hosts.frames import Frame, Kind, decode, encode, make_frame
from jaxserve.hosts.link import Hearing
from jaxserve.sched import StepResult
from jaxserve.testing import ManualClock, make_limits

# ---- frames ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frame", [Frame(Kind.BEAT), Frame(Kind.BYE, -1), Frame(Kind.PLAN, 2**40, b"\0plan\xff")])
def test_a_frame_survives_the_way(frame: Frame) -> None:
    assert decode(encode(frame)) == frame


def test_texts_and_fields() -> None:
    assert decode(encode(make_frame(Kind.FAILED, "der Grund: ü"))).text == "der Grund: ü"
    assert decode(encode(make_frame(Kind.HELLO, {"host": "a", "n": 1}, 3))).take(n=int, host=str) == [1, "a"]
    assert len(make_frame(Kind.FAILED, "x" * 10**6).text) < 10**5, "a reason is not a book"


def test_bytes_that_are_no_frame() -> None:
    raw = encode(Frame(Kind.PLAN, 7))
    for length in range(len(raw)):
        with pytest.raises(PlanCorrupt, match="too short"):
            decode(raw[:length])
    for kind in {*range(256)} - {*Kind}:
        with pytest.raises(PlanCorrupt, match=f"kind {kind}, which this version does not know"):
            decode(bytes([kind]) + raw[1:])


# ---- digests ---------------------------------------------------------------------------------------------------------


def run_steps(fed: list[bytes], tokens: list[list[int]]) -> list[bytes]:
    digest = StepDigest()
    found = []
    for seq, (data, token_ids) in enumerate(zip(fed, tokens, strict=True)):
        digest.observe(data)
        found.append(digest.chain(seq, digest.take_inputs(), StepResult(token_ids=token_ids)))
    return found


def test_a_digest_covers_what_went_in_and_what_came_out() -> None:
    base = run_steps([b"abc", b"d"], [[1, 2], [3]])
    assert base == run_steps([b"abc", b"d"], [[1, 2], [3]])
    other_input = run_steps([b"abX", b"d"], [[1, 2], [3]])
    other_output = run_steps([b"abc", b"d"], [[1, 9], [3]])
    for other in (other_input, other_output):
        assert base[0] != other[0]
        assert base[1] != other[1], "a difference must not be forgotten by the next step"


def test_the_digest_of_a_step_does_not_take_in_the_next_one() -> None:
    """The next step is dispatched before this one is read."""
    digest = StepDigest()
    digest.observe(b"a")
    first = digest.take_inputs()
    digest.observe(b"b")
    second = digest.take_inputs()
    late = [digest.chain(i, data, StepResult(token_ids=[i])) for i, data in enumerate((first, second))]
    assert late == run_steps([b"a", b"b"], [[0], [1]])


def test_the_book_compares_early_and_late_reports() -> None:
    book = DigestBook([1, 2])
    assert book.add_report(1, 0, b"x") is None, "process 0 has not finished it yet"
    assert (book.confirmed, book.agreed) == (-1, -1)
    assert book.add_own(0, b"x") is None
    assert book.add_own(1, b"y") is None
    assert book.add_report(2, 1, b"y") is None
    assert (book.confirmed, book.agreed) == (0, 0)
    assert book.add_report(1, 1, b"y") is None
    assert (book.confirmed, book.agreed) == (1, 1)


def test_the_book_names_who_differs_and_since_when() -> None:
    book = DigestBook([1, 2])
    for seq in range(6):
        assert book.add_own(seq, bytes([seq])) is None
    assert book.add_report(1, 2, b"\2") is None
    assert book.add_report(2, 3, b"\3") is None
    found = book.add_report(1, 5, b"other")
    assert found is not None
    assert found == (1, 5, 2)
    early = DigestBook([1])
    assert early.add_report(1, 0, b"a") is None
    assert early.add_own(0, b"b") == (1, 0, -1)


def test_the_book_forgets_what_all_have_confirmed() -> None:
    book = DigestBook([1])
    for seq in range(10_000):
        book.add_own(seq, b"x")
        if seq % 16 == 15:
            book.add_report(1, seq, b"x")
    assert len(book._own) <= 17


# ---- facts -----------------------------------------------------------------------------------------------------------


def test_facts_differ_where_it_matters(tmp_path) -> None:
    base = _facts(Config(), _checkpoint(tmp_path / "a"))
    local = Config(
        model=ModelConfig(path="/elsewhere"),
        hosts=HostsConfig(coordinator="b:1", process_id=1),
        runtime=RuntimeConfig(compile_cache=None, log_level="debug"),
    )
    assert _facts(local, _checkpoint(tmp_path / "b")) == base, "each host may have its own paths"
    other = Config(sched=SchedConfig(max_rows=7))
    assert differences(base, _facts(other, tmp_path / "a"), "process 1 (b)") == [
        "sched.max_rows is null on process 0 and 7 on process 1 (b)"
    ]


@pytest.mark.parametrize("numbers", [slice(None, None, 100), slice(-1000, None)], ids=["few", "last rows"])
@pytest.mark.parametrize("changed", range(12))
def test_one_trained_tensor_makes_another_checkpoint(tmp_path, changed: int, numbers: slice) -> None:
    """Hosts compare this digest, and pages of keys and values are found again by it: those of other weights must not
    be."""
    facts: list[dict[str, str]] = []
    for step in range(2):
        tensors = {f"layers.{i:02d}.weight": np.zeros(1 << 17, np.float32) for i in range(12)}
        tensors[f"layers.{changed:02d}.weight"][numbers] = step
        directory = _checkpoint(tmp_path / f"step {step}")
        save_file(tensors, directory / "model.safetensors")
        facts.append(_facts(Config(), directory))
    (line,) = differences(facts[0], facts[1], "process 1 (b)")
    assert re.match(r"checkpoint is \d{7} bytes, digest [0-9a-f]{16} on process 0 and ", line)


@pytest.mark.parametrize("at", [0, 1 << 20, 2_599_999])
def test_other_files_have_samples_at_even_distances(tmp_path, at: int) -> None:
    weights = bytearray(2_600_000)
    facts: list[dict[str, str]] = []
    for name in ("a", "b"):
        directory = _checkpoint(tmp_path / name)
        (directory / "weights.bin").write_bytes(weights)
        facts.append(_facts(Config(), directory))
        weights[at] = 1
    (line,) = differences(facts[0], facts[1], "process 1 (b)")
    assert line.startswith("checkpoint is ")


def test_random_weights_need_the_config_alone(tmp_path) -> None:
    config = Config(model=ModelConfig(random_weights=True))
    base = _facts(config, _checkpoint(tmp_path / "a"))
    other = _checkpoint(tmp_path / "b")
    (other / "model.safetensors").unlink()
    assert _facts(config, other) == base


def test_a_version_and_a_pool_can_differ(tmp_path) -> None:
    checkpoint = _checkpoint(tmp_path / "a")
    found = differences(config_facts(Config(), checkpoint, "1.0"), config_facts(Config(), checkpoint, "1.1"), "p")
    assert found == ["version of jaxserve is 1.0 on process 0 and 1.1 on p"]
    here = device_facts(make_limits(num_pages=32), {"model": "a"})
    there = device_facts(make_limits(num_pages=33), {"model": "b" * 500})
    pages, model = differences(here, there, "p")
    assert pages == "pages is 32 of 4 tokens on process 0 and 33 of 4 tokens on p"
    windows = device_facts(make_limits(windows=(None, 8)), {})
    assert differences(device_facts(make_limits(), {}), windows, "p") == [
        "page groups is all on process 0 and all 8 on p"
    ]
    assert len(model) < 200, "a long fact is cut"
    assert differences({"a": "1"}, {}, "p") == ["a is 1 on process 0 and absent on p"]


def _facts(config: Config, checkpoint) -> dict[str, str]:
    return config_facts(config, checkpoint, "1.0")


def _checkpoint(directory):
    directory.mkdir()
    (directory / "config.json").write_text('{"layers": 1}\n')
    (directory / "model.safetensors").write_bytes(bytes(range(240)) * 2500)
    (directory / ".cache").write_text(str(directory))
    return directory


# ---- silence ---------------------------------------------------------------------------------------------------------


def test_only_those_who_were_heard_can_fall_silent() -> None:
    clock = ManualClock()
    hearing = Hearing(4.0, clock)
    hearing.heard(1)
    hearing.heard(2)
    for _ in range(4):
        clock.advance(1.0)
        hearing.heard(2)
        assert hearing.silent() == []
    clock.advance(1.0)
    assert hearing.silent() == [(1, 5.0)]


def test_whoever_slept_blames_nobody() -> None:
    clock = ManualClock()
    hearing = Hearing(4.0, clock)
    hearing.heard(1)
    clock.advance(3600.0)
    assert hearing.silent() == []
    for _ in range(5):
        clock.advance(1.0)
        silent = hearing.silent()
    assert silent == [(1, 5.0)], "the grace is given once"
