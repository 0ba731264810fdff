"""The number of pages that fit: arithmetic on bytes, printed so that an operator can check it.

The temporaries of a step are estimated before anything is compiled, since the page count is part of the compiled
shapes; after the compile the real figure is compared with the bytes that were left free
(`MemoryPlan.check_compiled`).
"""

import bisect
import dataclasses
import os
from pathlib import Path

import jax

from jaxserve.config.schema import MEMORY_FRACTION, CacheConfig
from jaxserve.errors import CapacityError, ConfigError
from jaxserve.runtime.page_groups import PageGroups
from jaxserve.runtime.page_moves import DRAINING_LAUNCHES, LOADING_LAUNCHES
from jaxserve.sched.plan import HostSlots, Limits, PageGroup

_GIB = 2**30
_CPU_CACHE = 0.25  # of the memory that is free at the start: the pages of a CPU are not alone on their machine
_GPU_POOL = 0.97  # of what JAX has reserved: a pool is never filled to the last byte
_GRID_BITS = 6  # leading bits of a number of pages that follows from the free memory: steps of 1.6 to 3.1 %
_MEMINFO = Path("/proc/meminfo")  # Linux; elsewhere all of the memory has to stand for what is available
_CGROUP = Path("/sys/fs/cgroup")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes on one device.

    Attributes:
      total_bytes: memory of the device (on a CPU: the memory that the system calls available).
      budget_bytes: the share of it that may be used.
      weight_bytes, temporary_bytes (estimated), page_bytes (one page, all slots).
      state_bytes: sampling state, block tables and slots of adapters.
      limits: with the number of pages that can be granted.
      page_groups: those of `limits`, with the layers that they have.
      chosen_by: which rule fixed the number of pages.
      adapter_bytes: of the state, the slots of LoRA adapters.
      draft_weight_bytes, draft_page_bytes: of weights and page, the part of a draft head or model.
      move_counts: pages of one launch to or from host memory; empty without it.
      move_bytes: of such launches, packed.
    """

    total_bytes: int
    budget_bytes: int
    weight_bytes: int
    temporary_bytes: int
    state_bytes: int
    page_bytes: int
    limits: Limits
    page_groups: PageGroups
    chosen_by: str
    adapter_bytes: int = 0
    draft_weight_bytes: int = 0
    draft_page_bytes: int = 0
    move_counts: tuple[int, ...] = ()
    move_bytes: int = 0

    @property
    def num_pages(self) -> int:
        """That can be granted."""
        return self.limits.num_pages

    @property
    def cache_bytes(self) -> int:
        """Of all pages, the dummy page included."""
        return (self.num_pages + 1) * self.page_bytes

    @property
    def held_bytes(self) -> int:
        """All that the device holds while no step runs."""
        return self.weight_bytes + self.state_bytes + self.move_bytes + self.cache_bytes

    def with_numbers(self, num_pages: int, num_slots: int) -> "MemoryPlan":
        """This plan with other numbers of pages and of host slots."""
        slots = self.limits.slots._replace(num_slots=num_slots)
        return dataclasses.replace(self, limits=dataclasses.replace(self.limits, num_pages=num_pages, slots=slots))

    def lines(self) -> list[str]:
        """The breakdown, one item a line."""
        page_size, rows_bytes = self.limits.page_size, self.state_bytes - self.adapter_bytes
        return [
            f"device memory   {self.total_bytes / _GIB:9.3f} GiB, of which {self.budget_bytes / _GIB:.3f} may be used",
            f"weights         {self.weight_bytes / _GIB:9.3f} GiB",
            f"temporaries     {self.temporary_bytes / _GIB:9.3f} GiB (estimate)",
            f"KV pages        {self.cache_bytes / _GIB:9.3f} GiB = {self.num_pages} + 1 pages of {page_size} "
            f"tokens x {self.page_bytes / page_size / 1024:.1f} KiB a token ({self.chosen_by})",
            *self._group_lines(),
            *self._draft_lines(),
            *self._slot_lines(),
            *self._adapter_lines(),
            f"row state       {rows_bytes / _GIB:9.3f} GiB of masks, counts and block tables",
            f"KV tokens       {held_tokens(self.limits, self.limits.max_model_len):9d}{self._of_length()}"
            f"{self._shortfall()}",
        ]

    def _group_lines(self) -> list[str]:
        return [f"page groups     {self.page_groups.describe()}"] if self.has_windows else []

    def _slot_lines(self) -> list[str]:
        slots = self.limits.slots
        if not slots.num_slots:
            return []
        return [
            f"host slots      {slots.num_slots * slots.page_bytes / _GIB:9.3f} GiB of host memory = {slots.num_slots} "
            f"pages, and {self.move_bytes / _GIB:.3f} GiB of the device for pages on their way"
        ]

    def _adapter_lines(self) -> list[str]:
        if not self.adapter_bytes:
            return []
        return [f"adapters        {self.adapter_bytes / _GIB:9.3f} GiB = {self.limits.adapter_slots} + 1 slots"]

    def _draft_lines(self) -> list[str]:
        if not self.draft_weight_bytes:
            return []
        per_token = self.draft_page_bytes / self.limits.page_size / 1024
        return [
            f"drafter         {self.draft_weight_bytes / _GIB:9.3f} GiB of the weights, and of the KV pages "
            f"{per_token:.1f} KiB a token"
        ]

    @property
    def has_windows(self) -> bool:
        """Some layers give pages back."""
        return self.limits.page_groups != (PageGroup(),)

    def _of_length(self) -> str:
        """What the number of tokens depends on."""
        if not self.has_windows:
            return ""
        length = self.limits.max_model_len
        return f" of sequences of {length} tokens; {held_tokens(self.limits, 1)} of sequences within a page"

    def _shortfall(self) -> str:
        longest = longest_sequence(self.limits)
        if longest >= self.limits.max_model_len:
            return ""
        return f"; a sequence can have {longest} of the {self.limits.max_model_len} tokens of model.max_len"

    def check_compiled(self, temporary_bytes: int, code_bytes: int) -> None:
        """Raises CapacityError when the compiled steps need more than is left beside weights and pages.

        Args:
          temporary_bytes: of the step that has most of them.
          code_bytes: of all programs, which a device holds at once.
        """
        left = self.total_bytes - self.held_bytes
        if temporary_bytes + code_bytes > left:
            raise CapacityError(
                f"the compiled step needs {temporary_bytes / _GIB:.2f} GiB of temporaries, and all programs have "
                f"{code_bytes / _GIB:.2f} GiB, but weights and {self.num_pages} pages leave {left / _GIB:.2f} GiB"
                f"{_moves(self.move_bytes)}; lower cache.num_pages or sched.max_step_tokens"
            )


def held_tokens(limits: Limits, length: int) -> int:
    """Tokens that all pages hold of sequences of `length` tokens each, the empty places of last pages counted."""
    columns = -(-length // limits.page_size)
    return limits.num_pages * columns * limits.page_size // limits.pages_of(columns * limits.page_size)


def tokens_within(limits: Limits, num_pages: int, chunk: int = 1) -> int:
    """Tokens of a sequence that holds `num_pages` pages at most, when steps feed up to `chunk` of them.

    Where these are enough for `model.max_len` tokens, it is that, rounded up to whole pages.
    """
    page_size = limits.page_size
    columns = range(1, -(-limits.max_model_len // page_size) + 1)
    return page_size * bisect.bisect_right(columns, num_pages, key=lambda c: limits.pages_of(c * page_size, chunk))


def enough_pages(limits: Limits) -> int:
    """Twice what all rows at full length could use: the second half keeps prefixes of requests that have ended."""
    return 2 * limits.max_rows * limits.pages_of(limits.max_model_len, limits.max_step_tokens)


def longest_sequence(limits: Limits) -> int:
    """Tokens of a sequence, prompt and output, that has all pages: more than `max_model_len` where these are enough."""
    return tokens_within(limits, limits.num_pages) + 1  # the last one is never written


def device_memory_bytes(device: jax.Device) -> int:  # pyright: ignore[reportInvalidTypeForm]
    """Bytes of the device; for a CPU, the bytes that the operating system could hand out now."""
    stats = device.memory_stats()
    if stats is not None and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return available_bytes()


def available_bytes() -> int:
    """Bytes that a process may still take: the kernel's estimate with its caches, within the control group's limit."""
    if _MEMINFO.exists():
        fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    else:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, used = (_CGROUP / name for name in ("memory.max", "memory.current"))
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, max(0, int(text) - int(used.read_text())))
    return available


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShare:
    """The share of a device's memory that may be used, where neither pages nor their bytes are set.

    Attributes:
      fraction: of all bytes, for weights, temporaries and pages.
      cache: of all bytes, for pages alone.
      steady: the bytes are the same at each start; otherwise the pages are rounded down to a grid, so that two starts
        most often agree, and the second finds the executables of the first.
    """

    fraction: float
    cache: float = 1.0
    steady: bool = True


def memory_share(cache: CacheConfig, backend: str) -> MemoryShare:
    """The share that `cache:` means on a backend, of the bytes that `device_memory_bytes` returns."""
    fraction = cache.memory_fraction or MEMORY_FRACTION
    if backend == "gpu":
        return MemoryShare(fraction=_GPU_POOL)
    if backend == "cpu":
        cache_share = _CPU_CACHE if cache.memory_fraction is None else 1.0
        return MemoryShare(fraction=fraction, cache=cache_share, steady=False)
    return MemoryShare(fraction=fraction)


def reserved_share(cache: CacheConfig, backend: str) -> float:
    """The part of a device that JAX takes for itself before anything is placed (`devices.find_devices` asks it to)."""
    return (cache.memory_fraction or MEMORY_FRACTION) if backend == "gpu" else 1.0


def estimate_temporaries(*, tokens: int, rows: int, hidden: int, ffn: int, vocab: int, itemsize: int) -> int:
    """Upper estimate of a step's live temporaries: a few activations of the widest layer, and logits in float32.

    8 widths of D and 3 of F cover residual, normed input, q/k/v/out and gate/up/product of one layer; 4 copies of the
    logits cover sampling (raw, processed, exponentials, noise).
    """
    return tokens * (8 * hidden + 3 * ffn) * itemsize + 4 * rows * vocab * 4


def plan_memory(
    *,
    total_bytes: int,
    share: MemoryShare,
    weight_bytes: int,
    temporary_bytes: int,
    state_bytes: int,
    page_bytes: int,
    limits: Limits,
    page_groups: PageGroups,
    num_pages: int | None,
    memory_bytes: int | None,
    move_counts: tuple[int, ...] = (),
) -> MemoryPlan:
    """Fixes the number of pages: as configured, by bytes, or from the memory that is left.

    The last rule takes no more than `enough_pages`. `limits` has the sizes; its number of pages does not matter.
    `move_counts`: see `MemoryPlan`. Raises CapacityError when not even one page in each group fits.
    """
    move_bytes = (DRAINING_LAUNCHES + LOADING_LAUNCHES) * max(move_counts, default=0) * page_bytes
    moves = _moves(move_bytes)
    least = len(limits.page_groups)
    needs = "a page" if least == 1 else f"a page in each of {least} groups of layers"
    budget = int(total_bytes * share.fraction)
    free = budget - weight_bytes - temporary_bytes - state_bytes - move_bytes
    limit = total_bytes - weight_bytes - state_bytes - move_bytes
    if num_pages is not None:
        chosen_by = "cache.num_pages"
        needed = (num_pages + 1) * page_bytes
        if needed > limit:
            raise CapacityError(
                f"cache.num_pages = {num_pages} needs {needed / _GIB:.2f} GiB, but the device has "
                f"{total_bytes / _GIB:.2f} GiB and the weights take {weight_bytes / _GIB:.2f}{moves}; lower "
                f"cache.num_pages to {max(0, limit // page_bytes - 1)} or less"
            )
        if num_pages < least:
            raise CapacityError(
                f"cache.num_pages = {num_pages}, but a sequence needs {needs}; raise it to {least} or more"
            )
    elif memory_bytes is not None:
        chosen_by = "cache.memory_bytes"
        num_pages = memory_bytes // page_bytes - 1
        if memory_bytes > limit:
            raise CapacityError(
                f"cache.memory_bytes = {memory_bytes} ({memory_bytes / _GIB:.2f} GiB) does not fit: the device has "
                f"{total_bytes / _GIB:.2f} GiB and the weights take {weight_bytes / _GIB:.2f}{moves}; {max(0, limit)} "
                "are left"
            )
        if num_pages < least:
            raise CapacityError(
                f"cache.memory_bytes = {memory_bytes} holds too few pages of {page_bytes} bytes: a sequence needs "
                f"{needs}, and one is for padding; raise it to {(least + 1) * page_bytes} or more, or lower "
                "cache.page_size"
            )
    else:
        chosen_by, most = "cache.memory_fraction", int(total_bytes * share.cache)
        if most < free:
            free, chosen_by = most, f"{share.cache:.0%} of the free memory"
        num_pages = free // page_bytes - 1
        enough = enough_pages(limits)
        if num_pages >= enough:
            num_pages, chosen_by = enough, "twice sched.max_rows x model.max_len"
        elif not share.steady:
            num_pages = _on_grid(num_pages)
    if num_pages < least:
        raise CapacityError(
            f"no room for KV pages of {page_bytes} bytes, of which a sequence needs {needs}, and padding one: "
            f"{share.fraction:.0%} of {total_bytes / _GIB:.2f} GiB leave {max(free, 0)} bytes beside "
            f"{weight_bytes / _GIB:.2f} GiB of weights and "
            f"{temporary_bytes / _GIB:.2f} GiB of temporaries{moves}; raise cache.memory_fraction, or lower "
            "sched.max_step_tokens or sched.max_rows"
        )
    return MemoryPlan(
        total_bytes=total_bytes,
        budget_bytes=budget,
        weight_bytes=weight_bytes,
        temporary_bytes=temporary_bytes,
        state_bytes=state_bytes,
        page_bytes=page_bytes,
        limits=dataclasses.replace(limits, num_pages=num_pages),
        page_groups=page_groups,
        chosen_by=chosen_by,
        move_counts=move_counts,
        move_bytes=move_bytes,
    )


def plan_slots(cache: CacheConfig, page_bytes: int, num_replicas: int, move_counts: tuple[int, ...]) -> HostSlots:
    """The slots of one replica in the host memory of this process; none without `cache.host_bytes`.

    `page_bytes`: of a page on all devices of the replica in this process. Raises ConfigError where the setting cannot
    work, CapacityError where not even one page fits.
    """
    if not cache.host_bytes:
        for name in ("host_policy", "host_admission", "load_bytes_per_step"):
            if (value := getattr(cache, name)) != CacheConfig.model_fields[name].default:
                raise ConfigError(
                    f"cache.{name} is {value!r:.80}, but without cache.host_bytes no page is kept in host memory or "
                    "loaded from it; set that, or leave this out"
                )
        return HostSlots()
    if not cache.prefix_caching:
        raise ConfigError(
            f"cache.host_bytes is {cache.host_bytes} and cache.prefix_caching is false, but pages in host memory are "
            "found by the prefix cache alone; leave one of them out"
        )
    num_slots = cache.host_bytes // num_replicas // page_bytes
    if num_slots < 1:
        raise CapacityError(
            f"cache.host_bytes = {cache.host_bytes} holds no page of {page_bytes} bytes for each of {num_replicas} "
            f"replicas; raise it to {num_replicas * page_bytes} or more, or set it to 0"
        )
    max_loads = move_counts[-1]
    if cache.load_bytes_per_step is not None:
        max_loads = max(1, cache.load_bytes_per_step // page_bytes)
    return HostSlots(
        num_slots=num_slots,
        max_draining=DRAINING_LAUNCHES * move_counts[-1],
        max_loads=max_loads,
        page_bytes=page_bytes,
    )


def _moves(move_bytes: int) -> str:
    """The part of a message that says what launches of pages need, with host memory behind the device."""
    if not move_bytes:
        return ""
    return f", beside {move_bytes / _GIB:.2f} GiB for pages on their way to and from host memory (cache.host_bytes)"


def check_host_memory(slot_bytes: int, embedding_bytes: int, device_bytes: int) -> None:
    """Raises CapacityError when this machine does not have so many bytes for host slots, and embeddings of pictures.

    `device_bytes`: what devices will hold in the same memory (`MemoryPlan.held_bytes`), nothing of which is there yet;
    0 where they have memory of their own.
    """
    available, host_bytes = available_bytes(), slot_bytes + embedding_bytes
    if not host_bytes or host_bytes + device_bytes <= available:
        return
    settings = {"cache.host_bytes": slot_bytes, "vision.host_bytes": embedding_bytes}
    named = [f"{name} = {size} ({size / _GIB:.2f} GiB)" for name, size in settings.items() if size]
    names = " or ".join(name for name, size in settings.items() if size)
    left = f"{available / _GIB:.2f} GiB of memory that this machine has left"
    if device_bytes:
        raise CapacityError(
            f"{' and '.join(named)} and the {device_bytes / _GIB:.2f} GiB of weights and pages, which a CPU has in the "
            f"same memory, are more than the {left}; lower {names} or cache.num_pages"
        )
    verb, them = ("is", "it") if len(named) == 1 else ("are", names)
    raise CapacityError(f"{' and '.join(named)} {verb} more than the {left}; lower {them}")


def _on_grid(num_pages: int) -> int:
    """The next number below whose binary digits behind the first few are all 0."""
    step = 1 << max(0, num_pages.bit_length() - _GRID_BITS)
    return num_pages - num_pages % step
