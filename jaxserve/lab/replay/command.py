"""The command `jaxserve replay` behind its options: from a file to a verdict and its exit code."""

import time
from pathlib import Path

from jaxserve import assemble
from jaxserve.assemble.step_log import check_fits, differing_settings, settings_of, sizes_from
from jaxserve.config import ResolvedConfig
from jaxserve.config.schema import HostsConfig
from jaxserve.errors import ConfigError
from jaxserve.lab.replay.core import replay
from jaxserve.offline.console import complain
from jaxserve.progress import show_progress
from jaxserve.sched.record import StepLog

DIFFERENT = 3


def replay_and_print(path: Path, resolved: ResolvedConfig) -> int:
    """Replays a log on the device that the config describes. Returns 0 when all tokens are equal, else 3.

    Sizes that the config leaves open are those of the log. The verdict goes to stdout, notes to stderr. Raises
    StepLogError, and what building a device raises.
    """
    if resolved.config.hosts != HostsConfig():
        raise ConfigError("a replay runs in one process; leave the section hosts out of its config")
    with StepLog(path) as log:
        header = log.header
        config = sizes_from(header, resolved.config)
        alone = config.model_copy(update={"parallel": config.parallel.model_copy(update={"data": 1})})
        with show_progress() as progress:
            [device] = assemble.build_devices(alone, progress)
        check_fits(header, device.runner.limits, device.vocab_size)
        differing = differing_settings(header, settings_of(config, device.facts))
        for line in differing:
            complain(f"note: {line}")
        begin_s = time.monotonic()
        result = replay(device.runner, log, device.vocab_size)
        seconds = time.monotonic() - begin_s
        if result.difference is None:
            print(f"{result.steps} steps, {result.tokens} tokens: all equal ({seconds:.1f} s)")
            if log.end is None:
                complain("note: the log has no end: its engine was killed, or is still running")
            elif log.end.dropped:
                complain(f"note: {log.end.dropped} steps at its end are missing from the log")
            return 0
    print(f"different after {result.steps} equal steps with {result.tokens} tokens; {result.difference}")
    if differing:
        complain(f"note: {len(differing)} settings that can change a token differ, see above")
    return DIFFERENT
