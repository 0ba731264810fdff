"""The choice of a draft head by config: what is found, and what is refused with the remedy."""

import json
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
import draft_files
import quantised_models

from jaxserve.assemble.draft_tokenizer import check_draft_tokenizer
from jaxserve.config import load_config
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.kernels.xla_attention import XLA_ATTENTION
from jaxserve.models import decoder_config, plan_model, read_checkpoint, resolve_model_path
from jaxserve.models.drafts import HeadKind
from jaxserve.models.drafts.attaching import with_head
from jaxserve.runtime.build import plan_stage_memory
from jaxserve.runtime.drafting import NgramDrafter
from jaxserve.runtime.executables import AbstractStage
from jaxserve.runtime.head_drafting import HeadDrafter
from jaxserve.runtime.heads import find_head
from jaxserve.runtime.model_drafting import ModelDrafter
from jaxserve.runtime.resolve import matmul_uses, resolve_sizes
from jaxserve.text import Tokenizer, load_tokenizer

FIXTURES = Path(__file__).parents[1] / "fixtures"


def sizes(fixture: str | Path = "llama", **settings: object):
    path = FIXTURES / fixture if isinstance(fixture, str) else fixture
    named = {f"speculation.{name}": value for name, value in settings.items()}
    config = load_config(None, {"model.path": str(path), **named}, environ={}).config
    model = decoder_config(read_checkpoint(path))[1]
    return resolve_sizes(config, model, np.dtype("float32"), "cpu")


@pytest.fixture
def eagle(tmp_path: Path) -> str:
    return str(draft_files.write(tmp_path / "eagle", *draft_files.eagle3()))


@pytest.fixture
def medusa(tmp_path: Path) -> str:
    return str(draft_files.write(tmp_path / "medusa", *draft_files.medusa()))


def test_a_head_by_its_method_or_by_auto(eagle: str, medusa: str) -> None:
    for method, path, kind in (
        ("eagle", eagle, HeadKind.EAGLE3),
        ("auto", eagle, HeadKind.EAGLE3),
        ("medusa", medusa, HeadKind.MEDUSA),
        ("auto", medusa, HeadKind.MEDUSA),
    ):
        drafter = sizes(method=method, model=path).speculation.drafter
        assert isinstance(drafter, HeadDrafter)
        assert drafter.config.kind is kind
        assert drafter.taps == ((0, 1, 2) if kind is HeadKind.EAGLE3 else ())


def test_the_head_beside_the_model(tmp_path: Path, medusa: str) -> None:
    copy = tmp_path / "model"
    shutil.copytree(FIXTURES / "llama", copy)
    assert isinstance(sizes(copy, method="auto").speculation.drafter.tokens, NgramDrafter)
    shutil.copytree(medusa, copy / "draft")
    for method in ("auto", "medusa"):
        assert sizes(copy, method=method).speculation.drafter.config.kind is HeadKind.MEDUSA
    with pytest.raises(ConfigError, match="is of kind medusa; set it to medusa or auto"):
        sizes(copy, method="eagle")


def test_mtp_layers_in_the_models_own_files(tmp_path: Path) -> None:
    values, tensors = draft_files.mtp()
    model = tmp_path / "model"
    shutil.copytree(FIXTURES / "llama", model)
    (model / "model.safetensors").unlink()
    draft_files.write(model, values, tensors)
    found = find_head(
        load_config(None, {"model.path": str(model), "speculation.method": "mtp"}, environ={}).config,
        decoder_config(read_checkpoint(FIXTURES / "llama"))[1],
    )
    assert found is not None
    assert (found.path, found.config.kind) == (model, HeadKind.MTP)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"method": "eagle"}, "has no head of its own"),
        ({"method": "medusa"}, "train it with `jaxserve train-draft`"),
        ({"method": "medusa", "model": "EAGLE"}, "is of kind eagle3; set it to eagle or auto"),
        ({"method": "ngram", "model": "EAGLE"}, "drafts of method 'ngram' come from no model; leave it out"),
        ({"method": "none", "model": "EAGLE"}, "drafts of method 'none' come from no model"),
        ({"method": "medusa", "model": "MEDUSA", "width": 5}, "guesses 3 tokens; set speculation.width to 4 or less"),
        ({"method": "grammar", "model": "EAGLE"}, "drafts of method 'grammar' come from no model"),
        ({"method": "draft"}, "speculation.model names no model; give the directory of a small model"),
        ({"method": "draft", "model": str(FIXTURES / "mixtral")}, "mixtral has layers of experts"),
    ],
)
def test_heads_that_are_not_to_be_had(settings: dict, said: str, eagle: str, medusa: str) -> None:
    paths = {"EAGLE": eagle, "MEDUSA": medusa}
    settings = {name: paths.get(str(value), value) for name, value in settings.items()}
    with pytest.raises(ConfigError, match=said):
        sizes(**settings)


def test_a_draft_model_is_of_the_same_vocabulary(tmp_path: Path) -> None:
    drafter = sizes(method="draft", model=str(FIXTURES / "gpt2")).speculation.drafter
    assert isinstance(drafter, ModelDrafter) and (drafter.config.num_layers, drafter.taps) == (2, ())
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((FIXTURES / "qwen2/config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": 96}))
    with pytest.raises(CheckpointError, match=r"other has 96 tokens, and the model .*llama has 128"):
        sizes(method="draft", model=str(other))
    with pytest.raises(ConfigError, match=r"windows \(24 tokens\), so pages are given back that the drafter in .*gpt2"):
        sizes("mistral_window", method="draft", model=str(FIXTURES / "gpt2"))


def test_a_draft_model_with_codes_keeps_them(tmp_path: Path) -> None:
    table, make = quantised_models.SCHEMES["gptq"]
    path = quantised_models.llama_pair(tmp_path, table, make).quantised
    config = decoder_config(read_checkpoint(path))[1]
    planned, alone = with_head(plan_model(FIXTURES / "llama"), path, config), plan_model(path).load()
    kept = planned.shapes.kept
    assert kept and {name[0] for name in kept} == {"head"} and len(kept) == len(alone.kept)
    uses = matmul_uses(np.dtype("float32"), planned.shapes.mesh, kept)
    assert any(use.storage is not None for use in uses), "products with codes are chosen for, and checked at the start"
    state = nnx.to_flat_state(planned.load().state)
    found = jax.tree.leaves([leaf for name, leaf in state if name[0] == "head"])
    for mine, its in zip(found, jax.tree.leaves(alone.state), strict=True):
        np.testing.assert_array_equal(mine, its)


def test_a_draft_model_has_the_same_tokenizer(tmp_path: Path) -> None:
    config = {"model.path": "demo", "speculation.method": "draft", "speculation.model": str(tmp_path)}
    target = load_tokenizer(resolve_model_path("demo"))

    def check(tokenizer: Tokenizer | None = target) -> None:
        check_draft_tokenizer(load_config(None, config, environ={}).config, tokenizer)

    check(None)
    with pytest.raises(CheckpointError, match="has neither tokenizer.json nor tokenizer.model"):
        check()
    for file in resolve_model_path("demo").glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    check()
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab = raw["model"]["vocab"]
    vocab[400][0], vocab[401][0] = vocab[401][0], vocab[400][0]
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=rf"token 400 is .* in the tokenizer of the draft model {tmp_path}, and"):
        check()


def test_a_path_without_a_head() -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        sizes(method="auto", model="/nowhere/at/all")


def test_pages_that_are_given_back(eagle: str) -> None:
    with pytest.raises(ConfigError, match=r"windows \(24 tokens\), so pages are given back"):
        sizes("mistral_window", method="eagle", model=eagle)


def test_stages_of_a_pipeline(medusa: str) -> None:
    config = load_config(
        None,
        {
            "model.path": str(FIXTURES / "llama"),
            "speculation.method": "medusa",
            "speculation.model": medusa,
            "parallel.pipeline": 2,
        },
        environ={},
    ).config
    model = decoder_config(read_checkpoint(FIXTURES / "llama"))[1]
    with pytest.raises(ConfigError, match=r"parallel.pipeline is 2"):
        resolve_sizes(config, model, np.dtype("float32"), "cpu")


def test_the_memory_breakdown_names_the_head(eagle: str, medusa: str) -> None:
    page_bytes, draft = {}, str(FIXTURES / "qwen2")
    for path in (None, eagle, medusa, draft):
        method = "draft" if path == draft else "auto"
        settings = {} if path is None else {"speculation.method": method, "speculation.model": path}
        config = load_config(None, {"model.path": str(FIXTURES / "llama"), **settings}, environ={}).config
        planned = plan_model(FIXTURES / "llama")
        found = find_head(config, planned.shapes.config) if path is not None else None
        model = (planned if found is None else with_head(planned, found.path, found.config)).shapes
        stage = AbstractStage(
            graphdef=model.graphdef,
            state=model.state,
            partition=model.partition,
            layers=model.layers,
            mesh=model.mesh,
            dtype=model.dtype,
        )
        sized = resolve_sizes(config, model.config, model.dtype, "cpu")
        memory = plan_stage_memory(config, sized, [stage], XLA_ATTENTION, 10**9)
        page_bytes[path] = memory.page_bytes
        assert any(line.startswith("drafter") for line in memory.lines()) is (path is not None)
        # A page has keys and values of two heads of 12 float32 numbers for each of its tokens.
        layers = {eagle: 1, draft: 2}.get(path, 0)
        assert memory.draft_page_bytes == layers * 2 * 2 * 12 * 4 * sized.page_size
        assert memory.weight_bytes == 4 * sum(leaf.size for leaf in jax.tree.leaves(model.state))
    assert page_bytes[eagle] == page_bytes[None] * 3 // 2, "the model has two layers, and the head one"
    assert page_bytes[medusa] == page_bytes[None]
    assert page_bytes[draft] == page_bytes[None] * 2, "two layers each"
