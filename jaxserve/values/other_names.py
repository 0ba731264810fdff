"""What users of vLLM, SGLang, llama.cpp and transformers type, and what it is here.

One table for all, `other_options.txt`: flags of commands, keys of a config, arguments of `LLM` and of its methods,
`SamplingParams`, and fields of HTTP bodies. A name of the table is never accepted in the place of another, since only
few mean exactly the same; the error says what to write. Where an option cannot be had, the error says so: a user who
were told to leave it out would get another answer. Methods and attributes are in `other_methods.txt`.
"""

import enum
import fnmatch
import functools
import importlib.resources
import re
from collections.abc import Collection, Mapping
from typing import NamedTuple


class Place(enum.StrEnum):
    """Where a name was written."""

    FLAG = "flag"  # of a command with --set
    SETTING = "setting"  # the last part of a dotted name
    MODEL = "model"  # an argument of LLM and AsyncLLM
    CALL = "call"  # an argument of generate, chat, embed and other methods
    SAMPLING = "sampling"  # a field of SamplingParams, or of a line of a batch
    REQUEST = "request"  # a field of an HTTP body


class Row(NamedTuple):
    """One thing that other engines have, under all of its names.

    Attributes:
      names: as they are written in Python, of all engines, one after the other; `*` stands for any letters, and of
        several that fit the longest counts.
      setting: dotted name of the setting here.
      model: argument of `LLM`; by default that of `SAME` with this setting.
      call: argument of a method of `LLM`.
      sampling: field of `SamplingParams`.
      request: field of bodies of completions or chats; by default `sampling`.
      note: what differs, or how; alone: why nothing here has this name.
    """

    names: str
    setting: str = ""
    model: str = ""
    call: str = ""
    sampling: str = ""
    request: str = ""
    note: str = ""


_ALWAYS = "not needed here: "
_NONE = "not implemented here: "


def _read(file: str) -> list[tuple[str, str]]:
    """The rows of a file beside this one: what is here, and the names of others, one after the other. A row goes on in
    the lines that are indented; one that begins with # is a comment."""
    rows = re.split(r"\n+(?=\S)", importlib.resources.files("jaxserve.values").joinpath(file).read_text("utf-8"))
    parts = [" ".join(row.split()).partition(" | ") for row in rows if not row.startswith("#")]
    return [(here, names) for here, _, names in parts]


def _option(here: str, names: str) -> Row:
    """`SETTING sampling=FIELD -- NOTE`, of which each may be absent, as a row."""
    places, _, note = here.partition("-- ")
    setting, others = "", {}
    for word in places.split():
        place, middle, name = word.partition("=")
        if middle:
            others[place] = name
        else:
            setting = word
    return Row(names, setting, note=note, **others)


ROWS: tuple[Row, ...] = tuple(_option(here, names) for here, names in _read("other_options.txt"))

# vLLM's names that mean exactly the same, and work: arguments of `LLM`, and flags of `jaxserve serve` -> setting.
SAME: Mapping[str, str] = {
    "tokenizer": "model.tokenizer",
    "skip_tokenizer_init": "model.skip_tokenizer",
    "served_model_name": "model.name",
    "dtype": "model.dtype",
    "quantization": "model.quantization",
    "seed": "model.seed",
    "max_model_len": "model.max_len",
    "max_num_seqs": "sched.max_rows",
    "max_num_batched_tokens": "sched.max_step_tokens",
    "enable_prefix_caching": "cache.prefix_caching",
    "enable_chunked_prefill": "sched.chunked_prefill",
    "block_size": "cache.page_size",
    "num_gpu_blocks_override": "cache.num_pages",
    "gpu_memory_utilization": "cache.memory_fraction",
    "tensor_parallel_size": "parallel.tensor",
    "pipeline_parallel_size": "parallel.pipeline",
    "data_parallel_size": "parallel.data",
}

# Fields of `SamplingParams`, which mean the same in most engines, written where they do not belong.
SAMPLING = (
    "n temperature top_k top_p min_p presence_penalty frequency_penalty repetition_penalty logit_bias "
    "allowed_token_ids bad_words min_tokens max_tokens stop stop_token_ids include_stop_str_in_output "
    "ignore_eos seed "
    "logprobs prompt_logprobs skip_special_tokens detokenize truncate_prompt_tokens structured"
)

_DOWNLOAD = (
    "`hf download OWNER/NAME --local-dir DIRECTORY`, since jaxserve downloads nothing; then `jaxserve chat DIRECTORY`"
)
_DIRECTORY = "`ls`, or `rm`: a model is a directory, or a GGUF file, wherever you keep it"

COMMANDS: Mapping[str, str] = {  # commands of others -> how it is done here
    "complete": "`jaxserve run --prompt TEXT`",
    "generate": "`jaxserve run --prompt TEXT`",
    "run-batch": "`jaxserve run --input FILE --output FILE`",
    "launch_server": "`jaxserve serve MODEL --port N`",
    "api_server": "`jaxserve serve MODEL --port N`",
    "server": "`jaxserve serve MODEL --port N`",
    "start": "`jaxserve serve MODEL --port N`",
    "pull": _DOWNLOAD,
    "download": _DOWNLOAD,
    "list": _DIRECTORY,
    "ls": _DIRECTORY,
    "rm": _DIRECTORY,
    "ps": "`jaxserve top HOST:PORT`, of one server, which has one model",
    "stop": "SIGTERM, or Ctrl-C, to the process of the server",
    "quantise": "`jaxserve quantize`",
    "collect-env": "`jaxserve version`",
}

# What others have on a loaded model -> how it is done here, or why it is not.
ATTRIBUTES: Mapping[str, str] = {name: here for here, names in _read("other_methods.txt") for name in names.split()}


def attribute_answer(name: str) -> str | None:
    """What the attribute `name` of a loaded model is here, as the end of a sentence about it."""
    said = ATTRIBUTES.get(name)
    return said if said is None or said.startswith((_ALWAYS, _NONE)) else f"here it is {said}"


def answer(name: str, place: Place, known: Collection[str] | None = None) -> str | None:
    """What `name` is here, as the end of a sentence about it; None: the table has no such name.

    `known`: for a REQUEST, the fields that its body may have, since not every route has all of them; for a FLAG, the
    parameters of the command. A flag of one dash is asked for with it.
    """
    row = _row(name)
    if row is None:
        return None
    found = _here(row, place, known)
    if found is None:
        is_of_others = place is Place.REQUEST and (row.sampling or row.request)
        return "this route has nothing like it" if is_of_others else row.note
    return f"{found} ({row.note})" if row.note else found


def command_answer(name: str) -> str | None:
    """How that which the command `name` does elsewhere is done here."""
    return COMMANDS.get(name)


def _row(name: str) -> Row | None:
    """The row of `name` itself, or that of the longest pattern that fits."""
    table = _table()
    if name in table:
        return table[name]
    fitting = [pattern for pattern in table if "*" in pattern and fnmatch.fnmatchcase(name, pattern)]
    return table[max(fitting, key=len)] if fitting else None


@functools.cache
def _table() -> Mapping[str, Row]:
    rows = {name: Row(name, sampling=name) for name in SAMPLING.split()}
    rows |= {name: Row(name, setting=setting) for name, setting in SAME.items()}
    return {**rows, **{name: row for row in ROWS for name in row.names.split()}}


def _here(row: Row, place: Place, known: Collection[str] | None) -> str | None:
    setting, sampling, call = row.setting, row.sampling, row.call
    request = row.request or sampling
    match place:
        case Place.FLAG:
            if (flag := _flag(setting, sampling, known or ())) is not None:
                return f"here it is {flag}"
            if setting:
                return f"here it is --set {setting}=VALUE"
            return f"each request says it, as {request or call!r}" if request or call else None
        case Place.SETTING:
            if setting:
                return f"here it is {setting!r}"
            return f"each request says it, as {request or call!r}" if request or call else None
        case Place.MODEL:
            argument = row.model or next((name for name, same in SAME.items() if same == setting), "")
            if argument:
                return f"here it is {argument!r}"
            if setting:
                return f"here it is the setting {setting!r}: from_config(None, overrides={{{setting!r}: ...}})"
            return _of_a_call(sampling, call, request)
        case Place.CALL:
            if call:
                return f"here it is {call!r}"
            return _of_a_call(sampling, call, request) or _of_the_engine(setting)
        case Place.SAMPLING:
            if sampling:
                return f"here it is {sampling!r}"
            return _of_a_call(sampling, call, request) or _of_the_engine(setting)
        case Place.REQUEST:
            if request and (known is None or request in known):
                return f"here it is {request!r}"
            return None if request else _of_the_engine(setting)


def _flag(setting: str, sampling: str, known: Collection[str]) -> str | None:
    """The flag of a command that has these parameters, where one does this."""
    names = (sampling, *(name for name, same in SAME.items() if same == setting))
    found = next((name for name in names if name and name in known), None)
    return None if found is None else f"--{found.replace('_', '-')} VALUE"


def _of_a_call(sampling: str, call: str, request: str) -> str | None:
    if sampling:
        return f"here it is SamplingParams({sampling}=...)"
    if call:
        return f"here it is {call!r}, an argument of the call that asks"
    return f"over HTTP it is {request!r}" if request else None


def _of_the_engine(setting: str) -> str | None:
    return f"the engine has it, not a request: the setting {setting!r}" if setting else None
