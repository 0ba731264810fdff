"""From the metadata of a GGUF file to the fields of config.json and generation_config.json that families read.

What the metadata leave out is what the architecture means by its absence, or is told by the tensors: whether the output
projection is the table of embeddings, and which projections have biases.
"""

import dataclasses
import functools
import struct
from collections.abc import Mapping
from typing import Any, NoReturn

from jaxserve.api import Pooling
from jaxserve.errors import CheckpointError
from jaxserve.files.gguf_file import GgufArray, GgufFile, ValueType
from jaxserve.models.gguf.architectures import ARCHITECTURES, MIXTRAL, Architecture

_REQUIRED = ("context_length", "embedding_length", "block_count", "attention.head_count")
# Sizes that others follow from here.
_SIZES = ("embedding_length", "block_count", "attention.head_count", "attention.key_length", "rope.dimension_count")
# Values that mean what the families do anyway, or what llama.cpp does without the key: attention that is causal, scales
# and caps that are off, no experts in a model without, and a softmax over their logits.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_feed_forward_length": (0,),
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_used_count": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "interleave_moe_layer_step": (0, 1),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "n_deepstack_layers": (0,),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.scale_linear": (0, 1),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.factor": (0, 1),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (-1, 0),
    "rope.scaling.yarn_log_multiplier": (0,),
    "swin_norm": (False,),
}
# Keys of the norms and the layers that the architecture has not, of the form of files, and of embeddings, which
# `read_pooling` reads.
_INERT = (
    "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon",
    "pooling_type",
    "rope.scaling.finetuned",
    "tensor_data_layout",
)
_POOLINGS = {1: Pooling.MEAN, 2: Pooling.FIRST, 3: Pooling.LAST}  # by the numbers of `pooling_type`
# Keys of the layers with a window, with those of all layers, or of the sizes that follow from others.
_OF_WINDOWS = {
    "attention.key_length_swa": "head_dim",
    "attention.value_length_swa": "head_dim",
    "rope.dimension_count_swa": "head_dim",
    "rope.freq_base_swa": "rope_theta",
}
# Options of sampling by the names of generation_config.json.
_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
# Keys of ids that end a turn, and texts of control tokens that do, since converters often write the first key alone.
_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_END_TEXTS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>")
_NOT_AN_END = {"gpt-oss": ("<|end|>",)}  # it ends a message there, after which the model goes on
_CONTROL = 3  # type of tokens


def architecture_of(file: GgufFile) -> tuple[str, Architecture]:
    """The name of the architecture and its row of the table. Raises CheckpointError for one that is not known."""
    kind = file.get("general.type", str) or "model"
    if kind != "model":
        raise CheckpointError(f"{file.path}: general.type is {kind!r}, which is no model; set model.path to the model")
    name = file.get("general.architecture", str)
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: general.architecture is {name!r}, which is not supported in GGUF; known: "
            f"{', '.join(ARCHITECTURES)}; take the safetensors checkpoint that the file was made of"
        )
    is_mixtral = name == "llama" and file.metadata.get("llama.expert_count", 0)
    return name, MIXTRAL if is_mixtral else ARCHITECTURES[name]


def read_config(file: GgufFile) -> dict[str, Any]:
    """The fields of config.json. Keys that nothing here knows are fields of their own name.

    Raises CheckpointError for an architecture or a value that is not supported, naming the key.
    """
    name, architecture = architecture_of(file)
    reader = _Reader(file, name)
    norms = [key for key in architecture.keys if key.endswith("_epsilon")]
    for key in (*_REQUIRED, *norms, *architecture.required):
        if reader.get(key) is None:
            reader.fail(key, "it is missing; convert the model again with a converter of today")
    for key in _SIZES:
        size = reader.take(key)
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            reader.fail(key, f"it is {size!r:.80}, but must be a whole number of at least 1")
    if (layers := reader.take("block_count")) > len(file.tensors):
        reader.fail("block_count", f"it is {layers}, but there are {len(file.tensors)} tensors in all")
    config: dict[str, Any] = {
        "architectures": [architecture.hf],
        "model_type": architecture.model_type,
        "dtype": _dtype(file),
        "vocab_size": _vocab_size(file, reader),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **_ids(file, name),
        **architecture.fixed,
    }
    for key, field in architecture.keys.items():
        if (value := reader.take(key)) is not None:
            config[field] = value
    heads = config["num_attention_heads"]
    config.setdefault("num_key_value_heads", heads)
    config.setdefault("head_dim", config["hidden_size"] // heads)
    config.setdefault("rope_theta", 10_000.0)  # of every architecture in llama.cpp; families have other defaults
    if (length := reader.take("attention.value_length")) not in (None, config["head_dim"]):
        reader.fail(
            "attention.value_length", f"it is {length}, but keys have {config['head_dim']}: both must be the same"
        )
    _read_rope(file, reader, config)
    _pass_over(reader, config)
    _ADAPTED.get(name, lambda *_: None)(file, config)
    if architecture.scalar_by_heads is not None:
        by_heads = config["num_hidden_layers"] in architecture.scalar_by_heads
        config["query_pre_attn_scalar"] = config["hidden_size"] // heads if by_heads else config["head_dim"]
    return config | reader.untaken()


def read_pooling(file: GgufFile) -> Pooling | None:
    """The pooling that the file asks for; None: it does not say. Raises CheckpointError for one that is not known."""
    name, _ = architecture_of(file)
    key = f"{name}.pooling_type"
    number = file.get(key, int)
    if number in (None, -1, 0):
        return None
    if number not in _POOLINGS:
        raise CheckpointError(
            f"{file.path}: {key} is {number}, which is not supported (1, the mean, 2, the first token, and 3, the "
            "last, are); set model.pooling to mean, last or first to embed in that way all the same"
        )
    return _POOLINGS[number]


def read_generation(file: GgufFile) -> dict[str, Any]:
    """The fields of generation_config.json."""
    return {field: value for key, field in _SAMPLING.items() if (value := file.get(key, int, float)) is not None}


@dataclasses.dataclass(frozen=True, slots=True)
class _Reader:
    """The keys of one architecture, of which each is taken once."""

    file: GgufFile
    name: str
    taken: set[str] = dataclasses.field(default_factory=lambda: set(_INERT))

    def get(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.name}.{key}")

    def take(self, key: str) -> Any:
        """The value, None where it is absent. Of a value for each layer, the one that all of them have."""
        self.taken.add(key)
        value = self.get(key)
        if not isinstance(value, GgufArray):
            return value
        values = value.read()
        if not values or any(other != values[0] for other in values):
            self.fail(key, f"it is {values!r:.80}, but must be the same in all layers")
        return values[0]

    def take_any(self, key: str) -> None:
        """Takes the key, whatever its value is."""
        self.taken.add(key)

    def is_one_of(self, key: str, *values: Any) -> bool:
        """The key is there with one of these values, in all layers where it has one for each."""
        found = self.get(key)
        found = found.read() if isinstance(found, GgufArray) else [] if found is None else [found]
        return bool(found) and all(value in values for value in found)

    def untaken_keys(self) -> list[str]:
        start = f"{self.name}."
        names = [key.removeprefix(start) for key in self.file.metadata if key.startswith(start)]
        return [name for name in names if name not in self.taken]

    def untaken(self) -> dict[str, Any]:
        found = {f"{self.name}.{key}": self.get(key) for key in self.untaken_keys()}
        return {key: value.read() if isinstance(value, GgufArray) else value for key, value in found.items()}

    def fail(self, key: str, problem: str) -> NoReturn:
        raise CheckpointError(f"{self.file.path}: {self.name}.{key}: {problem}")


def _pass_over(reader: _Reader, config: Mapping[str, Any]) -> None:
    """Takes the keys that change nothing in this model, by their values."""
    for key, neutral in _NEUTRAL.items():
        if reader.is_one_of(key, *neutral):
            reader.take(key)
    window = reader.get("attention.sliding_window")
    if isinstance(window, int) and window >= config["max_position_embeddings"]:
        reader.take("attention.sliding_window")  # no token is so far away
    has_windows = "attention.sliding_window" in reader.untaken_keys() or config.get("sliding_window")
    if not has_windows:
        reader.take_any("attention.sliding_window_pattern")
    for key, field in _OF_WINDOWS.items():
        if not has_windows or reader.is_one_of(key, config[field]):
            reader.take_any(key)
    if reader.is_one_of("embedding_length_out", config["hidden_size"]):
        reader.take("embedding_length_out")


def _dtype(file: GgufFile) -> str:
    """The type that matrices are meant for. Codes are: bfloat16, which engines compute them in."""
    kinds = {tensor.type for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if kinds <= {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F32", "F16"} else "bfloat16"


def _vocab_size(file: GgufFile, reader: _Reader) -> int:
    stated = reader.take("vocab_size")
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise CheckpointError(
            f"{file.path} has no tensor token_embd.weight of two axes, the table of embeddings; fetch the whole model"
        )
    if stated not in (None, table.shape[0]):
        reader.fail("vocab_size", f"it is {stated}, but token_embd.weight has {table.shape[0]} rows")
    return table.shape[0]


def _ids(file: GgufFile, name: str) -> dict[str, Any]:
    """The ids that begin and end a text."""
    ends = [*(file.get(key, int) for key in _END_KEYS), *_control_ends(file, name)]
    found = {"bos_token_id": file.get("tokenizer.ggml.bos_token_id", int)}
    found["eos_token_id"] = sorted({token_id for token_id in ends if token_id is not None}) or None
    return {field: value for field, value in found.items() if value is not None}


@functools.lru_cache(maxsize=4)  # a start reads its config from six places; a vocabulary takes 0.2 s
def _control_ends(file: GgufFile, name: str) -> tuple[int, ...]:
    """Control tokens whose text ends a text."""
    tokens, types = (file.metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if isinstance(tokens, GgufArray) and isinstance(types, GgufArray) and tokens.type is ValueType.STRING:
        wanted = set(_END_TEXTS) - set(_NOT_AN_END.get(name, ()))
        control = {i for i, kind in enumerate(types.read()) if kind == _CONTROL}
        return tuple(i for i, text in tokens.read_texts(control).items() if text in wanted)
    return ()


def _read_rope(file: GgufFile, reader: _Reader, config: dict[str, Any]) -> None:
    kind = reader.take("rope.scaling.type")
    table: dict[str, Any] = {}
    if kind not in (None, "none"):
        table["rope_type"] = kind
        for key, field in _ROPE_SCALING.items():
            if (value := reader.take(f"rope.scaling.{key}")) is not None:
                table[field] = value
    else:
        reader.take("rope.scaling.original_context_length")  # it matters to a scaling alone
        if kind == "none":
            reader.take("rope.scaling.factor")  # without a type it would be that of a linear scaling
    if kind != "yarn":
        for key in ("yarn_beta_fast", "yarn_beta_slow", "yarn_log_multiplier"):
            reader.take(f"rope.scaling.{key}")
    elif reader.is_one_of("rope.scaling.yarn_ext_factor", 1):
        reader.take("rope.scaling.yarn_ext_factor")
    dimensions = reader.take("rope.dimension_count")
    if dimensions is not None and dimensions != config["head_dim"]:
        config["partial_rotary_factor"] = dimensions / config["head_dim"]
    if "rope_freqs.weight" in file.tensors:
        if table:
            reader.fail("rope.scaling.type", f"it is {kind!r}, but rope_freqs.weight scales each frequency, too")
        table = {"rope_type": "factors", "factors": _read_floats(file, "rope_freqs.weight")}
    for name in ("rope_factors_long.weight", "rope_factors_short.weight"):
        if name in file.tensors:
            raise CheckpointError(
                f"{file.path}: tensor {name}: rope scaling by two tables (longrope) is not supported; take the same "
                "model with the short context"
            )
    if table:
        config["rope_scaling"] = table


_ROPE_SCALING = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


def _read_floats(file: GgufFile, name: str) -> list[float]:
    tensor = file.tensors[name]
    if tensor.type != "F32" or len(tensor.shape) != 1:
        raise CheckpointError(
            f"{file.path}: tensor {name} is {tensor.type} of shape {list(tensor.shape)}, but must be F32 of one axis; "
            "convert the model again"
        )
    with tensor.file.open("rb") as opened:
        opened.seek(tensor.start)
        return [*struct.unpack(f"<{tensor.shape[0]}f", opened.read(tensor.num_bytes))]


def _llama(file: GgufFile, config: dict[str, Any]) -> None:
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if config["model_type"] == "llama":
        config["mlp_bias"] = "blk.0.ffn_down.bias" in file.tensors


def _gpt_oss(file: GgufFile, config: dict[str, Any]) -> None:
    del file
    # The published config does not round the range of yarn, which GGUF has no key for.
    config.get("rope_scaling", {})["truncate"] = False


def _phi3(file: GgufFile, config: dict[str, Any]) -> None:
    del file
    config["sliding_window"] = config["sliding_window"] or None  # 0: none


_ADAPTED: Mapping[str, Any] = {"llama": _llama, "gpt-oss": _gpt_oss, "phi3": _phi3}
