"""Devices, their memory and their kernels: one table from name to class, nothing imported until chosen."""

BUILTIN = {
    "cpu": "headrace.backends.cpu.backend:CpuBackend",
    "simulated": "headrace.backends.simulated.backend:SimulatedBackend",
}
