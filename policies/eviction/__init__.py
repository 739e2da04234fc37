"""Eviction policies: one table from name to class, nothing imported until chosen."""

BUILTIN = {
    "lfu": "headrace.policies.eviction.lfu:LeastFrequentlyUsed",
    "lru": "headrace.policies.eviction.lru:LeastRecentlyUsed",
    "priority_ttl": "headrace.policies.eviction.priority_ttl:PriorityAndTime",
}
