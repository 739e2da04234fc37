"""How much a request will probably produce, learnt from what its tenant's requests produced before.

An upper bound that most requests keep, not their mean: the mean and twice the mean deviation, as TCP does
for round-trip times (RFC 6298), and never more than was asked for. Memory is bounded: of too many tenants
the one that has been quiet longest is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict

UNKNOWN_OUTPUT_TOKENS = 128
"""What routing takes for an output of which nothing is known: a caller who sets no bound asks for the
rest of the context, and that as a load would outweigh every cache."""
_MAX_TENANTS = 4096
_MIN_SAMPLES = 8
_GAIN = 1 / 16
_DEVIATIONS = 2.0


class _Estimate:
    __slots__ = ("deviation", "mean", "num_samples")

    def __init__(self) -> None:
        self.mean = 0.0
        self.deviation = 0.0
        self.num_samples = 0

    def observe(self, num_tokens: int) -> None:
        self.num_samples += 1
        gain = max(_GAIN, 1 / self.num_samples)
        self.deviation += gain * (abs(num_tokens - self.mean) - self.deviation)
        self.mean += gain * (num_tokens - self.mean)


class ExpectedOutput:
    """Estimates per model and tenant; a tenant that is new is taken for the model's average."""

    def __init__(self, max_tenants: int = _MAX_TENANTS) -> None:
        self._max_tenants = max_tenants
        self._tenants: OrderedDict[tuple[str, str], _Estimate] = OrderedDict()
        self._models: dict[str, _Estimate] = {}

    def __len__(self) -> int:
        return len(self._tenants)

    def observe(self, model: str, tenant: str, num_tokens: int) -> None:
        """Learn what one choice produced."""
        key = (model, tenant)
        self._tenants.setdefault(key, _Estimate()).observe(num_tokens)
        self._tenants.move_to_end(key)
        if len(self._tenants) > self._max_tenants:
            self._tenants.popitem(last=False)
        self._models.setdefault(model, _Estimate()).observe(num_tokens)

    def predict(
        self, model: str, tenant: str, max_tokens: int, *, unknown: int | None = None
    ) -> int:
        """Return the tokens one choice will probably stay below.

        While nothing is known: `unknown`, and without that `max_tokens`.
        """
        for estimate in (self._tenants.get((model, tenant)), self._models.get(model)):
            if estimate is not None and estimate.num_samples >= _MIN_SAMPLES:
                likely = estimate.mean + _DEVIATIONS * estimate.deviation
                return min(max_tokens, max(1, round(likely)))
        return max_tokens if unknown is None else min(max_tokens, unknown)
