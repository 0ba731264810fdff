"""What became of one request, in plain times.

Owns `Outcome`. Refuses to compute (`metrics`) and to know a clock: whoever measures says when, in seconds of one clock,
be it that of a machine or that of a simulation.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One request.

    Attributes:
      start_s: when it was handed to the network, or to the engine.
      output_times_s: when each piece of output came; a piece may have several tokens.
      prompt_tokens: as the server counts, else as the dataset did.
      output_tokens: as the server counts; None when it does not say.
      cached_tokens: prompt tokens that the server had cached; None when it does not say.
      asked_tokens: the output length that was asked for.
      failure: kind of failure; None for an answer.
      end_s: of a failure, when it was noticed; else the last piece.
    """

    start_s: float
    output_times_s: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int | None = None
    cached_tokens: int | None = None
    asked_tokens: int = 0
    failure: str | None = None
    detail: str = ""
    end_s: float = 0.0
