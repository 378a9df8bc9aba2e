"""Transports for httpx: an unmodified SDK goes through the policy by passing `http_client=`.

    policy = PolicyClient("127.0.0.1:50051")
    main = Upstream("https://api.openai.com/v1", {"authorization": "Bearer ..."})
    door = Door({"main": main}, pool("openai/main/gpt-4o"))
    OpenAI(api_key="unused", http_client=client(policy, door), max_retries=0)

Needs the extra `httpx`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import httpx

from policy_client.asynchronous import AsyncPolicyClient
from policy_client.httpx_shell import AsyncShell, AsyncStream, BlockingShell, BlockingStream, transport_options
from policy_client.synchronous import PolicyClient
from policy_client.upstreams import Door, Sent, Upstream

__all__ = ["AsyncPolicyTransport", "Door", "PolicyTransport", "Sent", "Upstream", "async_client", "client"]


class _Stream(BlockingStream, httpx.SyncByteStream):
    """Body of a streamed answer."""


class _AsyncStream(AsyncStream, httpx.AsyncByteStream):
    """Body of a streamed answer."""


class PolicyTransport(BlockingShell, httpx.BaseTransport):
    """Sends each request where the policy says, and on to the next target while it says so.

    Args:
        policy: the client.
        door: how requests pass.
        inner: transport that makes the calls; a `httpx.HTTPTransport` unless given.
    """

    kit: ClassVar[Any] = httpx
    stream_class: ClassVar[Any] = _Stream

    def __init__(self, policy: PolicyClient, door: Door, inner: httpx.BaseTransport | None = None) -> None:
        super().__init__(policy, door, inner)


class AsyncPolicyTransport(AsyncShell, httpx.AsyncBaseTransport):
    """The same for asyncio; `inner` is a `httpx.AsyncHTTPTransport` unless given."""

    kit: ClassVar[Any] = httpx
    stream_class: ClassVar[Any] = _AsyncStream

    def __init__(self, policy: AsyncPolicyClient, door: Door, inner: httpx.AsyncBaseTransport | None = None) -> None:
        super().__init__(policy, door, inner)


def client(policy: PolicyClient, door: Door, **options: Any) -> httpx.Client:
    """A client for `http_client=`; `options` are those of `httpx.Client`, but `transport` and `mounts`."""
    inner = httpx.HTTPTransport(**transport_options(options))
    return httpx.Client(transport=PolicyTransport(policy, door, inner), **options)


def async_client(policy: AsyncPolicyClient, door: Door, **options: Any) -> httpx.AsyncClient:
    """The same for asyncio; `options` are those of `httpx.AsyncClient`, but `transport` and `mounts`."""
    inner = httpx.AsyncHTTPTransport(**transport_options(options))
    return httpx.AsyncClient(transport=AsyncPolicyTransport(policy, door, inner), **options)
