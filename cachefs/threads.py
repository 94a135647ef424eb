"""Calls in worker threads, by all who must not block the event loop. A limit of processes that is reached (pids of the
control group, RLIMIT_NPROC) lets the system refuse a thread: one call fails then, and nothing else.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

import trio

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


class NoThread(BlockingIOError):
    """EAGAIN: the system starts no thread just now. Nothing was called."""


async def in_thread(
    call: Callable[[*Arguments], Result], *arguments: *Arguments, limiter: trio.CapacityLimiter | None = None
) -> Result:
    """Return what a call returns that waits for the disk or takes long; run it in a worker thread.

    Raises what the call raises, and NoThread.
    """
    try:
        return await trio.to_thread.run_sync(call, *arguments, limiter=limiter)
    except RuntimeError as error:
        if str(error) != "can't start new thread":  # Modules/_threadmodule.c
            raise
        raise NoThread(errno.EAGAIN, "the system starts no more threads") from error
