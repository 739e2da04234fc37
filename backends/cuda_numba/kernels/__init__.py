"""Kernel factories: each takes what to specialise for and returns a `KernelSource`."""
