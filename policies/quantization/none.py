"""No quantization: every weight stays as its checkpoint stores it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class AsStored:
    name: ClassVar[str] = "none"

    def scheme_for(self, tensor_name: str, shape: tuple[int, ...], stored_as: str) -> str | None:
        return None

    def quantize(
        self,
        weight: NDArray[np.float32],
        scheme: str,
        statistics: Mapping[str, NDArray[np.float32]] | None,
    ) -> Mapping[str, Any]:
        raise ValueError(f"'none' chooses no scheme, so it makes no parts for '{scheme}'")
