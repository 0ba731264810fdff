"""The official client against `/v1/files` and `/v1/batches`: results, refusals, and a server that ends in between."""

import contextlib
import errno
import io
import json
import os
import resource
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from http_parts import ToolTokenizer, browse, http_served, openai_client
from serve_parts import WAIT_S, Served, wait_until

from jaxserve.errors import EngineStopped, QueueFull
from jaxserve.serve.http.batches import runner, store
from jaxserve.serve.http.batches.bodies import BatchObject, RequestCounts
from jaxserve.serve.http.batches.runner import check_lines
from jaxserve.serve.http.batches.store import BatchStore, read_results
from jaxserve.serve.http.errors import HttpRefusal

KEYS = ("sk-one", "sk-two")
CHATS: Any = "/v1/chat/completions"


def line(name: str, **body: Any) -> str:
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi "}], "max_tokens": 3, **body}
    return json.dumps({"custom_id": name, "method": "POST", "url": CHATS, "body": body})


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("\n".join(KEYS))
    return str(path)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, keys: str) -> Iterator[Served]:
    parts = Served(tokenizer=ToolTokenizer(), vocab_size=259)
    folder = tmp_path_factory.mktemp("batches")
    with http_served(
        parts, api_keys_file=keys, batch_dir=str(folder), batch_file_bytes=20_000, batch_lines=4, max_body_bytes=8000
    ):
        yield parts
    parts.scheduler.check()


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai_client(server, KEYS[0]) as client:
        yield client


def begin(client: openai.OpenAI, *lines: str, endpoint: Any = CHATS) -> str:
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"a": "b"})
    return made.id


def end_of(client: openai.OpenAI, batch_id: str) -> openai.types.Batch:
    ended = ("completed", "failed", "cancelled", "expired")
    wait_until(lambda: client.batches.retrieve(batch_id).status in ended, "the batch ends")
    return client.batches.retrieve(batch_id)


def results(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    found = [json.loads(each) for each in client.files.content(file_id).text.splitlines()]
    assert len({each["custom_id"] for each in found}) == len(found), "no line is answered twice"
    return {each["custom_id"]: each["response"] for each in found}


def test_a_batch(client: openai.OpenAI) -> None:
    """Results are those of single calls, refusals are results too, and the order is free."""
    lines = [line(f"n{k}", max_tokens=k + 1) for k in range(10)]
    batch = end_of(client, begin(client, *lines, "", line("wrong", temperature=-1)))
    assert (batch.status, batch.metadata, batch.errors) == ("completed", {"a": "b"}, None)
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (11, 10, 1)
    good = results(client, batch.output_file_id)
    assert {name: good[name]["body"]["choices"][0]["message"]["content"] for name in ("n0", "n2")} == {
        "n0": "!",
        "n2": '!"#',
    }
    assert good["n0"]["request_id"] in good["n0"]["body"]["id"]
    (bad,) = results(client, batch.error_file_id).values()
    assert (bad["status_code"], bad["body"]["error"]["type"]) == (400, "invalid_request_error")
    assert client.files.retrieve(str(batch.output_file_id)).purpose == "batch_output"
    assert next(one.id for one in client.batches.list(limit=1)) == batch.id
    client.files.delete(batch.input_file_id)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(batch.input_file_id)


def test_a_file_that_is_wrong_fails_its_batch(client: openai.OpenAI) -> None:
    wrong = [
        ("{", "no JSON"),
        (line("a"), None),
        (line("a"), "twice"),
        (line("b").replace(CHATS, "/v1/completions"), "method and url"),
        (line("c", stream=True), "cannot stream"),
        ("[]", "custom_id"),
        ('{"custom_id": "d", "method": "POST", "url": "/v1/chat/completions"}', "body must be an object"),
    ]
    batch = end_of(client, begin(client, *(text for text, _ in wrong)))
    assert batch.status == "failed"
    assert batch.errors is not None
    problems = {problem.line: problem.message for problem in batch.errors.data or ()}
    expected = {number: text for number, (_, text) in enumerate(wrong, start=1) if text is not None}
    assert problems.keys() == expected.keys()
    assert all(text in str(problems[number]) for number, text in expected.items())
    empty = end_of(client, begin(client, "\n"))
    assert empty.errors is not None and empty.errors.data is not None
    assert empty.errors.data[0].code == "empty_file"


def test_a_batch_is_cancelled_and_keeps_what_it_has(client: openai.OpenAI, server: Served) -> None:
    server.runner.hold()
    try:
        batch_id = begin(client, *(line(f"n{k}") for k in range(30)))
        wait_until(lambda: server.runner.is_held, "the first lines run")
        with pytest.raises(openai.ConflictError, match="still reads"):
            client.files.delete(client.batches.retrieve(batch_id).input_file_id)
        assert client.batches.cancel(batch_id).status == "cancelling"
    finally:
        server.runner.release()
    batch = end_of(client, batch_id)
    assert batch.status == "cancelled"
    assert batch.request_counts is not None
    assert 0 < batch.request_counts.completed < 30
    assert len(results(client, batch.output_file_id)) == batch.request_counts.completed
    with pytest.raises(openai.ConflictError, match="is cancelled already"):
        client.batches.cancel(batch_id)


def test_a_line_waits_for_an_engine_that_is_built_again(
    client: openai.OpenAI, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that comes back is no end of the server, and no result of a line. Nor does the line keep its batch."""
    refusals: list[str] = []

    def refuse(*args: Any, **options: Any) -> Any:
        refusals.append("once")
        raise EngineStopped("the replica is being built again")

    with monkeypatch.context() as dead:
        dead.setattr(server.engine, "submit", refuse)
        first, second = begin(client, line("a")), begin(client, line("b"))
        wait_until(lambda: len(refusals) > 1, "a line is tried again")
        client.batches.cancel(first)
        assert end_of(client, first).status == "cancelled"
    assert end_of(client, second).request_counts == openai.types.BatchRequestCounts(completed=1, failed=0, total=1)


def test_batches_of_one_key_hold_up_none_of_another(
    client: openai.OpenAI, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines that are refused for now, as by a rate of their tenant, leave their places to others meanwhile."""
    submit, refused = server.engine.submit, set[str]()

    def refuse(request: Any, *args: Any, **options: Any) -> Any:
        if request.tenant == "slow":
            refused.add(request.request_id)
            raise QueueFull("the tenant has no credit")
        return submit(request, *args, **options)

    monkeypatch.setattr(server.engine, "submit", refuse)
    slow = begin(client, *(line(f"n{k}", user="slow") for k in range(20)))
    wait_until(lambda: len(refused) >= 4, "its lines are tried")
    with openai_client(server, KEYS[1]) as other:
        assert end_of(other, begin(other, line("a"), line("b"))).status == "completed"
    client.batches.cancel(slow)
    assert end_of(client, slow).status == "cancelled"


def test_a_line_may_have_as_many_bytes_as_a_body(client: openai.OpenAI) -> None:
    batch = end_of(client, begin(client, line("a"), line("b", user="x" * 8000)))
    assert batch.status == "failed" and batch.errors is not None and batch.errors.data is not None
    [problem] = batch.errors.data
    assert (problem.line, problem.code) == (2, "line_too_large") and "max_body_bytes" in problem.message


def test_a_line_may_have_as_many_parts_as_a_body(tmp_path: Path) -> None:
    lines = [line("a", prompt=["a"] * 50), line("b", prompt=[[]] * 50)]
    (tmp_path / "input").write_text("\n".join(lines))
    count, [problem] = check_lines(tmp_path / "input", CHATS, 2**20, 50)
    assert count == 1
    assert (problem.line, problem.code) == (2, "invalid_json_line") and "max_json_parts" in problem.message


@pytest.mark.parametrize(
    "metadata",
    [{f"n{k}": "" for k in range(17)}, {"n" * 65: ""}, {"n": "v" * 513}, {"n": [[]] * 400}],
    ids=["pairs", "name", "value", "nested"],
)
def test_little_is_kept_beside_a_batch(client: openai.OpenAI, metadata: Any) -> None:
    for keep in (
        lambda: client.batches.create(
            input_file_id="file-1", endpoint=CHATS, completion_window="24h", metadata=metadata
        ),
        lambda: client.responses.create(model="fake", input="hi", metadata=metadata),
    ):
        with pytest.raises(openai.BadRequestError, match="at most 16 pairs"):
            keep()


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("number", "status", "remedy"),
    [
        (errno.EDQUOT, 507, "has no room for it.*the quota of its user"),
        (errno.EFBIG, 507, "has no room for it.*no larger files"),
        (errno.ENOSPC, 507, "has no room for it.*when there is room"),
        (errno.EROFS, 507, "has no room for it.*mounted for reading"),
        (errno.EMFILE, 503, "can be opened now.*try again later"),
    ],
)
def test_each_call_that_changes_files_tells_why_the_disk_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, status: int, remedy: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    parts = Served(tokenizer=ToolTokenizer(), vocab_size=259)
    with http_served(parts, batch_dir=str(tmp_path)) as server, openai_client(server) as client:
        server.runner.hold()
        batch = begin(client, line("a"))
        wait_until(lambda: client.batches.retrieve(batch).status == "in_progress", "its line runs")
        file = client.files.create(file=("in.jsonl", b"a"), purpose="batch").id
        before = {path for path in tmp_path.rglob("*") if not path.name.endswith(".tmp")}
        with monkeypatch.context() as disk:
            disk.setattr(os, "fsync", fail)
            for call in (
                lambda: client.files.create(file=("in.jsonl", b"a"), purpose="batch"),
                lambda: client.batches.create(input_file_id=file, endpoint=CHATS, completion_window="24h"),
                lambda: client.batches.cancel(batch),
            ):
                assert told(call, remedy) == status
        assert set(tmp_path.rglob("*")) == before, "nothing is left of what was refused"
        with monkeypatch.context() as disk:
            disk.setattr(Path, "unlink", fail)
            assert told(lambda: client.files.delete(file), remedy) == status
        client.files.delete(file)
        server.release()
        assert end_of(client, batch).status == "completed"


def told(call: Any, remedy: str) -> int:
    with pytest.raises(openai.APIStatusError, match=remedy) as refused:
        call()
    return refused.value.status_code


def test_what_cannot_be_opened_now_is_neither_damaged_nor_left_out(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a list would lack it, a batch would be forgotten, and a file deleted that a batch reads."""

    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    file = client.files.create(file=("in.jsonl", b"a"), purpose="batch").id
    with monkeypatch.context() as disk:
        disk.setattr(store, "_read", fail)
        for call in (
            lambda: client.files.list(),
            lambda: client.files.retrieve(file),
            lambda: client.files.content(file),
            lambda: client.files.delete(file),
        ):
            assert told(call, "can be opened now") == 503
    with monkeypatch.context() as disk:
        disk.setattr(os, "scandir", fail)
        assert told(lambda: client.batches.list(), "can be opened now") == 503
    assert client.files.retrieve(file).id == file


@contextlib.contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """As `ulimit -f` says it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_an_upload_of_megabytes_needs_no_disk_but_that_of_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", None)
    parts = Served(tokenizer=ToolTokenizer(), vocab_size=259)
    with http_served(parts, batch_dir=str(tmp_path)) as server, openai_client(server) as client:
        data = bytes(3_000_000)
        with largest_file(2_000_000):
            refused = told(lambda: client.files.create(file=("a", data), purpose="batch"), "ulimit -f")
        assert (refused, list((tmp_path / "files").iterdir())) == (507, [])
        whole = client.files.create(file=("a", data), purpose="batch")
        assert (whole.bytes, client.files.content(whole.id).content) == (len(data), data)


def test_a_batch_whose_results_are_more_than_a_file_may_have_fails_once_and_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun: list[str] = []
    call = runner._call

    async def counted(*given: Any) -> Any:
        begun.append(json.loads(given[2])["user"])
        return await call(*given)

    monkeypatch.setattr(runner, "_call", counted)
    monkeypatch.setattr(runner, "_AGAIN_S", 0.05)
    asked = {"logprobs": True, "top_logprobs": 20, "max_tokens": 200, "ignore_eos": True}
    parts = Served(tokenizer=ToolTokenizer(), vocab_size=259)
    with http_served(parts, batch_dir=str(tmp_path), batch_lines=1) as server, openai_client(server) as client:
        server.runner.hold()
        batch = begin(client, *(line(f"n{k}", user=f"n{k}", **asked) for k in range(6)))
        with largest_file(1_000_000):
            server.release()
            ended = end_of(client, batch)
        second = end_of(client, begin(client, line("a", user="a")))
        counts, (problem,) = ended.request_counts, ended.errors.data  # pyright: ignore
        assert (ended.status, problem.code) == ("failed", "file_too_large") and "ulimit -f" in problem.message
        kept = results(client, ended.output_file_id)
        assert 0 < len(kept) == counts.completed < 6 and [*kept] == [f"n{k}" for k in range(len(kept))]
        assert begun == [*(f"n{k}" for k in range(len(kept) + 1)), "a"], "no line is answered again, and none behind it"
        assert second.status == "completed"
    assert "Traceback" not in caplog.text and "tried again" not in caplog.text


def test_a_full_disk_is_told_and_a_batch_goes_on_when_there_is_room(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner, "_AGAIN_S", 0.05)
    file = client.files.create(file=("in.jsonl", line("a").encode()), purpose="batch")
    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        for call in (
            lambda: client.files.create(file=("in.jsonl", b"a"), purpose="batch"),
            lambda: begin_with(client, file.id),
        ):
            with pytest.raises(openai.InternalServerError, match="batch_dir has no room") as refused:
                call()
            assert refused.value.status_code == 507
    with monkeypatch.context() as disk:
        disk.setattr(runner, "read_results", full)  # within the work, after the batch was accepted
        batch = begin_with(client, file.id).id
        wait_until(lambda: sum("is tried again in" in text for text in caplog.messages) > 1, "it is tried again")
    assert end_of(client, batch).status == "completed", "nobody made another batch"
    assert "Traceback" not in caplog.text


def test_a_directory_has_a_limit_and_a_broken_description_hides_no_other(tmp_path: Path) -> None:
    kept_in = BatchStore(str(tmp_path), most_bytes=5 * 4096, most_ended=10)
    kept = [kept_in.add_file(b"key", f"{number}", io.BytesIO(b"{}")) for number in range(2)]
    with pytest.raises(HttpRefusal, match="serve.http.batch_dir_bytes.*delete files"):
        kept_in.add_file(b"key", "large", io.BytesIO(bytes(5000)))
    for damaged in ("[" * 100_000, "[]", "{"):
        (tmp_path / "files" / f"{kept[0].id}.json").write_text(damaged)
        assert [file.id for file in kept_in.files(b"key")] == [kept[1].id]
        with pytest.raises(HttpRefusal, match="is damaged"):
            kept_in.file(b"key", kept[0].id)
    (tmp_path / "files" / "renamed.tmp").symlink_to("nowhere")  # as a file that is renamed between listing and looking
    assert [file.id for file in kept_in.files(b"key")] == [kept[1].id]
    kept_in.remove_file(b"key", kept[1].id)
    assert kept_in.add_file(b"key", "large", io.BytesIO(bytes(5000))).bytes == 5000


def test_one_key_may_fill_the_directory_and_others_still_have_a_part_of_it(tmp_path: Path) -> None:
    kept_in = BatchStore(str(tmp_path), most_bytes=80 * 4096, most_ended=10)
    large = kept_in.add_file(b"one", "large", io.BytesIO(bytes(78 * 4096)))
    with pytest.raises(HttpRefusal, match="this key 323584, of which 81920 always have room, and this one needs 8192"):
        kept_in.add_file(b"one", "more", io.BytesIO(bytes(2 * 4096)))
    small = [kept_in.add_file(b"two", "small", io.BytesIO(b"a")) for _ in range(5)]
    with pytest.raises(HttpRefusal, match=r"serve.http.batch_dir_bytes.*this key 40960, of which 40960 always"):
        kept_in.add_file(b"two", "small", io.BytesIO(b"a"))
    kept_in.remove_file(b"one", large.id)
    assert kept_in.add_file(b"two", "large", io.BytesIO(bytes(60 * 4096)))
    assert len(kept_in.files(b"two")) == len(small) + 1


def test_results_that_are_not_described_yet_are_those_of_their_key(tmp_path: Path) -> None:
    kept_in = BatchStore(str(tmp_path), most_bytes=80 * 4096, most_ended=10)
    source = kept_in.add_file(b"one", "in", io.BytesIO(b"a"))
    batch = BatchObject(
        id=store.new_batch_id(),
        endpoint=CHATS,
        input_file_id=source.id,
        completion_window="24h",
        status="in_progress",
        output_file_id=store.new_file_id(),
        created_at=0,
        expires_at=0,
        request_counts=RequestCounts(),
    )
    kept_in.add_batch(b"one", batch)
    kept_in.content_path(str(batch.output_file_id)).write_bytes(bytes(77 * 4096))
    with pytest.raises(HttpRefusal, match="this key 327680,"):
        kept_in.add_file(b"one", "more", io.BytesIO(b"a"))
    assert kept_in.add_file(b"two", "small", io.BytesIO(b"a"))


def test_a_description_is_read_again_only_when_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept_in = BatchStore(str(tmp_path), most_bytes=2**30, most_ended=10)
    read: list[str] = []
    plain = store._read

    def counted(path: Path, kind: Any) -> Any:
        read.append(path.name)
        return plain(path, kind)

    monkeypatch.setattr(store, "_read", counted)
    first = kept_in.add_file(b"key", "first", io.BytesIO(b"a"))
    for _ in range(3):
        assert [file.id for file in kept_in.files(b"key")] == [first.id]
    second = kept_in.add_file(b"key", "second", io.BytesIO(b"a"))
    assert read == [f"{first.id}.json"]
    path = tmp_path / "files" / f"{first.id}.json"
    path.with_suffix(".tmp").write_text(path.read_text().replace("first", "renamed"))
    path.with_suffix(".tmp").replace(path)
    assert {file.filename for file in kept_in.files(b"key")} == {"renamed", "second"}
    assert sorted(read) == sorted([f"{first.id}.json"] * 2 + [f"{second.id}.json"])
    kept_in.remove_file(b"key", first.id)
    assert [file.id for file in kept_in.files(b"key")] == [second.id]


def test_files_and_batches_belong_to_a_key(client: openai.OpenAI, server: Served) -> None:
    batch = end_of(client, begin(client, line("a")))
    with openai_client(server, KEYS[1]) as other:
        assert not {batch.input_file_id, batch.output_file_id} & {file.id for file in other.files.list()}
        assert batch.id not in {each.id for each in other.batches.list()}
        for call in (
            lambda: other.files.content(str(batch.output_file_id)),
            lambda: other.files.delete(batch.input_file_id),
            lambda: other.batches.retrieve(batch.id),
            lambda: other.batches.cancel(batch.id),
            lambda: begin_with(other, batch.input_file_id),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
    for spelled in (f"bearer {KEYS[0]}", f"BEARER   {KEYS[0]}"):
        with browse(server, authorization=spelled) as http:
            assert http.get(f"/v1/batches/{batch.id}").status_code == 200, spelled


def begin_with(client: openai.OpenAI, file_id: str) -> Any:
    return client.batches.create(input_file_id=file_id, endpoint=CHATS, completion_window="24h")


def test_an_ended_batch_can_be_forgotten_and_its_files_stay(client: openai.OpenAI, server: Served) -> None:
    server.runner.hold()
    batch_id = begin(client, line("a"))
    with (
        browse(server, authorization=f"Bearer {KEYS[0]}") as http,
        browse(server, authorization="Bearer sk-two") as two,
    ):
        path = f"/v1/batches/{batch_id}"
        running = http.delete(path)
        assert running.status_code == 409 and "cancel it" in running.json()["error"]["message"]
        server.release()
        ended = end_of(client, batch_id)
        assert two.delete(path).status_code == 404
        assert http.delete(path).json() == {"id": batch_id, "object": "batch", "deleted": True}
        assert http.delete(path).status_code == http.get(path).status_code == 404
    assert batch_id not in {batch.id for batch in client.batches.list()}
    assert ended.output_file_id is not None
    assert client.files.content(ended.output_file_id).text


def test_of_very_many_ended_batches_the_oldest_of_their_key_go(tmp_path: Path) -> None:
    parts = Served(tokenizer=ToolTokenizer(), vocab_size=259)
    with (
        http_served(parts, batch_dir=str(tmp_path), batch_ended=2),
        openai_client(parts, "one") as one,
        openai_client(parts, "two") as two,
    ):
        others = end_of(two, begin(two, line("a"))).id
        ids = [end_of(one, begin(one, line("a"))).id for _ in range(4)]
        kept = {batch.id for batch in one.batches.list()}
        assert len(kept & set(ids)) == 3 and ids[-1] in kept  # two that had ended when the last was made
        assert [batch.id for batch in two.batches.list()] == [others]


def test_refusals(client: openai.OpenAI, server: Served) -> None:
    with pytest.raises(openai.APIStatusError, match="batch_file_bytes") as large:
        client.files.create(file=("in.jsonl", b"a" * 30_000), purpose="batch")
    assert large.value.status_code == 413
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("in.jsonl", b"a"), purpose="fine-tune")
    with pytest.raises(openai.BadRequestError, match="endpoint"):
        client.batches.create(input_file_id="file-1", endpoint="/v1/moderations", completion_window="24h")
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve("../../etc/passwd")


def test_a_form_needs_a_header_that_no_web_page_sends_with_it(tmp_path: Path, server: Served) -> None:
    form: Any = {"files": {"file": b"a"}, "data": {"purpose": "batch"}}
    with http_served(Served(), batch_dir=str(tmp_path)) as open_server, browse(open_server) as http:
        refused = http.post("/v1/files", **form)
        assert (refused.status_code, "Authorization" in refused.json()["error"]["message"]) == (400, True)
        assert http.post("/v1/files", headers={"authorization": "Bearer any"}, **form).status_code == 200
    with browse(server, **{"x-api-key": KEYS[0]}) as http:  # as every route takes it
        assert http.post("/v1/files", **form).status_code == 200


@pytest.mark.parametrize(
    ("kind", "body", "status", "text"),
    [
        ("application/json", b"{}", 415, "multipart/form-data"),
        ("multipart/form-data", b"--x--", 400, "no boundary"),
        ("multipart/form-data; boundary=x", b"no form", 400, "no form that can be read"),
        ("multipart/form-data; boundary=x", b"--x\r\na: b\r\n\r\n", 400, "no form that can be read"),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\ncontent-disposition: form-data; name="a"\r\n\r\n\r\n' * 200,
            400,
            "100",
        ),
        ("multipart/form-data; boundary=x", b"--x--", 400, "file: Field required"),
    ],
    ids=["json", "boundary", "noise", "nameless", "parts", "empty"],
)
def test_what_is_no_form_with_a_file_is_refused(
    client: openai.OpenAI, server: Served, kind: str, body: bytes, status: int, text: str
) -> None:
    headers = {"authorization": f"Bearer {KEYS[0]}", "content-type": kind}
    with browse(server, **headers) as http:
        refused = http.post("/v1/files", content=body)
    assert (refused.status_code, text in refused.json()["error"]["message"]) == (status, True), refused.text


def test_files_are_listed_by_their_purpose_and_in_pages(tmp_path: Path) -> None:
    with (
        http_served(Served(tokenizer=ToolTokenizer()), batch_dir=str(tmp_path)) as parts,
        openai_client(parts) as client,
    ):
        end_of(client, begin(client, line("a")))
        made = [client.files.create(file=("in.jsonl", b"a"), purpose="batch").id for _ in range(3)]
        every = [file.id for file in client.files.list()]
        assert len(every) == 5
        assert [file.id for file in client.files.list(limit=2)] == every, "the client asks for the next pages"
        assert [file.id for file in client.files.list(limit=2).data] == every[:2]
        assert [file.id for file in client.files.list(after=every[3])] == every[4:]
        assert [file.id for file in client.files.list(order="asc")] == every[::-1]
        [answers] = client.files.list(purpose="batch_output")
        assert {file.id for file in client.files.list(purpose="batch")} == {*every} - {answers.id} > {*made}
        with pytest.raises(openai.NotFoundError, match="after is 'file-1'"):
            client.files.list(after="file-1")


def test_a_batch_goes_on_after_the_end_of_its_server(tmp_path: Path, keys: str) -> None:
    """SIGTERM in the middle, and a line of the results that is only half there: every line is answered once."""
    options: Any = {"api_keys_file": keys, "batch_dir": str(tmp_path), "batch_lines": 2}
    first = Served(tokenizer=ToolTokenizer(), vocab_size=259)
    with http_served(first, drain_s=0.0, **options), openai_client(first, KEYS[0]) as client:
        first.runner.hold(after=9)
        batch_id = begin(client, *(line(f"n{k}") for k in range(12)))
        wait_until(lambda: first.runner.is_held, "some lines are answered")
        first.request_shutdown()
        first.request_shutdown()
        first.runner.release()
        first.wait_for_exit()
    (partial,) = [path for path in tmp_path.glob("files/*.jsonl") if b"status_code" in path.read_bytes()]
    done: list[str] = []
    read_results(partial, done.append)
    assert 0 < len(done) < 12
    with partial.open("ab") as file:
        file.write(b'{"custom_id": "n11", "respon')
    second = Served(tokenizer=ToolTokenizer(), vocab_size=259)
    with http_served(second, **options), openai_client(second, KEYS[0]) as client:
        batch = end_of(client, batch_id)
        found = results(client, batch.output_file_id)
    assert batch.status == "completed"
    assert found.keys() == {f"n{k}" for k in range(12)}
    assert {each["body"]["choices"][0]["message"]["content"] for each in found.values()} == {'!"#'}
    assert batch.request_counts is not None and batch.request_counts.completed == 12


def test_bytes_that_one_key_holds_shut_out_no_other(tmp_path: Path, keys: str) -> None:
    """Uploads without their last byte, as many as are let in: others chat, and the next of this key is told."""
    options: Any = {"api_keys_file": keys, "batch_dir": str(tmp_path), "batch_file_bytes": 30_000}
    parts = Served(tokenizer=ToolTokenizer(), vocab_size=259)
    with http_served(parts, max_bodies_bytes=100_000, **options) as server, contextlib.ExitStack() as stack:
        host, port = server.http_url.removeprefix("http://").split(":")
        head = (
            f"POST /v1/files HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {KEYS[0]}\r\n"
            "content-length: 30000\r\n\r\n"
        )
        held = []
        for _ in range(3):
            held.append(stack.enter_context(socket.create_connection((host, int(port)), timeout=WAIT_S)))
            held[-1].sendall(head.encode() + bytes(29_999))
        fourth = stack.enter_context(socket.create_connection((host, int(port)), timeout=WAIT_S))
        fourth.sendall(head.encode() + bytes(29_999))
        answer = b""
        while b"max_bodies_bytes" not in answer:
            part = fourth.recv(65536)
            assert part, answer
            answer += part
        assert answer.startswith(b"HTTP/1.1 503"), answer
        with openai_client(server, KEYS[1]) as other:
            for _ in range(3):
                assert other.completions.create(model="fake", prompt="hi ", max_tokens=2).choices
        for connection in held:
            connection.close()
        with openai_client(server, KEYS[0]) as client:
            wait_until(lambda: client.files.create(file=("a", bytes(20_000)), purpose="batch").bytes == 20_000, "room")


def test_without_a_directory_there_are_no_batches() -> None:
    with http_served(Served(tokenizer=ToolTokenizer(), vocab_size=259)) as parts, browse(parts) as http:
        assert http.get("/v1/batches").status_code == 404
        assert "/v1/batches" not in http.get("/openapi.json").json()["paths"]


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    """As editors of Windows write it."""
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
    (tmp_path / "input").write_text("".join(json.dumps(line | {"custom_id": i}) + "\n" for i in "ab"), "utf-8-sig")
    assert check_lines(tmp_path / "input", "/v1/completions", 2**20, 2**10) == (2, [])
