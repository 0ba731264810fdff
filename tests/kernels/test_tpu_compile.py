"""Every case compiled for TPUs that are not here: what Mosaic or the memory of the chip would refuse, fails here."""

import dataclasses

import pytest
from kernel_builds import compile_attend

from jaxserve.kernels.cases import REAL
from jaxserve.kernels.pallas.tpu_body import make_body
from jaxserve.runtime.topology import device_of_topology

# All three kernels, and the conversions of eight bits; the others run with `-m slow`.
QUICK = ("llama3-8b-tp1/busy/64/bfloat16", "llama3-8b-tp4/busy/32/int8")

DISTINCT = {dataclasses.replace(case, name=""): name for name, case in reversed(REAL.items())}.values()


@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in DISTINCT])
def test_every_case_compiles_with_its_cache_in_place(name, topology):
    case, body = REAL[name], make_body(device_of_topology(topology))
    assert body.refuses(case.use) is None
    compiled, _ = compile_attend(case, body, topology)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= case.kv_bytes, "the cache is updated in place"
    if case.kv_bytes > 2**30:
        assert memory.temp_size_in_bytes < case.kv_bytes / 2, "nothing of the cache's size beside it"
