"""The runtime: it executes a plan on the devices and returns tokens. It decides nothing.

    StepPlan --pack--> one int32 buffer --one transfer--> one compiled step --> token ids

XLA compiles fixed shapes, so the ragged batch of a step is padded to the smallest of a few `Bucket`s, each compiled
before the first request; a plan that fits none is an error, never a compile. Python must not stand between two steps,
so all integers of a step travel in one buffer, and everything a later step needs (KV pages, block tables, last tokens,
sampling state) stays on the device in `DeviceState`, donated from step to step and updated in place. Only changes are
sent: a block table entry when a page is granted, a row's masks when a request begins.

`build` decides sizes once, from the config and the checkpoint, then the memory, then the compiled shapes.
"""

from jaxserve.runtime.build import Built, build_runners
from jaxserve.runtime.compile import Compiled
from jaxserve.runtime.runner import DeviceRunner

__all__ = ["Built", "Compiled", "DeviceRunner", "build_runners"]
