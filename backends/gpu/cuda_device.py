"""A CUDA device as torch knows it. Implements headrace.backends.gpu.device.Device."""

from __future__ import annotations

from collections.abc import Callable

import torch


class CudaDevice:
    """Device `index` of this process."""

    can_capture = True

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        properties = torch.cuda.get_device_properties(self.torch_device)
        self.name: str = properties.name
        self.architecture = f"sm_{properties.major}{properties.minor}"
        self.num_multiprocessors: int = properties.multi_processor_count

    def total_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch_device)[1])

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        reserved = torch.cuda.memory_reserved(self.torch_device)
        return int(free) + int(reserved) - int(torch.cuda.memory_allocated(self.torch_device))

    def peak_of(self, run: Callable[[], None]) -> int:
        """By what torch took from the driver: whole segments, and more than its tensors add up to."""
        device = self.torch_device
        self.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        run()
        self.synchronize()
        peak = int(torch.cuda.max_memory_reserved(device))
        torch.cuda.empty_cache()
        return peak - int(torch.cuda.memory_reserved(device))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)
