"""Many prompts in, all their results out: the engine driven by hand, without a thread.

    jobs      text, ids, messages -> Job: encoded and checked
    loop      Jobs -> engine -> results, in order of completion
    turns     threads that share the engine, a step each
    results   updates -> RequestOutput, in the names and meanings of vLLM
    jsonl     files of prompts, files of results
    journal   a file of what has ended, so that a batch survives its process

`LLM` and the command line are two interfaces of this package: the one raises the first error, the other writes it
beside the results and goes on. Hence an error is a value here, in the place of a job or of a result.

The engine has no thread. A caller that waits for everything gains nothing from one, and an interrupt in a notebook
would leave requests running behind its back. Here an interrupt takes effect between two steps: running requests are
aborted, their pages are free, and the next call works.
"""

from jaxserve.offline.jobs import Job, prepare_chat, prompt_text
from jaxserve.offline.loop import InOrder, run_jobs, stream_updates
from jaxserve.offline.picture_files import check_takes_pictures, open_under, read_pictures
from jaxserve.offline.results import (
    CompletionOutput,
    Counts,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    Result,
    ScoringOutput,
    ScoringRequestOutput,
)
from jaxserve.offline.turns import Turns

__all__ = [
    "CompletionOutput",
    "Counts",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "InOrder",
    "Job",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "Result",
    "ScoringOutput",
    "ScoringRequestOutput",
    "Turns",
    "check_takes_pictures",
    "open_under",
    "prepare_chat",
    "prompt_text",
    "read_pictures",
    "run_jobs",
    "stream_updates",
]
