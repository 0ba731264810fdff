"""The loop on a fake device: order of a step, ends of every kind, and failures that stay where they belong."""

import asyncio
import dataclasses
import sys
import threading
import time

import pytest

from jaxserve.api import FinishReason, Known, RequestOptions, Resume, SamplingParams
from jaxserve.engine import AsyncEngine, CacheControl, Engine, ModelInfo, Update
from jaxserve.errors import (
    DeadlineExceeded,
    EngineStopped,
    InvalidRequest,
    PromptTooLong,
    QueueFull,
    RequestRejected,
    UnsupportedOption,
)
from jaxserve.sched import ContinuousScheduler, create_scheduler
from jaxserve.testing import ByteTokenizer, FakeRunner, make_limits

WAIT_S = 120.0  # for anything that must happen: far more than a busy machine takes
GREEDY = SamplingParams(temperature=0.0, max_tokens=5)
MODEL = ModelInfo(name="fake", vocab_size=259, max_model_len=64, eos_token_ids=(257,))
BYTES = ByteTokenizer()


class Parts:
    """An engine on a fake runner whose next token is the byte after the last one."""

    def __init__(
        self,
        *,
        max_waiting: int = 100,
        tokenizer: ByteTokenizer | None = BYTES,
        runner: FakeRunner | None = None,
        model: ModelInfo = MODEL,
        **limits,
    ):
        self.runner = runner or FakeRunner(make_limits(**limits), vocab_size=ByteTokenizer.vocab_size)
        scheduler = create_scheduler("fcfs", self.runner.limits)
        assert isinstance(scheduler, ContinuousScheduler)
        self.scheduler = scheduler
        self.engine = Engine(
            runner=self.runner,
            scheduler=scheduler,
            tokenizer=tokenizer,
            model=model,
            max_waiting=max_waiting,
            seed=5,
        )
        self.updates: dict[str, list[Update]] = {}

    def submit(self, prompt, sampling: SamplingParams = GREEDY, **options) -> str:
        request = self.engine.prepare(prompt, sampling, RequestOptions(**options))
        self.engine.submit(request, self.updates.setdefault(request.request_id, []).append)
        return request.request_id

    def text(self, request_id: str, index: int = 0) -> str:
        return "".join(u.text for u in self.updates[request_id] if u.index == index)

    def end(self, request_id: str) -> Update:
        last = self.updates[request_id][-1]
        assert last.last
        return last


def test_tokens_text_and_reason() -> None:
    parts = Parts()
    request_id = parts.submit("ab")
    parts.engine.run_until_idle()
    assert parts.text(request_id) == "cdefg"
    assert [u.token_ids for u in parts.updates[request_id]] == [(ord(c),) for c in "cdefg"]
    assert parts.end(request_id).finish_reason is FinishReason.LENGTH
    assert [u.last for u in parts.updates[request_id]] == [False] * 4 + [True]
    assert parts.engine.num_live == parts.engine.num_unstarted == parts.scheduler.num_held_pages == 0


def test_next_step_is_launched_before_the_last_is_read() -> None:
    order: list[str] = []

    class Watched(FakeRunner):
        def dispatch(self, plan):
            order.append(f"launch {plan.step_id}")
            flight = super().dispatch(plan)

            class Read:
                def result(self):
                    order.append(f"read {plan.step_id}")
                    return flight.result()

            return Read()

    parts = Parts(runner=Watched(make_limits(), vocab_size=259))
    parts.submit("a", SamplingParams(temperature=0.0, max_tokens=3))
    parts.engine.run_until_idle()
    assert order == ["launch 0", "launch 1", "read 0", "launch 2", "read 1", "read 2"]


def test_stop_string_ends_the_sequence_and_frees_its_pages() -> None:
    parts = Parts()
    request_id = parts.submit("a", SamplingParams(temperature=0.0, max_tokens=40, stop=["ef", "zz"]))
    parts.engine.run_until_idle()
    assert parts.text(request_id) == "bcd"
    assert parts.end(request_id).finish_reason is FinishReason.STOP
    assert parts.end(request_id).stop_reason == "ef"
    assert parts.scheduler.num_held_pages == 0
    assert parts.runner.num_steps < 10, "it ran on after its stop string"


@pytest.mark.parametrize(("include", "text"), [(False, "bcd"), (True, "bcde")])
def test_stop_token(include: bool, text: str) -> None:
    parts = Parts()
    sampling = SamplingParams(
        temperature=0.0, max_tokens=40, stop_token_ids=[ord("e")], include_stop_str_in_output=include
    )
    request_id = parts.submit("a", sampling)
    parts.engine.run_until_idle()
    assert parts.text(request_id) == text
    assert parts.end(request_id).stop_reason == ord("e")
    assert parts.end(request_id).token_ids == (ord("e"),)


def test_end_of_sequence_has_no_stop_reason_and_can_be_ignored() -> None:
    forced = {("stop", 0): {2: 257}, ("go", 0): {2: 257}}
    parts = Parts(runner=FakeRunner(make_limits(), vocab_size=259, forced=forced))
    parts.submit("a", GREEDY, request_id="stop")
    parts.submit("a", SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True), request_id="go")
    parts.engine.run_until_idle()
    assert (parts.text("stop"), parts.end("stop").finish_reason) == ("bc", FinishReason.STOP)
    assert parts.end("stop").stop_reason is None
    assert parts.end("go").finish_reason is FinishReason.LENGTH
    assert len(parts.updates["go"]) == 5


def test_echo_and_ids_only() -> None:
    parts = Parts()
    echoed = parts.submit("ab", GREEDY, echo=True)
    silent = parts.submit("ab", SamplingParams(temperature=0.0, max_tokens=5, detokenize=False))
    parts.engine.run_until_idle()
    assert parts.text(echoed) == "abcdefg"
    assert parts.text(silent) == ""
    assert len(parts.updates[silent]) == 5


def test_the_loop_does_not_decode_what_is_echoed() -> None:
    class Counting(ByteTokenizer):
        longest = 0

        def decode(self, token_ids, **options):
            self.longest = max(self.longest, len(token_ids))
            return super().decode(token_ids, **options)

    tokenizer = Counting()
    parts = Parts(tokenizer=tokenizer)
    echoed = parts.submit("ab" * 20, GREEDY, echo=True)
    assert tokenizer.longest >= 40, "on the caller's thread"
    tokenizer.longest = 0
    parts.engine.run_until_idle()
    assert parts.text(echoed).startswith("ab" * 20)
    assert tokenizer.longest <= 10


def test_n_sequences_end_apart_and_last_comes_once() -> None:
    parts = Parts()
    request_id = parts.submit("a", SamplingParams(n=3, max_tokens=4))
    parts.engine.run_until_idle()
    assert sorted(u.index for u in parts.updates[request_id] if u.finish_reason) == [0, 1, 2]
    assert [u.last for u in parts.updates[request_id]].count(True) == 1
    assert parts.end(request_id).last


def test_abort_waiting_and_in_flight() -> None:
    parts = Parts(max_rows=1)
    running, waiting = parts.submit("a", SamplingParams(max_tokens=40)), parts.submit("b")
    for _ in range(3):
        parts.engine.step()
    parts.engine.abort(waiting)
    parts.engine.abort(running)
    parts.engine.abort("never heard of")
    parts.engine.run_until_idle()
    assert parts.end(running).finish_reason is FinishReason.ABORT
    assert parts.end(waiting).finish_reason is FinishReason.ABORT
    assert parts.scheduler.num_held_pages == parts.engine.num_unstarted == 0
    again = parts.submit("x")
    parts.engine.run_until_idle()
    assert parts.text(again) == "yz{|}"


def test_a_broken_sink_costs_its_own_request() -> None:
    parts = Parts()

    def broken(update: Update) -> None:
        raise RuntimeError("the client's code is broken")

    parts.engine.submit(parts.engine.prepare("a", GREEDY), broken)
    good = parts.submit("a")
    parts.engine.run_until_idle()
    assert parts.text(good) == "bcdef"
    assert parts.engine.failure is None
    assert parts.scheduler.num_held_pages == 0


@pytest.mark.parametrize("where", ["dispatch", "result"])
def test_a_broken_device_ends_every_stream(where) -> None:
    parts = Parts(runner=FakeRunner(make_limits(), vocab_size=259, fail_at=(2, where)))
    ids = [parts.submit("a"), parts.submit("b")]
    parts.engine.start()
    _wait(lambda: parts.engine.failure is not None)
    for request_id in ids:
        assert isinstance(parts.end(request_id).error, EngineStopped)
        assert "injected failure of step 2" in str(parts.end(request_id).error)
    with pytest.raises(EngineStopped, match="injected failure"):
        parts.submit("c")
    parts.engine.stop()


def test_a_scheduler_that_breaks_on_a_request_leaves_no_client_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts()

    def broken(request) -> None:
        raise RuntimeError("the policy is broken")

    monkeypatch.setattr(parts.scheduler, "add", broken)
    ids = [parts.submit("a"), parts.submit("b")]
    with pytest.raises(RuntimeError, match="policy is broken"):
        parts.engine.run_until_idle()
    for request_id in ids:
        assert isinstance(parts.end(request_id).error, EngineStopped)
        assert "policy is broken" in str(parts.end(request_id).error)
    assert parts.engine.num_live == parts.engine.num_unstarted == 0


def test_queue_is_bounded() -> None:
    parts = Parts(max_waiting=2)
    parts.submit("a")
    parts.submit("b")
    with pytest.raises(QueueFull, match="2 sequences are waiting and 1 more are asked for; sched.max_waiting is 2"):
        parts.submit("c")
    parts.engine.run_until_idle()
    parts.submit("c")
    parts.engine.run_until_idle()


def test_same_id_twice_fails_the_second_only() -> None:
    parts = Parts()
    first = parts.submit("a", request_id="same")
    second: list[Update] = []
    parts.engine.submit(parts.engine.prepare("b", GREEDY, RequestOptions(request_id="same")), second.append)
    parts.engine.run_until_idle()
    assert parts.text(first) == "bcdef"
    assert isinstance(second[-1].error, InvalidRequest)


def test_a_resumed_request_that_is_refused_is_told_so_once_for_each_sequence() -> None:
    """One of its sequences ends with its known tokens, before the scheduler sees the request."""
    parts = Parts()
    parts.scheduler.resize_pool(1, preempt=False)
    sampling = SamplingParams(temperature=0.0, max_tokens=40, n=2)
    resume = Resume(sequences=(Known((98,) * 40, 40), Known((98,), 1)))
    updates = parts.updates[parts.submit("a", sampling, resume=resume)]
    parts.engine.run_until_idle()
    assert [(update.index, update.finish_reason) for update in updates] == [
        (0, FinishReason.LENGTH),
        (1, FinishReason.ERROR),
    ]
    assert isinstance(updates[-1].error, RequestRejected) and updates[-1].last
    assert parts.engine.load.num_waiting == 0


def test_an_order_for_which_the_loop_came_too_late_is_not_carried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts()
    monkeypatch.setattr("jaxserve.engine.cache_control._TURN_S", 0.0)  # nobody drives the loop meanwhile
    with pytest.raises(DeadlineExceeded, match="will not do"):
        CacheControl(parts.engine).resize(4)
    parts.engine.step()
    assert parts.scheduler.cache_state.grantable == parts.scheduler.limits.num_pages > 4


def test_a_call_that_is_cancelled_in_time_is_not_carried_out() -> None:
    parts = Parts()
    done: list[str] = []
    calls = [parts.engine.call(lambda scheduler, name=name: done.append(name)) for name in ("first", "second")]
    assert calls[0].cancel()
    parts.engine.step()
    assert done == ["second"] and not calls[1].cancel()
    late = parts.engine.call(lambda scheduler: done.append("late"))
    late.cancel()
    parts.engine.stop()
    assert done == ["second"]


def test_a_change_waits_for_the_requests_that_came_before_it() -> None:
    """Also for those that the loop takes out of its inbox together with it, or that wait for an earlier change."""
    parts = Parts()
    ids = [parts.submit("a")]
    ended: list[list[bool]] = []

    def work(runner: object, scheduler: object) -> None:
        ended.append([bool(parts.updates[i]) and parts.updates[i][-1].last for i in ids])

    changes = [parts.engine.change(work, after_running=True)]
    ids.append(parts.submit("b"))
    changes.append(parts.engine.change(work, after_running=True))
    parts.engine.run_until_idle()
    assert ended == [[True, False], [True, True]]
    assert all(change.done() for change in changes) and [parts.end(i).error for i in ids] == [None] * 2


def test_a_change_that_leaves_all_as_it_was_ends_nothing() -> None:
    parts = Parts()
    request_id = parts.submit("a")

    def refuses(runner: object, scheduler: object) -> None:
        raise InvalidRequest("there is no room")

    change = parts.engine.change(refuses, after_running=False, version="other")
    parts.engine.run_until_idle()
    assert isinstance(change.exception(), InvalidRequest) and not parts.end(request_id).weights
    assert parts.text(request_id) == "bcdef"


def test_what_can_never_fit_is_refused_with_the_reason() -> None:
    parts = Parts(num_pages=3, page_size=4)
    request_id = parts.submit(list(range(10)), SamplingParams(max_tokens=20))
    fine = parts.submit("a", SamplingParams(temperature=0.0, max_tokens=3))
    parts.engine.run_until_idle()
    assert isinstance(parts.end(request_id).error, RequestRejected)
    assert parts.text(fine) == "bcd"


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ([], {}, InvalidRequest, "the prompt is empty"),
        ({"prompt_token_ids": []}, {}, InvalidRequest, "the prompt is empty"),
        ([259], {}, InvalidRequest, r"token id 259 is outside the vocabulary; ids are 0..258"),
        ([-1], {}, InvalidRequest, "token id -1"),
        ([1.5], {}, InvalidRequest, "got 1.5 among them"),
        (7, {}, InvalidRequest, "text or a list of token ids, got int"),
        ({"text": "a"}, {}, InvalidRequest, "'prompt' or 'prompt_token_ids'"),
        ("\ud800", {}, InvalidRequest, "not valid Unicode at character 0"),
        ([1] * 64, {}, PromptTooLong, "or raise model.max_len"),
        ([1] * 64, {}, PromptTooLong, "the prompt has 64 tokens; a sequence holds 64"),
        ([1] * 60, {"max_tokens": 5}, InvalidRequest, "ask for at most 4"),
        ("a", {"logit_bias": {300: 1.0}}, InvalidRequest, "300"),
        ("a", {"bad_words": ["much too long for the slots"]}, UnsupportedOption, "a bad word is 27 tokens long"),
    ],
)
def test_bad_input_is_a_typed_error(prompt, options, error, message) -> None:
    with pytest.raises(error, match=message):
        Parts().engine.prepare(prompt, SamplingParams(**options))


def test_a_model_of_short_context_is_not_told_to_be_longer() -> None:
    parts = Parts(model=dataclasses.replace(MODEL, max_position=MODEL.max_model_len))
    with pytest.raises(PromptTooLong, match="take a model of longer context: this one has no more") as caught:
        parts.engine.prepare([1] * 64, SamplingParams())
    assert "model.max_len" not in str(caught.value)


def test_truncation_keeps_the_end_and_null_max_tokens_takes_what_fits() -> None:
    request = Parts().engine.prepare([1] * 70 + [2, 3], SamplingParams(truncate_prompt_tokens=2, max_tokens=None))
    assert request.prompt_token_ids == (2, 3)
    assert request.max_tokens == 62


def test_seeds_differ_by_request_and_repeat_by_engine() -> None:
    seeds = [[p.prepare("a", GREEDY).seed for _ in range(3)] for p in (Parts().engine, Parts().engine)]
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 3
    assert Parts().engine.prepare("a", SamplingParams(seed=9)).seed == 9


def test_without_a_tokenizer_text_options_are_refused() -> None:
    engine = Parts(tokenizer=None).engine
    for sampling in (SamplingParams(stop=["x"]), SamplingParams(bad_words=["x"])):
        with pytest.raises(UnsupportedOption, match="started without"):
            engine.prepare([1], sampling)
    with pytest.raises(InvalidRequest, match="send prompt_token_ids"):
        engine.prepare("text", GREEDY)


def test_prompts_of_their_own_length_share_only_with_their_like() -> None:
    parts = Parts()
    parts.engine.model = dataclasses.replace(parts.engine.model, private_prompts_above=3)
    salts = [parts.engine.prepare([1] * n, GREEDY).cache_salt for n in (2, 3, 4, 4, 5)]
    assert salts[0] == salts[1] == ""
    assert salts[2] == salts[3] not in ("", salts[4])
    own = [
        parts.engine.prepare([1] * 4, GREEDY, RequestOptions(cache_salt=salt)).cache_salt for salt in ("x", "x", "y")
    ]
    assert own[0] == own[1] not in (salts[2], own[2])


def test_drain_finishes_the_live_and_refuses_the_new() -> None:
    parts = Parts()
    request_id = parts.submit("a")
    parts.engine.start()
    assert parts.engine.drain(WAIT_S)
    assert parts.text(request_id) == "bcdef"
    with pytest.raises(EngineStopped, match="shutting down"):
        parts.submit("b")
    parts.engine.stop()


def test_stop_ends_live_streams() -> None:
    gate = threading.Event()

    class Slow(FakeRunner):
        def dispatch(self, plan):
            gate.set()
            return super().dispatch(plan)

    parts = Parts(runner=Slow(make_limits(max_model_len=64), vocab_size=259))
    parts.engine.start()
    ids = [parts.submit("a", SamplingParams(max_tokens=40, ignore_eos=True)) for _ in range(20)]
    assert gate.wait(WAIT_S)
    parts.engine.stop()
    for request_id in ids:
        assert parts.end(request_id).finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)
    assert parts.scheduler.num_held_pages == 0


async def test_async_streams_are_not_mixed_and_leaving_one_aborts_it() -> None:
    parts = Parts(num_pages=64, max_rows=4)
    parts.engine.start()
    streams = AsyncEngine(parts.engine)

    async def collect(first: str) -> str:
        request = parts.engine.prepare(first, SamplingParams(temperature=0.0, max_tokens=9))
        return "".join([u.text async for u in streams.stream(request)])

    async def leave() -> None:
        async for update in streams.stream(parts.engine.prepare("a", SamplingParams(temperature=0.0, max_tokens=60))):
            if len(update.text):
                break

    texts, _ = await asyncio.gather(asyncio.gather(*(collect(c) for c in "abcdefgh")), leave())
    assert texts == ["".join(chr(ord(c) + i) for i in range(1, 10)) for c in "abcdefgh"]
    assert await asyncio.to_thread(parts.engine.drain, 120.0)
    assert parts.scheduler.num_held_pages == 0
    with pytest.raises(EngineStopped):
        await collect("a")
    parts.engine.stop()
    streams.close()


async def test_work_runs_off_the_event_loop_until_the_streams_are_closed() -> None:
    streams = AsyncEngine(Parts().engine)
    assert await streams.run(threading.get_ident) != threading.get_ident()
    given = asyncio.create_task(streams.run(lambda: time.sleep(0.05) or "done"))
    await asyncio.sleep(0)
    streams.close()
    assert await given == "done", "what was given before is finished"
    with pytest.raises(EngineStopped, match="shutting down"):
        await streams.run(threading.get_ident)


def test_the_chat_template_is_compiled_once_and_may_be_replaced() -> None:
    engine = Parts().engine
    messages = [{"role": "user", "content": "hi"}]
    assert engine.chat_template() is engine.chat_template()
    assert engine.chat_template().render(messages) == "<|chat|>user: hi\n<|chat|>assistant: "
    assert engine.chat_template("{{ bos_token }}{{ eos_token }}").render(messages) == "<s></s>"
    with pytest.raises(InvalidRequest, match="does not compile"):
        engine.chat_template("{% if %}")
    with pytest.raises(InvalidRequest, match="a chat needs a tokenizer"):
        Parts(tokenizer=None).engine.chat_template()


def test_stop_returns_when_its_wake_is_swallowed_by_a_turn() -> None:
    """The loop is between its test and its inbox when `stop` comes: the turn takes the wake, and must look again."""
    engine = Parts().engine
    inside, go_on = threading.Event(), threading.Event()
    set_working = engine._set_working

    def slow(working: bool) -> None:
        if working:
            inside.set()
            assert go_on.wait(WAIT_S)
        set_working(working)

    engine._set_working = slow
    engine.start()
    assert inside.wait(WAIT_S)
    stopping = threading.Thread(target=engine.stop, daemon=True)
    stopping.start()
    _wait(lambda: engine._stop_now.is_set() and not engine._inbox.empty())
    go_on.set()
    stopping.join(WAIT_S)
    assert not stopping.is_alive()


def test_every_accepted_request_is_told_its_end_when_submitters_race_with_stop() -> None:
    old = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(30):
            engine = Parts(max_waiting=10_000).engine
            ends: list[Update] = []
            accepted = [0, 0, 0]

            def work(i: int, engine: Engine = engine, ends: list[Update] = ends, accepted: list[int] = accepted):
                request = engine.prepare("a", GREEDY)
                for number in range(10_000):
                    try:
                        engine.submit(
                            dataclasses.replace(request, request_id=f"{i}-{number}"),
                            lambda update: ends.append(update) if update.last else None,
                        )
                    except EngineStopped:
                        return
                    accepted[i] += 1

            engine.start()
            workers = [threading.Thread(target=work, args=(i,)) for i in range(3)]
            for worker in workers:
                worker.start()
            _wait(lambda accepted=accepted: sum(accepted) > 20)
            engine.stop()
            for worker in workers:
                worker.join(WAIT_S)
            assert len(ends) == sum(accepted)
    finally:
        sys.setswitchinterval(old)


def test_both_of_one_id_are_told_when_the_engine_stops() -> None:
    parts = Parts()
    first = parts.submit("a", SamplingParams(max_tokens=40), request_id="same")
    parts.engine.step()
    second: list[Update] = []
    parts.engine.submit(parts.engine.prepare("b", GREEDY, RequestOptions(request_id="same")), second.append)
    parts.engine.stop()
    assert parts.end(first).finish_reason is FinishReason.ABORT
    assert second[-1].last


def test_a_tokenizer_that_breaks_costs_its_own_request() -> None:
    class Broken(ByteTokenizer):
        def decode(self, ids, *, skip_special_tokens=True):
            if 99 in ids:
                raise ValueError("a defect")
            return super().decode(ids, skip_special_tokens=skip_special_tokens)

    parts = Parts()
    parts.engine.tokenizer = Broken()
    bad, good = parts.submit([99]), parts.submit("x")
    parts.engine.run_until_idle()
    assert "could not be decoded" in str(parts.end(bad).error)
    assert parts.text(good) == "yz{|}"
    late = parts.submit([99])
    parts.engine.stop()
    assert parts.end(late).finish_reason is FinishReason.ABORT


def test_a_broken_sink_of_many_sequences_leaves_nothing_behind() -> None:
    parts = Parts()

    def broken(update: Update) -> None:
        raise RuntimeError("closed")

    request = parts.engine.prepare("a", SamplingParams(n=3, max_tokens=4))
    parts.engine.submit(request, broken)
    parts.engine.run_until_idle()
    assert parts.engine.num_live == parts.scheduler.num_held_pages == 0


@pytest.mark.parametrize("priority", [10**400, "high", True, 1.5])
def test_priority_is_a_number(priority) -> None:
    with pytest.raises(InvalidRequest, match="priority is"):
        Parts().engine.prepare("a", GREEDY, RequestOptions(priority=priority))


def test_thousands_of_ids_are_aborted_by_one_command() -> None:
    parts = Parts()
    names = [parts.submit("a") for _ in range(3)]
    commands = parts.engine._inbox.qsize()
    parts.engine.abort(*(f"nobody {k}" for k in range(5000)), names[0], names[2])
    assert parts.engine._inbox.qsize() == commands + 1
    parts.engine.run_until_idle()
    assert [parts.end(name).finish_reason for name in names] == [*(FinishReason.ABORT, FinishReason.LENGTH) * 2][:3]


def test_aborts_do_not_count_as_waiting() -> None:
    parts = Parts(max_waiting=2)
    ids = [parts.submit("a") for _ in range(2)]
    with pytest.raises(QueueFull):
        parts.submit("a")
    for name in (*ids, "gone", ids[0]):
        parts.engine.abort(name)
    assert parts.engine.num_unstarted == 2, "the loop has not heard of them"
    parts.engine.step()
    assert parts.engine.num_unstarted == 0
    again = [parts.submit("a") for _ in range(2)]
    parts.engine.run_until_idle()
    assert [parts.text(name) for name in again] == ["bcdef"] * 2


@pytest.mark.parametrize("stop", [{"stop": ["z"]}, {"stop_token_ids": [ord("z")]}])
def test_an_end_by_a_stop_string_teaches_lengths_as_one_by_a_stop_id_does(stop) -> None:
    """400 requests that may take 900 tokens and end after 25: admission must learn that they do."""
    parts = Parts(
        max_waiting=400,
        runner=FakeRunner(
            make_limits(max_rows=32, num_pages=256, page_size=16, max_model_len=1024), vocab_size=259, keep_plans=False
        ),
    )
    parts.engine.model = dataclasses.replace(parts.engine.model, max_model_len=1024)
    ids = [parts.submit("a", SamplingParams(temperature=0.0, max_tokens=900, **stop)) for _ in range(400)]
    parts.engine.run_until_idle()
    assert {parts.end(name).finish_reason for name in ids} == {FinishReason.STOP}
    assert 400 * 25 / 32 < parts.runner.num_steps < 450
    parts.scheduler.check()


def test_a_scheduler_that_takes_no_ends_is_told_of_an_abort() -> None:
    class Plain:
        """The methods of the protocol, and no more."""

        def __init__(self, inner: ContinuousScheduler) -> None:
            self.add, self.schedule, self.commit = inner.add, inner.schedule, inner.commit
            self.has_work, self._inner = inner.has_work, inner
            self.aborted: list[tuple[str, int | None]] = []

        def abort(self, request_id: str, index: int | None = None) -> bool:
            self.aborted.append((request_id, index))
            return self._inner.abort(request_id, index)

    parts = Parts()
    plain = Plain(parts.scheduler)
    parts.engine = Engine(
        runner=parts.runner, scheduler=plain, tokenizer=ByteTokenizer(), model=parts.engine.model, seed=5
    )
    name = parts.submit("a", SamplingParams(temperature=0.0, max_tokens=9, stop=["d"]))
    parts.engine.run_until_idle()
    assert (parts.text(name), plain.aborted) == ("bc", [(name, 0)])


def test_abort_of_a_request_leaves_its_namesake_alone() -> None:
    parts = Parts()
    first = parts.submit("a", request_id="same")
    namesake = parts.engine.prepare("a", GREEDY, RequestOptions(request_id="same"))
    parts.engine.step()
    parts.engine.abort(namesake)
    parts.engine.run_until_idle()
    assert parts.text(first) == "bcdef"


def test_null_max_tokens_takes_what_the_pool_holds() -> None:
    engine = Parts(model=dataclasses.replace(MODEL, max_pool_tokens=20)).engine
    assert engine.prepare([1] * 5, SamplingParams(max_tokens=None)).max_tokens == 15


def _wait(condition, timeout_s: float = 120.0) -> None:
    deadline = threading.Event()
    for _ in range(int(timeout_s / 0.01)):
        if condition():
            return
        deadline.wait(0.01)
    raise AssertionError("it did not happen in time")
