"""Token bucket: requests and tokens per minute and requests at a time, of each tenant or organization.

Tokens are charged as prompt + max_tokens when a request is parsed and settled to what it really used when
it ends. A bucket holds a minute's worth unless a burst says otherwise, and fills all the time: there is no
moment at which windows begin anew. Limits of a tenant inside those of its organization are two entries in
the list of admission policies; what both charge is taken together or not at all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from headrace.errors import did_you_mean
from headrace.types import AdmissionView, Admit, Charge, Queue, Reject, TicketView
from headrace.types.units import Bounds

_WINDOW_SECONDS = 60.0
_LIMITS = (
    "requests_per_minute",
    "tokens_per_minute",
    "concurrency",
    "requests_burst",
    "tokens_burst",
)
Limit = Annotated[int, Bounds(1, None)] | None


class TokenBucket:
    name: ClassVar[str] = "token_bucket"

    @dataclass(frozen=True, slots=True)
    class Options:
        """At least one of the first three; what is left out is not limited."""

        requests_per_minute: Limit = None
        tokens_per_minute: Limit = None
        concurrency: Limit = None
        """Requests at a time."""
        requests_burst: Limit = None
        """Requests at once after a pause; left out: a minute's worth."""
        tokens_burst: Limit = None
        by: Literal["tenant", "organization", "server"] = "tenant"
        """Whose limits: everybody without a key is one tenant; a tenant without an organization has none."""
        per_model: bool = False
        """Limits apply to each model by itself."""
        overrides: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
        """Other limits for the tenants or organizations named: {name: {requests_per_minute: 600}}."""

        def __post_init__(self) -> None:
            if not (self.requests_per_minute or self.tokens_per_minute or self.concurrency):
                raise ValueError(
                    "set at least one of requests_per_minute, tokens_per_minute and concurrency"
                )
            if self.overrides and self.by == "server":
                raise ValueError("overrides need by: tenant or by: organization")
            for name, limits in self.overrides.items():
                _check_override(name, limits)

    def __init__(self, options: Options) -> None:
        self._options = options
        self._overridden = {
            name: _overridden(options, limits) for name, limits in options.overrides.items()
        }

    def admit(self, ticket: TicketView, view: AdmissionView, now: float) -> Admit | Queue | Reject:
        by = self._options.by
        name = {"tenant": ticket.tenant, "organization": ticket.organization, "server": ""}[by]
        if by == "organization" and not name:
            return Admit()
        limits = self._overridden.get(name, self._options)
        model = ticket.model if limits.per_model else ""
        whose = f"{by}/{len(model)}:{model}/{name}"
        charges: list[Charge] = []
        if ticket.stage == ("parsed" if limits.per_model else "arrival"):
            charges += _request_charges(limits, whose)
        if ticket.stage == "parsed" and limits.tokens_per_minute:
            charges.append(
                Charge(
                    f"tokens/{whose}",
                    ticket.num_prompt_tokens + ticket.max_output_tokens,
                    limits.tokens_per_minute,
                    _WINDOW_SECONDS,
                    burst=limits.tokens_burst,
                    unit="tokens",
                )
            )
        return Admit(tuple(charges))


def _overridden(options: TokenBucket.Options, limits: Mapping[str, int]) -> TokenBucket.Options:
    changes: dict[str, Any] = dict(limits)
    return dataclasses.replace(options, overrides={}, **changes)


def _request_charges(limits: TokenBucket.Options, whose: str) -> list[Charge]:
    charges: list[Charge] = []
    if limits.requests_per_minute:
        charges.append(
            Charge(
                f"requests/{whose}",
                1,
                limits.requests_per_minute,
                _WINDOW_SECONDS,
                burst=limits.requests_burst,
            )
        )
    if limits.concurrency:
        charges.append(Charge(f"concurrency/{whose}", 1, limits.concurrency))
    return charges


def _check_override(name: str, limits: Mapping[str, int]) -> None:
    for key, value in limits.items():
        if key not in _LIMITS:
            raise ValueError(f"overrides.{name} has no limit '{key}'. {did_you_mean(key, _LIMITS)}")
        if value < 1:
            raise ValueError(f"overrides.{name}.{key} must be at least 1, got {value}")
