"""LoRA adapters through the whole engine: the log-probabilities of merged weights, whatever runs beside."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_files import merge, write_adapter
from whole import FIXTURES, POOL, build, scheduler, travels

from jaxserve.api import RequestOptions, SamplingParams, TokenLogprobs
from jaxserve.engine import AnyEngine
from jaxserve.errors import AdapterError, ConfigError, InvalidRequest, UnknownModel

LLAMA = FIXTURES / "llama"
SCORED = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, prompt_logprobs=0)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPT = [3, 17, 5, 29, 11, 2, 40, 8, 23, 9, 31, 4, 6, 12, 7, 19, 33, 21, 14, 28]
# What decoders do beside Llama's: positions in the scores, blocks beside each other, norms of heads, sinks, biases and
# norms behind blocks, experts. That the slots of all families hold what is merged, tests/models/test_peft.py says.
FAMILIES = ("bloom", "falcon_new", "gemma3", "gpt_oss", "opt_350m", "qwen2_moe")


def engine_of(path: Path, slots: int = 2, **more: Any) -> AnyEngine:
    """Of one size, so that all tests find the steps of the first."""
    return build(path, **{**POOL, "adapters__slots": slots, "adapters__max_rank": 64, **more})


def load(engine: AnyEngine, name: str, path: Path) -> None:
    assert engine.model.adapters is not None
    engine.model.adapters.load(name, path, engine.model.name)


def answers(engine: AnyEngine, adapters: list[str | None], sampling: SamplingParams = GREEDY) -> list[list[int]]:
    """The tokens of one prompt with each of the adapters, all in one batch."""
    return [tokens for tokens, _ in scored(engine, adapters, sampling)]


def scored(
    engine: AnyEngine, adapters: list[str | None], sampling: SamplingParams = SCORED, prompt: list[int] = PROMPT
) -> list[tuple[list[int], np.ndarray]]:
    """The tokens, and the log-probabilities of the prompt where `sampling` asks for them."""
    tokens: list[list[int]] = [[] for _ in adapters]
    scores: list[np.ndarray] = [np.zeros(0) for _ in adapters]
    for number, name in enumerate(adapters):
        request = engine.prepare({"prompt_token_ids": prompt}, sampling, RequestOptions(adapter=name))

        def sink(update: Any, number: int = number) -> None:
            assert update.error is None, update.error
            tokens[number] += update.token_ids
            if update.prompt is not None and update.prompt.logprobs is not None:
                scores[number] = np.array([entry.logprob for entry in update.prompt.logprobs])

        engine.submit(request, sink)
    engine.run_until_idle()
    return list(zip(tokens, scores, strict=True))


def check_merged(
    base: Path, tmp_path: Path, tolerance: float = 1e-4, engine: AnyEngine | None = None, **adapter: Any
) -> None:
    """Log-probabilities, and the tokens that follow, equal those of the merged model, and not those of the base."""
    path = write_adapter(tmp_path / "adapter", base, **adapter)
    engine = engine_of(base) if engine is None else engine
    load(engine, "tuned", path)
    [(tokens, scores), (_, plain)] = scored(engine, ["tuned", None])
    merged = build(merge(tmp_path / "merged", base, path), **POOL)
    [(expected_tokens, expected)] = scored(merged, [None])
    assert np.abs(scores - plain).max() > 0.02, "the adapter changes nothing"
    np.testing.assert_allclose(scores, expected, atol=tolerance, rtol=0)
    assert tokens == expected_tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", *FAMILIES])
def test_equals_merged_weights(name: str, tmp_path: Path) -> None:
    check_merged(FIXTURES / name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "adapter",
    [
        {"rank": 1},
        {"rank": 64, "size": 0.1},
        {"wanted": lambda module: module.endswith("up_proj"), "target_modules": r".*\.up_proj", "size": 1.0},
    ],
    ids=["rank 1", "rank 64", "half of a fused weight"],
)
def test_kinds_of_adapters(adapter: dict[str, Any], tmp_path: Path) -> None:
    """Beside those that PEFT made, below."""
    check_merged(LLAMA, tmp_path, **adapter)


def check_made_by_peft(engine: AnyEngine, base: str, tolerance: float = 1e-4) -> int:
    """The 20 most likely tokens behind each of the prompt have the log-probabilities of the model that PEFT merges."""
    count = 0
    for path in sorted((FIXTURES / "adapters").iterdir()):
        with np.load(path / "oracle.npz") as oracle:
            prompt, logits, without = (oracle[name] for name in ("prompt", "logits", "base"))
        if (
            json.loads((path / "adapter_config.json").read_text())["base_model_name_or_path"]
            != f"tests/fixtures/{base}"
        ):
            continue
        load(engine, path.name, path)
        wanted, plain = (
            values - np.log(np.exp(values).sum(-1, keepdims=True)) for values in (logits.astype(np.float64), without)
        )
        assert np.abs(wanted - plain).max() > 0.02, f"{path.name} changes nothing"
        entries = prompt_entries(engine, path.name, prompt.tolist())
        assert len(entries) == len(prompt) - 1
        for place, entry in enumerate(entries):
            assert len(entry.top_ids) == 20
            np.testing.assert_allclose(entry.top_logprobs, wanted[place, list(entry.top_ids)], atol=tolerance, rtol=0)
            assert abs(entry.logprob - wanted[place, prompt[place + 1]]) < tolerance
        count += 1
    return count


def prompt_entries(engine: AnyEngine, name: str, prompt: list[int]) -> list[TokenLogprobs]:
    entries: list[TokenLogprobs] = []
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=20)

    def sink(update: Any) -> None:
        if update.prompt is not None:
            entries.extend(update.prompt.logprobs)

    engine.submit(engine.prepare({"prompt_token_ids": prompt}, sampling, RequestOptions(adapter=name)), sink)
    engine.run_until_idle()
    return entries


def test_adapters_that_peft_made_and_merged() -> None:
    """Plain, rsLoRA, patterns of ranks and alphas, some modules and layers (scripts/make_adapter_fixtures.py)."""
    assert check_made_by_peft(engine_of(LLAMA), "llama") == 5


@pytest.mark.slow
def test_an_adapter_of_transposed_weights_that_peft_made() -> None:
    assert check_made_by_peft(engine_of(FIXTURES / "gpt2"), "gpt2") == 1


@pytest.mark.slow
def test_over_eight_devices(tmp_path: Path) -> None:
    """With heads that are copied. No more travels than without adapters: a sum of hidden states for the embedding and
    two for a layer, which XLA may join, and the best logits of each device with their ids, of prompts too."""
    engine = engine_of(LLAMA, parallel__tensor=8)
    check_merged(LLAMA, tmp_path, engine=engine)
    [stage] = engine.replicas[0]._runner._stages  # pyright: ignore[reportAttributeAccessIssue]
    for bucket, step in stage.executables.steps.items():
        found = [(kind, max(sizes)) for kind, sizes in travels(step.as_text()) if kind != "copy"]
        large = [size for kind, size in found if kind == "all-reduce" and size >= bucket.tokens * 48]
        assert 1 <= len(large) <= 1 + 2 * 2, bucket
        others = [kind for kind, _ in found if kind != "all-reduce"]
        assert others == ["all-gather"] * (2 if bucket.decode_only else 4), bucket


@pytest.mark.slow
@pytest.mark.parametrize(("name", "devices"), [("gpt2", 3), ("olmo2", 4), ("phi3", 2), ("falcon_mqa", 4)])
def test_over_devices(name: str, devices: int, tmp_path: Path) -> None:
    """Also with padded heads."""
    check_merged(FIXTURES / name, tmp_path, engine=engine_of(FIXTURES / name, parallel__tensor=devices))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    paths = {name: write_adapter(root / name, LLAMA, seed=seed, size=0.5) for seed, name in enumerate("abc")}
    return paths | {"zero": write_adapter(root / "zero", LLAMA, size=0.0)}


@pytest.fixture(scope="module")
def engine(adapters: dict[str, Path]) -> AnyEngine:
    """With two slots, and four adapters."""
    engine = engine_of(LLAMA)
    for name, path in adapters.items():
        load(engine, name, path)
    return engine


def test_tokens_do_not_depend_on_slots_or_neighbours(engine: AnyEngine, adapters: dict[str, Path]) -> None:
    """Alone, beside others, with more adapters than slots, after eviction, and after a load under another name."""
    alone = {name: answers(engine, [name])[0] for name in (None, *adapters)}
    assert len({tuple(tokens) for tokens in alone.values()}) == 4, "the adapters change nothing"
    assert alone["zero"] == alone[None]
    mixed = [None, "a", "b", "c", "zero", "a", None, "c"]
    assert answers(engine, mixed) == [alone[name] for name in mixed]
    assert answers(engine, mixed[::-1]) == [alone[name] for name in mixed[::-1]]
    scheduler(engine).check()
    load(engine, "other-name", adapters["a"])
    assert answers(engine, ["other-name", None, "b"]) == [alone["a"], alone[None], alone["b"]]
    loaded = engine.model.adapters
    assert loaded is not None
    loaded.unload("other-name", engine.model.name)
    with pytest.raises(UnknownModel, match=r"'other-name' is not served here"):
        engine.prepare({"prompt_token_ids": PROMPT}, GREEDY, RequestOptions(adapter="other-name"))


def test_a_zero_adapter_is_the_base_to_the_bit(engine: AnyEngine) -> None:
    [(_, zero), (_, base), (_, other)] = scored(engine, ["zero", None, "a"])
    assert (zero == base).all() and (other != base).any()


def test_a_name_with_other_bytes_finds_no_pages_of_the_old_ones(engine: AnyEngine, adapters: dict[str, Path]) -> None:
    """Requests that run keep the weights with which they began."""
    loaded = engine.model.adapters
    assert loaded is not None
    [a], [b] = (answers(engine, [name]) for name in "ab")
    loaded.load("tuned", adapters["a"], engine.model.name)
    old = engine.prepare({"prompt_token_ids": PROMPT}, GREEDY, RequestOptions(adapter="tuned"))
    assert answers(engine, ["tuned"]) == [a]
    loaded.load("tuned", adapters["b"], engine.model.name, replace=True)
    assert answers(engine, ["tuned"]) == [b]
    tokens: list[int] = []
    engine.submit(old, lambda update: tokens.extend(update.token_ids))
    engine.run_until_idle()
    assert tokens == a
    loaded.unload("tuned", engine.model.name)


def test_limits(engine: AnyEngine, adapters: dict[str, Path]) -> None:
    loaded = engine.model.adapters
    assert loaded is not None
    for name, message in (
        ("a", "an adapter 'a' already"),
        (engine.model.name, "the name of the model itself"),
        ("../a", "1 to 64 letters"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            load(engine, name, adapters["b"])
    with pytest.raises(UnknownModel, match="did you mean 'zero'"):
        engine.prepare({"prompt_token_ids": PROMPT}, GREEDY, RequestOptions(adapter="zeros"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parallel__pipeline": 2}, r"parallel\.pipeline"),
        ({"runtime__batch_invariant": True}, r"runtime\.batch_invariant"),
        ({"slots": 0, "adapters__load": {"a": "a"}}, r"adapters\.slots is 0"),
        ({"adapters__host_bytes": 1000}, r"adapters\.host_bytes is 1000"),
        ({"adapters__directory": "absent"}, r"'absent' is no directory|absent"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_of(LLAMA, **settings)


def test_a_wrong_adapter_of_the_config_is_found_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def costs(*arguments: Any, **options: Any) -> None:
        raise AssertionError("weights are read and steps compiled")

    monkeypatch.setattr("jaxserve.assemble.build_runners", costs)
    large = write_adapter(tmp_path / "large", LLAMA, rank=65)
    for path, message in ((large, "has rank 65"), (tmp_path / "absent", "is no directory")):
        with pytest.raises(AdapterError, match=message):
            engine_of(LLAMA, adapters__load={"tuned": str(path)})
