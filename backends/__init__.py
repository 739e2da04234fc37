"""Devices, their memory and their kernels: one table from name to class, nothing imported until chosen."""

BUILTIN = {
    "cpu": "headrace.backends.cpu.backend:CpuBackend",
    "cuda_numba": "headrace.backends.cuda_numba.backend:CudaNumbaBackend",
    "cupy_raw": "headrace.backends.cupy_raw.backend:CupyRawBackend",
    "simulated": "headrace.backends.simulated.backend:SimulatedBackend",
}
