"""The time of a whole step, on a program written by hand: every instruction can be counted on paper."""

import re
import types
from typing import Any

import pytest

from jaxserve.lab.compiled.collectives import Collective
from jaxserve.lab.ledger import PARTS, StepTime, time_of_step
from jaxserve.runtime.hlo import parse_hlo
from jaxserve.values.chips import CHIPS

CHIP = CHIPS["v5e"]
MIB = 2**20
KERNEL_S, KERNEL_BYTES = 1e-3, 10 * MIB
EXCHANGE_S = 7e-6

# MAIN and FAST: an array of 1 MiB in either memory. XLA's notes are short here, and `written_out` writes them out.
TEXT = """HloModule step, is_scheduled=true

%multiplied (a: MAIN, b: MAIN) -> MAIN {
  %a = MAIN parameter(0)
  %b = MAIN parameter(1)
  ROOT %convolution.1 = MAIN convolution(%a, %b), dim_labels=bf_io->bf
}

%negated (c: MAIN) -> MAIN {
  %c = MAIN parameter(0)
  ROOT %negate.1 = MAIN negate(%c)
}

%short (d: MAIN) -> MAIN {
  ROOT %d = MAIN parameter(0)
}

%long (e: MAIN) -> MAIN {
  %e = MAIN parameter(0)
  ROOT %fusion.7 = FAST fusion(%e), kind=kLoop, calls=%negated, CYCLES(9000)
}

%turn (f: MAIN) -> MAIN {
  %f = FAST parameter(0)
  ROOT %fusion.8 = FAST fusion(%f), kind=kLoop, calls=%negated, CYCLES(100)
}

%goes_on (g: MAIN) -> pred[] {
  %g = FAST parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (x: MAIN, w: MAIN) -> MAIN {
  %x = MAIN parameter(0)
  %w = MAIN parameter(1)
  %copy-start.1 = (FAST, MAIN, u32[]{:S(2)}) copy-start(%w)
  %fusion.1 = FAST fusion(%x), kind=kLoop, calls=%negated, CYCLES(1000)
  %copy-done.1 = FAST copy-done(%copy-start.1)
  %fusion.2 = FAST fusion(%fusion.1, %copy-done.1), kind=kOutput, calls=%multiplied, CYCLES(5000)
  %fusion.3 = MAIN fusion(%fusion.2), kind=kLoop, calls=%negated, SCOPE(layer_0/attend/negate)
  %custom-call.1 = FAST custom-call(%fusion.3), KERNEL, SCOPE(layer_0/attend/paged_attention_decode/pallas_call)
  %all-reduce.1 = FAST all-reduce(%custom-call.1), replica_groups={{0,1,2,3}}, to_apply=%negated
  %while.1 = FAST while(%all-reduce.1), condition=%goes_on, body=%turn, TURNS(30)
  %while.2 = FAST while(%while.1), condition=%goes_on, body=%turn
  ROOT %conditional.1 = FAST conditional(%x, %x, %x), branch_computations={%short, %long}, SCOPE(sample/cond)
}
"""


def written_out(text: str) -> str:
    """The text with notes and arrays as XLA writes them."""
    for short, full in (
        (r"CYCLES\((.*?)\)", r'backend_config={"estimated_cycles":"\1"}'),
        (r"TURNS\((.*?)\)", r'backend_config={"known_trip_count":{"n":"\1"}}'),
        (r"SCOPE\((.*?)\)", r'metadata={op_name="\1"}'),
        ("KERNEL", 'custom_call_target="tpu_custom_call"'),
        ("MAIN", "bf16[512,1024]{1,0}"),
        ("FAST", "bf16[512,1024]{1,0:S(1)}"),
    ):
        text = re.sub(short, full, text)
    return text


def counted(text: str = TEXT, hit_share: float = 1.0) -> StepTime:
    kernel: Any = types.SimpleNamespace(seconds=KERNEL_S, walk=types.SimpleNamespace(copied_bytes=KERNEL_BYTES))
    exchanges: list[Collective] = []

    def collective_seconds(exchange: Collective) -> float:
        exchanges.append(exchange)
        return EXCHANGE_S

    found = time_of_step(
        parse_hlo(written_out(text)),
        CHIP,
        num_devices=4,
        kernel_time=lambda i: {"paged_attention_decode": kernel}.get(i.kernel or ""),
        collective_seconds=collective_seconds,
        hit_share=hit_share,
    )
    assert exchanges == [Collective(kind="all-reduce", group=4, count=1, payload_bytes=MIB)]
    return found


def cycles(number: float) -> float:
    return number / CHIP.clock_hz


def moved(size: float) -> float:
    return size / CHIP.memory_bandwidth


def test_each_part_of_a_step_is_what_it_is_on_paper() -> None:
    found = counted()
    first = moved(2 * MIB)  # the fusion's bytes come behind those of the weights that are fetched beside it
    assert first > cycles(1000)
    assert found.parts == pytest.approx(
        {
            "products": cycles(5000),
            "attention": moved(MIB) + KERNEL_S,
            "write": 0.0,
            "sampling": cycles(9000),
            "collectives": EXCHANGE_S,
            "copies": 0.0,
            "rest": first + cycles(31 * 100),
        }
    )
    assert tuple(found.parts) == PARTS and found.seconds == pytest.approx(sum(found.parts.values()))
    assert found.moved_bytes == 4 * MIB + KERNEL_BYTES
    assert moved(found.moved_bytes) < found.seconds
    assert (found.instructions, found.unestimated, found.open_loops) == (5 + 31 + 1, 1, 1)
    assert found.unestimated_seconds == pytest.approx(moved(MIB))


def test_weights_that_come_late_are_waited_for() -> None:
    """Without the work beside which they are fetched, the product waits until the last of their bytes."""
    lines = (line for line in TEXT.splitlines() if "%fusion.1 = " not in line)
    late = "\n".join(lines).replace("fusion(%fusion.1, ", "fusion(%x, ")
    assert counted(TEXT).parts["copies"] == 0.0
    assert counted(late).parts["copies"] == pytest.approx(moved(MIB))


def test_the_product_of_experts_is_a_kernel_of_xla_and_takes_the_time_of_the_experts_hit() -> None:
    before = "  %all-reduce.1 = FAST"
    scope = "SCOPE(layer_0/mlp/ragged_dot_general/pallas_call)"
    product = f"  %ragged-dot-none.1 = FAST custom-call(%custom-call.1, %w), KERNEL, {scope}\n"
    found, without = counted(TEXT.replace(before, product + before), hit_share=0.63), counted()
    assert found.parts["products"] - without.parts["products"] == pytest.approx(moved(0.63 * MIB), rel=1e-4)
    assert found.unestimated == without.unestimated + 1
