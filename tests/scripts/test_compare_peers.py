"""The comparison with other engines, as far as it needs none: requests, figures, turns, and a run of jaxserve alone."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import compare_peers
import pytest
from peers.checkpoint import ensure_checkpoint
from peers.compare import Comparison, Plan
from peers.figures import Agreement, make_rows, measure
from peers.limits import best_rates, find_file_limits, find_limits, shares
from peers.models import DENSE, MODELS
from peers.noise import Used, others_share, read_used
from peers.process import PeerError, PeerProcess
from peers.values import Answer, Ask, Settings, answers_from_json, answers_to_json, asks_from_json, asks_to_json
from peers.workloads import TINY, WORKLOADS, Sizes, describe, make_again, make_asks, make_warm_up
from safetensors.numpy import load_file

from jaxserve.files.gguf_file import read_gguf
from jaxserve.models.decoder_config import ExpertSpec
from jaxserve.models.family import FAMILIES

VOCAB = 512
WAIT_S = 120.0  # for anything that must happen: far more than a busy machine takes


def answer(*times_s: float) -> Answer:
    return Answer(tokens=tuple(range(len(times_s))), times_s=times_s)


@pytest.mark.parametrize("name", WORKLOADS)
def test_requests_are_those_described_new_in_each_round_and_the_same_for_all(name):
    sizes = Sizes()
    first = make_asks(name, 1, VOCAB, sizes, rate=10.0)
    assert first == make_asks(name, 1, VOCAB, sizes, rate=10.0)
    assert not {ask.prompt for ask in first} & {ask.prompt for ask in make_asks(name, 2, VOCAB, sizes, rate=10.0)}
    assert len(first) <= sizes.max_requests
    assert max(len(ask.prompt) + ask.num_tokens for ask in first) <= sizes.max_len
    assert all(3 <= token < VOCAB for ask in first for token in ask.prompt)
    assert "{" not in describe(name, sizes)


def test_many_requests_have_the_lengths_asked_for():
    sizes = Sizes(requests=500)
    asks = make_asks("mixed", 1, VOCAB, sizes)
    assert {min(len(a.prompt) for a in asks), max(len(a.prompt) for a in asks)} <= {*range(16, 30), *range(500, 513)}
    assert min(a.num_tokens for a in asks) >= 16 and max(a.num_tokens for a in asks) <= 256
    dues_s = [a.due_s for a in make_asks("poisson", 1, VOCAB, sizes, rate=4.0)]
    assert dues_s == sorted(dues_s) and dues_s[-1] == pytest.approx(500 / 4.0)
    shared = make_asks("shared", 1, VOCAB, sizes)
    assert len({a.prompt[:400] for a in shared}) == 1 and len({a.prompt for a in shared}) == 500


def test_a_warm_up_remembers_nothing_of_the_rounds():
    asks = make_asks("shared", 0, VOCAB, Sizes())
    warm_up = make_warm_up(asks)
    assert [len(a.prompt) for a in warm_up] == [len(a.prompt) for a in asks]
    assert max(a.num_tokens for a in warm_up) == 8
    assert not {a.prompt[:16] for a in warm_up} & {a.prompt[:16] for a in asks}


def test_a_repeated_run_asks_the_same_in_other_tokens():
    asks = make_asks("shared", 1, VOCAB, Sizes())
    again, later = make_again(asks, 1, VOCAB), make_again(asks, 2, VOCAB)
    assert [(len(a.prompt), a.num_tokens, a.due_s) for a in again] == [
        (len(a.prompt), a.num_tokens, a.due_s) for a in asks
    ]
    assert len({a.prompt[:400] for a in again}) == 1 and len({a.prompt for a in again}) == len(asks)
    assert len({a.prompt[:8] for a in (*asks, *again, *later)}) == 3
    assert all(3 <= token < VOCAB for ask in again for token in ask.prompt)


def test_values_survive_their_json():
    asks = [Ask(prompt=(1, 2), num_tokens=2, due_s=0.5)]
    assert asks_from_json(json.loads(json.dumps(asks_to_json(asks)))) == asks
    answers = [answer(0.25, 0.5)]
    assert answers_from_json(json.loads(json.dumps(answers_to_json(answers)))) == answers


def test_figures_follow_their_definitions():
    asks = [Ask(prompt=(1,) * 4, num_tokens=4), Ask(prompt=(1,) * 6, num_tokens=3)]
    answers = [answer(1.0, 2.0, 3.0, 4.0), answer(2.0, 3.0, 4.0)]
    assert measure("streams", asks, answers) == {"decode tokens/s": 2.0}  # 4 tokens come between 2 s and 4 s
    assert measure("mixed", asks, answers) == {"output tokens/s": 7 / 4}
    assert measure("one", asks[:1], answers[:1]) == {"decode tokens/s": 1.0, "TTFT p50 (ms)": 1000.0}
    first = [Ask(prompt=(1,) * 512, num_tokens=1)]
    assert measure("prefill", first, [answer(0.5)]) == {"prompt tokens/s": 1024.0}
    late = [asks[0], Ask(prompt=(1,), num_tokens=3, due_s=1.5)]
    found = measure("poisson", late, answers)
    assert found["TTFT p50 (ms)"] == 750.0 and found["TTFT p99 (ms)"] == pytest.approx(995.0)
    assert found["TPOT p50 (ms)"] == found["TPOT p99 (ms)"] == 1000.0


def test_an_answer_of_another_length_is_no_answer():
    with pytest.raises(AssertionError):
        measure("one", [Ask(prompt=(1,), num_tokens=3)], [answer(1.0, 2.0)])


def test_ratios_are_medians_of_rounds_and_above_one_where_ours_is_better():
    runs = {
        "jaxserve": [{"output tokens/s": v, "TTFT p50 (ms)": 10.0} for v in (10.0, 20.0, 60.0)],
        "other": [{"output tokens/s": v, "TTFT p50 (ms)": 40.0} for v in (10.0, 10.0, 20.0)],
    }
    output, ttft = make_rows("shared", runs, "jaxserve")
    assert output.medians == {"jaxserve": 20.0, "other": 10.0}
    assert output.ratios == {"other": 2.0} and ttft.ratios == {"other": 4.0}
    assert make_rows("shared", {"other": runs["other"]}, "jaxserve")[0].ratios == {}


def test_agreement_counts_choices_until_the_first_difference():
    found = Agreement()
    found.add([1, 2, 3, 4], [1, 2, 9, 4])
    found.add([5, 6], [5, 6])
    assert (found.tokens, found.equal, found.choices, found.same) == (6, 5, 5, 4)
    assert found.share_same == 0.8


def test_others_are_what_neither_idled_nor_was_ours():
    before, after = Used(passed=100, busy=50, group=10), Used(passed=200, busy=130, group=60)
    assert others_share(before, after) == pytest.approx(0.3)
    assert others_share(None, after) is None and others_share(after, after) is None
    now = read_used(os.getpgrp())
    assert now is None or 0 < now.busy <= now.passed


class Scripted:
    """An engine that takes a tenth of a second a token, and whose runs are as disturbed as told."""

    def __init__(self, noise: list[float], step_s: float = 0.1) -> None:
        self.about = {"versions": {}}
        self.noise, self.step_s, self.asked = noise, step_s, []

    def run(self, asks, before):
        self.asked.append(asks)
        made = [answer(*(self.step_s * (i + 1) + a.due_s for i in range(a.num_tokens))) for a in asks]
        return made, self.noise.pop(0) if before else None

    def most_memory(self):
        return 2**20


def make_comparison(**changes) -> Comparison:
    options = {"rounds": 2, "load": 0.5, "rate": None, "max_noise": 0.1, "compare_tokens": True}
    return Comparison(Plan(**(options | changes), sizes=TINY, vocab=VOCAB), say=lambda line: None)


def test_a_disturbed_run_is_done_again_and_the_quietest_counts():
    comparison, peer = make_comparison(), Scripted([0.5, 0.4, 0.3, 0.9, 0.05])
    comparison.add("jaxserve", peer)
    comparison.measure("one")
    assert len(peer.asked) == 1 + 3 + 2  # the warm-up, a round that never was quiet, one whose second try was
    assert len({ask.prompt for asks in peer.asked for ask in asks}) == 1 + 3 + 2  # no prefix cache has seen any of them
    assert comparison.as_json()["workloads"]["one"]["others_share"] == {"jaxserve": [0.3, 0.05]}


def test_a_process_of_arrivals_is_for_engines_that_can_follow():
    comparison = make_comparison(max_noise=1.0)
    peers = {"jaxserve": Scripted([0.0] * 4), "hf": Scripted([0.0] * 4), "vllm": Scripted([0.0] * 4, step_s=0.5)}
    for name, peer in peers.items():
        comparison.add(name, peer)
    comparison.measure("mixed")
    comparison.measure("poisson")
    found = comparison.as_json()["workloads"]["poisson"]
    assert list(found["figures"]["TTFT p50 (ms)"]["medians"]) == ["jaxserve"]
    assert found["notes"]["hf"].startswith("n/a") and found["notes"]["vllm"].startswith("over its capacity")
    rate = float(found["notes"]["rate"].split()[0])
    assert peers["jaxserve"].asked[-1][-1].due_s == pytest.approx(TINY.requests / rate, rel=1e-2)
    assert comparison.agreements["vllm"].share_same == 1.0


def test_checkpoints_are_the_same_wherever_they_are_made(tmp_path):
    one, two = (ensure_checkpoint("tiny", tmp_path / name) for name in ("a", "b"))
    tensors = load_file(one / "model.safetensors")
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    assert tensors["model.layers.1.self_attn.k_proj.weight"].shape == (32, 64)
    assert json.loads((one / "config.json").read_text()) == MODELS["tiny"].config
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["tiny"]


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("tiny")])
def test_a_checkpoint_has_the_tensors_of_its_family_in_one_file_or_several(name, tmp_path, monkeypatch):
    config = MODELS[name].config
    family = FAMILIES.get(config["architectures"][0])
    decoder = family.decoder_config(config, name)
    monkeypatch.setattr("peers.checkpoint._SHARD_BYTES", 40_000)
    folder = ensure_checkpoint(name, tmp_path)
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 1
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {tensor: path.name for path in files for tensor in load_file(path)}
    assert index["weight_map"] == found
    count = max((mlp.count for mlp in decoder.mlps if isinstance(mlp, ExpertSpec)), default=1)
    known = {
        rule.source.replace("{layer}", str(layer)).replace("{expert}", str(expert))
        for rule in family.weights
        for layer in range(decoder.num_layers)
        for expert in range(count)
    }
    optional = {"lm_head.weight"} if decoder.tied_embeddings else set()
    biases = {tensor for tensor in known - found.keys() if tensor.endswith("bias")}  # of Llamas that have some
    assert found.keys() == known - optional - biases


def test_the_expert_model_reads_as_many_bytes_a_token_as_the_dense_one():
    model, rates = MODELS["experts"], {"read_gb_per_s": 34.0, "multiply_add_gflop_per_s": 230.0}
    experts = find_limits(model.config, model.sizes, "float32", rates)
    dense = find_limits(MODELS[DENSE].config, model.sizes, "float32", rates)
    attention, mlp, table = 12 * 768 * 64 * (2 * 12 + 2 * 4), 12 * 3 * 768 * 2048, 32000 * 768
    context, of_token = model.sizes.prompt + model.sizes.output / 2, 12 * 2 * 4 * 64 * 4
    assert dense["one"].step_bytes == 4 * (attention + mlp + table) + of_token * (context + 1)
    assert experts["one"].step_bytes == pytest.approx(dense["one"].step_bytes, rel=5e-3)  # and the routers
    assert experts["streams"].step_bytes > 3 * dense["streams"].step_bytes  # 14 of 16 experts are hit
    assert dense["one"].byte_limit == pytest.approx(34e9 / dense["one"].step_bytes)
    assert dense["prefill"].compute_limit == pytest.approx(512 * 230e9 / dense["prefill"].step_flops)
    assert find_limits(model.config, model.sizes, "float32", None)["one"].byte_limit is None
    fewer_bits = find_limits(MODELS[DENSE].config, model.sizes, "int8-a8", rates)["one"]
    assert fewer_bits.step_bytes == attention + mlp + table + of_token * (context + 1)  # keys and values stay float32
    assert fewer_bits.compute_limit is None  # the rate is that of float32
    (row,) = make_rows("streams", {"jaxserve": [{"decode tokens/s": 100.0}]}, "jaxserve")
    limit = dense["streams"]
    assert limit.byte_limit is not None and limit.compute_limit is not None
    of_both = {"of_byte_limit": 100.0 / limit.byte_limit, "of_compute_limit": 100.0 / limit.compute_limit}
    assert shares(row, {"jaxserve": dense}) == {"jaxserve": of_both}


def test_a_published_file_is_read_once_for_a_token_at_its_own_bytes():
    path, sizes = Path(__file__).parents[1] / "fixtures/gguf/llama.gguf", Sizes(prompt=8, output=4)
    tensors = {name: found for name, found in read_gguf(path).tensors.items() if len(found.shape) > 1}
    assert {"token_embd.weight", "output.weight"} <= tensors.keys(), "rows of one table are looked up"
    read = sum(found.num_bytes for name, found in tensors.items() if name != "token_embd.weight")
    layers, keys = sum("attn_k" in name for name in tensors), tensors["blk.0.attn_k.weight"].shape[0]
    limit = find_file_limits(path, sizes, {"read_gb_per_s": 20.0, "multiply_add_gflop_per_s": 200.0})["one"]
    assert limit.step_bytes == pytest.approx(read + 2 * 2 * layers * keys * (sizes.prompt + sizes.output / 2 + 1))
    assert limit.compute_limit is None, "the rate is that of float32"


def test_the_best_rates_of_a_run_count_and_only_those_of_as_many_threads():
    def rates(read: float, multiply: float):
        return {
            "read_gb_per_s": {"1 thread": 1.0, "2 threads": read},
            "multiply_add_gflop_per_s": {"1 thread": 1.0, "2 threads": multiply},
        }

    found = [rates(30.0, 230.0), None, rates(34.0, 200.0)]
    assert best_rates(found, 2) == {"read_gb_per_s": 34.0, "multiply_add_gflop_per_s": 230.0}
    assert best_rates(found, 8) is None and best_rates([None], 2) is None


def test_engines_one_after_the_other_are_compared_as_those_in_turns():
    comparison = make_comparison(max_noise=1.0)
    for name in ("jaxserve", "hf", "jaxserve-dense"):
        comparison.add(name, Scripted([0.0] * 4), same_weights=name != "jaxserve-dense")
        comparison.measure("one")
        comparison.remove(name)
    (decode, _) = comparison.rows()
    assert decode.ratios == pytest.approx({"hf": 1.0, "jaxserve-dense": 1.0})
    assert comparison.reference == "hf"
    assert {name: found.share_same for name, found in comparison.agreements.items()} == {"jaxserve": 1.0}
    assert comparison.agreements["jaxserve"].tokens == 2 * TINY.output
    assert comparison.as_json()["most_memory_bytes"] == dict.fromkeys(("jaxserve", "hf", "jaxserve-dense"), 2**20)


def fake_settings() -> Settings:
    return Settings(
        model="",
        random_weights=False,
        dtype="float32",
        device="cpu",
        threads=1,
        max_len=8,
        max_requests=1,
        kv_bytes=1,
        memory_share=0.5,
    )


def start_fake(tmp_path: Path, body: str) -> PeerProcess:
    """A process whose engine is `body`; what it prints must not reach the answers."""
    package = tmp_path / "fake"
    package.mkdir(exist_ok=True)
    source = "import time\nfrom peers.values import Answer\n" + body
    (package / "peers_fake.py").write_text(source)
    (package / "sitecustomize.py").write_text(
        "import sys\nimport peers_fake\nsys.modules['peers.engine_fake'] = peers_fake\n"
    )
    env = {"PYTHONPATH": str(package)}
    return PeerProcess("fake", "fake", sys.executable, fake_settings(), tmp_path / "fake.log", WAIT_S, env)


ECHO = """
class Engine:
    def __init__(self, settings):
        self.about = {"dtype": settings.dtype}

    def run(self, asks):
        print("more noise")
        if any(ask.num_tokens == 0 for ask in asks):
            raise ValueError("no tokens asked for")
        return [Answer(tokens=ask.prompt[: ask.num_tokens], times_s=(0.0,) * ask.num_tokens) for ask in asks]
"""


def test_a_process_answers_in_its_turn_and_is_stopped_otherwise(tmp_path):
    peer = start_fake(tmp_path, ECHO)
    try:
        assert peer.about == {"dtype": "float32"}
        answers, _ = peer.run([Ask(prompt=(7, 8), num_tokens=2)], [])
        assert answers == [Answer(tokens=(7, 8), times_s=(0.0, 0.0))]
        assert sys.platform != "linux" or 2**20 < (peer.most_memory() or 0) < 2**32  # a Python, and no weights
        if sys.platform == "linux":
            deadline_s = time.monotonic() + WAIT_S
            while Path(f"/proc/{peer.process_id}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                assert time.monotonic() < deadline_s, "it goes on out of its turn"
                time.sleep(0.01)
        with pytest.raises(PeerError, match="no tokens asked for"):
            peer.run([Ask(prompt=(7,), num_tokens=0)], [])
    finally:
        peer.close()
    with pytest.raises(ProcessLookupError):
        os.kill(peer.process_id, signal.SIGCONT)


def test_engines_that_cannot_start_say_why(tmp_path):
    with pytest.raises(PeerError, match="cannot run"):
        PeerProcess("x", "x", str(tmp_path / "none"), fake_settings(), tmp_path / "x.log", 5.0, {})
    with pytest.raises(PeerError, match="peers.engine_x"):
        PeerProcess("x", "x", sys.executable, fake_settings(), tmp_path / "x.log", WAIT_S, {})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--engines", "jaxserve,llama"], "no 'llama'"),
        (["--workloads", "ones"], "no 'ones'"),
        (["--workloads", "poisson"], "needs the load of jaxserve in mixed"),
        (["--engines", "jaxserve,hf-grouped"], "is for a model with experts"),
        (["--model", "gemma-2-2b", "--workloads", "poisson"], "loaded one at a time"),
    ],
)
def test_wrong_flags_are_refused(arguments, says, capsys):
    with pytest.raises(SystemExit):
        compare_peers.parse_args(arguments)
    assert says in capsys.readouterr().err


@pytest.mark.slow
def test_a_comparison_of_jaxserve_alone(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    rates = {name: {"1 thread": 11.0, "2 threads": 22.0} for name in ("read_gb_per_s", "multiply_add_gflop_per_s")}
    monkeypatch.setattr("compare_peers.machine_rates", lambda: rates)
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    small = ["runtime.row_buckets=[4]", "runtime.token_buckets=[64]", "sched.max_rows=4", "sched.max_step_tokens=64"]
    arguments = ["--envs", str(tmp_path), "--engines", "jaxserve", "--model", "tiny", "--rounds", "2"]
    arguments += ["--max-noise", "1", "--kv-gib", "0.01", "--threads", "2", "--workloads", "streams,mixed,poisson"]
    arguments += ["--json", str(out), "--plot", str(plot)]
    for pair in [*small, f"runtime.compile_cache={tmp_path / 'cache'}"]:
        arguments += ["--set", pair]
    assert compare_peers.main(arguments) == 0, (tmp_path / "logs/jaxserve.log").read_text()
    found = json.loads(out.read_text())
    assert found["about"]["commit"] is None or found["about"]["commit"]
    assert found["about"]["rates"]["read_gb_per_s"]["1 thread"] == 11.0
    assert found["about"]["engines"]["jaxserve"]["settings"]["model.dtype"] == "float32"
    figures = found["results"]["workloads"]["mixed"]["figures"]["output tokens/s"]
    assert len(figures["rounds"]["jaxserve"]) == 2 and figures["medians"]["jaxserve"] > 0
    streams = found["results"]["workloads"]["streams"]
    limit, median = streams["limits"]["jaxserve"], streams["figures"]["decode tokens/s"]["medians"]["jaxserve"]
    assert limit["byte_limit"] == pytest.approx(3 * 22e9 / limit["step_bytes"])
    share = streams["figures"]["decode tokens/s"]["shares"]["jaxserve"]["of_byte_limit"]
    assert share == pytest.approx(median / limit["byte_limit"])
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "output tokens/s" in capsys.readouterr().out
