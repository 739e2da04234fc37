"""Quantization policies: one table from name to class, nothing imported until chosen."""

BUILTIN = {
    "none": "headrace.policies.quantization.none:AsStored",
    "int8": "headrace.policies.quantization.integers:Int8",
    "int4": "headrace.policies.quantization.integers:Int4",
    "mixed": "headrace.policies.quantization.mixed:Mixed",
}
