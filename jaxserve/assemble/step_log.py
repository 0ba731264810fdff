"""The settings that a step log records of its engine, and the check whether a device can replay it.

Sizes need not be equal: a token depends neither on the padding of its step nor on the number of a page. So a device
fits when every plan of the log has room on it.
"""

import time
from collections.abc import Mapping
from typing import TypeVar

from jaxserve import __version__
from jaxserve.config.model_path import resolve_model_path
from jaxserve.config.schema import Config, Section
from jaxserve.engine.step_log import StepLogWriter, replica_path
from jaxserve.errors import StepLogError
from jaxserve.sched import Limits
from jaxserve.sched.record import LogHeader

_S = TypeVar("_S", bound=Section)

_EXACT = {"model.dtype", "model.seed", "model.random_weights", "cache.dtype", "checkpoint"}
_PREFIXES = ("version of ", "kernels.", "parallel.")


def settings_of(config: Config, device_facts: Mapping[str, str]) -> dict[str, str]:
    """All settings that can change a token, except sizes, by name. `device_facts` are those of `assemble.Device`."""
    from jaxserve.hosts.fingerprint import config_facts  # gRPC: not needed by an engine that writes no log

    facts = config_facts(config, resolve_model_path(config.model.path), __version__)
    chosen = {name: value for name, value in facts.items() if name in _EXACT or name.startswith(_PREFIXES)}
    return {**chosen, **device_facts}


def open_step_log(
    config: Config,
    *,
    limits: Limits,
    model: str,
    policy: object,
    vocab_size: int,
    replica: int,
    device_facts: Mapping[str, str],
) -> StepLogWriter | None:
    """The log of one replica, on `time.monotonic`; None when `runtime.step_log` asks for none. Raises ConfigError."""
    path = config.runtime.step_log
    if path is None:
        return None
    header = LogHeader(
        limits=limits,
        model=model,
        policy=_name_of(policy),
        vocab_size=vocab_size,
        replica=replica,
        started_at=round(time.time(), 3),
        settings=settings_of(config, device_facts),
    )
    return StepLogWriter(replica_path(path, replica, config.parallel.data), header, start_s=time.monotonic())


def sizes_from(header: LogHeader, config: Config) -> Config:
    """The config with the log's sizes wherever it leaves one open, so that defaults of another machine do not matter.

    `runtime.step_log` is taken out, too: a replay writes none.
    """
    limits = header.limits
    sched = _fill(config.sched, {"max_rows": limits.max_rows, "max_step_tokens": limits.max_step_tokens})
    shapes: dict[str, object] = {}
    if sched.max_step_tokens == limits.max_step_tokens:
        shapes["token_buckets"] = [b.tokens for b in limits.buckets if not b.decode_only]
    if sched.max_rows == limits.max_rows:
        shapes["row_buckets"] = [b.rows for b in limits.buckets if b.decode_only and b.plain]
    cache = {"page_size": limits.page_size}
    if config.cache.memory_bytes is None:
        cache["num_pages"] = limits.num_pages
    filled = _fill(config.cache, cache)
    if not config.cache.host_bytes and limits.slots.num_slots:
        filled = filled.model_copy(update={"host_bytes": limits.slots.num_slots * limits.slots.page_bytes})
    return config.model_copy(
        update={
            "cache": filled,
            "sched": sched,
            "model": _fill(config.model, {"max_len": limits.max_model_len}),
            "runtime": _fill(config.runtime.model_copy(update={"step_log": None, "background_buckets": False}), shapes),
        }
    )


def check_fits(header: LogHeader, limits: Limits, vocab_size: int) -> None:
    """Raises StepLogError that names every limit of the device that is too small for the log's plans."""
    log = header.limits
    wrong = []
    if limits.page_size != log.page_size:
        wrong.append(f"its pages hold {log.page_size} tokens, here {limits.page_size} (cache.page_size)")
    if limits.page_groups != log.page_groups:
        wrong.append(
            f"its rows have {_tables(log)}, here {_tables(limits)} (model.path, and model.max_len against the windows)"
        )
    for name, setting in (
        ("max_rows", "sched.max_rows"),
        ("num_pages", "cache.num_pages"),
        ("max_model_len", "model.max_len"),
    ):
        if getattr(limits, name) < getattr(log, name):
            wrong.append(f"it needs {name} {getattr(log, name)}, here {getattr(limits, name)} ({setting})")
    if limits.slots.num_slots < log.slots.num_slots:
        wrong.append(f"it needs {log.slots.num_slots} host slots, here {limits.slots.num_slots} (cache.host_bytes)")
    for bucket in log.buckets:
        if limits.find_bucket(bucket.tokens, bucket.rows, bucket.decode_only, bucket.width, bucket.rounds) is None:
            setting = "sched.max_step_tokens, runtime.token_buckets" if bucket.plain else "speculation"
            wrong.append(f"no step here has room for {bucket.tokens} tokens of {bucket.rows} rows ({setting})")
            break
    if vocab_size != header.vocab_size:
        wrong.append(f"its model {header.model!r} has {header.vocab_size} tokens, here {vocab_size} (model.path)")
    if wrong:
        raise StepLogError(f"the log cannot be replayed on this device: {'; '.join(wrong)}")


def differing_settings(header: LogHeader, settings: Mapping[str, str]) -> list[str]:
    """One text for each setting that can change a token and differs here."""
    return [
        f"{name} is {header.settings.get(name, 'absent')} in the log, {settings.get(name, 'absent')} here"
        for name in dict.fromkeys([*header.settings, *settings])
        if header.settings.get(name) != settings.get(name)
    ]


def _tables(limits: Limits) -> str:
    windows = ["none" if group.window is None else str(group.window) for group in limits.page_groups]
    return f"block tables for windows of {', '.join(windows)}"


def _fill(section: _S, values: Mapping[str, object]) -> _S:
    """The section with these values where it has None."""
    return section.model_copy(update={k: value for k, value in values.items() if getattr(section, k) is None})


def _name_of(policy: object) -> str:
    if isinstance(policy, str):
        return policy
    return policy.__name__ if isinstance(policy, type) else type(policy).__name__
