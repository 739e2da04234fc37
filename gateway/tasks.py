"""Runs work beside a watch on the client, so that a client that leaves ends the work at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.types import Receive

from headrace.errors import RequestAborted


async def until_disconnected(receive: Receive, work: Callable[[], Awaitable[None]]) -> None:
    """Run `work`; where the client leaves first, cancel it and raise RequestAborted.

    `receive` must have given the whole body already: what comes next is the disconnect.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    is_running, has_left = True, False

    def leave(watch: asyncio.Task[None]) -> None:
        nonlocal has_left
        if is_running and not watch.cancelled():
            has_left = True
            task.cancel()

    watch = loop.create_task(_watch(receive))
    watch.add_done_callback(leave)
    try:
        await work()
    except asyncio.CancelledError:
        if has_left and task.uncancel() == 0:
            raise RequestAborted("the client closed the connection") from None
        raise
    finally:
        is_running = False
        watch.cancel()


async def _watch(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def first_error(errors: BaseExceptionGroup) -> BaseException:
    """Return the first plain exception in a group: a request fails for one reason."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
