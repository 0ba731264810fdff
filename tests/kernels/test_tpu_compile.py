"""Every case compiled for TPUs that are not here: what Mosaic or the memory of the chip would refuse, fails here."""

import pytest

from jaxserve.kernels.cases import REAL
from jaxserve.kernels.pallas.tpu_implementation import make_attention
from jaxserve.lab.compiled.attention import compile_attend
from jaxserve.lab.compiled.topology import device_of_topology

QUICK = (("llama3-8b-tp4/busy/32/int8", "v6e:2x2"),)
# Each has another text of the kernel: float32 or eight bits, pages that fill no tile, a soft cap, sinks, slopes, one
# key head, many. Models that differ in the numbers of their heads alone compile alike, and mixes
# beside `busy`, which has rows of both kinds, differ in sizes of work lists and tables.
ON_V5E = (
    "gpt-oss/busy/16",
    "gemma2-9b/busy/64/bfloat16",
    "mpt-7b-alibi/busy/64/bfloat16",
    "llama3-8b-tp1/busy/24/bfloat16",
    "llama3-8b-tp4/busy/32/float8_e5m2",
    "llama3-70b-tp1/row128k/64/bfloat16",
)
ON_V6E = ("gpt-oss/busy/128/float8_e4m3fn",)
# Copies are described to the hardware in another way there.
ON_OTHERS = (("llama3-8b-tp8/decode64/64/bfloat16", "v5p:2x2x1"), ("llama3-8b-tp4/busy/32/int8", "v7x:2x2x1"))
BUILDS = dict.fromkeys(
    [
        *QUICK,
        *((name, "v5e:2x2") for name in ON_V5E),
        *((name, "v6e:2x2") for name in ON_V6E),
        *ON_OTHERS,
    ]
)


@pytest.mark.parametrize(
    ("name", "topology"), [pytest.param(*b, marks=() if b in QUICK else pytest.mark.slow) for b in BUILDS]
)
def test_every_case_compiles_with_its_cache_in_place(name, topology):
    case, implementation = REAL[name], make_attention(device_of_topology(topology))
    assert implementation.refuses(case.use) is None
    compiled, _ = compile_attend(case, implementation, topology)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= case.kv_bytes, "the cache is updated in place"
    if case.kv_bytes > 2**30:
        assert memory.temp_size_in_bytes < case.kv_bytes / 2, "nothing of the cache's size beside it"
