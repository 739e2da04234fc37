"""Admission policies: one table from name to class, nothing imported until chosen."""

BUILTIN = {
    "kv_footprint": "headrace.policies.admission.kv_footprint:KVFootprint",
    "token_bucket": "headrace.policies.admission.token_bucket:TokenBucket",
    "unlimited": "headrace.policies.admission.unlimited:Unlimited",
}
