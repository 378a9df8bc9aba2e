"""The HTTP transports without their library: httpx and httpx2 have the same classes under two names.

`policy_client.httpx` and `policy_client.httpx2` give the library; what is decided is decided in `upstreams`,
`stream_reading` and the client.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from policy_client import messages, outcomes
from policy_client.asynchronous import AsyncPolicyClient
from policy_client.core import monotonic_ms
from policy_client.errors import LeaseLostError, NoTargetError, RefusedWhileAwayError, ServiceError
from policy_client.outcomes import Outcome
from policy_client.steps import Answer, Attempt, Result
from policy_client.stream_reading import StreamReader, format_of
from policy_client.synchronous import PolicyClient
from policy_client.upstreams import Door, Sent, is_event_stream, restated, whole_outcome

REFUSALS = (NoTargetError, RefusedWhileAwayError, LeaseLostError, ServiceError)
"""Errors that become an answer for the SDK."""


@dataclass(slots=True)
class Passing:
    """A stream that has begun: what was held back, what is to come."""

    response: Any
    chunks: Any
    reader: StreamReader
    held: list[bytes] = field(default_factory=list)

    @property
    def status(self) -> int:
        return int(self.response.status_code)

    def take(self, chunk: bytes) -> None:
        self.held.append(chunk)
        self.reader.feed(chunk, monotonic_ms())

    def is_undecided(self, held_bytes: int) -> bool:
        """Nothing that a client would see has come yet."""
        reader = self.reader
        return not (reader.error or reader.has_output or reader.is_complete) and reader.bytes < held_bytes


class Shell:
    """What both transports share.

    Args:
        door: how requests pass.
    """

    kit: ClassVar[Any]
    """The library."""

    def __init__(self, door: Door) -> None:
        self._door = door

    def _sent(self, request: Any, body: bytes) -> Sent:
        path = request.url.raw_path.decode("ascii")
        return Sent(request.method, path, tuple(request.headers.multi_items()), body)

    def _outgoing(self, request: Any, sent: Sent, attempt: Attempt) -> Any:
        out = self._door.outgoing(sent, attempt)
        return self.kit.Request(
            sent.method, out.url, headers=list(out.headers), content=out.body, extensions=request.extensions
        )

    def _whole(self, response: Any, raw: bytes, started_at: int) -> Answer[Any]:
        """An answer that was read to its end."""
        whole = self._response(response, raw)
        headers = tuple(response.headers.multi_items())
        outcome = whole_outcome(whole.status_code, headers, whole.content, monotonic_ms() - started_at)
        return Answer(whole, outcome)

    def _response(self, like: Any, raw: bytes) -> Any:
        return self.kit.Response(like.status_code, headers=like.headers, content=raw, extensions=like.extensions)

    def _passing(self, sent: Sent, response: Any, chunks: Any, started_at: int) -> Passing:
        reader = StreamReader(format_of(sent.path), started_at, self._door.watchdog)
        return Passing(response, chunks, reader)

    def _begun(self, passing: Passing) -> Answer[Any]:
        """The stream shows output: from here on it belongs to the client."""
        outcome = outcomes.http(passing.status, tuple(passing.response.headers.multi_items()))
        return Answer(passing, replace(outcome, is_streamed=True), is_open=True)

    def _stillborn(self, passing: Passing, outcome: Outcome) -> Answer[Any]:
        """The stream failed before any output: another target may serve, and nobody has seen this one."""
        headers = tuple(passing.response.headers.multi_items())
        return Answer(self._response(passing.response, b"".join(passing.held)), replace(outcome, headers=headers))

    def _returned(self, result: Result[Any]) -> Any:
        """The answer for the SDK, with the status and waiting time that the service gives it."""
        response = result.value
        status = result.http_status or response.status_code
        if status < 400:
            return self._unread(response)
        headers = [*restated(tuple(response.headers.multi_items()), result.retry_after_ms), *_SETTLED]
        return self._unread(
            self.kit.Response(status, headers=headers, content=response.content, extensions=response.extensions)
        )

    def _unread(self, response: Any) -> Any:
        """As a transport gives an answer: the client reads it, and so learns how long it took."""
        return self.kit.Response(
            response.status_code, headers=response.headers, stream=response.stream, extensions=response.extensions
        )

    def _refused(self, error: Exception) -> Any:
        """An answer of our own, in the error shape that OpenAI and Anthropic clients both read."""
        shown = _as_reject(error)
        headers = {"x-policy-code": shown.code, **dict(_SETTLED)}
        if shown.retry_after_ms is not None:
            headers["retry-after"] = str(-(-shown.retry_after_ms // 1000))
        return self._unread(self.kit.Response(shown.http_status, headers=headers, json=shown.body()))


_SETTLED = (("x-should-retry", "false"),)
"""OpenAI's and Anthropic's SDKs obey it: what the policy gave up on is not tried twice more by them."""


def _as_reject(error: Exception) -> NoTargetError:
    if isinstance(error, NoTargetError):
        return error
    code = getattr(error, "code", "")
    status = 409 if isinstance(error, LeaseLostError) else _STATUS_OF_CODE.get(code, 503)
    shown = messages.Reject(
        http_status=status,
        code=getattr(error, "reason", "") or code,
        type="invalid_request_error" if status == 400 else "service_unavailable",
        message=str(error),
    )
    if isinstance(error, ServiceError) and error.retry_after_ms is not None:
        shown.retry_after_ms = error.retry_after_ms
    return NoTargetError(shown)


_STATUS_OF_CODE = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "FAILED_PRECONDITION": 409,
    "ABORTED": 409,
    "RESOURCE_EXHAUSTED": 429,
}
"""HTTP status of an error of the service by gRPC status (spec/diagnostics.md section 5); any other is 503."""

_OF_TRANSPORT = frozenset({"verify", "cert", "http1", "http2", "limits", "proxy"})


def transport_options(options: dict[str, Any]) -> dict[str, Any]:
    """Those options of a client that its transport has to be made with, taken out of `options`.

    Raises:
        TypeError: an option leads around the policy.
    """
    around = sorted(options.keys() & {"transport", "mounts"})
    if around:
        raise TypeError(f"{around[0]} leads around the policy: make a transport of this module with inner=...")
    return {name: options.pop(name) for name in _OF_TRANSPORT & options.keys()}


class BlockingShell(Shell):
    """`handle_request` of a blocking transport."""

    stream_class: ClassVar[Any]

    def __init__(self, policy: PolicyClient, door: Door, inner: Any = None) -> None:
        super().__init__(door)
        self._policy = policy
        self._inner = inner or self.kit.HTTPTransport()

    def handle_request(self, request: Any) -> Any:
        sent = self._sent(request, request.read())
        asked = self._door.asked(sent)
        try:
            result = self._policy.run(asked, lambda attempt: self._attempt(request, sent, attempt), self._door.budget)
        except REFUSALS as error:
            return self._refused(error)
        if not isinstance(result.value, Passing):
            return self._returned(result)
        passing = result.value
        stream = self.stream_class(passing, lambda outcome: self._policy.complete(result, outcome), self.kit)
        return self.kit.Response(
            passing.status, headers=passing.response.headers, stream=stream, extensions=passing.response.extensions
        )

    def close(self) -> None:
        self._inner.close()

    def _attempt(self, request: Any, sent: Sent, attempt: Attempt) -> Answer[Any]:
        started_at = monotonic_ms()
        response = self._inner.handle_request(self._outgoing(request, sent, attempt))
        if is_event_stream(response.status_code, tuple(response.headers.multi_items())):
            return self._open(self._passing(sent, response, iter(response.stream), started_at))
        try:
            return self._whole(response, b"".join(response.stream), started_at)
        finally:
            response.close()

    def _open(self, passing: Passing) -> Answer[Any]:
        """Hold the stream back until it shows output, an error or its end."""
        try:
            for chunk in passing.chunks:
                passing.take(chunk)
                if not passing.is_undecided(self._door.held_bytes):
                    break
            else:
                passing.reader.finish(monotonic_ms())
                return self._end_held(passing)
        except BaseException:
            passing.response.close()
            raise
        return self._end_held(passing) if passing.reader.error else self._begun(passing)

    def _end_held(self, passing: Passing) -> Answer[Any]:
        passing.response.close()
        return self._stillborn(passing, passing.reader.ended(passing.status))


class AsyncShell(Shell):
    """`handle_async_request` of an asyncio transport."""

    stream_class: ClassVar[Any]

    def __init__(self, policy: AsyncPolicyClient, door: Door, inner: Any = None) -> None:
        super().__init__(door)
        self._policy = policy
        self._inner = inner or self.kit.AsyncHTTPTransport()

    async def handle_async_request(self, request: Any) -> Any:
        sent = self._sent(request, await request.aread())
        asked = self._door.asked(sent)
        try:
            result = await self._policy.run(
                asked, lambda attempt: self._attempt(request, sent, attempt), self._door.budget
            )
        except REFUSALS as error:
            return self._refused(error)
        if not isinstance(result.value, Passing):
            return self._returned(result)
        passing = result.value
        stream = self.stream_class(passing, lambda outcome: self._policy.complete(result, outcome), self.kit)
        return self.kit.Response(
            passing.status, headers=passing.response.headers, stream=stream, extensions=passing.response.extensions
        )

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def _attempt(self, request: Any, sent: Sent, attempt: Attempt) -> Answer[Any]:
        started_at = monotonic_ms()
        response = await self._inner.handle_async_request(self._outgoing(request, sent, attempt))
        if is_event_stream(response.status_code, tuple(response.headers.multi_items())):
            return await self._open(self._passing(sent, response, aiter(response.stream), started_at))
        try:
            return self._whole(response, b"".join([chunk async for chunk in response.stream]), started_at)
        finally:
            await response.aclose()

    async def _open(self, passing: Passing) -> Answer[Any]:
        """Hold the stream back until it shows output, an error or its end."""
        try:
            async for chunk in passing.chunks:
                passing.take(chunk)
                if not passing.is_undecided(self._door.held_bytes):
                    break
            else:
                passing.reader.finish(monotonic_ms())
                return await self._end_held(passing)
        except BaseException:
            await passing.response.aclose()
            raise
        return await self._end_held(passing) if passing.reader.error else self._begun(passing)

    async def _end_held(self, passing: Passing) -> Answer[Any]:
        await passing.response.aclose()
        return self._stillborn(passing, passing.reader.ended(passing.status))


class Ending:
    """The end of a stream, told once."""

    def __init__(self, passing: Passing, complete: Any, kit: Any) -> None:
        self._passing = passing
        self._complete = complete
        self._kit = kit
        self._is_told = False

    def _first(self) -> bool:
        is_first, self._is_told = not self._is_told, True
        return is_first

    def _slow(self) -> Exception:
        error: Exception = self._kit.ReadError("STREAM_THROUGHPUT_TOO_LOW: the stream gives hardly any output")
        return error


class BlockingStream(Ending):
    """The body of a stream for the SDK; read on its way."""

    def __iter__(self) -> Iterator[bytes]:
        passing = self._passing
        yield from passing.held
        try:
            for chunk in passing.chunks:
                passing.reader.feed(chunk, monotonic_ms())
                if passing.reader.is_too_slow:
                    self._tell(passing.reader.too_slow())
                    raise self._slow()
                yield chunk
        except Exception as error:
            self._tell(passing.reader.broken(error))
            raise
        passing.reader.finish(monotonic_ms())
        self._tell(passing.reader.ended(passing.status))

    def close(self) -> None:
        try:
            self._passing.response.close()
        finally:
            self._tell(self._passing.reader.left(self._passing.status))

    def _tell(self, outcome: Outcome) -> None:
        if self._first():
            self._complete(outcome)


class AsyncStream(Ending):
    """The body of a stream for the SDK; read on its way."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        passing = self._passing
        for held in passing.held:
            yield held
        try:
            async for chunk in passing.chunks:
                passing.reader.feed(chunk, monotonic_ms())
                if passing.reader.is_too_slow:
                    await self._tell(passing.reader.too_slow())
                    raise self._slow()
                yield chunk
        except Exception as error:
            await self._tell(passing.reader.broken(error))
            raise
        passing.reader.finish(monotonic_ms())
        await self._tell(passing.reader.ended(passing.status))

    async def aclose(self) -> None:
        try:
            await self._passing.response.aclose()
        finally:
            await self._tell(self._passing.reader.left(self._passing.status))

    async def _tell(self, outcome: Outcome) -> None:
        if self._first():
            await self._complete(outcome)
