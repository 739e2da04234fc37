"""Scheduling policies: one table from name to class, nothing imported until chosen."""

BUILTIN = {
    "deficit_prefix": "headrace.policies.scheduling.deficit_prefix:DeficitPrefix",
    "fair_share": "headrace.policies.scheduling.fair_share:FairShare",
    "fcfs": "headrace.policies.scheduling.fcfs:FirstComeFirstServed",
    "priority": "headrace.policies.scheduling.priority:PriorityFirst",
    "shortest_first": "headrace.policies.scheduling.shortest_first:ShortestFirst",
    "slo": "headrace.policies.scheduling.slo:LatencyTargets",
}
