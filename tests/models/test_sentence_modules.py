"""The files of sentence-transformers, as they stand in checkpoints, and what of them is refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from jaxserve.api import Pooling
from jaxserve.assemble.answers import embedding_rules, find_reranker
from jaxserve.config.schema import Config, ModelConfig, RerankConfig
from jaxserve.engine import EmbeddingRules
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.testing import ByteTokenizer

CONFIG = json.loads((Path(__file__).parents[1] / "fixtures/qwen3/config.json").read_text())
SIZE = CONFIG["hidden_size"]
OLD = "sentence_transformers.models."
TRANSFORMER = (OLD + "Transformer", "")
POOLING = (OLD + "Pooling", "1_Pooling")
NORMALIZE = (OLD + "Normalize", "2_Normalize")
LAST = {
    "word_embedding_dimension": SIZE,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": False,
    "pooling_mode_max_tokens": False,
    "pooling_mode_mean_sqrt_len_tokens": False,
    "pooling_mode_weightedmean_tokens": False,
    "pooling_mode_lasttoken": True,
    "include_prompt": True,
}


def write(
    folder: Path,
    modules: list[tuple[str, str]] | None = None,
    pooling: Mapping[str, Any] | None = None,
    **config: Any,
) -> ModelConfig:
    """A checkpoint directory without weights."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    if modules is not None:
        listed = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (kind, path) in enumerate(modules)]
        (folder / "modules.json").write_text(json.dumps(listed))
    if pooling is not None:
        (folder / "1_Pooling").mkdir(exist_ok=True)
        (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    return ModelConfig(path=str(folder))


def test_what_the_files_say(tmp_path: Path) -> None:
    mean = EmbeddingRules(pooling=Pooling.MEAN, normalize=True, size=SIZE)
    assert embedding_rules(write(tmp_path)) == mean, "no files"
    rules = embedding_rules(write(tmp_path, [TRANSFORMER, POOLING, NORMALIZE], LAST))
    assert rules == EmbeddingRules(pooling=Pooling.LAST, normalize=True, size=SIZE)
    newer = [(f"sentence_transformers.sentence_transformer.modules.pooling.{kind.rpartition('.')[2]}", path)
             for kind, path in (TRANSFORMER, POOLING)]  # fmt: skip
    rules = embedding_rules(write(tmp_path, newer, {"pooling_mode": "cls"}))
    assert rules == EmbeddingRules(pooling=Pooling.FIRST, normalize=False, size=SIZE), "no module normalises"
    (tmp_path / "modules.json").unlink()
    assert embedding_rules(write(tmp_path, pooling=LAST)) == EmbeddingRules(pooling=Pooling.LAST, size=SIZE)


def test_the_config_goes_before_the_files(tmp_path: Path) -> None:
    model = write(tmp_path, [TRANSFORMER, POOLING, (OLD + "Dense", "2_Dense")], LAST)
    with pytest.raises(CheckpointError, match=r"modules.json has Dense .* set model.pooling to mean, last or first"):
        embedding_rules(model)
    assert embedding_rules(model.model_copy(update={"pooling": "mean"})).pooling is Pooling.MEAN


@pytest.mark.parametrize(
    ("pooling", "problem"),
    [
        ({"pooling_mode": "weightedmean"}, "pools by weightedmean, which is not supported"),
        ({"pooling_mode": ["mean", "max"]}, "pools by"),
        ({**LAST, "pooling_mode_mean_tokens": True}, "pools by mean and lasttoken"),
        ({}, "pools by nothing"),
    ],
)
def test_a_pooling_that_is_not_computed_here(tmp_path: Path, pooling: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError, match=f"1_Pooling/config.json {problem}"):
        embedding_rules(write(tmp_path, [TRANSFORMER, POOLING], pooling))


@pytest.mark.parametrize("text", ["{}", "[1]", '[{"type": "x"}]', "["])
def test_a_list_of_modules_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    model = write(tmp_path)
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"modules\.json"):
        embedding_rules(model)


def test_sizes_to_which_embeddings_may_be_cut(tmp_path: Path) -> None:
    assert embedding_rules(write(tmp_path, is_matryoshka=True)).sizes == range(1, SIZE)
    assert embedding_rules(write(tmp_path, matryoshka_dimensions=[16, 8])).sizes == (8, 16)
    with pytest.raises(CheckpointError, match=rf"must list sizes of 1 to {SIZE}"):
        embedding_rules(write(tmp_path, matryoshka_dimensions=[8, SIZE + 1]))
    model = write(tmp_path)
    assert embedding_rules(model).sizes == ()
    named = model.model_copy(update={"overrides": {"matryoshka_dimensions": [4, 2]}})
    assert embedding_rules(named).sizes == (2, 4)


class Words(ByteTokenizer):
    """With one id for yes, and one for no, after a blank line."""

    words: Mapping[int, str] = {255: "yes", 254: "no", 253: "No"}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        for token_id, word in self.words.items():
            if text.endswith(f"\n\n{word}"):
                return [*super().encode(text[: -len(word)], add_special_tokens=add_special_tokens), token_id]
        return super().encode(text, add_special_tokens=add_special_tokens)

    def token_text(self, token_id: int) -> str:
        return self.words.get(token_id) or super().token_text(token_id)


def test_a_reranker_is_known_by_its_name(tmp_path: Path) -> None:
    plain, named = tmp_path / "Qwen3-0.6B", tmp_path / "Qwen3-Reranker-0.6B"
    for folder in (plain, named):
        folder.mkdir()
    assert find_reranker(Config(model=write(plain)), Words()) is None
    model = write(named)
    found = find_reranker(Config(model=model), Words())
    assert found is not None and (found.yes_id, found.no_id) == (255, 254)
    tail = "<Query>: q\n<Document>: d<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert found.text("q", "d").endswith(tail)
    assert find_reranker(Config(model=model, rerank=RerankConfig(template="none")), Words()) is None
    with pytest.raises(ConfigError, match=r"rerank.positive is 'yes', which is not a single token"):
        find_reranker(Config(model=model), ByteTokenizer())
    assert find_reranker(Config(model=model), None) is None, "served without a tokenizer"
    with pytest.raises(ConfigError, match="needs a tokenizer, but model.skip_tokenizer is true"):
        find_reranker(Config(model=model, rerank=RerankConfig(template="qwen3")), None)
    assert find_reranker(Config(model=write(named, model_type="llama")), Words()) is None


def test_a_reranker_is_known_by_the_answers_in_its_files(tmp_path: Path) -> None:
    scoring = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
    model = write(tmp_path, [TRANSFORMER, (scoring, "1_LogitScore")])
    (tmp_path / "1_LogitScore").mkdir()
    for positive, negative, known in ((255, 254, True), (254, 255, False), (255, 253, False), (255, None, False)):
        settings = {"true_token_id": positive, "false_token_id": negative}
        (tmp_path / "1_LogitScore/config.json").write_text(json.dumps(settings))
        assert (find_reranker(Config(model=model), Words()) is not None) == known
    assert find_reranker(Config(model=model, rerank=RerankConfig(template="qwen3")), Words()) is not None
    assert embedding_rules(model) == EmbeddingRules(size=SIZE), "files of a score say nothing of embeddings"
