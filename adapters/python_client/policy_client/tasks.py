"""Tasks of the asyncio client: work beside a request whose failure is logged, not raised."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from policy_client.errors import PolicyClientError

log = logging.getLogger("policy_client")

Work = Callable[..., Coroutine[Any, Any, None]]


async def logged(work: Work, *arguments: Any) -> None:
    """Do the work."""
    # Made here, not by the caller: a task that is cancelled before its start would leave a coroutine behind.
    try:
        await work(*arguments)
    except PolicyClientError as error:
        log.info("not done: %s", error)
    except Exception:
        log.exception("a task of the policy client failed")
