"""The one table of XLA flags for executables: on which backend, why, and on whose recommendation.

`XLA_FLAGS` of the environment belongs to the user, holds for the whole process, and is left alone; these options travel
with each executable, so that two models in one process do not disturb each other and the compilation cache tells them
apart. A flag stands here when it was measured to help, when the makers of the backend recommend it for what a step
does, or when a promise needs it; docs/performance.md lists those that were measured and did not.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class XlaFlag:
    """One row.

    Attributes:
      backend: 'cpu', 'gpu' or 'tpu'.
      name, value: as XLA spells them, without the dashes.
      sharded_only: it changes how devices communicate, so a single device does without.
      why: its effect on a step.
      source: of the recommendation.
    """

    backend: str
    name: str
    value: bool | str
    sharded_only: bool
    why: str
    source: str


_JAX_FLAGS = "https://docs.jax.dev/en/latest/xla_flags.html"

XLA_FLAGS = (
    XlaFlag(
        backend="cpu",
        name="xla_allow_excess_precision",
        value=False,
        sharded_only=False,
        why="a value of bfloat16 is rounded where the program says so, whatever a step shape of this size fuses",
        source="docs/kernels.md, 'The order of sums'",
    ),
    XlaFlag(
        backend="gpu",
        name="xla_gpu_enable_command_buffer",
        # XLA's own list and WHILE. Collectives stay outside: graphs with them were seen to hang.
        value="FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
        sharded_only=False,
        why="a step is one CUDA graph: sampling is a conditional with a loop in it, whose turns the host waits for",
        source="https://github.com/openxla/xla/blob/main/xla/xla.proto, CommandBufferCmdType",
    ),
    XlaFlag(
        backend="gpu",
        name="xla_gpu_enable_latency_hiding_scheduler",
        value=True,
        sharded_only=True,
        why="the two sums of a layer travel while the GPU computes",
        source="https://docs.jax.dev/en/latest/gpu_performance_tips.html",
    ),
    XlaFlag(
        backend="tpu",
        name="xla_tpu_enable_async_collective_fusion",
        value=True,
        sharded_only=True,
        why="a collective and the matmul beside it become one fusion",
        source=_JAX_FLAGS,
    ),
    XlaFlag(
        backend="tpu",
        name="xla_tpu_enable_async_collective_fusion_multiple_steps",
        value=True,
        sharded_only=True,
        why="a long collective spans several fusions",
        source=_JAX_FLAGS,
    ),
    XlaFlag(
        backend="tpu",
        name="xla_tpu_overlap_compute_collective_tc",
        value=True,
        sharded_only=True,
        why="compute and communication overlap on one core",
        source=_JAX_FLAGS,
    ),
)


def compiler_options(backend: str, num_devices: int) -> dict[str, bool | str]:
    """The flags for an executable that runs on `num_devices` devices of `backend` together."""
    rows = [flag for flag in XLA_FLAGS if flag.backend == backend]
    return {flag.name: flag.value for flag in rows if num_devices > 1 or not flag.sharded_only}
