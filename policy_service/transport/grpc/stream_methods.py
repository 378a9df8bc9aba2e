"""WatchStream on the wire: read progress, run the use case, write its news. No rule lives here.

A message that cannot be used ends the whole call with the reason: the wire has no error for a single stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

from policy_service.application.messages import DecisionToken
from policy_service.application.stream_holdings import PermitNews, StreamOpening
from policy_service.application.watch_stream import AbortOrder, Told, WatchedCall, WatchStream
from policy_service.domain.ids import Target
from policy_service.generated.policy.v1 import stream_pb2
from policy_service.transport.grpc.gate import Stream
from policy_service.transport.grpc.limits import MAX_ATTEMPT, Problems
from policy_service.transport.grpc.mapping.reading import Reading
from policy_service.transport.grpc.wire_enums import ABORT

MAX_EVENTS = 1_024
"""Events of one message."""
MAX_USEFUL_BYTES = 2**40
UNREAD_ANSWERS = 1_024
"""Answers kept for a gateway that does not read them; then its progress waits, and news of permits are dropped."""


class _Answers:
    """Answers in line for one gateway. None is the end."""

    def __init__(self) -> None:
        self._line: asyncio.Queue[stream_pb2.WatchStreamResponse | None] = asyncio.Queue()
        self._has_room = asyncio.Event()
        self._has_room.set()

    def put(self, answer: stream_pb2.WatchStreamResponse | None) -> None:
        self._line.put_nowait(answer)
        if self._line.qsize() >= UNREAD_ANSWERS:
            self._has_room.clear()

    async def get(self) -> stream_pb2.WatchStreamResponse | None:
        answer = await self._line.get()
        if self._line.qsize() < UNREAD_ANSWERS:
            self._has_room.set()
        return answer

    async def room(self) -> None:
        """Return once the gateway reads what it was told."""
        await self._has_room.wait()

    def offer(self, number: int, told: Told) -> None:
        """Put news in line; those of permits only where there is room, an order to abort always."""
        if self._has_room.is_set() or isinstance(told, AbortOrder):
            self.put(_told(number, told))


class StreamMethods:
    """Methods by name, for the servicer."""

    def __init__(self, watch: WatchStream, reading: Reading) -> None:
        self._watch = watch
        self._reading = reading

    def streams(self) -> Mapping[str, Stream]:
        """For `PolicyServicer(streams=...)`."""
        return {"WatchStream": self.watch}

    async def watch(self, requests: AsyncIterator[Any]) -> AsyncGenerator[stream_pb2.WatchStreamResponse, None]:
        """WatchStream: until the gateway has nothing more to say, leaves, or the replica drains."""
        answers = _Answers()
        call = self._watch.call(answers.offer)
        reader = asyncio.create_task(self._read(requests, call, answers), name="watch-stream")
        try:
            while (answer := await answers.get()) is not None:
                yield answer
            await reader
        finally:
            call.end()
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[Any], call: WatchedCall, answers: _Answers) -> None:
        try:
            async for message in requests:
                opened = self._take(message, call)
                if opened is not None:
                    answers.put(opened)
                await answers.room()
        finally:
            answers.put(None)

    def _take(self, message: stream_pb2.WatchStreamRequest, call: WatchedCall) -> stream_pb2.WatchStreamResponse | None:
        """Run one message; the answer to an opening."""
        event = message.WhichOneof("event")
        if event == "progress":
            _progress(message, call)
        elif event == "open":
            opened = call.open(message.stream_id, self._opening(message.open))
            return _answer(message.stream_id, opened=stream_pb2.StreamOpened(watchdog_enabled=opened))
        elif event == "close":
            call.close(message.stream_id)
        else:
            problems = Problems()
            problems.require("event", "is missing", "one of open, progress and close")
            problems.settle()
        return None

    def _opening(self, message: stream_pb2.StreamOpen) -> StreamOpening:
        problems = Problems()
        if not message.decision_token:
            problems.require("open.decision_token", "is missing", "the token of the answer to SelectTarget")
        problems.between("open.attempt", message.attempt, 0, MAX_ATTEMPT)
        problems.settle()
        token = self._reading.seal.open(message.decision_token, self._reading.clock.now())
        if not token.targets:
            problems.add("open.decision_token", "of a decision that dispatched nothing", "the token of a Dispatch")
            problems.settle()
        return StreamOpening(token, message.attempt, _served(token, message))


def _served(token: DecisionToken, message: stream_pb2.StreamOpen) -> Target | None:
    """The target that is called; None where the gateway does not say and it need not be the first."""
    if not message.target_key:
        return token.targets[0].target if message.attempt == 0 else None
    for named in token.targets:
        if named.key == message.target_key:
            return named.target
    problems = Problems()
    problems.add("open.target_key", "is no target of this decision", "one of the keys of the answer")
    problems.settle()
    return None


def _progress(message: stream_pb2.WatchStreamRequest, call: WatchedCall) -> None:
    events = message.progress.events
    if len(events) > MAX_EVENTS or any(not 0 <= event.useful_bytes <= MAX_USEFUL_BYTES for event in events):
        _refuse(message.progress)
    told = [(event.useful_bytes, event.protected) for event in events]
    call.progress(message.stream_id, told, first_byte=message.progress.first_byte)


def _refuse(progress: stream_pb2.StreamProgress) -> None:
    problems = Problems()
    problems.count("progress.events", len(progress.events), MAX_EVENTS)
    for index, event in enumerate(progress.events[:MAX_EVENTS]):
        problems.between(f"progress.events[{index}].useful_bytes", event.useful_bytes, 0, MAX_USEFUL_BYTES)
    problems.settle()


def _told(number: int, told: Told) -> stream_pb2.WatchStreamResponse:
    if isinstance(told, PermitNews):
        news = stream_pb2.StreamPermit(permit_id=told.permit_id, expires_at_unix_ms=told.expires_at)
        return _answer(number, permit=news)
    order = stream_pb2.StreamAbort(reason=ABORT.number(told.reason), reason_text=told.reason, code=told.code)
    return _answer(number, abort=order)


def _answer(number: int, **event: Any) -> stream_pb2.WatchStreamResponse:
    return stream_pb2.WatchStreamResponse(stream_id=number, **event)
