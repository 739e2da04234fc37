"""How long a step takes: the formula, its online fit and the fit's error.

Four terms are enough to rank decisions (a fixed cost, prompt tokens, sequences, KV rows read), and
few enough to be fitted from the steps that happen anyway. The fit is recursive least squares that
forgets slowly, bounds what one odd step can teach it, and predicts with coefficients never below 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

_PREFILL_SCALE, _SEQUENCE_SCALE, _ROW_SCALE = 256.0, 16.0, 8192.0
_FORGETTING = 0.995
_PRIOR_VARIANCE = 100.0
_MAX_VARIANCE = 1e4
_ERROR_WEIGHT = 0.05
_OUTLIER_ERRORS = 4.0
_WARMUP_STEPS = 8


class StepTime(Protocol):
    """How long a step takes; never less for more KV rows."""

    def seconds(self, num_prefill_tokens: int, num_sequences: int, num_kv_rows: Any) -> Any:
        """Return seconds; of an array of KV rows, those of each."""
        ...


@dataclass(frozen=True, slots=True)
class StepTimeFormula:
    """Seconds of a step, linear in what it computes."""

    base_seconds: float = 0.0
    seconds_per_prefill_token: float = 0.0
    seconds_per_sequence: float = 0.0
    seconds_per_kv_row: float = 0.0

    def seconds(self, num_prefill_tokens: int, num_sequences: int, num_kv_rows: int) -> float:
        return (
            self.base_seconds
            + self.seconds_per_prefill_token * num_prefill_tokens
            + self.seconds_per_sequence * num_sequences
            + self.seconds_per_kv_row * num_kv_rows
        )

    def prefill_tokens_within(
        self, seconds: float, num_sequences: int, num_kv_rows: int, most: int
    ) -> int:
        """Return how many prompt tokens, at most `most`, such a step can take in `seconds`."""
        room = seconds - self.seconds(0, num_sequences, num_kv_rows)
        if room <= 0:
            return 0
        if self.seconds_per_prefill_token * most <= room:
            return most
        return int(room / self.seconds_per_prefill_token)


class StepTimeModel:
    """The formula fitted to the steps seen so far."""

    def __init__(self) -> None:
        self._weights = [0.0] * 4
        v = _PRIOR_VARIANCE
        self._covariance = (v, 0.0, 0.0, 0.0, v, 0.0, 0.0, v, 0.0, v)
        """Of a symmetric matrix, row by row from the diagonal on."""
        self._mean_error = 0.0
        self._mean_seconds = 0.0
        self.num_steps = 0
        self._formula: StepTimeFormula | None = None
        """Made from the weights when somebody asks; None: they have changed since."""

    @property
    def formula(self) -> StepTimeFormula:
        if self._formula is None:
            first, second, third, fourth = self._weights
            self._formula = StepTimeFormula(
                max(0.0, first),
                max(0.0, second / _PREFILL_SCALE),
                max(0.0, third / _SEQUENCE_SCALE),
                max(0.0, fourth / _ROW_SCALE),
            )
        return self._formula

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        """Seconds per step, prompt token, sequence and KV row."""
        formula = self.formula
        return (
            formula.base_seconds,
            formula.seconds_per_prefill_token,
            formula.seconds_per_sequence,
            formula.seconds_per_kv_row,
        )

    @property
    def is_fitted(self) -> bool:
        """Whether enough steps were seen for predictions to mean anything."""
        return self.num_steps >= _WARMUP_STEPS

    @property
    def relative_error(self) -> float:
        """Mean absolute error of recent predictions, over the mean step; 1 before the first step."""
        return self._mean_error / self._mean_seconds if self._mean_seconds > 0 else 1.0

    def predict(self, num_prefill_tokens: int, num_sequences: int, num_kv_rows: int) -> float:
        return self.formula.seconds(num_prefill_tokens, num_sequences, num_kv_rows)

    def observe(
        self, num_prefill_tokens: int, num_sequences: int, num_kv_rows: int, seconds: float
    ) -> None:
        """Learn from one step. Steps of no or negative length teach nothing."""
        if not 0 < seconds < float("inf"):
            return
        features = [
            1.0,
            num_prefill_tokens / _PREFILL_SCALE,
            num_sequences / _SEQUENCE_SCALE,
            num_kv_rows / _ROW_SCALE,
        ]
        first, second, third, fourth = self._weights
        residual = seconds - (
            first + second * features[1] + third * features[2] + fourth * features[3]
        )
        predicted = (
            max(0.0, first)
            + max(0.0, second) * features[1]
            + max(0.0, third) * features[2]
            + max(0.0, fourth) * features[3]
        )
        error = abs(seconds - predicted)
        if self.is_fitted:
            limit = _OUTLIER_ERRORS * self._mean_error + 0.05 * self._mean_seconds
            residual = max(-limit, min(limit, residual))
            error = min(error, 2 * limit)
        self._remember(error, seconds)
        self._update(features, residual)
        self._formula = None

    def _remember(self, error: float, seconds: float) -> None:
        weight = max(_ERROR_WEIGHT, 1.0 / (self.num_steps + 1))
        self._mean_error += weight * (error - self._mean_error)
        self._mean_seconds += weight * (seconds - self._mean_seconds)
        self.num_steps += 1

    def _update(self, features: list[float], residual: float) -> None:
        """Take one step into the symmetric covariance; written out, because it runs beside every step."""
        a, b, c, d = features
        p, q, r, s, t, u, v, w, x, y = self._covariance
        at_a = p * a + q * b + r * c + s * d
        at_b = q * a + t * b + u * c + v * d
        at_c = r * a + u * b + w * c + x * d
        at_d = s * a + v * b + x * c + y * d
        gain = _FORGETTING + a * at_a + b * at_b + c * at_c + d * at_d
        by_a, by_b, by_c, by_d = at_a / gain, at_b / gain, at_c / gain, at_d / gain
        weights = self._weights
        weights[0] += by_a * residual
        weights[1] += by_b * residual
        weights[2] += by_c * residual
        weights[3] += by_d * residual
        p, q, r, s = p - by_a * at_a, q - by_a * at_b, r - by_a * at_c, s - by_a * at_d
        t, u, v = t - by_b * at_b, u - by_b * at_c, v - by_b * at_d
        w, x, y = w - by_c * at_c, x - by_c * at_d, y - by_d * at_d
        if max(p, t, w, y) < _MAX_VARIANCE * _FORGETTING:
            f = 1 / _FORGETTING
            p, q, r, s, t = p * f, q * f, r * f, s * f, t * f
            u, v, w, x, y = u * f, v * f, w * f, x * f, y * f
        self._covariance = (p, q, r, s, t, u, v, w, x, y)
