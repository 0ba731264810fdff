"""`Outcome`: what became of one request, in plain times, in seconds of the clock of a machine or of a simulation.

Figures are computed from it in `metrics`.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One request.

    Attributes:
      start_s: when it was handed to the network, or to the engine.
      output_times_s: when each piece of output came; a piece may have several tokens.
      prompt_tokens: as the server counts, else as the dataset did.
      output_tokens: as the server counts; None when it does not report them.
      cached_tokens: prompt tokens that the server had cached; None when it does not report them.
      drafted_tokens, accepted_tokens: drafts of the server, and tokens of the output that were drafts; None when it
        does not report them.
      asked_tokens: the requested output length.
      failure: kind of failure; None for an answer.
      end_s: of a failure, when it was noticed; else the last piece.
    """

    start_s: float
    output_times_s: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int | None = None
    cached_tokens: int | None = None
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    asked_tokens: int = 0
    failure: str | None = None
    detail: str = ""
    end_s: float = 0.0
