"""Plans as tables for a person. Every figure is in the `Plan`."""

from collections.abc import Sequence

import rich.box
import rich.console
import rich.table
import rich.text

from jaxserve.lab.ledger import PARTS
from jaxserve.lab.planner.report import Plan, Prediction, TowerUse

_GIB = 2**30
_WIDTH = 112
_SHORT = {"products": "prod.", "attention": "attent.", "sampling": "sampl.", "collectives": "coll."}


def show_plan(plan: Plan, console: rich.console.Console) -> None:
    """One plan in full."""
    console.print(_headline(plan))
    if plan.problem is not None:
        console.print(rich.text.Text(plan.problem))
        console.print(rich.text.Text(_advice(plan)))
    console.print(_memory_table(plan))
    if plan.tower is not None:
        console.print(_pictures_table(plan.tower))
    if plan.steps:
        console.print(_steps_table(plan))
        for line in _kernel_lines(plan):
            console.print(rich.text.Text(line))
    if any(step.collectives for step in plan.steps):
        console.print(_collectives_table(plan))
    if any(step.counted for step in plan.steps):
        console.print(_counted_table(plan))
        for line in _counted_lines(plan):
            console.print(rich.text.Text(line))
    if plan.predictions:
        console.print(_predictions_table(plan))
        console.print(rich.text.Text("Predicted, never measured. Assumed:", style="italic"))
    for line in plan.assumptions:
        console.print(rich.text.Text(f"  - {line}"))
    for line in plan.notes:
        console.print(rich.text.Text(f"Note: {line}."))
    console.print(rich.text.Text(f"Planned in {plan.seconds:.1f} s."))


def compare_plans(plans: Sequence[Plan], console: rich.console.Console) -> None:
    """One line for each plan."""
    table = _table(f"{plans[0].model}, by topology; bytes in GiB for each device")
    names = (
        "topology",
        "tensor",
        "fits",
        "of",
        "weights",
        "KV",
        "temp.",
        "spare",
        "KV tokens",
        "rows",
        "TPOT",
        "tokens/s",
        "TTFT",
    )
    for name in names:
        table.add_column(name, justify="left" if name == "topology" else "right", no_wrap=True)
    for plan in plans:
        memory = plan.memory
        best = _largest_decode(plan)
        prefill = next((p for p in plan.predictions if not p.decode), None)
        table.add_row(
            plan.topology,
            str(plan.tensor),
            "yes" if plan.fits else "NO",
            *(
                f"{size / _GIB:.2f}"
                for size in (
                    memory.total_bytes,
                    memory.weight_bytes,
                    memory.kv_bytes,
                    memory.temporary_bytes,
                    memory.headroom_bytes,
                )
            ),
            f"{memory.kv_tokens}",
            *(
                ("-", "-", "-")
                if best is None
                else (str(best.rows), _ms(best.seconds), f"{best.tokens_per_second:.0f}")
            ),
            "-" if prefill is None else _ms(prefill.seconds),
        )
    console.print(table)
    for plan in plans:
        if not plan.fits:
            console.print(rich.text.Text(f"{plan.topology}: {_advice(plan)}"))
    predicted = next((plan for plan in plans if plan.predictions), None)
    if predicted is not None:
        context = predicted.predictions[0].context
        tokens = predicted.predictions[-1].tokens
        console.print(
            rich.text.Text(
                f"TPOT and tokens/s: the largest decode step whose rows of {context} tokens the pages hold. "
                f"TTFT: a prompt of {tokens} tokens, alone. Predicted, never measured; "
                "one topology without --compare tells the assumptions."
            )
        )


def make_console() -> rich.console.Console:
    """For stdout, never narrower than the tables: a cut figure is worse than a line that a terminal breaks."""
    width = max(_WIDTH, rich.console.Console().width)
    return rich.console.Console(width=width, highlight=False, markup=False, emoji=False)


def _headline(plan: Plan) -> rich.text.Text:
    verdict = "fits" if plan.fits else "does NOT fit"
    spare = f"{abs(plan.memory.headroom_bytes) / _GIB:.2f} GiB {'spare' if plan.fits else 'missing'} on each device"
    text = rich.text.Text(f"{plan.model} in {plan.dtype} on {plan.topology} ({plan.chip}), ")
    text.append(f"tensor {plan.tensor}" + (f" x {plan.data} replicas" if plan.data > 1 else "") + ": ")
    text.append(f"{verdict}, {spare}", style="bold green" if plan.fits else "bold red")
    return text


def _advice(plan: Plan) -> str:
    if plan.suggestion is None:
        return "no topology of this chip is large enough with these settings"
    return f"the smallest that fits: {plan.suggestion.topology} with parallel.tensor {plan.suggestion.tensor}"


def _table(title: str) -> rich.table.Table:
    return rich.table.Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=rich.box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )


def _memory_table(plan: Plan) -> rich.table.Table:
    memory = plan.memory
    table = _table("Memory of each device")
    for name in ("what", "GiB", "how"):
        table.add_column(name, justify="right" if name == "GiB" else "left")
    token_kib = memory.page_bytes / memory.page_size / 1024
    pages = f"{memory.num_pages} + 1 pages of {memory.page_size} tokens x {token_kib:.1f} KiB"
    rows = (
        (
            "memory",
            memory.total_bytes,
            f"of which {memory.budget_bytes / _GIB:.2f} GiB may be used (cache.memory_fraction)",
        ),
        ("weights", memory.weight_bytes, plan.weights),
        (
            "KV pages",
            memory.kv_bytes,
            f"{memory.kv_tokens} tokens: {pages} ({memory.chosen_by})" if plan.fits else "none",
        ),
        *([("page groups", None, memory.page_groups)] if memory.page_groups else []),
        ("row state", memory.state_bytes, "block tables, masks and counts of the rows"),
        *([("adapters", memory.adapter_bytes, _slots(memory.adapter_slots))] if memory.adapter_slots else []),
        *([("page moves", memory.move_bytes, "on their way to and from host memory")] if memory.move_bytes else []),
        ("temporaries", memory.temporary_bytes, "XLA's figure" if memory.temporaries_compiled else "estimate"),
        (
            "spare" if plan.fits else "missing",
            abs(memory.headroom_bytes),
            "" if plan.fits else "until the first pages fit",
        ),
    )
    for what, size, how in rows:
        table.add_row(what, "" if size is None else f"{size / _GIB:.3f}", how)
    return table


def _slots(number: int) -> str:
    return f"{number} + 1 slots of LoRA adapters (adapters.slots, adapters.max_rank)"


def _pictures_table(tower: TowerUse) -> rich.table.Table:
    table = _table(
        f"Pictures: tower of {tower.weight_bytes / _GIB:.3f} GiB among the weights, pool of {tower.pool_tokens} "
        f"embeddings ({tower.pool_bytes / _GIB:.3f} GiB) in the state"
    )
    for name in ("patches", "tokens", "activations (estimate)", "encoded in (predicted)"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in tower.pictures:
        table.add_row(
            str(one.patches), str(one.tokens), f"{one.temporary_bytes / 2**20:.0f} MiB", f"{1e3 * one.seconds:.2f} ms"
        )
    return table


def _steps_table(plan: Plan) -> rich.table.Table:
    table = _table("Compiled steps, on each device")
    for name in ("step", "compiled in", "arguments", "by arithmetic", "temporaries", "Gflop (XLA)"):
        table.add_column(name, justify="left" if name == "step" else "right", no_wrap=True)
    for step in plan.steps:
        table.add_row(
            step.name,
            f"{step.compile_seconds:.1f} s",
            f"{step.argument_bytes / _GIB:.3f} GiB",
            f"{100 * (step.predicted_argument_bytes / step.argument_bytes - 1):+.3f} %",
            f"{step.temporary_bytes / 2**20:.0f} MiB",
            "-" if step.flops is None else f"{step.flops / 1e9:.0f}",
        )
    return table


def _kernel_lines(plan: Plan) -> list[str]:
    return [
        f"Pallas kernels in {step.name}: "
        + (", ".join(f"{count} {name}" for name, count in step.kernels.items()) or "none")
        for step in plan.steps
    ]


def _collectives_table(plan: Plan) -> rich.table.Table:
    table = _table("Collectives of a step")
    for name in ("step", "kind", "devices", "how many", "payload", "sent by a device"):
        table.add_column(name, justify="left" if name in ("step", "kind") else "right")
    for step in plan.steps:
        for c in step.collectives:
            table.add_row(
                step.name,
                c.kind,
                str(c.group),
                str(c.count),
                f"{c.payload_bytes / 2**20:.2f} MiB",
                f"{c.sent_bytes / 2**20:.2f} MiB",
            )
    return table


def _counted_table(plan: Plan) -> rich.table.Table:
    table = _table("Best guess of a step, beside what its bytes and flops need: milliseconds, counted and not measured")
    names = ("step", "rows x context", "bytes", "flops", "guess", *(_SHORT.get(part, part) for part in PARTS))
    for name in names:
        table.add_column(name, justify="left" if name in ("step", "rows x context") else "right", no_wrap=True)
    for step in plan.steps:
        if (c := step.counted) is not None:
            times = (c.byte_seconds, c.flop_seconds, c.seconds, *(c.parts[part] for part in PARTS))
            table.add_row(step.name, f"{c.rows} x {c.context}", *(f"{1e3 * seconds:.2f}" for seconds in times))
    return table


def _counted_lines(plan: Plan) -> list[str]:
    lines = []
    for step in plan.steps:
        if (c := step.counted) is None:
            continue
        loops = f"; {c.open_loops} loops of unknown length count one turn" if c.open_loops else ""
        lines.append(
            f"{step.name}: XLA estimates {c.instructions - c.unestimated} of {c.instructions} instructions; the others "
            f"count by their bytes, {_ms(c.unestimated_seconds)}{loops}"
        )
        for k in c.kernels:
            layer = "a layer" if k.window is None else f"a layer of window {k.window}"
            lines.append(
                f"  {k.name}: {k.seconds * 1e6:.0f} us {layer}, its bytes alone {k.byte_seconds * 1e6:.0f}; "
                f"{k.spills:.0f} registers spilled in a turn of an inner loop"
            )
    return lines


def _predictions_table(plan: Plan) -> rich.table.Table:
    context = plan.predictions[0].context
    table = _table(f"Predicted milliseconds of a step, each row at {context} tokens of context")
    names = ("step", "Gflop", "GB moved", "compute", "memory", "collect.", "in all", "bound by", "tokens/s", "")
    for name in names:
        table.add_column(name, justify="left" if name in ("step", "bound by", "") else "right", no_wrap=True)
    for p in plan.predictions:
        times = (p.compute_seconds, p.memory_seconds, p.collective_seconds, p.seconds)
        table.add_row(
            _what(p),
            f"{p.flops / 1e9:.0f}",
            f"{p.moved_bytes / 1e9:.2f}",
            *(f"{1e3 * seconds:.2f}" for seconds in times),
            p.bound_by,
            f"{p.tokens_per_second:.0f}",
            _remark(p),
        )
    return table


def _what(p: Prediction) -> str:
    if not p.decode:
        return f"TTFT, {p.tokens} tokens"
    rows = f"{p.rows} row{'s' * (p.rows > 1)}"
    return f"TPOT, {rows}" if p.width == 1 else f"round of {p.width}, {rows}"


def _remark(prediction: Prediction) -> str:
    if not prediction.fits_pages:
        return "too few pages"
    return "compiled" if prediction.compiled else ""


def _largest_decode(plan: Plan) -> Prediction | None:
    fitting = [p for p in plan.predictions if p.decode and p.width == 1 and p.fits_pages]
    return max(fitting, key=lambda p: p.rows, default=None)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
