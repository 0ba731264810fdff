"""`Tenants`: how much each tenant may take of an engine: requests and tokens a second, and tokens at once.

Rates are token buckets: a bucket holds the credit of `burst_s` seconds at most, and is refilled at the rate. A call is
taken while there is credit and may overdraw it, since the length of an answer is known only when it has ended; the next
one waits until the debt is paid. So a tenant gets its rate on average whatever the size of its calls.

Limits are for front doors (`AsyncEngine`): a tenant is refused before its prompt is encoded, and the error says when to
come back. What the scheduler does with requests that were taken is up to its policy. A request that goes on here after
it began elsewhere (`Request.resume`) has been accepted: it is counted and never refused.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping

from jaxserve.api import Request
from jaxserve.errors import RequestRejected, TenantLimited

_SWEPT_AT = 1024  # known tenants at which idle ones are forgotten; names are the clients' to choose
_LEAST_S = 0.1
_ROUNDING = 1e-6
_UNKNOWN_S = 1.0  # to wait for running requests, which end when they end


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """The limits of one tenant; None: there is none.

    Attributes:
      requests_per_s: prompts; a call may have several.
      tokens_per_s: of prompts and answers.
      burst_s: seconds of both rates that may be saved up.
      concurrent_tokens: of all live requests: prompts, and as many tokens as their answers may have, for each of their
        n sequences.
    """

    requests_per_s: float | None = None
    tokens_per_s: float | None = None
    burst_s: float = 10.0
    concurrent_tokens: int | None = None


class _Bucket:
    """Credit that is refilled. Mutated by its owner."""

    __slots__ = ("_at_s", "_credit", "_most", "_rate")

    def __init__(self, rate: float, burst_s: float, now_s: float) -> None:
        self._rate = rate
        self._most = max(1.0, rate * burst_s)  # a whole request, however slow the rate
        self._credit = self._most
        self._at_s = now_s

    def wait_s(self, now_s: float) -> float:
        """Seconds until there is credit for a request or a token; 0 while there is."""
        self._credit = min(self._most, self._credit + (now_s - self._at_s) * self._rate)
        self._at_s = now_s
        lacking = 1.0 - self._credit
        return max(_LEAST_S, lacking / self._rate) if lacking > _ROUNDING else 0.0

    def spend(self, amount: float) -> None:
        """May go below zero."""
        self._credit -= amount

    @property
    def is_full(self) -> bool:
        """As new, at the time of the last `wait_s`."""
        return self._credit >= self._most


class _Tenant:
    """One tenant. Mutated by `Tenants`."""

    __slots__ = ("limits", "num_live_tokens", "requests", "tokens")

    def __init__(self, limits: TenantLimits, now_s: float) -> None:
        self.limits = limits
        self.num_live_tokens = 0
        self.requests = self._bucket(limits.requests_per_s, now_s)
        self.tokens = self._bucket(limits.tokens_per_s, now_s)

    def _bucket(self, rate: float | None, now_s: float) -> _Bucket | None:
        return None if rate is None else _Bucket(rate, self.limits.burst_s, now_s)

    def is_idle(self, now_s: float) -> bool:
        """Nothing would change if it were forgotten."""
        if self.num_live_tokens:
            return False
        buckets = [bucket for bucket in (self.requests, self.tokens) if bucket is not None]
        return all(not bucket.wait_s(now_s) and bucket.is_full for bucket in buckets)


class Tenants:
    """The limits of all tenants, and what each has used. Mutated by the event loop of the doors.

    Args:
      default: of each tenant that `named` does not have; requests without a tenant are one, with an empty name.
      clock: seconds, monotonic.
    """

    def __init__(
        self,
        default: TenantLimits,
        named: Mapping[str, TenantLimits],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._default = default
        self._named = dict(named)
        self._clock = clock
        self._known: dict[str, _Tenant] = {}
        self._sweep_at = _SWEPT_AT

    def __len__(self) -> int:
        """Tenants of whom something is remembered."""
        return len(self._known)

    def enter(self, name: str, num_prompts: int) -> None:
        """A call of a tenant begins, and nothing is known of it but its number of prompts. Raises TenantLimited."""
        now_s, tenant = self._clock(), self._tenant(name)
        limits = tenant.limits
        if tenant.requests is not None and (wait_s := tenant.requests.wait_s(now_s)):
            asked = f"has sent more than {limits.requests_per_s:g} requests a second (serve.tenants: requests_per_s)"
            raise _refusal(name, asked, "requests", wait_s)
        if tenant.tokens is not None and (wait_s := tenant.tokens.wait_s(now_s)):
            asked = f"has used more than {limits.tokens_per_s:g} tokens a second (serve.tenants: tokens_per_s)"
            raise _refusal(name, asked, "tokens", wait_s)
        most = limits.concurrent_tokens
        if most is not None and tenant.num_live_tokens >= most:
            raise _too_many(name, tenant.num_live_tokens, most)
        if tenant.requests is not None:
            tenant.requests.spend(num_prompts)

    def begin(self, request: Request) -> None:
        """A request is about to be submitted. Raises TenantLimited, and RequestRejected for one that never fits; else
        it counts until `end`."""
        tenant, num_tokens = self._tenant(request.tenant), tokens_of(request)
        most = tenant.limits.concurrent_tokens
        if most is not None and request.resume is None:
            if num_tokens > most:
                raise RequestRejected(
                    f"the request may have {num_tokens} tokens, prompt and answers together, and its tenant "
                    f"{request.tenant!r} may have {most} at once (serve.tenants: concurrent_tokens); ask for fewer"
                )
            if tenant.num_live_tokens + num_tokens > most:
                raise _too_many(request.tenant, tenant.num_live_tokens, most)
        tenant.num_live_tokens += num_tokens
        if tenant.tokens is not None:
            tenant.tokens.spend(len(request.prompt_token_ids))

    def charge(self, name: str, num_tokens: int) -> None:
        """So many tokens were generated for a tenant."""
        tenant = self._known.get(name)
        if tenant is not None and tenant.tokens is not None:
            tenant.tokens.spend(num_tokens)

    def end(self, request: Request) -> None:
        """A request that had begun has ended, for whatever reason."""
        tenant = self._known[request.tenant]
        tenant.num_live_tokens -= tokens_of(request)
        assert tenant.num_live_tokens >= 0, (request.tenant, tenant.num_live_tokens)

    def _tenant(self, name: str) -> _Tenant:
        found = self._known.get(name)
        if found is None:
            now_s = self._clock()
            if len(self._known) >= self._sweep_at:
                self._known = {key: one for key, one in self._known.items() if not one.is_idle(now_s)}
                self._sweep_at = max(_SWEPT_AT, 2 * len(self._known))
            found = self._known[name] = _Tenant(self._named.get(name, self._default), now_s)
        return found


def tokens_of(request: Request) -> int:
    """The most tokens that the request can have at once, prompt and answers of all its sequences."""
    return request.sampling.n * (len(request.prompt_token_ids) + (0 if request.pooling else request.max_tokens))


def _too_many(name: str, num_live: int, most: int) -> TenantLimited:
    limit = f"{most} tokens in live requests (serve.tenants: concurrent_tokens)"
    asked = f"may have {limit}, and those there are take {num_live}"
    return _refusal(name, asked, "concurrent_tokens", _UNKNOWN_S)


def _refusal(name: str, asked: str, limit: str, wait_s: float) -> TenantLimited:
    return TenantLimited(f"the tenant {name!r:.80} {asked}; try again later", limit=limit, retry_after_s=wait_s)
