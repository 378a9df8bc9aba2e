"""Between Envoy's messages and the values of the stages: reading requests, writing replies.

Replies that change nothing are constant bytes, and what recurs (modes, order of upstreams) is built once: this runs
for every message of every request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from policy_envoy._generated.envoy.config.core.v3 import base_pb2
from policy_envoy._generated.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from policy_envoy._generated.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from policy_envoy.actions import Local, Mode, Pass
from policy_envoy.flight import Flight
from policy_envoy.names import CHAIN_NAMESPACE, DECISION_NAMESPACE, ENDPOINT_HEADER, LB_NAMESPACE

read_message: Callable[[bytes], Any] = ext_proc.ProcessingRequest.FromString
_OVERWRITE = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
_ATTRIBUTES = "envoy.filters.http.ext_proc"
_DETAILS = "response.code_details"


# -- reading -----------------------------------------------------------------------------------------------
def headers_of(message: Any) -> dict[str, str]:
    """Headers by lower-case name; of a repeated name the last. Bytes that are no UTF-8 are read as Latin-1."""
    try:
        return {header.key: header.raw_value.decode() or header.value for header in message.headers.headers}
    except UnicodeDecodeError:
        return {header.key: _text(header.raw_value) or header.value for header in message.headers.headers}


def header_of(message: Any, name: str, *, comes_late: bool = False) -> str:
    """One header, empty if there is none, which costs a fraction of all of them where it is found soon.

    Args:
        comes_late: Envoy adds it, behind those of the client or the upstream.
    """
    headers = message.headers.headers
    for header in reversed(headers) if comes_late else headers:
        if header.key == name:
            return _text(header.raw_value) or header.value
    return ""


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def details_of(message: Any) -> str:
    """Envoy's response code details, where the filter asks for that attribute."""
    found = message.attributes.get(_ATTRIBUTES)
    return found.fields[_DETAILS].string_value if found else ""


def connection_of(message: Any) -> str:
    """Connection of the chosen host, from the metadata of its endpoint (shared clusters)."""
    found = message.attributes.get(_ATTRIBUTES)
    text = str(found["xds.upstream_host_metadata"]) if found and "xds.upstream_host_metadata" in found else ""
    return _connection_in(text)


@lru_cache(maxsize=4_096)
def _connection_in(text: str) -> str:
    """The attribute is a text proto: filter_metadata { key: "policy" value { fields { key: "connection" value ..."""
    _, _, after = text.partition('key: "connection"')
    _, _, value = after.partition('string_value: "')
    return value.partition('"')[0]


def decision_of(message: Any) -> str:
    """What the listener stage left in the metadata (`Flight.carried`); empty: it was passed over."""
    if not message.HasField("metadata_context"):
        return ""
    found = message.metadata_context.filter_metadata
    if DECISION_NAMESPACE not in found:
        return ""
    text: str = found[DECISION_NAMESPACE].fields[_CARRIED].string_value
    return text


# -- writing -----------------------------------------------------------------------------------------------
def write_reply(reply: Pass | Local) -> bytes:
    """A reply as bytes."""
    return _local(reply) if type(reply) is Local else _passed(reply)  # type: ignore[arg-type]


def _passed(reply: Pass) -> bytes:
    kind, set_headers, remove_headers, modes, chain, clears_route, body, chunk, is_end = reply
    data = _head(kind, set_headers, remove_headers, modes, clears_route)
    if chain is not None:
        data += _order(*chain.order) + _carried(chain)
    if body is None and chunk is None:
        return data
    message = ext_proc.ProcessingResponse.FromString(data)
    common = getattr(message, kind).response
    if body is not None:
        if kind.endswith("headers"):
            common.status = ext_proc.CommonResponse.CONTINUE_AND_REPLACE
        common.body_mutation.body = body
        common.header_mutation.set_headers.append(_header("content-length", str(len(body))))
    if chunk is not None:
        common.body_mutation.streamed_response.body = chunk
        common.body_mutation.streamed_response.end_of_stream = is_end
    written: bytes = message.SerializeToString()
    return written


@lru_cache(maxsize=4_096)
def _head(
    kind: str,
    set_headers: tuple[tuple[str, str], ...],
    remove_headers: tuple[str, ...],
    modes: tuple[Mode, ...],
    clears_route: bool,
) -> bytes:
    """A reply without what differs from request to request. Serialized messages are merged by joining their bytes."""
    message = ext_proc.ProcessingResponse()
    answer = getattr(message, kind)
    answer.SetInParent()
    if set_headers or remove_headers:
        mutation = answer.response.header_mutation
        mutation.set_headers.extend(_header(name, value) for name, value in set_headers)
        mutation.remove_headers.extend(remove_headers)
    if clears_route:
        answer.response.clear_route_cache = True
    if modes:
        message.mode_override.CopyFrom(_mode(modes))
    data: bytes = message.SerializeToString()
    return data


def _header(name: str, value: str) -> Any:
    return base_pb2.HeaderValueOption(
        header=base_pb2.HeaderValue(key=name, raw_value=value.encode()), append_action=_OVERWRITE
    )


_SEND = ProcessingMode.SEND
_FIELDS: Mapping[Mode, Mapping[str, Any]] = {
    Mode.REQUEST_BODY: {"request_body_mode": ProcessingMode.BUFFERED},
    Mode.ERROR_BODY: {"response_body_mode": ProcessingMode.BUFFERED_PARTIAL},
    Mode.CHUNKS: {"response_body_mode": ProcessingMode.STREAMED},
    Mode.HELD: {"response_body_mode": ProcessingMode.FULL_DUPLEX_STREAMED, "response_trailer_mode": _SEND},
    Mode.HEAD: {},
    Mode.END: {"response_trailer_mode": _SEND},
}


@lru_cache(maxsize=64)
def _mode(modes: tuple[Mode, ...]) -> ProcessingMode:
    """The override of a message: it replaces all modes, so that the head of the answer is always asked for."""
    fields = {name: value for mode in modes for name, value in _FIELDS[mode].items()}
    return ProcessingMode(request_header_mode=_SEND, response_header_mode=_SEND, **fields)


@lru_cache(maxsize=4_096)
def _order(connections: tuple[str, ...], addresses: tuple[str, ...]) -> bytes:
    """The order of the upstreams for the cluster specifier, and for override_host."""
    message = ext_proc.ProcessingResponse()
    groups: Any = [{"name": name, "clusters": [{"cluster_name": name, "weight": 1}]} for name in connections]
    message.dynamic_metadata.update({CHAIN_NAMESPACE: {"priority_groups": groups}})
    if addresses:
        message.dynamic_metadata.update({LB_NAMESPACE: {ENDPOINT_HEADER: ",".join(addresses)}})
    data: bytes = message.SerializeToString()
    return data


_CARRIED = "request"
"""Key below the namespace of the decision."""


def _field(number: int, data: bytes) -> bytes:
    """A field of that number with bytes, a text or a message, as protobuf writes it."""
    size = len(data)
    if size < 0x80:
        return bytes((number << 3 | 2, size)) + data
    head = bytearray((number << 3 | 2,))
    while size >= 0x80:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return bytes(head) + data


_REQUEST_KEY, _NAMESPACE_KEY = _field(1, _CARRIED.encode()), _field(1, DECISION_NAMESPACE.encode())


def _carried(flight: Flight) -> bytes:
    """dynamic_metadata {DECISION_NAMESPACE: {_CARRIED: text}}: written by hand, since no two requests share it and the
    messages in between cost several times as much."""
    data = flight.carried().encode()
    return _before(len(data)) + data


@lru_cache(maxsize=4_096)
def _before(size: int) -> bytes:
    """What stands before a text of so many bytes: all of it but the text depends on its size alone."""
    data = bytes(size)
    text = _field(1, _REQUEST_KEY + _field(2, _field(3, data)))
    whole = _field(8, _field(1, _NAMESPACE_KEY + _field(2, _field(5, text))))
    return whole[: len(whole) - size]


def _local(reply: Local) -> bytes:
    message = ext_proc.ProcessingResponse()
    answer = message.immediate_response
    answer.status.code = reply.status  # type: ignore[assignment]  # any number, also one without a name
    answer.body = reply.body
    answer.details = reply.details
    answer.headers.set_headers.extend(_header(name, value) for name, value in reply.headers)
    data: bytes = message.SerializeToString()
    return data
