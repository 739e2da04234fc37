"""How long a step takes: the formula, its online fit and the fit's error.

Four terms are enough to rank decisions (a fixed cost, prompt tokens, sequences, KV rows read), and
few enough to be fitted from the steps that happen anyway. The fit is recursive least squares that
forgets slowly, bounds what one odd step can teach it, and predicts with coefficients never below 0.
"""

from __future__ import annotations

from dataclasses import dataclass

_SCALES = (1.0, 256.0, 16.0, 8192.0)
_FORGETTING = 0.995
_PRIOR_VARIANCE = 100.0
_MAX_VARIANCE = 1e4
_ERROR_WEIGHT = 0.05
_OUTLIER_ERRORS = 4.0
_WARMUP_STEPS = 8


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
        size = len(_SCALES)
        self._weights = [0.0] * size
        self._covariance = [
            [_PRIOR_VARIANCE if row == column else 0.0 for column in range(size)]
            for row in range(size)
        ]
        self._mean_error = 0.0
        self._mean_seconds = 0.0
        self.num_steps = 0
        self._formula = StepTimeFormula()

    @property
    def formula(self) -> StepTimeFormula:
        return self._formula

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        """Seconds per step, prompt token, sequence and KV row."""
        formula = self._formula
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
        return self._formula.seconds(num_prefill_tokens, num_sequences, num_kv_rows)

    def observe(
        self, num_prefill_tokens: int, num_sequences: int, num_kv_rows: int, seconds: float
    ) -> None:
        """Learn from one step. Steps of no or negative length teach nothing."""
        if not 0 < seconds < float("inf"):
            return
        counts = (1.0, num_prefill_tokens, num_sequences, num_kv_rows)
        features = [count / scale for count, scale in zip(counts, _SCALES, strict=True)]
        residual = seconds - sum(w * f for w, f in zip(self._weights, features, strict=True))
        error = abs(seconds - self.predict(num_prefill_tokens, num_sequences, num_kv_rows))
        if self.is_fitted:
            limit = _OUTLIER_ERRORS * self._mean_error + 0.05 * self._mean_seconds
            residual = max(-limit, min(limit, residual))
            error = min(error, 2 * limit)
        self._remember(error, seconds)
        self._update(features, residual)
        self._formula = StepTimeFormula(
            *(max(0.0, w / scale) for w, scale in zip(self._weights, _SCALES, strict=True))
        )

    def _remember(self, error: float, seconds: float) -> None:
        weight = max(_ERROR_WEIGHT, 1.0 / (self.num_steps + 1))
        self._mean_error += weight * (error - self._mean_error)
        self._mean_seconds += weight * (seconds - self._mean_seconds)
        self.num_steps += 1

    def _update(self, features: list[float], residual: float) -> None:
        covariance = self._covariance
        projected = [sum(c * f for c, f in zip(row, features, strict=True)) for row in covariance]
        gain = _FORGETTING + sum(f * p for f, p in zip(features, projected, strict=True))
        size = range(len(features))
        for row in size:
            step = projected[row] / gain
            self._weights[row] += step * residual
            for column in size:
                covariance[row][column] -= step * projected[column]
        if max(covariance[row][row] for row in size) < _MAX_VARIANCE * _FORGETTING:
            for row in size:
                for column in size:
                    covariance[row][column] /= _FORGETTING
