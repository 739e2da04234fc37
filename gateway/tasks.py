"""Runs work beside a watch on the client, so that a client that leaves ends the work at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.types import Receive, Scope

from headrace.errors import RequestAborted

WATCH_CLIENT = "headrace.watch_client"
"""Where the scope has what takes a function to be called once the client leaves, and returns what ends the
watch. Without it a task of its own waits for the disconnect."""


async def until_disconnected(
    scope: Scope, receive: Receive, work: Callable[[], Awaitable[None]]
) -> None:
    """Run `work`; where the client leaves first, cancel it and raise RequestAborted.

    `receive` must have given the whole body already: what comes next is the disconnect.
    """
    task = asyncio.current_task()
    assert task is not None
    is_running, has_left = True, False

    def leave() -> None:
        nonlocal has_left
        if is_running:
            has_left = True
            task.cancel()

    end_watch = _watch(scope, receive, leave)
    try:
        await work()
    except asyncio.CancelledError:
        if has_left and task.uncancel() == 0:
            raise RequestAborted("the client closed the connection") from None
        raise
    finally:
        is_running = False
        end_watch()


def _watch(scope: Scope, receive: Receive, leave: Callable[[], None]) -> Callable[[], object]:
    watch: Callable[[Callable[[], None]], Callable[[], object]] | None = scope.get(WATCH_CLIENT)
    if watch is not None:
        return watch(leave)
    task = asyncio.get_running_loop().create_task(_disconnected(receive))
    task.add_done_callback(lambda ended: None if ended.cancelled() else leave())
    return task.cancel


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def first_error(errors: BaseExceptionGroup) -> BaseException:
    """Return the first plain exception in a group: a request fails for one reason."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
