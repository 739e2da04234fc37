"""Quantization policies: one table from name to class, nothing imported until chosen."""

BUILTIN = {"none": "headrace.policies.quantization.none:AsStored"}
