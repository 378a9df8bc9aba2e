"""SIGINT and SIGTERM as a cancel, so that a command stops what it started before it ends."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


async def interruptible(work: Coroutine[Any, Any, Result]) -> Result:
    """Run the work; a signal cancels it, repeating the signal changes nothing.

    Raises:
        asyncio.CancelledError: a signal came.
    """
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _cancel_once, task)
    return await task


def _cancel_once(task: asyncio.Task[Any]) -> None:
    if not task.cancelling():
        task.cancel()
