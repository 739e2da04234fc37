"""Admission policies: one table from name to class, nothing imported until chosen."""

BUILTIN = {"unlimited": "headrace.policies.admission.unlimited:Unlimited"}
