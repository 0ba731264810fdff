"""`SchedulerOptions`: what a config or a notebook may set, for the mechanism and for the built-in policies.

Names, defaults and bounds are here; what a value does is written where it is used. All policies share the one class,
so that changing the policy's name is the whole of changing a policy.
"""

import dataclasses
import math
from collections.abc import Mapping

from jaxserve.errors import ConfigError
from jaxserve.sched.lengths import DEFAULT_LENGTHS, LengthPredictor
from jaxserve.sched.speculate import SpeculationOptions
from jaxserve.sched.tier_policy import TierOptions, TierPolicy

_MOST_SHARES = 64  # each costs a look whenever a page is evicted


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """Settings of the mechanism and of the built-in policies; the fields of `sched:` and `cache:` in a config.

    Attributes:
      chunked_prefill: cut prompts to fill steps; False runs each prompt in one piece.
      prefix_caching: share pages of equal prompt beginnings.
      namespace: of the keys of pages: all that keys and values follow from beside the content, such as the checkpoint.
      sparse: generated tokens attend to some pages alone. Their keys and values are not those of a prompt of the same
        tokens, so pages with them are shared only where the prompts before them end at the same place; and no page is
        copied that is not full, since what summarises its keys would cover tokens of another sequence.
      page_shares: by tenant, the share of the device's pages, and of the slots of host memory, that others cannot take
        from it. Their sum is less than 1.
      watermark: share of all pages that an admission leaves free, beside the growth that is foreseen.
      growth: how much of the foreseen growth of running sequences an admission leaves room for; 0: none, 1: all.
      lengths: predictor of the length of outputs: a name (see `lengths.LENGTHS`), a path, or a predictor.
      ageing_s: `priority`, `preemptive` and `fair`: seconds of waiting that are worth one level. `sjf`: what are worth
        `sjf.TOKENS_PER_LEVEL` tokens of work.
      input_weight, output_weight: `fair`: what a token of a prompt and a generated one are charged.
      preempt_lag: `fair`: by how much what an owner was charged may fall behind that of another with more rows, before
        a row of the other gives way.
      preempt_after: `fair`: tokens that a sequence generates between getting a row and giving way to another owner.
      host_policy: which pages stay in host memory, where the device has such: a name (see `tier_policy.TIER_POLICIES`),
        a path, a class, or a policy of its own for each scheduler.
      host_tier: settings of that policy.
      store_wait_s: seconds that a sequence waits for pages from a store at most.
      lends: full pages are saved to host memory as soon as there is room, since other engines will fetch them.
      speculation: how many tokens the rows of a step may draw.
      ttft_target_s, tpot_target_s: `slo`: seconds to the first token and for each one after it, unless a request says
        otherwise.

    Raises ConfigError when a value is out of range.
    """

    chunked_prefill: bool = True
    prefix_caching: bool = True
    namespace: str = ""
    sparse: bool = False
    page_shares: Mapping[str, float] = dataclasses.field(default_factory=dict)
    watermark: float = 0.03
    growth: float = 0.5
    lengths: str | LengthPredictor | type[LengthPredictor] = DEFAULT_LENGTHS
    ageing_s: float = 10.0
    input_weight: float = 1.0
    output_weight: float = 2.0
    preempt_lag: float = 1024.0
    preempt_after: int = 16
    ttft_target_s: float = 1.0
    tpot_target_s: float = 0.1
    host_policy: str | type[TierPolicy] | TierPolicy = "lru"
    host_tier: TierOptions = dataclasses.field(default_factory=TierOptions)
    store_wait_s: float = 2.0
    lends: bool = False
    speculation: SpeculationOptions = dataclasses.field(default_factory=SpeculationOptions)

    def __post_init__(self) -> None:
        for name in ("ageing_s", "ttft_target_s", "tpot_target_s"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"sched.{name} is {value}, but must be more than 0 seconds")
        for name in ("input_weight", "output_weight", "preempt_lag"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"sched.{name} is {value}, but must be more than 0")
        if self.preempt_after < 1:
            raise ConfigError(f"sched.preempt_after is {self.preempt_after}, but must be at least 1 token")
        for tenant, share in self.page_shares.items():
            if not 0 <= share < 1:
                raise ConfigError(f"cache.page_shares of {tenant!r} is {share}, but must be at least 0 and less than 1")
        if sum(self.page_shares.values()) >= 1 or len(self.page_shares) > _MOST_SHARES:
            raise ConfigError(
                f"cache.page_shares has {len(self.page_shares)} tenants with {sum(self.page_shares.values()):g} of the "
                f"pages in all, but at most {_MOST_SHARES} tenants may have less than 1, so that others find pages, too"
            )
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"sched.watermark is {self.watermark}, but must be at least 0 and less than 1")
        if not 0 <= self.growth <= 1:
            raise ConfigError(f"sched.growth is {self.growth}, but must be between 0 and 1")
