"""Runs work beside a watch on the client, so that a client that leaves ends the work at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import anyio
from starlette.types import Receive

from headrace.errors import RequestAborted


async def until_disconnected(receive: Receive, work: Callable[[], Awaitable[None]]) -> None:
    """Run `work`; where the client leaves first, cancel it and raise RequestAborted.

    `receive` must have given the whole body already: what comes next is the disconnect.
    """
    with anyio.CancelScope() as scope:
        watch = asyncio.get_running_loop().create_task(_watch(receive, scope))
        try:
            await work()
            return
        finally:
            watch.cancel()
    raise RequestAborted("the client closed the connection")


async def _watch(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def first_error(errors: BaseExceptionGroup) -> BaseException:
    """Return the first plain exception in a group: a request fails for one reason."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
