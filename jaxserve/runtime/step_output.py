"""`StepOutput`: what a compiled step leaves on the device for the host to read."""

import dataclasses

import jax
from jaxtyping import Array, Float, Int

from jaxserve.runtime.sampling import Logprobs

NOT_TAKEN = -1  # of a row that takes no part in a round


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOutput:
    """The results of a step of up to K rounds of R rows and W tokens each; K and W are 1 in a plain step.

    Of round k, row r drew `token_ids[k, r, : accepted[k, r] + 1]`; `accepted` is NOT_TAKEN where it took no part.
    Log-probabilities are copied to the host only when a row asked for them.

    Attributes:
      token_ids: NOT_FINITE where the hidden states are not.
      drafted, accepted: drafts that each row fed, and how many of the first of them it drew; None in a plain step.
      logprobs: of the R * W places of each round, as `token_ids[k].reshape(-1)`.
      prompt: of the T tokens that follow those of a mixed step.
      last_token: of every device row, for the first stage of a pipeline.
      hidden_sums: over the tokens of a mixed step that each row pools; 0 where none are.
    """

    token_ids: Int[Array, "K R W"]
    logprobs: Logprobs
    drafted: Int[Array, "K R"] | None = None
    accepted: Int[Array, "K R"] | None = None
    prompt: Logprobs | None = None
    last_token: Int[Array, " R+1"] | None = None
    hidden_sums: Float[Array, "R D"] | None = None
