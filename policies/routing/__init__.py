"""Routing policies: one table from name to class, nothing imported until chosen."""

BUILTIN = {"round_robin": "headrace.policies.routing.round_robin:RoundRobin"}
