"""The front doors on a fake device: what the tests of the front doors share.

Run as a program, it is `python -m jaxserve.run` on the fake device: what the tests of processes start.
"""

import dataclasses
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Literal, Self

from jaxserve import assemble
from jaxserve.config.schema import Config
from jaxserve.progress import Progress
from jaxserve.sched import InFlight, StepPlan, StepResult
from jaxserve.testing import ByteTokenizer, FakeRunner, make_limits


@dataclasses.dataclass(kw_only=True)
class Fakes:
    """How the next device behaves, and what was built last. Mutated by tests and by `build_devices`."""

    mode: Literal["count", "context"] = "count"
    fail_at: tuple[int, Literal["dispatch", "result"]] | None = None
    fail_replica: int | None = None  # None: `fail_at` holds for all of them
    sampling_defaults: Mapping[str, object] = dataclasses.field(default_factory=dict)
    config: Config | None = None
    runner: FakeRunner | None = None
    max_rows: int = 4
    wait: bool = False  # the device is ready when a line has come on stdin
    hangs: bool = False  # no step ends

    def install(self, patch: Callable[[object, str, object], None] = setattr) -> Self:
        """Puts itself in the place of the device; `patch` may be that of a MonkeyPatch, which takes it back."""
        patch(assemble, "build_devices", self.build_devices)
        patch(assemble, "build_tokenizer", self.build_tokenizer)
        return self

    def build_devices(self, config: Config, progress: Progress) -> list[assemble.Device]:
        self.config = config
        progress.begin("building the fake")
        progress.count(1, 1, "fake")
        if self.wait:
            print("building", flush=True)
            sys.stdin.readline()
        return [self._build(config, replica) for replica in range(config.parallel.data)]

    def _build(self, config: Config, replica: int) -> assemble.Device:
        limits = make_limits(
            max_rows=self.max_rows, num_pages=config.cache.num_pages or 64, max_model_len=config.model.max_len or 64
        )
        fail_at = self.fail_at if self.fail_replica in (None, replica) else None
        self.runner = FakeRunner(limits, vocab_size=ByteTokenizer.vocab_size, mode=self.mode, fail_at=fail_at)
        return assemble.Device(
            runner=HangingRunner(self.runner) if self.hangs else self.runner,
            vocab_size=ByteTokenizer.vocab_size, eos_token_ids=(257,), sampling_defaults=self.sampling_defaults,
            renew=lambda: self._build(config, replica),
        )  # fmt: skip

    def build_tokenizer(self, config: Config) -> ByteTokenizer | None:
        return None if config.model.skip_tokenizer else ByteTokenizer()


class HangingRunner:
    """A device of which no step ends."""

    def __init__(self, inner: FakeRunner) -> None:
        self.limits = inner.limits

    def dispatch(self, plan: StepPlan) -> InFlight:
        class Hung:
            def result(self) -> StepResult:
                threading.Event().wait()
                raise AssertionError("nobody sets it")

        return Hung()


def main() -> int:
    from jaxserve import run

    own = {option for option in ("--broken-device", "--slow-device", "--hanging-device") if option in sys.argv}
    fail_at = (0, "dispatch") if "--broken-device" in own else None
    Fakes(fail_at=fail_at, wait="--slow-device" in own, hangs="--hanging-device" in own).install()
    return run.main([a for a in sys.argv[1:] if a not in own])


if __name__ == "__main__":
    sys.exit(main())
