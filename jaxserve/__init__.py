"""jaxserve: a JAX/XLA inference engine for large language models on TPUs, GPUs and CPUs.

    from jaxserve import LLM, SamplingParams
    llm = LLM(model="demo")
    print(llm.chat([{"role": "user", "content": "What is 683+784?"}])[0].outputs[0].text)

Names are imported when first used: a notebook that only wants `jaxserve.sched` never loads JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.api import FinishReason, SamplingParams, StructuredOutput
    from jaxserve.config.schema import Config
    from jaxserve.offline.async_llm import AsyncLLM
    from jaxserve.offline.llm import LLM, CompletionOutput, RequestOutput

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Config",
    "FinishReason",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutput",
]

_HOME = {
    "LLM": "jaxserve.offline.llm",
    "AsyncLLM": "jaxserve.offline.async_llm",
    "CompletionOutput": "jaxserve.offline.llm",
    "RequestOutput": "jaxserve.offline.llm",
    "SamplingParams": "jaxserve.api",
    "StructuredOutput": "jaxserve.api",
    "FinishReason": "jaxserve.api",
    "Config": "jaxserve.config.schema",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'jaxserve' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
