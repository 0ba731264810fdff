"""Walks of programs written by hand in libtpu's notation: every bundle, wait and stall can be counted on paper."""

import numpy as np
import pytest

from jaxserve.lab.ledger.bundles import UNITS, Program, parse_program
from jaxserve.lab.ledger.walk import Rates, UnknownSchedule, Walk, walk

RATES = Rates(bytes_per_cycle=32.0, rows_per_cycle={"bf16": 1.0, "s8": 2.0}, matrix_units=4, delay_slots=4)


def program(*bundles: str) -> Program:
    """Bundles as 'LB: >' + body: what stands before the brace is optional."""
    lines = [f"  {i:#x} {b if b.startswith(('LB', 'PF', ' ')) else ': ' + b}" for i, b in enumerate(bundles)]
    used = "\n".join(" ".join("1" if name == "SALU" else "0" for name in UNITS) for _ in bundles)
    head = "== CAPACTIY:\n" + ", ".join(UNITS) + "\n" + " ".join("4" for _ in UNITS) + "\n"
    return parse_program("\n".join(lines), f"{head}== UTILIZATION:\n{used}")


def run(found: Program, *operands: np.ndarray | None, latency: float = 0.0) -> Walk:
    rates = Rates(
        bytes_per_cycle=RATES.bytes_per_cycle,
        rows_per_cycle=RATES.rows_per_cycle,
        matrix_units=RATES.matrix_units,
        delay_slots=RATES.delay_slots,
        latency_cycles=latency,
    )
    return walk(found, operands, rates)


COUNTDOWN = (
    "{ %s1_s0 = inlined_call_operand.<no memory space> [shape: s32[], index: 0, kind: input] /* operand 0 */ }",
    "LB: > { %s2_s0 = sphi %s1_s0, %s3_s0  ;;  %s3_s0 = sadd.s32 4294967295, %s2_s0 } /* Start region 7 */",
    " : > { %p4_p0 = scmp.gt.s32.totalorder %s3_s0, 0 }",
    " : > { %5 = sbr.rel (%p4_p0) target = $region7 }",
    *["{}"] * 4,
    "{}",
)


@pytest.mark.parametrize("turns", [1, 2, 100])
def test_a_loop_runs_as_often_as_its_operand_says(turns: int) -> None:
    found = run(program(*COUNTDOWN), np.array(turns))
    (loop,) = found.loops
    assert (loop.turns, loop.depth, loop.bundles_per_turn) == (turns, 1, 7)  # the delay slots run in each turn
    assert found.cycles == found.bundles == 1 + 7 * turns + 1
    assert loop.units["SALU"] == 7 * turns


def test_a_branch_on_an_unknown_value_is_refused() -> None:
    with pytest.raises(UnknownSchedule, match="not known: give the walk every integer operand"):
        run(program(*COUNTDOWN), None)


COPY = (
    "{ %s1_s0 = inlined_call_operand.hbm [shape: f32[8,128], index: 0, kind: input] /* operand 0 */ }",
    "{ %2 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s1_s0, /*size_in_granules=*/128, /*vmem=*/[#allocation2],"
    " /*dst_syncflagno=*/[#allocation3 + $0x1] }",
    *["{}"] * 20,
    "{ %3 = dma.done.wait [#allocation3 + $0x1], 128 }",
    "{ %4 = vsyncadd [#allocation3 + $0x1], 4294967168 }",
)


def test_a_wait_lasts_until_the_bytes_have_come() -> None:
    found = run(program(*COPY))
    assert found.copied_bytes == 4096
    assert found.cycles == 1 + 128 + 2, "started at cycle 1; 4096 bytes at 32 a cycle; two bundles follow"
    assert found.waited_cycles == 128 - 21
    assert run(program(*COPY), latency=500.0).cycles == found.cycles + 500


def test_two_copies_share_the_bandwidth() -> None:
    second = COPY[1].replace("%2", "%9")
    both = (*COPY[:2], second, *COPY[2:], *COPY[-2:])
    assert run(program(*both)).cycles == 1 + 256 + 2


def test_a_wait_for_a_copy_that_never_started_is_refused() -> None:
    with pytest.raises(UnknownSchedule, match="waits for 128 granules of a copy that it never started"):
        run(program(*COPY[:1], *COPY[2:]))


def test_guarded_operations_act_where_their_predicate_holds() -> None:
    guarded = COPY[1].replace("[thread:$0]  ", "[thread:$0]  (!%p8_p0), ")
    start = "{{ %s7_s1 = smov {0}  ;;  %p8_p0 = scmp.eq.s32.totalorder {0}, 1 }}"
    copied = [run(program(COPY[0], start.format(n), guarded, "{}")).copied_bytes for n in (0, 1)]
    assert copied == [4096, 0]


@pytest.mark.parametrize(
    ("operand", "cell"),
    [
        (np.arange(16) * 2, 3),
        (np.arange(16).reshape(1, 4, 4) * 2 - 12, 2 * 128 + 1),  # a row of the last two dimensions has 128 columns
        (np.arange(6 * 256).reshape(6, 256) - 650, 8 * 128 + 2 * 128 + 16),  # row 2, column 144: the second tile
    ],
)
def test_scalar_memory_holds_what_a_copy_brought(operand: np.ndarray, cell: int) -> None:
    found = program(
        "{ %s1_s0 = inlined_call_operand.vmem [shape: s32[16], index: 0, kind: input] /* operand 0 */ }",
        "{ %s2_s0 = sshll.u32 %s1_s0, 4  ;;  %s3_s0 = int_to_ptr.vmem [resolvable:$true] %s2_s0 }",
        "{ %4 = dma.vmem_to_smem /*vmem=*/%s3_s0, /*size_in_granules=*/256, /*smem=*/[#allocation5],"
        " /*dst_syncflagno=*/[#allocation6] }",
        f"{{ %s9_s0 = sld [smem:[#allocation5 + $0x{cell:x}]] }}",
        *(line.replace("sphi %s1_s0", "sphi %s9_s0") for line in COUNTDOWN[1:]),
    )
    assert run(found, operand.astype(np.int32)).loops[0].turns == 6


def test_a_flag_in_an_array_of_flags_is_counted_up_and_down() -> None:
    """The address as a sum, and what a wait takes off in a register: as in kernels that choose the flag as they run."""
    chosen = (
        COPY[0],
        "{ %s7_s1 = smov 128  ;;  %s5_s2 = scalar_lea.sflag [#allocation3], 1 }",
        "{ %s6_s3 = scalar_lea.sflag %s5_s2, 2 [#allocation3]  ;;  %s8_s4 = ssub.s32 0, %s7_s1 }",
    )
    copy = COPY[1].replace("[#allocation3 + $0x1]", "%s6_s3")
    wait = ("{ %3 = dma.done.wait [#allocation3 + $0x3], 128 }", "{ %4 = vsyncadd %s6_s3, %s8_s4 }")
    once = run(program(*chosen, copy, *wait))
    assert once.waited_cycles == 127
    assert run(program(*chosen, copy, *wait, copy, *wait)).waited_cycles == 2 * 127


@pytest.mark.parametrize(("dtype", "rows", "cycles"), [("bf16", 16, 16), ("s8", 32, 16)])
def test_products_take_the_cycles_of_their_rows(dtype: str, rows: int, cycles: int) -> None:
    products = [f"{{ %{i} = vmatmul.{dtype}.gmra.mxu0 %v1_v0 }}" for i in range(10)]
    found = run(program(*products))
    assert found.cycles == 10 * cycles, "all on one unit, each with a register of rows"
    assert found.stalled_cycles == 10 * cycles - 10
    spread = [f"{{ %{i} = vmatmul.{dtype}.gmra.mxu{i % 4} %v1_v0 }}" for i in range(8)]
    assert run(program(*spread)).cycles == 2 * cycles
