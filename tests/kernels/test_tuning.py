"""Tuned tables: measured sizes go before counted ones, and a counted one says so."""

import json
import logging

from jaxserve.kernels.cases import REAL
from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.pallas.tpu_attention import default_blocks
from jaxserve.kernels.pallas.tpu_implementation import NAME, make_attention
from jaxserve.kernels.tuning import entry_name, read_table

USE = REAL["llama3-8b-tp8/decode64/64/bfloat16"].use
DECODE, PREFILL = (entry_name(NAME, variant, USE) for variant in ("decode", "prefill"))
MEASURED, COUNTED = ({"block_q": 1, "pages": pages, "compute": 8} for pages in (64, 32))


def table_text(entries, counted) -> str:
    about = {"us": 1.0, "default_us": 2.0, "tried": 3, "commit": "def", "compiler": "libtpu 1.2"}
    return json.dumps(
        {
            "device_kind": "TPU v6 lite",
            "commit": "abc",
            "entries": entries,
            "measured": {},
            "counted": {name: about | {"blocks": blocks} for name, blocks in counted.items()},
        }
    )


def test_measured_sizes_go_before_counted_ones_and_those_before_the_heuristic():
    both = read_table(table_text({DECODE: MEASURED}, {DECODE: COUNTED}))
    counted = read_table(table_text({}, {DECODE: COUNTED, PREFILL: None}))
    assert both.get(NAME, "decode", USE) == MEASURED
    assert both.origin(NAME, "decode", USE) == "measured at abc"
    assert counted.get(NAME, "decode", USE) == COUNTED
    assert counted.origin(NAME, "decode", USE) == "by count, libtpu 1.2, never measured"
    assert counted.get(NAME, "prefill", USE) is None, "the heuristic was not beaten"
    assert counted.origin(NAME, "prefill", USE) == "by the heuristic"
    old = json.loads(table_text({DECODE: MEASURED}, {}))
    del old["counted"]  # as a table that was only measured has it
    assert read_table(json.dumps(old)).get(NAME, "decode", USE) == MEASURED


def test_the_log_says_which_sizes_run_and_that_they_were_counted(caplog):
    table = read_table(table_text({}, {DECODE: COUNTED}))
    with caplog.at_level(logging.INFO):
        make_attention(Device(backend="tpu", kind="TPU v6 lite"), table).prepare(USE)
    decode, prefill = caplog.messages
    assert "decode on TPU v6 lite: Blocks(block_q=1, pages=32, compute=8), by count, libtpu 1.2, never" in decode
    assert str(default_blocks("prefill", USE)) in prefill and prefill.endswith("by the heuristic")
