"""CUDA C++ kernels on the CPU: a header that gives the language its meaning, a loader that compiles with g++.

A test bed, not a device: it shows what a kernel computes and whether its synchronisation holds, in any
order of threads and under sanitizers. It says nothing of speed, and PTX behind `CUDA_ON_CPU` is not run.
"""
