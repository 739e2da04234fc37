"""Says exactly what a GPU backend lacks on this machine, and how to get it. Imports nothing heavy."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from headrace.interfaces import Availability

MIN_CAPABILITY = (8, 0)
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


def probe_gpu(
    modules: Mapping[str, str],
    extra: str,
    *,
    load_driver: Callable[[], Any] = lambda: ctypes.CDLL("libcuda.so.1"),
    torch_version: Callable[[], str] = lambda: importlib.metadata.version("torch"),
) -> Availability:
    """Say whether packages (`modules`: import name -> package), torch's CUDA, driver and card are there."""
    for module, package in modules.items():
        if importlib.util.find_spec(module) is None:
            return Availability(
                False, f"the package {package} is not installed: pip install 'headrace[{extra}]'"
            )
    if torch_version().endswith("+cpu"):
        return Availability(
            False,
            f"torch {torch_version()} is built without CUDA: install a CUDA build of torch",
        )
    try:
        driver = load_driver()
    except OSError:
        return Availability(
            False, "there is no NVIDIA driver (libcuda.so.1 is not found): install the driver"
        )
    return _probe_card(driver)


def _probe_card(driver: Any) -> Availability:
    code = driver.cuInit(0)
    if code:
        return Availability(
            False, f"the NVIDIA driver does not start (error {code}): see what nvidia-smi says"
        )
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    if count.value == 0:
        return Availability(
            False, "the NVIDIA driver sees no GPU: check CUDA_VISIBLE_DEVICES and nvidia-smi"
        )
    major, minor, device = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(device), 0)
    driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
    if (major.value, minor.value) < MIN_CAPABILITY:
        return Availability(
            False,
            f"GPU 0 has compute capability {major.value}.{minor.value}; the kernels need "
            f"{MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} or newer (A100, L4, H100, ...)",
        )
    return Availability(True)
