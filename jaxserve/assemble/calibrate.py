"""`jaxserve calibrate-cache`: from a model and a text to the file of ranges that a cache of eight bits takes.

The text should be of the kind that the model will read: chats as its template writes them, where it is one for chats.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import IO

from jaxserve.assemble.devices import find_devices
from jaxserve.config.schema import Config
from jaxserve.errors import ConfigError, InvalidRequest
from jaxserve.kernels.ops import PAGED_ATTENTION
from jaxserve.kernels.paged_attention import PAGE_SIZES
from jaxserve.models import configured_checkpoint, load_model, resolve_model_path
from jaxserve.models.cache_scales import CacheRanges, write_ranges
from jaxserve.models.layers import attention_use
from jaxserve.offline.jsonl import Entry, read_entries
from jaxserve.progress import Progress, Quiet
from jaxserve.runtime.calibration import STEP_TOKENS, measure_ranges
from jaxserve.runtime.mesh import make_meshes
from jaxserve.runtime.resolve import backend_of, choose
from jaxserve.text import ChatTemplate, Tokenizer, encode_chat, load_tokenizer

QUANTILE = 0.9999  # of magnitudes; the few that are larger are cut
_INPUTS = ("text", "prompt", "prompt_token_ids", "messages")


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
    if config.parallel.pipeline > 1:
        raise ConfigError(
            f"parallel.pipeline is {config.parallel.pipeline}, but calibration runs all layers on the same devices; "
            "set it to 1 and use parallel.tensor"
        )
    progress.begin("reading the text")
    tokenizer = load_tokenizer(resolve_model_path(config.model.tokenizer or config.model.path))
    checkpoint = configured_checkpoint(config.model)
    ids = _read_ids(tokenizer, data)
    progress.begin("loading weights")
    mesh = make_meshes(config.parallel, find_devices(config))[0][0]
    model = load_model(checkpoint, dtype=config.model.dtype, mesh=mesh)
    longest = min(STEP_TOKENS, model.config.max_position)
    pieces = [sequence[start : start + longest] for sequence in ids for start in range(0, len(sequence), longest)]
    unknown = max((max(piece) for piece in pieces), default=0)
    if unknown >= model.config.vocab_size:
        raise ConfigError(
            f"{data} has token {unknown}, but {config.model.path} has {model.config.vocab_size} of them; "
            "is model.tokenizer that of the model?"
        )
    device = mesh.local_devices[0]
    page_size = config.cache.page_size or PAGE_SIZES[backend_of(device)]
    uses = [
        attention_use(
            model.partition.local, layer, page_size=page_size, query_dtype=model.dtype, cache_dtype=model.dtype
        )
        for layer in model.partition.local.layers
    ]
    progress.begin("choosing kernels")
    attention = choose(PAGED_ATTENTION, config, uses, device)
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


def _read_ids(tokenizer: Tokenizer, data: Path) -> list[list[int]]:
    """The tokens of each text of a file. Raises ConfigError."""
    try:
        with data.open("rb") as file:
            read = _read_lines(tokenizer, file, data) if data.suffix == ".jsonl" else _read_text(tokenizer, file, data)
            found = [ids for ids in read if ids]
    except OSError as error:
        raise ConfigError(f"cannot read {data}: {error.strerror}") from error
    if not found:
        raise ConfigError(f"{data} holds no text; give a file of some thousand words that the model is meant to read")
    return found


def _read_text(tokenizer: Tokenizer, file: IO[bytes], data: Path) -> Iterator[list[int]]:
    try:
        text = file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{data} is not valid UTF-8 at byte {error.start}; convert it") from error
    if text.strip():
        yield tokenizer.encode(text)


def _read_lines(tokenizer: Tokenizer, file: IO[bytes], data: Path) -> Iterator[list[int]]:
    template = ChatTemplate.of(tokenizer)
    for entry, problem in read_entries(file):
        try:
            if problem is not None:
                raise problem
            yield _ids_of(tokenizer, template, entry)
        except InvalidRequest as error:
            raise ConfigError(f"{data}:{entry.line}: {error}") from error


def _ids_of(tokenizer: Tokenizer, template: ChatTemplate, entry: Entry) -> list[int]:
    given = [name for name in _INPUTS if entry.fields.get(name) is not None]
    if len(given) != 1:
        raise InvalidRequest(f"a line has exactly one of {', '.join(_INPUTS)}; this one has {sorted(entry.fields)}")
    value = entry.fields[given[0]]
    if given[0] == "messages":
        return encode_chat(tokenizer, template, value, add_generation_prompt=False)
    if given[0] != "prompt_token_ids" and isinstance(value, str):
        return tokenizer.encode(value)
    is_ids = isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
    if given[0] == "text" or not is_ids:
        raise InvalidRequest(f"{given[0]} is {value!r:.80}, but must be text or a list of token ids")
    return value
