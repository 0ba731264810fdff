"""How many pages fit: arithmetic on bytes, printed so that an operator can check it.

Owns the sizing rule and its breakdown. Refuses to allocate. The temporaries of a step are estimated before anything
is compiled, since the page count is part of the compiled shapes; after the compile the real figure is compared with
what was left free (`MemoryPlan.check_temporaries`).
"""

import dataclasses
import os
from pathlib import Path

import jax

from jaxserve.errors import CapacityError

_GIB = 2**30
_MEMINFO = Path("/proc/meminfo")  # Linux; elsewhere all of the memory has to stand for what is available
_CGROUP = Path("/sys/fs/cgroup")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes on one device.

    Attributes:
      total_bytes: what the device has (on a CPU: what the system says is available).
      budget_bytes: the share that may be used: total x memory_fraction.
      weight_bytes, temporary_bytes (estimated), page_bytes (one page, all layers), num_pages (grantable).
      state_bytes: sampling state and block tables.
      max_model_len: tokens of a sequence, asked for.
      chosen_by: which rule fixed num_pages.
    """

    total_bytes: int
    budget_bytes: int
    weight_bytes: int
    temporary_bytes: int
    state_bytes: int
    page_bytes: int
    num_pages: int
    page_size: int
    max_model_len: int
    chosen_by: str

    @property
    def cache_bytes(self) -> int:
        return (self.num_pages + 1) * self.page_bytes

    def lines(self) -> list[str]:
        """The breakdown, one item a line."""
        return [
            f"device memory   {self.total_bytes / _GIB:9.3f} GiB, of which {self.budget_bytes / _GIB:.3f} may be used",
            f"weights         {self.weight_bytes / _GIB:9.3f} GiB",
            f"temporaries     {self.temporary_bytes / _GIB:9.3f} GiB (estimate)",
            f"KV pages        {self.cache_bytes / _GIB:9.3f} GiB = {self.num_pages} + 1 pages of {self.page_size} "
            f"tokens x {self.page_bytes / self.page_size / 1024:.1f} KiB a token ({self.chosen_by})",
            f"row state       {self.state_bytes / _GIB:9.3f} GiB of masks, counts and block tables",
            f"KV tokens       {self.num_pages * self.page_size:9d}{self._shortfall()}",
        ]

    def _shortfall(self) -> str:
        longest = self.num_pages * self.page_size + 1  # the last token of a sequence is never written
        if longest >= self.max_model_len:
            return ""
        return f"; a sequence can have {longest} of the {self.max_model_len} tokens of model.max_len"

    def check_temporaries(self, measured_bytes: int) -> None:
        """Raises CapacityError when the compiled steps need more than is left beside weights and pages."""
        left = self.total_bytes - self.weight_bytes - self.state_bytes - self.cache_bytes
        if measured_bytes > left:
            raise CapacityError(
                f"the compiled step needs {measured_bytes / _GIB:.2f} GiB of temporaries, but weights and "
                f"{self.num_pages} pages leave {left / _GIB:.2f} GiB; lower cache.num_pages, cache.memory_fraction or "
                "sched.max_step_tokens"
            )


def device_memory_bytes(device: jax.Device) -> int:  # pyright: ignore[reportInvalidTypeForm]
    """Bytes of the device; for a CPU, what the operating system could hand out now."""
    stats = device.memory_stats()
    if stats is not None and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return _available_bytes()


def _available_bytes() -> int:
    """What a process may still take: what the kernel would give up its caches for, within the control group's limit."""
    if _MEMINFO.exists():
        fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    else:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, used = (_CGROUP / name for name in ("memory.max", "memory.current"))
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, max(0, int(text) - int(used.read_text())))
    return available


def estimate_temporaries(*, tokens: int, rows: int, hidden: int, ffn: int, vocab: int, itemsize: int) -> int:
    """Upper estimate of a step's live temporaries: a few activations of the widest layer, and logits in float32.

    8 widths of D and 3 of F cover residual, normed input, q/k/v/out and gate/up/product of one layer; 4 copies of the
    logits cover sampling (raw, processed, exponentials, noise).
    """
    return tokens * (8 * hidden + 3 * ffn) * itemsize + 4 * rows * vocab * 4


def plan_memory(
    *,
    total_bytes: int,
    fraction: float,
    weight_bytes: int,
    temporary_bytes: int,
    state_bytes: int,
    page_bytes: int,
    page_size: int,
    max_rows: int,
    max_model_len: int,
    num_pages: int | None,
    memory_bytes: int | None,
) -> MemoryPlan:
    """Fixes the number of pages: asked for, by bytes, or what the device has left.

    The last rule takes no more than all rows at full length could use, twice (the second half keeps prefixes of
    requests that have ended). Raises CapacityError when not even one sequence of one page fits.
    """
    budget = int(total_bytes * fraction)
    free = budget - weight_bytes - temporary_bytes - state_bytes
    limit = total_bytes - weight_bytes - state_bytes
    if num_pages is not None:
        chosen_by = "cache.num_pages"
        needed = (num_pages + 1) * page_bytes
        if needed > limit:
            raise CapacityError(
                f"cache.num_pages = {num_pages} needs {needed / _GIB:.2f} GiB, but the device has "
                f"{total_bytes / _GIB:.2f} GiB and the weights take {weight_bytes / _GIB:.2f}; lower cache.num_pages "
                f"to {max(0, limit // page_bytes - 1)} or less"
            )
    elif memory_bytes is not None:
        chosen_by = "cache.memory_bytes"
        num_pages = memory_bytes // page_bytes - 1
        if memory_bytes > limit:
            raise CapacityError(
                f"cache.memory_bytes = {memory_bytes} ({memory_bytes / _GIB:.2f} GiB) does not fit: the device has "
                f"{total_bytes / _GIB:.2f} GiB and the weights take {weight_bytes / _GIB:.2f}; {max(0, limit)} are left"
            )
        if num_pages < 1:
            raise CapacityError(
                f"cache.memory_bytes = {memory_bytes} holds no page: two of {page_bytes} bytes are the least (one is "
                f"for padding); raise it to {2 * page_bytes} or more, or lower cache.page_size"
            )
    else:
        chosen_by = "cache.memory_fraction"
        num_pages = free // page_bytes - 1
        enough = 2 * max_rows * -(-max_model_len // page_size)
        if num_pages > enough:
            num_pages, chosen_by = enough, "twice sched.max_rows x model.max_len"
    if num_pages < 1:
        raise CapacityError(
            f"no room for a KV page of {page_bytes} bytes: {chosen_by} = {fraction} leaves {max(free, 0)} bytes beside "
            f"{weight_bytes / _GIB:.2f} GiB of weights and {temporary_bytes / _GIB:.2f} GiB of temporaries; "
            "raise cache.memory_fraction, or lower sched.max_step_tokens or sched.max_rows"
        )
    return MemoryPlan(
        total_bytes=total_bytes,
        budget_bytes=budget,
        weight_bytes=weight_bytes,
        temporary_bytes=temporary_bytes,
        state_bytes=state_bytes,
        page_bytes=page_bytes,
        num_pages=num_pages,
        page_size=page_size,
        max_model_len=max_model_len,
        chosen_by=chosen_by,
    )
