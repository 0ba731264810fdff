"""`jaxserve calibrate-cache`: from a model and a text to the file of ranges that a cache of eight bits takes."""

from pathlib import Path

import jax
import numpy as np

from jaxserve.assemble.devices import find_devices
from jaxserve.assemble.texts import read_texts
from jaxserve.config.model_path import resolve_model_path
from jaxserve.config.schema import Config
from jaxserve.errors import ConfigError
from jaxserve.kernels.ops import PAGED_ATTENTION
from jaxserve.kernels.paged_attention import PAGE_SIZES, PagedAttention
from jaxserve.models import configured_checkpoint, load_model
from jaxserve.models.cache_scales import CacheRanges, write_ranges
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.layers import attention_use
from jaxserve.models.loading import decoder_config
from jaxserve.progress import Progress, Quiet
from jaxserve.runtime.calibration import STEP_TOKENS, measure_ranges
from jaxserve.runtime.mesh import make_meshes
from jaxserve.runtime.resolve import backend_of, choose
from jaxserve.text import load_tokenizer

QUANTILE = 0.9999  # of magnitudes; the few that are larger are cut


def calibrate_cache(
    config: Config,
    data: Path,
    out: Path,
    *,
    progress: Progress = Quiet(),  # noqa: B008 (stateless)
) -> int:
    """Writes `out` for the model of a config, and returns the number of tokens that it was measured on.

    `data` is text, or JSONL (by its name) with "text", "prompt", "prompt_token_ids" or "messages" in each line. The
    model is cut over devices as `parallel` says; of `cache` nothing is read.

    Raises ConfigError for files and settings that cannot be, CheckpointError for a model that cannot be read.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already; give the name of a new file")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"cannot write {out}: there is no directory {out.absolute().parent}; make it first")
    if config.parallel.pipeline > 1:
        raise ConfigError(
            f"parallel.pipeline is {config.parallel.pipeline}, but calibration runs all layers on the same devices; "
            "set it to 1 and use parallel.tensor"
        )
    progress.begin("reading the text")
    tokenizer = load_tokenizer(resolve_model_path(config.model.tokenizer or config.model.path))
    checkpoint = configured_checkpoint(config.model)
    _, decoder = decoder_config(checkpoint)
    texts = read_texts(tokenizer, data, decoder.vocab_size)
    longest = min(STEP_TOKENS, decoder.max_position)
    pieces = [text.ids[start : start + longest] for text in texts for start in range(0, len(text.ids), longest)]
    progress.begin("loading weights")
    mesh = make_meshes(config.parallel, find_devices(config))[0][0]
    model = load_model(checkpoint, dtype=config.model.dtype, mesh=mesh)
    progress.begin("choosing kernels")
    attention, page_size = attention_without_engine(config, model.partition.local, model.dtype, mesh.local_devices[0])
    progress.begin("measuring keys and values")
    ranges: CacheRanges = measure_ranges(
        model,
        attention,
        pieces,
        quantile=QUANTILE,
        page_size=page_size,
        count=lambda done, total: progress.count(done, total, "tokens"),
    )
    num_tokens = sum(map(len, pieces))
    about = {"model": config.model.name or checkpoint.path.name, "tokens": num_tokens, "quantile": QUANTILE}
    write_ranges(out, ranges, about)
    return num_tokens


def attention_without_engine(
    config: Config,
    model: DecoderConfig,
    dtype: np.dtype,
    device: jax.Device,  # pyright: ignore[reportInvalidTypeForm]
) -> tuple[PagedAttention, int]:
    """The attention that all layers of `model`, with the sizes of one device, can use; and the tokens of its pages."""
    page_size = config.cache.page_size or PAGE_SIZES[backend_of(device)]
    uses = [
        attention_use(model, layer, page_size=page_size, query_dtype=dtype, cache_dtype=dtype) for layer in model.layers
    ]
    return choose(PAGED_ATTENTION, config, uses, device), page_size
