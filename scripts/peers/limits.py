"""The least that a step of a workload must read and multiply, and the speed that the machine's rates allow it.

The bytes are those of `jaxserve.lab.roofline`: the matrices of all layers and the table of the logits once in each
step, of experts those that a step hits on average (routed evenly), and the keys and values of every stream halfway
through its output. Activations are not counted, since they fit into the caches.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.files.gguf_file import find_gguf, read_gguf
from jaxserve.lab.roofline import Work
from jaxserve.models.checkpoint import read_checkpoint
from jaxserve.models.family import FAMILIES
from peers.figures import DECODE, PREFILL, Row
from peers.workloads import Sizes

# Bytes of a number of the matrices, with its share of scales where they are not one a row.
_WIDTH = {"float32": 4, "bfloat16": 2, "q8_0": 34 / 32, "int8-a8": 1, "int4-a8": 0.5 + 4 / 128}
_CACHE_WIDTH = {"bfloat16": 2}  # of a key's or value's number; otherwise 4
_HEAD_WIDTH = {"int4-a8": 1}  # where the logits' table has a format of its own


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One step of a workload.

    Attributes:
      figure: that has this limit.
      tokens: that it gives: one of each stream, or all of a prompt.
      step_bytes: that are read from the memory.
      step_flops: a multiply-add counts as two.
      byte_limit, compute_limit: tokens a second, if nothing else took time. None where the rate is not known: that of
        multiply-adds is measured in float32 alone, and instructions for fewer bits do several times as many.
    """

    figure: str
    tokens: int
    step_bytes: float
    step_flops: float
    byte_limit: float | None
    compute_limit: float | None


def find_limits(
    config: Mapping[str, Any], sizes: Sizes, dtype: str, rates: Mapping[str, float] | None
) -> dict[str, Limit]:
    """The limits of the workloads with one kind of step, by name.

    `dtype`: of the weights, a key of `_WIDTH`. `rates`: "read_gb_per_s" and "multiply_add_gflop_per_s" of as many
    threads as the engines have.
    """
    architecture = config["architectures"][0]
    model = FAMILIES.get(architecture).decoder_config(config, architecture)
    work = Work(model=model, weight_size=_WIDTH[dtype], cache_size=_CACHE_WIDTH.get(dtype, 4))
    return _limits(work, _HEAD_WIDTH.get(dtype, work.weight_size), sizes, rates, has_compute_rate=dtype == "float32")


def find_file_limits(path: Path, sizes: Sizes, rates: Mapping[str, float] | None) -> dict[str, Limit]:
    """The same of a GGUF file, whose matrices have the bytes of the file, and keys and values two a number."""
    checkpoint, first = read_checkpoint(path), find_gguf(path)
    assert checkpoint.family is not None and first is not None, path
    matrices = {name: tensor for name, tensor in read_gguf(first).tensors.items() if len(tensor.shape) > 1}
    table = matrices.pop("token_embd.weight")
    head = matrices.pop("output.weight", table)

    def width(*tensors: Any) -> float:
        return sum(tensor.num_bytes for tensor in tensors) / sum(math.prod(tensor.shape) for tensor in tensors)

    model = FAMILIES.get(checkpoint.family).decoder_config(checkpoint.config, str(path))
    work = Work(model=model, weight_size=width(*matrices.values()), cache_size=2)
    return _limits(work, width(head), sizes, rates, has_compute_rate=False)


def _limits(
    work: Work, head_size: float, sizes: Sizes, rates: Mapping[str, float] | None, *, has_compute_rate: bool
) -> dict[str, Limit]:
    """`head_size`: bytes of a number of the table of the logits."""
    model = work.model

    def limit(figure: str, tokens: int, rows: int, context: float) -> Limit:
        table = model.vocab_size * model.hidden_size
        step_bytes = (
            work.weight_size * work.read_params(tokens) + head_size * table + work.cache_bytes(tokens, rows, context)
        )
        step_flops = work.flops(tokens, rows, tokens * context)
        return Limit(
            figure=figure,
            tokens=tokens,
            step_bytes=step_bytes,
            step_flops=step_flops,
            byte_limit=tokens * rates["read_gb_per_s"] * 1e9 / step_bytes if rates else None,
            compute_limit=tokens * rates["multiply_add_gflop_per_s"] * 1e9 / step_flops
            if rates and has_compute_rate
            else None,
        )

    halfway = sizes.prompt + sizes.output / 2
    return {
        "one": limit(DECODE.name, 1, 1, halfway),
        "streams": limit(DECODE.name, sizes.streams, sizes.streams, halfway),
        **{
            name: limit(PREFILL.name, length, 1, length / 2)
            for name, length in (
                ("short_prefill", sizes.short_prefill),
                ("prefill", sizes.prefill),
                ("long_prefill", sizes.long_prefill),
            )
        },
    }


def best_rates(found: list[dict[str, dict[str, float]] | None], threads: int) -> dict[str, float] | None:
    """The best of several measurements: other programs can only take away. None where so many threads have no rate."""
    key = f"{threads} thread{'s' * (threads > 1)}"
    known = [rates for rates in found if rates and all(key in of_threads for of_threads in rates.values())]
    if not known:
        return None
    return {name: max(rates[name][key] for rates in known) for name in known[0]}


def shares(row: Row, limits: Mapping[str, Mapping[str, Limit]]) -> dict[str, dict[str, float | None]]:
    """For each engine its median as a share of both limits (None: not known). `limits`: engine -> workload -> limit."""
    found: dict[str, dict[str, float | None]] = {}
    for engine, median in row.medians.items():
        limit = limits.get(engine, {}).get(row.workload)
        if limit and limit.figure == row.figure.name and limit.byte_limit:
            found[engine] = {
                "of_byte_limit": median / limit.byte_limit,
                "of_compute_limit": median / limit.compute_limit if limit.compute_limit else None,
            }
    return found
