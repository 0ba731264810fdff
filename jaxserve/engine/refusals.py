"""Why an engine takes no more requests, as errors and as words."""

from jaxserve.errors import Draining, EngineStopped, JaxserveError

ASLEEP = "the engine sleeps, and its device is given back; wake it up first"


def refusal_of(failure: BaseException | None) -> EngineStopped:
    """The error of a request that is not taken any more, by an engine that has failed or is shutting down."""
    kind = Draining if failure is None else EngineStopped
    return kind(f"the engine takes no more requests: {reason_of(failure)}")


def reason_of(failure: BaseException | None) -> str:
    """Why an engine takes no request, to end a sentence. `failure`: of the engine; many exceptions have no text."""
    if failure is None:
        return "it is shutting down"
    return str(failure) if isinstance(failure, JaxserveError) else repr(failure)
