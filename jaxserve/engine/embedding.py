"""From the pooled hidden states of a prompt, which a step returns, to the embedding that a caller asked for.

`EmbeddingRules` says what the model was trained for: which tokens are pooled, whether vectors have length 1, and to
which sizes they may be cut. `EmbeddingForm` is what one caller gets within these rules.
"""

import dataclasses
import math

from jaxserve.api import Pooling, PromptInfo, SamplingParams
from jaxserve.errors import JaxserveError, UnsupportedOption


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingForm:
    """`normalize`: of Euclidean length 1. `dimensions`: numbers to keep, from the first on; None: all D."""

    normalize: bool = True
    dimensions: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRules:
    """How the hidden states of a model become embeddings.

    Attributes:
      pooling: the tokens whose final hidden states are averaged.
      normalize: vectors have Euclidean length 1 unless a caller asks for others.
      size: D, the numbers of a whole embedding; None: not known.
      sizes: smaller numbers that the model was trained to be cut to (Matryoshka): a range, or some of them.
    """

    pooling: Pooling = Pooling.MEAN
    normalize: bool = True
    size: int | None = None
    sizes: range | tuple[int, ...] = ()

    def form(self, dimensions: int | None = None, normalize: bool | None = None) -> EmbeddingForm:
        """What a caller gets who asks for this; None: as the model has it.

        Raises UnsupportedOption for a size that the model was not trained for.
        """
        normalized = self.normalize if normalize is None else normalize
        if dimensions is None or dimensions == self.size:
            return EmbeddingForm(normalize=normalized)
        if dimensions in self.sizes:
            return EmbeddingForm(normalize=normalized, dimensions=dimensions)
        size = "a size of their own" if self.size is None else f"{self.size} numbers"
        if not self.sizes:
            raise UnsupportedOption(
                f"dimensions is {dimensions}, but this model's embeddings have {size}, and its config.json does not "
                "say that they may be cut; leave dimensions out, or name the sizes that the model was trained for in "
                "matryoshka_dimensions of model.overrides"
            )
        known = f"1 to {self.sizes[-1]}" if isinstance(self.sizes, range) else ", ".join(map(str, self.sizes))
        raise UnsupportedOption(
            f"dimensions is {dimensions}, but this model's embeddings have {size} and may be cut to {known}; ask for "
            "that, or leave dimensions out"
        )


def pooling_params(truncate_prompt_tokens: int | None = None) -> SamplingParams:
    """The sampling of a request with `pooling`, from which nothing is drawn. Raises InvalidRequest."""
    return SamplingParams(temperature=0.0, truncate_prompt_tokens=truncate_prompt_tokens)


def embedding_of(prompt: PromptInfo | None, form: EmbeddingForm = EmbeddingForm()) -> list[float]:
    """The embedding in that form: [D] numbers, or fewer. It is cut before it is normalised; zeros stay zeros.

    Raises JaxserveError when the model computed no finite numbers.
    """
    assert prompt is not None and prompt.pooled is not None, prompt
    values = prompt.pooled[: form.dimensions]
    length = math.hypot(*values)
    if not math.isfinite(length):
        raise JaxserveError("the model's hidden states are not finite for this prompt, so it has no embedding")
    return [value / length for value in values] if length and form.normalize else list(values)
