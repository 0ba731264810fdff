"""The engine: one loop that turns requests into streams of text.

    client thread                 loop thread                                    device
    ------------                  -----------                                    ------
    prepare: encode, check
    submit -> inbox  ----------->  drain inbox -> Scheduler.add
                                   Scheduler.schedule -> StepPlan N+1
                                   Runner.dispatch(N+1)  ----------------------> queued behind step N
    sink(Update)     <-----------  tokens of step N-1: Detokenizer.push
                                   InFlight(N).result()  <---------------------- step N ends
                                   Scheduler.commit(N) -> TokenEvents
                                   stop strings and grammars, which change the next plan

Why it has this shape. The device must never wait for Python, so step N+1 is planned and launched before step N is
read, and nothing but commit, plan and launch stands between a result and the next launch: text, streams and garbage
come when the device has its next work (docs/host.md has the figures). One thread owns every mutable thing of the loop,
so there is nothing to lock: other threads only put commands into the inbox, and get updates through the sink that came
with their request. Nothing here imports JAX: the same loop runs on a fake runner in tests.

Failure has two sizes. What concerns one request (it is too long, its text cannot be decoded) ends that request with
an error and nothing else. What concerns the device or the scheduler is a defect: the loop stops, every stream ends
with `EngineStopped`, and `Engine.failure` says why, so that a health check can turn red.

Several replicas in one process are an `EngineGroup`: each is an `Engine` with a loop, a scheduler and a device of its
own, and front doors see one `AnyEngine`. A replica that dies gives its unanswered requests to the others.
"""

from jaxserve.engine.base import Answering, AnyEngine
from jaxserve.engine.cache_control import CacheControl
from jaxserve.engine.embedding import EmbeddingForm, EmbeddingRules, embedding_of, pooling_params
from jaxserve.engine.engine import Engine, ModelInfo
from jaxserve.engine.inputs import Prompt, check_token_ids, prepare_request
from jaxserve.engine.load import Load
from jaxserve.engine.outputs import DrawnBy, Sink, Update
from jaxserve.engine.pictures import (
    OpenUrl,
    PictureReader,
    PictureSource,
    chat_prompt,
    check_takes_pictures,
    refuse_url,
    split_chat,
    with_pictures,
)
from jaxserve.engine.replicas import EngineGroup
from jaxserve.engine.scoring import QWEN3_TEMPLATE, Judgement, Reranker, encode_pairs, make_pairs, need_reranker
from jaxserve.engine.stats import EngineStats, RequestStats, RequestTimes
from jaxserve.engine.streams import AsyncEngine

__all__ = [
    "QWEN3_TEMPLATE",
    "Answering",
    "AnyEngine",
    "AsyncEngine",
    "CacheControl",
    "DrawnBy",
    "EmbeddingForm",
    "EmbeddingRules",
    "Engine",
    "EngineGroup",
    "EngineStats",
    "Judgement",
    "Load",
    "ModelInfo",
    "OpenUrl",
    "PictureReader",
    "PictureSource",
    "Prompt",
    "RequestStats",
    "RequestTimes",
    "Reranker",
    "Sink",
    "Update",
    "chat_prompt",
    "check_takes_pictures",
    "check_token_ids",
    "embedding_of",
    "encode_pairs",
    "make_pairs",
    "need_reranker",
    "pooling_params",
    "prepare_request",
    "refuse_url",
    "split_chat",
    "with_pictures",
]
