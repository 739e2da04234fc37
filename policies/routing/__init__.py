"""Routing policies: one table from name to class, nothing imported until chosen."""

BUILTIN = {
    "cost": "headrace.policies.routing.cost:Cost",
    "least_loaded": "headrace.policies.routing.least_loaded:LeastLoaded",
    "power_of_two": "headrace.policies.routing.power_of_two:PowerOfTwo",
    "prefix_hash": "headrace.policies.routing.prefix_hash:PrefixHash",
    "random": "headrace.policies.routing.at_random:AtRandom",
    "round_robin": "headrace.policies.routing.round_robin:RoundRobin",
    "session": "headrace.policies.routing.session:Session",
}
