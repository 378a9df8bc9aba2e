"""A batch of a thousand selections over a large pool kept the event loop for a minute: nobody else was answered."""

from __future__ import annotations

import asyncio
import time

from policy_service.transport.grpc import policy_servicer
from policy_service.transport.grpc.policy_servicer import _each, _in_turns


async def test_others_have_their_turn_between_the_items_of_a_batch() -> None:
    loop = asyncio.get_running_loop()
    turns: list[int] = []

    def hard(item: int) -> int:
        loop.call_soon(turns.append, item)
        until = time.monotonic() + policy_servicer.TURN_S
        while time.monotonic() < until:
            pass
        return item

    assert await _each(range(10), hard) == list(range(10))
    assert len(turns) >= 8


async def test_easy_items_give_no_turn_away() -> None:
    turns: list[None] = []
    asyncio.get_running_loop().call_soon(turns.append, None)
    assert [item async for item in _in_turns([1, 2, 3])] == [1, 2, 3]
    assert turns == []
