"""The front doors on a fake device: what tests/test_llm.py and tests/test_run.py share.

Run as a program, it is `python -m jaxserve.run` on the fake device: what the tests of processes start.
"""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Literal

from jaxserve import assemble
from jaxserve.config import Config
from jaxserve.testing import ByteTokenizer, FakeRunner, make_limits


@dataclasses.dataclass(kw_only=True)
class Fakes:
    """How the next device behaves, and what was built last. Mutated by tests and by `build_device`."""

    mode: Literal["count", "context"] = "count"
    fail_at: tuple[int, Literal["dispatch", "result"]] | None = None
    sampling_defaults: Mapping[str, object] = dataclasses.field(default_factory=dict)
    config: Config | None = None
    runner: FakeRunner | None = None
    max_rows: int = 4

    def build_device(self, config: Config, on_compiled: assemble.OnCompiled) -> assemble.Device:
        self.config = config
        limits = make_limits(
            max_rows=self.max_rows, num_pages=config.cache.num_pages or 64, max_model_len=config.model.max_len or 64
        )
        self.runner = FakeRunner(limits, vocab_size=ByteTokenizer.vocab_size, mode=self.mode, fail_at=self.fail_at)
        on_compiled(1, 1, "fake")
        return assemble.Device(
            runner=self.runner, vocab_size=ByteTokenizer.vocab_size, eos_token_ids=(257,),
            sampling_defaults=self.sampling_defaults,
        )  # fmt: skip

    def build_tokenizer(self, config: Config) -> ByteTokenizer | None:
        return None if config.model.skip_tokenizer else ByteTokenizer()


def main() -> int:
    from jaxserve import run

    fakes = Fakes(fail_at=(0, "dispatch") if "--broken-device" in sys.argv else None)
    assemble.build_device = fakes.build_device
    assemble.build_tokenizer = fakes.build_tokenizer
    return run.main([a for a in sys.argv[1:] if a != "--broken-device"])


if __name__ == "__main__":
    sys.exit(main())
