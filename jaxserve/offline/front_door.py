"""`FrontDoor`, the base of `LLM` and `AsyncLLM`: from arguments or a file to an engine, and facts about it.

The arguments are translated into the config here. The two classes differ only in how they answer prompts.
"""

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, Self

from jaxserve.api import SamplingParams
from jaxserve.config import FlagSetting, ResolvedConfig, for_one_user, get_value, load_config
from jaxserve.config.model_path import resolve_model_path
from jaxserve.errors import ConfigError, InvalidRequest
from jaxserve.offline.arguments import hint
from jaxserve.offline.forks import watch_forks
from jaxserve.offline.llm_tokenizer import LlmTokenizer
from jaxserve.progress import show_progress
from jaxserve.values.other_names import SAME, Place, answer, attribute_answer

if TYPE_CHECKING:
    from jaxserve.assemble import Assembly, SchedulerChoice

_P = ParamSpec("_P")

watch_forks()  # from now on, whoever starts JAX


def _refuses_unknown(init: Callable[_P, None]) -> Callable[_P, None]:
    """Wraps a function: an option that it does not have is a ConfigError in place of a TypeError."""
    known = [name for name, p in inspect.signature(init).parameters.items() if p.kind is p.KEYWORD_ONLY]

    @functools.wraps(init)
    def checked(*args: _P.args, **options: _P.kwargs) -> None:
        for name in options:
            if name not in (*known, "model"):
                if (here := answer(name, Place.MODEL)) is not None:
                    raise ConfigError(f"{type(args[0]).__name__} has no option {name!r}; {here}")
                raise ConfigError(
                    f"{type(args[0]).__name__} has no option {name!r}; {hint(name, known)}; settings of docs/config.md "
                    f"go in by {type(args[0]).__name__}.from_config(None, overrides={{...}})"
                )
        init(*args, **options)

    return checked


def _no_attribute(who: str, name: str, where: object) -> AttributeError:
    here = attribute_answer(name)
    return AttributeError(f"{who} has no attribute {name!r}" + (f"; {here}" if here else ""), name=name, obj=where)


class _Door(type):
    """The class of `LLM` and `AsyncLLM`: of class methods that others have, such as `from_pretrained`, it says the
    same as an object does of its attributes."""

    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> Any:
            raise _no_attribute(f"type object {cls.__name__!r}", name, cls)


class FrontDoor(metaclass=_Door):
    """A loaded model. Takes the arguments of `LLM`; a subclass answers prompts."""

    @_refuses_unknown
    def __init__(
        self,
        model: str | os.PathLike[str] = "demo",
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        skip_tokenizer_init: bool | None = None,
        served_model_name: str | None = None,
        dtype: str | None = None,
        quantization: str | None = None,
        seed: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        enable_prefix_caching: bool | None = None,
        enable_chunked_prefill: bool | None = None,
        block_size: int | None = None,
        num_gpu_blocks_override: int | None = None,
        gpu_memory_utilization: float | None = None,
        tensor_parallel_size: int | None = None,
        pipeline_parallel_size: int | None = None,
        data_parallel_size: int | None = None,
        scheduler: "SchedulerChoice | None" = None,
        progress: bool = True,
    ) -> None:
        """Loads the weights and compiles the step, which takes as long as it takes.

        Args:
          model: Hugging Face style or Orbax directory, or 'demo' or 'demo-vision', which are packaged.
          tokenizer: directory of the tokenizer when it is another one.
          skip_tokenizer_init: token ids in, token ids out; no tokenizer is loaded.
          served_model_name: `model_name`, and the name in the log; default: the directory's.
          dtype: 'auto', 'float32' or 'bfloat16'.
          quantization: 'auto', 'none', 'int8', 'int8-a8', 'int4', 'int4-a8' or 'fp8'.
          seed: of requests that bring none.
          max_model_len: tokens of a sequence, prompt and output.
          max_num_seqs: sequences that run at once.
          max_num_batched_tokens: tokens of a step.
          enable_prefix_caching: share pages of equal prompt beginnings.
          enable_chunked_prefill: cut prompts to fill steps.
          block_size: tokens of a page of the KV cache.
          num_gpu_blocks_override: pages of the KV cache, on whatever device.
          gpu_memory_utilization: share of the device's memory for weights and pages.
          tensor_parallel_size: devices that share every layer.
          pipeline_parallel_size: groups of devices that each hold some of the layers.
          data_parallel_size: replicas in this process; each takes as many devices as the other two multiply to.
          scheduler: name of a policy, or a policy or scheduler, class or object (see `jaxserve.sched`).
          progress: show the phases of the start on stderr (in the log instead, where that shows INFO).

        Raises ConfigError, CheckpointError or CapacityError; ForkedProcess in a child of a process that uses JAX.
        """
        given = {
            "tokenizer": None if tokenizer is None else os.fspath(tokenizer),
            "skip_tokenizer_init": skip_tokenizer_init,
            "served_model_name": served_model_name,
            "dtype": dtype,
            "quantization": quantization,
            "seed": seed,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "enable_prefix_caching": enable_prefix_caching,
            "enable_chunked_prefill": enable_chunked_prefill,
            "block_size": block_size,
            "num_gpu_blocks_override": num_gpu_blocks_override,
            "gpu_memory_utilization": gpu_memory_utilization,
            "tensor_parallel_size": tensor_parallel_size,
            "pipeline_parallel_size": pipeline_parallel_size,
            "data_parallel_size": data_parallel_size,
        }
        overrides: dict[str, object] = {SAME[n]: value for n, value in given.items() if value is not None}
        settings = {"model.path": os.fspath(model), **overrides}
        # A program says all in its arguments: what is set for servers of the same machine does not change it.
        self._start(load_config(None, settings, every_variable=False), scheduler, progress=progress)

    @classmethod
    def from_config(
        cls,
        path: str | os.PathLike[str] | None,
        overrides: Mapping[str, object] | Sequence[str | FlagSetting] = (),
        *,
        scheduler: "SchedulerChoice | None" = None,
        progress: bool = True,
    ) -> Self:
        """From a YAML file: `from_config("demo.yaml", overrides={"cache.num_pages": 24})`; None takes the defaults.

        As for commands, variables of the environment (docs/config.md) come between the file and `overrides`.
        """
        door = cls.__new__(cls)
        door._start(load_config(path, overrides), scheduler, progress=progress)
        return door

    def _start(self, resolved: ResolvedConfig, scheduler: "SchedulerChoice | None", *, progress: bool) -> None:
        for name in ("hosts.coordinator", "hosts.num_processes"):
            if get_value(resolved.config, name) not in (None, 1):
                raise ConfigError(
                    f"{name} is set by {resolved.sources[name]}, but LLM and AsyncLLM use the devices of this host "
                    "alone: unset it, or serve with `python -m jaxserve.run` on every host"
                )
        watch_forks().check()
        resolve_model_path(resolved.config.model.path)  # a name that is no directory is told before JAX is loaded
        with show_progress(shown=progress) as shown:
            shown.begin(f"starting with model {resolved.config.model.path}: loading JAX")
            from jaxserve.assemble import assemble  # seconds, which are not to be silent

            self._assembly: Assembly = assemble(for_one_user(resolved), scheduler=scheduler, progress=shown)
        self._engine = self._assembly.engine

    if not TYPE_CHECKING:  # a checker of types is to find names that do not exist

        def __getattr__(self, name: str) -> Any:
            """Only for names that do not exist: those of other libraries are answered with what it is here."""
            raise _no_attribute(f"{type(self).__name__!r} object", name, self)

    @property
    def model_name(self) -> str:
        """`served_model_name`, or the name of the model's directory."""
        return self._engine.model.name

    @property
    def start_seconds(self) -> Mapping[str, float]:
        """Times of the start, as `bench startup` reports it."""
        return self._assembly.seconds

    def wait_until_built(self) -> None:
        """Waits until no step shape is built in the background any more, so that a measurement is not disturbed."""
        for buckets in self._assembly.later:
            buckets.wait()

    def get_tokenizer(self) -> LlmTokenizer | None:
        """The tokenizer, with a call and `apply_chat_template` as in transformers; None with `skip_tokenizer_init`."""
        tokenizer = self._engine.tokenizer
        return None if tokenizer is None else LlmTokenizer(tokenizer, self._engine.chat_template)

    @property
    def tokenizer(self) -> LlmTokenizer | None:
        """That of `get_tokenizer`."""
        return self.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """The recommendations of the checkpoint's generation_config.json; the rest as in `SamplingParams()`."""
        return SamplingParams.from_dict(self._assembly.sampling_defaults)

    def _end(self) -> None:
        """Ends the engine and all that it started, and frees its weights and pages, though somebody may still hold
        them. Once; takes as long as the step that runs."""
        self._engine.stop()
        self._assembly.weights.release()

    def _sampling(self, given: SamplingParams | None) -> SamplingParams:
        """Those that a caller gave, or the defaults. Raises InvalidRequest for anything else."""
        if given is None:
            return self.get_default_sampling_params()
        if isinstance(given, Mapping):
            SamplingParams.from_dict(given)  # names of others are answered first
            raise InvalidRequest("sampling_params is a dictionary; write SamplingParams.from_dict(...) around it")
        if not isinstance(given, SamplingParams):
            raise InvalidRequest(f"sampling_params must be SamplingParams, got {given!r:.80}")
        return given
