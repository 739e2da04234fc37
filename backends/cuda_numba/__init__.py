"""NVIDIA GPUs through kernels in Numba CUDA. Nothing of it is imported unless the backend is chosen."""
