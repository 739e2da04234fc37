"""Our histograms tell what prometheus_client's own would."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from headrace.gateway.histogram import ModelHistogram

BOUNDS = (0.005, 0.01, 0.5, 1, 7.5, 80)


def told(registry: CollectorRegistry) -> list[str]:
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", 'b"\\\n']), st.sampled_from(BOUNDS) | st.floats(0, 100, width=32)
        )
    )
)
def test_any_values_are_told_as_by_the_library(values: list[tuple[str, float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = ModelHistogram("headrace_x_seconds", "What x takes", BOUNDS)
    ours.register(histogram)
    expected = Histogram(
        "headrace_x_seconds", "What x takes", ("model",), registry=theirs, buckets=BOUNDS
    )
    for model, seconds in values:
        histogram.observe(model, seconds)
        expected.labels(model).observe(seconds)
    assert told(ours) == told(theirs)
