"""`Drafter`: what steps ask of whatever makes drafts, be it told of tokens alone or a model with weights and pages.

A draft is a guess of the next tokens of a row. It changes no token (`rounds`), so a drafter may guess however it likes;
a good one makes steps draw more. Drafts are made on the device, since the host does not know the last tokens of a row
when it plans the next step. (Rows with a grammar wait for the host anyway, which makes theirs: `engine.structured`.)
"""

import dataclasses
from typing import Any, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxserve.kernels.paged_attention import AttentionBatch, LayerCache, PagedAttention
from jaxserve.models.decoder import Decoder
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.drafts.config import HeadConfig
from jaxserve.models.sharding import Shards
from jaxserve.runtime.drafting import DrafterState, DraftSizes, LearnsFromAnswers, Observer, TokenDrafter
from jaxserve.runtime.row_state import SamplingState
from jaxserve.runtime.sampling import choose_tokens

Caches = tuple[LayerCache, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """The model of the step that is being traced, and what it computes with."""

    model: Decoder
    attention: PagedAttention
    page_size: int
    shards: Shards


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The rows that drafts are made for.

    Attributes:
      rows: device rows.
      tables: their block tables, of the drafter's group of layers.
      lens: tokens in the pages of each, which is the position of the last token.
      room: tokens that each may draw, and so places that its pages have; below 2 no draft of the row is used.
      params, sampling: how each draws.
    """

    rows: Int[Array, " R"]
    tables: Int[Array, "R P"]
    lens: Int[Array, " R"]
    room: Int[Array, " R"]
    params: Int[Array, "R F"]
    sampling: SamplingState

    def draw(
        self,
        logits: Float[Array, "R V"],
        place: int,
        drafts: Int[Array, "R count"],
        active: Bool[Array, " R"],
        shards: Shards,
    ) -> Int[Array, "R count"]:
        """`drafts` with those of `place`, drawn as the model's own token will be: with the row's options and noise.

        The noise of a token at a position is the same for both, so where a drafter's distribution is near the model's,
        so is the token (arXiv:2408.07978). Rows that are not `active` have NO_TOKEN there already.
        """
        position = self.lens + 1 + place
        found = choose_tokens(
            logits, self.rows, position, self.params, active, self.sampling, shards, ahead=drafts
        ).token_ids
        return drafts.at[:, place].set(jnp.where(active, found, drafts[:, place]))

    def single(self, position: Int[Array, " R"], active: Bool[Array, " R"], page_size: int) -> AttentionBatch:
        """A token of each row. Rows that are not active have the dummy page, so that every row has a token."""
        count = position.shape[0]
        position = jnp.where(active, position, 0)
        return AttentionBatch(
            positions=position,
            token_rows=jnp.arange(count, dtype=jnp.int32),
            q_starts=jnp.arange(count + 1, dtype=jnp.int32),
            context_lens=position + 1,
            block_tables=jnp.where(active[:, None], self.tables, 0),
            page_size=page_size,
            decode_only=True,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fed:
    """Tokens that went through the model, and what became of them.

    Attributes:
      tokens: [T], in rows as `batch` says, whose block tables are those of the drafter's group.
      from_host: those of them that nobody drew in a step before: prompts; None: there are none.
      hidden: behind the final norm.
      taps: those that the drafter asked for.
      num_kept: of each row of the batch, how many of its tokens stay; rejected drafts stand behind them.
      drawn: what each row drew, of which `num_drawn` count; the first of them is at position `drawn_at`.
    """

    tokens: Int[Array, " T"]
    batch: AttentionBatch
    from_host: Bool[Array, " T"] | None
    hidden: Float[Array, "T D"]
    taps: tuple[Float[Array, "T D"], ...]
    num_kept: Int[Array, " R"]
    drawn: Int[Array, "R W"]
    num_drawn: Int[Array, " R"]
    drawn_at: Int[Array, " R"]


class Drafter(Observer, Protocol):
    """Makes drafts. It observes the tokens that no step will feed, since they are in the pages already.

    `caches` are those of the model with the drafter's own behind them, one for each layer of `decoder`.
    """

    @property
    def config(self) -> HeadConfig | DecoderConfig | None:
        """Of the weights that the model carries for it (`Decoder.head`); None: it has none."""
        ...

    @property
    def decoder(self) -> DecoderConfig | None:
        """Of its layers with keys and values, in pages under the model's block tables; None: it has none."""
        ...

    @property
    def group(self) -> int:
        """The group of layers whose block tables it reads."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the model whose inputs `absorb` wants."""
        ...

    @property
    def learner(self) -> LearnsFromAnswers | None:
        """The part of it that keeps answers for sequences to come."""
        ...

    def propose(
        self, state: DrafterState, caches: Caches, asked: Asked, count: int, body: Body
    ) -> tuple[Int[Array, "R count"], Caches]:
        """Guesses of the `count` tokens that follow the last one of each row; NO_TOKEN for no guess.

        What stands behind a NO_TOKEN is not used, nor are numbers outside the vocabulary.
        """
        ...

    def absorb(
        self, state: DrafterState, caches: Caches, rows: Int[Array, " R"], fed: Fed, body: Body
    ) -> tuple[DrafterState, Caches]:
        """Tokens went through the model. `rows` are the device rows of the batch; rows without tokens mean nothing."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class FromTokens:
    """The `Drafter` that a `TokenDrafter` is: neither weights nor pages."""

    tokens: TokenDrafter

    @property
    def config(self) -> None:
        return None

    @property
    def decoder(self) -> None:
        return None

    @property
    def group(self) -> int:
        return 0

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    @property
    def learner(self) -> LearnsFromAnswers | None:
        return self.tokens if isinstance(self.tokens, LearnsFromAnswers) else None

    def init_state(self, sizes: DraftSizes) -> DrafterState:
        return self.tokens.init_state(sizes)

    def observe(self, state: Any, rows: Any, positions: Any, tokens: Any, known: Any) -> DrafterState:
        return self.tokens.observe(state, rows, positions, tokens, known)

    def propose(
        self, state: DrafterState, caches: Caches, asked: Asked, count: int, body: Body
    ) -> tuple[Int[Array, "R count"], Caches]:
        return self.tokens.propose(state, asked.rows, asked.lens + 1, count), caches

    def absorb(
        self, state: DrafterState, caches: Caches, rows: Int[Array, " R"], fed: Fed, body: Body
    ) -> tuple[DrafterState, Caches]:
        """Prompts first, then what was drawn behind them."""
        if fed.from_host is not None:
            row = rows[jnp.minimum(fed.batch.token_rows, rows.shape[0] - 1)]
            state = self.tokens.observe(state, row, fed.batch.positions, fed.tokens, fed.from_host)
        width = fed.drawn.shape[1]
        place = jnp.arange(width)
        state = self.tokens.observe(
            state,
            jnp.repeat(rows, width),
            (fed.drawn_at[:, None] + place).reshape(-1),
            fed.drawn.reshape(-1),
            (place < fed.num_drawn[:, None]).reshape(-1),
        )
        return state, caches


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """What a step that may draw several tokens of a row needs beside its bucket."""

    drafter: Drafter
    window: int

    def init_state(self, max_rows: int, max_model_len: int) -> DrafterState:
        """The arrays of the drafter before the first step."""
        return self.drafter.init_state(
            DraftSizes(max_rows=max_rows, max_model_len=max_model_len, window=min(self.window, max_model_len))
        )
