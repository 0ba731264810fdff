"""The best guess of a step's time on a TPU, by count: the batch that is counted, its kernels, and the rest of the step.

The kernels are counted in a process of their own (`lab.ledger.counting_process`) while this one compiles the step.
"""

import concurrent.futures
import re
from collections.abc import Sequence

from jaxserve.kernels.cases import Case, Room
from jaxserve.lab.compiled.ahead import AbsentModel
from jaxserve.lab.compiled.collectives import Collective
from jaxserve.lab.compiled.traffic import is_weight_kernel
from jaxserve.lab.ledger import KernelTime, UnknownSchedule, time_of_step
from jaxserve.lab.ledger.attention import Counting
from jaxserve.lab.planner.report import CountedKernel, CountedStep
from jaxserve.lab.roofline import Assumptions, Work, collective_wait, peak_flops
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.runtime.hlo import Instruction, Module
from jaxserve.runtime.memory import tokens_within
from jaxserve.runtime.resolve import attention_uses, draft_uses
from jaxserve.sched.plan import Bucket, Limits
from jaxserve.values.chips import Topology

_LAYER = re.compile(r"layer_(\d+)")


class StepCounter:
    """Counts the steps of a placed model.

    The kernels are handed to `counting` at once. `failure` says, after a step could not be counted, why.
    """

    def __init__(
        self,
        absent: AbsentModel,
        topology: Topology,
        buckets: Sequence[Bucket],
        *,
        num_pages: int,
        context: int,
        work: Work,
        assumed: Assumptions,
        counting: Counting,
    ) -> None:
        self._topology, self._assumed, self._work = topology, assumed, work
        self._dtype = absent.stages[0].dtype
        self._group = absent.config.parallel.tensor
        self.failure: str | None = None
        self._sizes = sizes = absent.sizes
        limits = sizes.limits(num_pages)
        partition = absent.stages[0].partition
        self._draft_uses = draft_uses(sizes, partition.devices, self._dtype)
        uses = dict.fromkeys((*attention_uses(partition.local, sizes, self._dtype), *self._draft_uses))
        self._batches = {bucket: batch_of(bucket, limits, context) for bucket in buckets}
        # Cases have all pages of a row, also those that a row gives back.
        whole = max(sum(_ceil(of, sizes.page_size) for _, of in rows) for rows in self._batches.values())
        room = Room(columns=_ceil(sizes.max_model_len, sizes.page_size), num_pages=max(num_pages, whole))
        self._futures = {
            (bucket, use): counting(
                Case(
                    name="plan",
                    spec=use.spec,
                    rows=rows,
                    page_size=use.page_size,
                    query_dtype=use.query_dtype,
                    cache_dtype=use.cache_dtype,
                    padding_rows=bucket.rows - len(rows),
                    padding_tokens=bucket.tokens - sum(n for n, _ in rows),
                    mixed=not (bucket.decode_only and bucket.plain),
                    sinks=use.sinks,
                    alibi=use.alibi,
                ),
                topology.name,
                room,
            )
            for bucket, rows in self._batches.items()
            for use in uses
        }

    def count(self, module: Module, bucket: Bucket, model: DecoderConfig) -> CountedStep | None:
        """The guess for the compiled step of a bucket; None where it cannot be counted. `model`: of one device."""
        uses = attention_uses(model, self._sizes, self._dtype)
        try:
            kernels = {
                (name, use): time
                for (of, use), future in self._futures.items()
                if of == bucket
                for name, time in future.result()
            }
        except (UnknownSchedule, concurrent.futures.BrokenExecutor) as error:
            self.failure = str(error)
            return None

        def kernel_time(i: Instruction) -> KernelTime | None:
            assert i.kernel is not None
            if is_weight_kernel(i):
                return None  # XLA's own kernel, or one that is bound by its bytes
            layers = [int(found.group(1)) for scope in i.scopes if (found := _LAYER.fullmatch(scope))]
            use = uses[layers[0]] if layers else self._draft_uses[0]  # a draft head has one layer, in no such scope
            return kernels[i.kernel, use]

        rows = self._batches[bucket]
        tokens, context = sum(n for n, _ in rows), rows[0][1]
        time = time_of_step(
            module,
            self._topology.chip,
            num_devices=self._group,
            kernel_time=kernel_time,
            collective_seconds=self._collective_seconds,
            hit_share=model.hit_share(tokens),
        )
        pairs = sum(n * (of - n) + n * (n + 1) / 2 for n, of in rows)
        return CountedStep(
            rows=len(rows),
            tokens=tokens,
            context=context,
            seconds=time.seconds,
            parts=time.parts,
            byte_seconds=time.moved_bytes / self._topology.chip.memory_bandwidth,
            flop_seconds=self._work.flops(tokens, len(rows) * bucket.width, pairs)
            / peak_flops(self._topology, self._dtype.name),
            instructions=time.instructions,
            unestimated=time.unestimated,
            unestimated_seconds=time.unestimated_seconds,
            open_loops=time.open_loops,
            kernels=tuple(_counted(name, use.spec.window, kernel) for (name, use), kernel in kernels.items()),
        )

    def _collective_seconds(self, exchange: Collective) -> float:
        """As in the predictions: a ring at an assumed share of the links, and a wait for each exchange."""
        wait = collective_wait(self._topology, self._assumed, exchange.group)
        sent = exchange.sent_bytes / (self._topology.chip.link_bandwidth * self._assumed.link_share)
        return exchange.count * wait + sent


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def batch_of(bucket: Bucket, limits: Limits, context: int) -> tuple[tuple[int, int], ...]:
    """(tokens of a round, tokens of context) of each row: all rows decode, or one prompt fills the bucket.

    As much of the context as the pages hold.
    """
    num_pages, least = limits.num_pages, len(limits.page_groups)
    if bucket.decode_only:
        held = tokens_within(limits, max(least, num_pages // bucket.rows))
        seen = max(bucket.width, min(context, held, limits.max_model_len))
        return ((bucket.width, seen),) * min(bucket.rows, num_pages // least)
    tokens = min(bucket.tokens, tokens_within(limits, num_pages, bucket.tokens), limits.max_model_len)
    return ((tokens, tokens),)


def _counted(name: str, window: int | None, kernel: KernelTime) -> CountedKernel:
    return CountedKernel(
        name=name,
        window=window,
        seconds=kernel.seconds,
        byte_seconds=kernel.byte_seconds,
        spills=max((loop.spills_per_turn for loop in kernel.walk.inner_loops), default=0.0),
    )
