"""Which answers other than text a model gives: embeddings and scores, by its files and by the config."""

from jaxserve.api import Pooling
from jaxserve.config.schema import Config, ModelConfig
from jaxserve.engine import QWEN3_TEMPLATE, EmbeddingRules, Reranker
from jaxserve.errors import ConfigError
from jaxserve.files.gguf_file import read_gguf
from jaxserve.models import configured_checkpoint, decoder_config
from jaxserve.models.checkpoint import Checkpoint
from jaxserve.models.gguf import config as gguf_config
from jaxserve.models.sentence_modules import SentenceModules, read_answers, read_modules, read_pooling, read_sizes
from jaxserve.text import Tokenizer


def embedding_rules(model: ModelConfig) -> EmbeddingRules:
    """How prompts are embedded. Raises CheckpointError."""
    checkpoint = configured_checkpoint(model)
    _, decoder = decoder_config(checkpoint)
    modules = read_modules(checkpoint.path)
    return EmbeddingRules(
        pooling=_own_pooling(checkpoint, modules) if model.pooling == "auto" else Pooling(model.pooling),
        normalize=modules.normalizes,
        size=decoder.hidden_size,
        sizes=read_sizes(checkpoint.config, decoder.hidden_size, checkpoint.config_file),
    )


def _own_pooling(checkpoint: Checkpoint, modules: SentenceModules) -> Pooling:
    """The pooling that the files ask for, a mean where they ask for none. Raises CheckpointError."""
    if checkpoint.gguf is None:
        return read_pooling(modules)
    return gguf_config.read_pooling(read_gguf(checkpoint.gguf)) or Pooling.MEAN


def find_reranker(config: Config, tokenizer: Tokenizer | None) -> Reranker | None:
    """How documents are judged; None for a model that is not known to judge.

    Raises ConfigError for settings that cannot be followed, CheckpointError for files that cannot be read.
    """
    rerank = config.rerank
    template = rerank.template
    if template == "auto":
        template = "qwen3" if tokenizer is not None and _is_qwen3_reranker(config, tokenizer) else "none"
    if template == "none":
        return None
    if tokenizer is None:
        raise ConfigError(
            "rerank.template needs a tokenizer, but model.skip_tokenizer is true; set it to false, or "
            "rerank.template to none"
        )
    return Reranker.of(
        tokenizer,
        template=QWEN3_TEMPLATE if template == "qwen3" else template,
        instruction=rerank.instruction,
        positive=rerank.positive,
        negative=rerank.negative,
    )


def _is_qwen3_reranker(config: Config, tokenizer: Tokenizer) -> bool:
    """By its name, or by a `LogitScore` of the same two answers: other models of that kind were taught other words."""
    checkpoint = configured_checkpoint(config.model)
    if checkpoint.config.get("model_type") != "qwen3":
        return False
    answers = read_answers(read_modules(checkpoint.path)) or ()
    words = [tokenizer.token_text(token_id) for token_id in answers if 0 <= token_id < tokenizer.vocab_size]
    return "qwen3-reranker" in checkpoint.path.name.lower() or words == [config.rerank.positive, config.rerank.negative]
