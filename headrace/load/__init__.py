"""A load generator for any OpenAI-compatible server, the figures it gives, and a page that plots them."""

from headrace.load.client import run_load
from headrace.load.plan import WORDS, Lengths, LoadPlan, PlannedRequest, arrivals, plan_requests
from headrace.load.report import LoadReport, RequestOutcome, ServiceLevel, percentile

__all__ = [
    "WORDS",
    "Lengths",
    "LoadPlan",
    "LoadReport",
    "PlannedRequest",
    "RequestOutcome",
    "ServiceLevel",
    "arrivals",
    "percentile",
    "plan_requests",
    "run_load",
]
