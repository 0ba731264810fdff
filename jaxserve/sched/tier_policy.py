"""`TierPolicy`: which pages a tier below the device keeps, and which it takes in at all.

A tier is anything with room for fewer pages than pass by: slots of host memory, a directory, another machine. The
tier moves bytes, counts room and pins; a policy sees keys alone, so the same object works in a scheduler, in a
store and in a simulation (`scripts/tier_policies.py`). Policies are in `tier_policies`, admission in `tier_admission`.

A tier drives its policy so:

    hit:  policy.touch(key)
    miss: if policy.admit(key):
              while there is no room: drop(policy.victim(key, held))      # None: all are held, the page is not taken
              policy.insert(key)

Pages of one sequence are a chain: without the page before it, a page is never asked for. So a tier touches what it has
of a chain first, and then inserts what it lacks, both from the chain's end to its beginning; the policies that order by
time then give up the end first, and never the beginning for the end.

To bring another policy, derive from `TierPolicy` and name it: an entry point in the group `jaxserve.tier_policies`,
`package.module:Class`, or the class itself.
"""

import abc
import dataclasses
from collections.abc import Callable

from jaxserve.errors import ConfigError
from jaxserve.sched.tier_admission import Admission, AdmitAll, SecondSight
from jaxserve.values.registry import Registry, make_derived

ADMISSIONS = ("second_sight", "always")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """Settings of a tier's policy.

    Attributes:
      admission: "always" takes every page in; "second_sight" takes a page the second time that it is offered, while
        the tier turns over faster than pages come back (see `SecondSight`).
      ghost_keys: keys that were seen of late and are remembered without their pages, for admission: 32 bytes and some
        hundred of overhead each.

    Raises ConfigError when a value is out of range.
    """

    admission: str = "second_sight"
    ghost_keys: int = 1 << 17

    def __post_init__(self) -> None:
        if self.admission not in ADMISSIONS:
            raise ConfigError(f"the admission {self.admission!r:.40} of a tier is none of {', '.join(ADMISSIONS)}")
        if self.ghost_keys < 1:
            raise ConfigError(f"ghost_keys of a tier is {self.ghost_keys}, but must be 1 key or more")


def nothing_held(key: bytes) -> bool:
    """The `held` of a tier that pins no page."""
    return False


class TierPolicy(abc.ABC):
    """Base of all policies. Mutated by one caller at a time: the tier that owns it.

    No capacity is given: a policy is asked for a victim only when the tier is full, so the number of keys at that
    moment is the capacity. A tier of compressed pages, or one that is resized, needs nothing else.

    Attributes:
      options: that it was made with.
    """

    def __init__(self, options: TierOptions | None = None) -> None:
        self.options = options = TierOptions() if options is None else options
        self._admission: Admission = (
            AdmitAll() if options.admission == "always" else SecondSight(ghost_keys=options.ghost_keys)
        )

    @abc.abstractmethod
    def __len__(self) -> int:
        """Keys in the tier."""

    @property
    def strict(self) -> bool:
        """Whether pages that are offered for the first time are refused just now. Asking is no offer."""
        return self._admission.strict

    def admit(self, key: bytes) -> bool:
        """Whether a page that is not in the tier is worth its room. Asked once each time that the page is offered."""
        return self._admission.admit(key)

    def touch(self, key: bytes) -> None:
        """The page was found in the tier and used."""
        self._admission.seen(key)
        self._touch(key)

    def victim(self, incoming: bytes | None = None, held: Callable[[bytes], bool] = nothing_held) -> bytes | None:
        """Takes the key out that has to give way, and returns it. None: all are held.

        Args:
          incoming: the key to make room for; None when the tier only shrinks.
          held: whether the page of a key may not be dropped now, since something reads it.
        """
        self._admission.full(len(self))
        return self._victim(incoming, held)

    @abc.abstractmethod
    def insert(self, key: bytes) -> None:
        """The page of `key`, which is not in the tier, is there now."""

    @abc.abstractmethod
    def remove(self, key: bytes) -> None:
        """The page was deleted, or proved to be bad: nothing of it is remembered. An unknown key is left alone."""

    @abc.abstractmethod
    def _touch(self, key: bytes) -> None: ...

    @abc.abstractmethod
    def _victim(self, incoming: bytes | None, held: Callable[[bytes], bool]) -> bytes | None: ...


TIER_POLICIES: Registry[type[TierPolicy] | TierPolicy] = Registry(
    "tier policy",
    "jaxserve.tier_policies",
    {
        "lru": "jaxserve.sched.tier_policies:Lru",
        "lfu": "jaxserve.sched.tier_policies:AgeingLfu",
        "arc": "jaxserve.sched.tier_policies:Arc",
        "s3-fifo": "jaxserve.sched.tier_policies:S3Fifo",
    },
)


def create_tier_policy(policy: str | type[TierPolicy] | TierPolicy, options: TierOptions | None = None) -> TierPolicy:
    """Builds the policy that a config or a notebook asks for, see `registry.make_derived`.

    Raises ConfigError, also for a finished policy that was made with other options than the tier has.
    """
    found = make_derived(TIER_POLICIES, policy, TierPolicy, options)
    if found is TIER_POLICIES.get(policy) and options not in (None, found.options):
        raise ConfigError(
            f"the tier policy {policy!r:.120} was made with {found.options}, but its tier asks for {options}; make it "
            "with the same, or give its class"
        )
    return found
