"""Scheduling policies: one table from name to class, nothing imported until chosen."""

BUILTIN = {
    "fcfs": "headrace.policies.scheduling.fcfs:FirstComeFirstServed",
    "priority": "headrace.policies.scheduling.priority:PriorityFirst",
}
