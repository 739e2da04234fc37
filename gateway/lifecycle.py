"""Whether the server still takes requests, and when the last one that it took is over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import anyio

from headrace.errors import Unavailable

_POLL_SECONDS = 0.02
_RETRY_AFTER_SECONDS = 1.0


class Stopping(Unavailable):
    """The server takes no new request; another one, or the same a little later, will."""

    code = "stopping"


@dataclass(slots=True)
class Lifecycle:
    """One server's way from running to stopped."""

    is_stopping: bool = False

    def stop(self) -> None:
        """Refuse what comes from now on. What runs goes on."""
        self.is_stopping = True

    def check(self) -> None:
        """Raise Stopping where no new request is taken."""
        if self.is_stopping:
            raise Stopping(
                "the server is stopping and takes no new requests; send it again, to another server",
                retry_after_seconds=_RETRY_AFTER_SECONDS,
            )


async def until_idle(count: Callable[[], int], seconds: float) -> bool:
    """Wait until `count()` is 0; False where that takes longer than `seconds`."""
    with anyio.move_on_after(seconds):
        while count():  # noqa: ASYNC110 - what is waited for has no event
            await anyio.sleep(_POLL_SECONDS)
        return True
    return count() == 0
