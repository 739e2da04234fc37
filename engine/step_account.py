"""How many steps there were, how long they took, and what is learnt from their times."""

from __future__ import annotations

from headrace.step_time import StepTimeModel

_EARLY_STEPS = 1024
_EARLY_EVERY, _EVERY = 8, 32


class StepAccount:
    """Counts steps. Of steps of decodes alone, which resemble each other, only some are learnt from."""

    def __init__(self) -> None:
        self.step_time = StepTimeModel()
        self.steps_total = 0
        self.seconds_total = self.prefill_seconds_total = 0.0

    def count(
        self, num_prefill_tokens: int, num_sequences: int, num_kv_rows: int, seconds: float
    ) -> None:
        """Count one step and what it computed."""
        self.steps_total += 1
        self.seconds_total += seconds
        if num_prefill_tokens:
            self.prefill_seconds_total += seconds
        number = self.steps_total
        if (
            num_prefill_tokens
            or number % _EVERY == 0
            or (number <= _EARLY_STEPS and (number <= 64 or number % _EARLY_EVERY == 0))
        ):
            self.step_time.observe(num_prefill_tokens, num_sequences, num_kv_rows, seconds)

    def count_decodes(
        self, num_sequences: int, num_kv_rows: int, start: float, times: list[float]
    ) -> None:
        """Count steps of decodes in a row that ended at `times`, as `count` does one by one."""
        num_steps = len(times)
        if num_steps < _EARLY_EVERY or self.steps_total < _EARLY_STEPS:
            for time in times:
                self.count(0, num_sequences, num_kv_rows, time - start)
                num_kv_rows += num_sequences
                start = time
            return
        before, total, step_start = self.steps_total, self.seconds_total, start
        for time in times:  # one by one, since a sum of floats depends on its order
            total += time - step_start
            step_start = time
        self.steps_total += num_steps
        self.seconds_total = total
        for number in range(before + _EVERY - before % _EVERY, before + num_steps + 1, _EVERY):
            step = number - before - 1
            rows = num_kv_rows + step * num_sequences
            seconds = times[step] - (times[step - 1] if step else start)
            self.step_time.observe(0, num_sequences, rows, seconds)
