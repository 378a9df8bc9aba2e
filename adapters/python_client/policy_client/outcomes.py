"""What came back from an upstream, as a value: a status, no usable answer, a cancel, or a fault of our own.

Made by whoever called; written into a report here. Exceptions of the usual HTTP libraries are told apart by class name,
so that none of them has to be installed.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from policy_client import messages
from policy_client._generated.policy.v1 import policy_pb2

BODY_BYTES = 65_536
"""Bytes of a body that the service reads (policy.proto)."""
HEADER_COUNT = 256
TEXT_CHARS = 4_096

NetworkErrorKind = messages.NetworkErrorKind
LocalFaultKind = messages.LocalFaultKind

DNS = policy_pb2.NETWORK_ERROR_KIND_DNS
CONNECT_REFUSED = policy_pb2.NETWORK_ERROR_KIND_CONNECT_REFUSED
CONNECT_TIMEOUT = policy_pb2.NETWORK_ERROR_KIND_CONNECT_TIMEOUT
TLS = policy_pb2.NETWORK_ERROR_KIND_TLS
CONNECTION_RESET = policy_pb2.NETWORK_ERROR_KIND_CONNECTION_RESET
READ_TIMEOUT = policy_pb2.NETWORK_ERROR_KIND_READ_TIMEOUT
PROTOCOL_ERROR = policy_pb2.NETWORK_ERROR_KIND_PROTOCOL_ERROR
PROXY_UNREACHABLE = policy_pb2.NETWORK_ERROR_KIND_PROXY_UNREACHABLE
STREAM_EARLY_EOF = policy_pb2.NETWORK_ERROR_KIND_STREAM_EARLY_EOF
STREAM_READINESS_TIMEOUT = policy_pb2.NETWORK_ERROR_KIND_STREAM_READINESS_TIMEOUT
STREAM_IDLE_TIMEOUT = policy_pb2.NETWORK_ERROR_KIND_STREAM_IDLE_TIMEOUT
STREAM_TOO_SLOW = policy_pb2.NETWORK_ERROR_KIND_STREAM_TOO_SLOW
EXECUTION = policy_pb2.LOCAL_FAULT_KIND_EXECUTION
OWN_QUEUE = policy_pb2.LOCAL_FAULT_KIND_OWN_QUEUE
NOT_DISPATCHED = policy_pb2.LOCAL_FAULT_KIND_NOT_DISPATCHED

Headers = Mapping[str, str] | Iterable[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one attempt. Make it with one of the functions below.

    `latency_ms` and `first_byte_ms` count from the dispatch; `run` fills `latency_ms` where it is None.
    """

    status: int | None = None
    network_error: NetworkErrorKind.ValueType | None = None
    text: str = ""
    is_cancelled: bool = False
    fault: LocalFaultKind.ValueType | None = None
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    latency_ms: int | None = None
    first_byte_ms: int | None = None
    is_streamed: bool = False
    bytes_streamed: int = 0
    stream_error: bytes = b""
    """Error event met inside a 200 stream."""
    details: messages.ReportDetails | None = None

    @property
    def is_success(self) -> bool:
        """A status below 400 with nothing in it that could be an error: nothing is left to decide."""
        return self.status is not None and self.status < 400 and not self.body and not self.stream_error

    @property
    def is_local(self) -> bool:
        """A cancel or a fault of our own: says nothing about the target and ends the request."""
        return self.is_cancelled or self.fault is not None

    @property
    def may_fall_back(self) -> bool:
        """Whether another target could do better, judged without the service: what is wrong with the request itself
        would be wrong everywhere."""
        if self.network_error is not None or self.stream_error:
            return True
        status = self.status or 0
        return status >= 500 or status in _ANOTHER_MAY_SERVE or (status < 400 and bool(self.body))


_ANOTHER_MAY_SERVE = frozenset({401, 402, 403, 404, 408, 425, 429})
"""Refusals of an account, a key or a model; 400, 413, 422 and the like are about the request."""


def http(status: int, headers: Headers = (), body: bytes = b"") -> Outcome:
    """An answer with a status line.

    Args:
        status: 100 .. 999.
        headers: of the answer; the service reads rate limits and retry hints from them.
        body: of a failure, or of a 2xx answer that carries an error; leave it out for a success.
    """
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    return Outcome(status=status, headers=tuple(pairs), body=body)


def network(kind: NetworkErrorKind.ValueType, text: str = "") -> Outcome:
    """No usable answer."""
    return Outcome(network_error=kind, text=text)


def cancelled() -> Outcome:
    """The client left."""
    return Outcome(is_cancelled=True)


def local_fault(kind: LocalFaultKind.ValueType = EXECUTION, text: str = "") -> Outcome:
    """A fault of our own; never held against the target."""
    return Outcome(fault=kind, text=text)


def of_exception(error: BaseException) -> Outcome:
    """What an exception of a call means: a network error where it is one, else a fault of our own."""
    if type(error).__name__ == "PoolTimeout":
        return local_fault(OWN_QUEUE, "PoolTimeout")
    kind = network_kind(error)
    if kind is not None:
        return network(kind, _told(error))
    return local_fault(EXECUTION, type(error).__name__)


_BY_TYPE: tuple[tuple[type[BaseException], NetworkErrorKind.ValueType], ...] = (
    (socket.gaierror, DNS),
    (ssl.SSLError, TLS),
    (ConnectionRefusedError, CONNECT_REFUSED),
)
"""Causes that tell more than what they are wrapped in."""
_BY_NAME: dict[str, NetworkErrorKind.ValueType] = {
    # httpx, httpx2, requests, urllib3
    "ConnectTimeout": CONNECT_TIMEOUT,
    "ConnectTimeoutError": CONNECT_TIMEOUT,
    "ReadTimeout": READ_TIMEOUT,
    "ReadTimeoutError": READ_TIMEOUT,
    "WriteTimeout": READ_TIMEOUT,
    "TimeoutException": READ_TIMEOUT,
    "ProxyError": PROXY_UNREACHABLE,
    "ProtocolError": PROTOCOL_ERROR,
    "ConnectError": CONNECT_REFUSED,
    "NetworkError": CONNECTION_RESET,
    "SSLError": TLS,
    # aiohttp
    "ClientConnectorDNSError": DNS,
    "ClientSSLError": TLS,
    "ClientProxyConnectionError": PROXY_UNREACHABLE,
    "ServerTimeoutError": READ_TIMEOUT,
    "ServerDisconnectedError": CONNECTION_RESET,
    "ClientPayloadError": STREAM_EARLY_EOF,
    "ClientConnectorError": CONNECT_REFUSED,
    "ClientOSError": CONNECTION_RESET,
    "ClientResponseError": PROTOCOL_ERROR,
    # a body that is not in the encoding that its head names
    "DecodingError": PROTOCOL_ERROR,
    "ContentDecodingError": PROTOCOL_ERROR,
    "DecodeError": PROTOCOL_ERROR,
    "ChunkedEncodingError": STREAM_EARLY_EOF,
    # standard library, http.client included
    "BadStatusLine": PROTOCOL_ERROR,
    "IncompleteRead": STREAM_EARLY_EOF,
    "ConnectionError": CONNECTION_RESET,
    "TimeoutError": READ_TIMEOUT,
}


def network_kind(error: BaseException) -> NetworkErrorKind.ValueType | None:
    """Kind of the network error that an exception stands for; None where it is none."""
    chain = tuple(_chain(error))
    named = next((_BY_NAME[base.__name__] for base in type(error).__mro__ if base.__name__ in _BY_NAME), None)
    caused = next((kind for each in chain for known, kind in _BY_TYPE if isinstance(each, known)), None)
    if named in (None, CONNECT_REFUSED, CONNECTION_RESET) and caused is not None:
        return caused
    return named


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(8):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:TEXT_CHARS]


def sound(text: str) -> str:
    """The text as UTF-8 can carry it: half a surrogate pair, which JSON and header readers let through, becomes `?`."""
    return text.encode("utf-8", "replace").decode()


def put(outcome: Outcome, report: messages.ReportOutcomeRequest) -> None:
    """Write an outcome into a report."""
    if outcome.details is not None:
        report.details.CopyFrom(outcome.details)
    _put_end(outcome, report)
    pairs = outcome.headers[:HEADER_COUNT]
    report.headers.extend(messages.Header(name=sound(name), value=sound(value)) for name, value in pairs if name)
    report.body = outcome.body[:BODY_BYTES]
    report.streamed = outcome.is_streamed
    report.bytes_streamed = outcome.bytes_streamed
    if outcome.latency_ms is not None:
        report.latency_ms = outcome.latency_ms
    if outcome.first_byte_ms is not None:
        report.first_byte_ms = outcome.first_byte_ms
    if outcome.stream_error:
        report.details.stream_error = outcome.stream_error[:BODY_BYTES]


def _put_end(outcome: Outcome, report: messages.ReportOutcomeRequest) -> None:
    if outcome.is_cancelled:
        report.client_cancelled.SetInParent()
        report.origin = messages.ORIGIN_CLIENT
    elif outcome.fault is not None:
        report.local_fault.kind = outcome.fault
        report.local_fault.text = sound(outcome.text[:256])
        report.origin = messages.ORIGIN_GATEWAY
    elif outcome.network_error is not None:
        report.network_error = outcome.network_error
        report.network_error_text = sound(outcome.text[:TEXT_CHARS])
        report.origin = messages.ORIGIN_TRANSPORT
    else:
        report.http_status = outcome.status or 0
        report.origin = messages.ORIGIN_UPSTREAM


def timed(outcome: Outcome, latency_ms: int) -> Outcome:
    """The outcome with its latency, where its maker did not measure one."""
    return outcome if outcome.latency_ms is not None else replace(outcome, latency_ms=max(0, latency_ms))
