"""A CUDA device as torch knows it. Implements headrace.backends.gpu.device.Device."""

from __future__ import annotations

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

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        reserved = torch.cuda.memory_reserved(self.torch_device)
        return int(free) + int(reserved) - int(torch.cuda.memory_allocated(self.torch_device))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)
