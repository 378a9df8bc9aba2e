# Made by carry.py from httpx.py. Change the original.
"""Transports for httpx2: an unmodified SDK goes through the policy by passing `http_client=`.

    policy = PolicyClient("127.0.0.1:50051")
    main = Upstream("https://api.openai.com/v1", {"authorization": "Bearer ..."})
    door = Door({"main": main}, pool("openai/main/gpt-4o"))
    OpenAI(api_key="unused", http_client=client(policy, door), max_retries=0)

Needs the extra `httpx2`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import httpx2

from policy_client.asynchronous import AsyncPolicyClient
from policy_client.httpx_shell import AsyncShell, AsyncStream, BlockingShell, BlockingStream, transport_options
from policy_client.synchronous import PolicyClient
from policy_client.upstreams import Door, Sent, Upstream

__all__ = ["AsyncPolicyTransport", "Door", "PolicyTransport", "Sent", "Upstream", "async_client", "client"]


class _Stream(BlockingStream, httpx2.SyncByteStream):
    """Body of a streamed answer."""


class _AsyncStream(AsyncStream, httpx2.AsyncByteStream):
    """Body of a streamed answer."""


class PolicyTransport(BlockingShell, httpx2.BaseTransport):
    """Sends each request where the policy says, and on to the next target while it says so.

    Args:
        policy: the client.
        door: how requests pass.
        inner: transport that makes the calls; a `httpx2.HTTPTransport` unless given.
    """

    kit: ClassVar[Any] = httpx2
    stream_class: ClassVar[Any] = _Stream

    def __init__(self, policy: PolicyClient, door: Door, inner: httpx2.BaseTransport | None = None) -> None:
        super().__init__(policy, door, inner)


class AsyncPolicyTransport(AsyncShell, httpx2.AsyncBaseTransport):
    """The same for asyncio; `inner` is a `httpx2.AsyncHTTPTransport` unless given."""

    kit: ClassVar[Any] = httpx2
    stream_class: ClassVar[Any] = _AsyncStream

    def __init__(self, policy: AsyncPolicyClient, door: Door, inner: httpx2.AsyncBaseTransport | None = None) -> None:
        super().__init__(policy, door, inner)


def client(policy: PolicyClient, door: Door, **options: Any) -> httpx2.Client:
    """A client for `http_client=`; `options` are those of `httpx2.Client`, but `transport` and `mounts`."""
    inner = httpx2.HTTPTransport(**transport_options(options))
    return httpx2.Client(transport=PolicyTransport(policy, door, inner), **options)


def async_client(policy: AsyncPolicyClient, door: Door, **options: Any) -> httpx2.AsyncClient:
    """The same for asyncio; `options` are those of `httpx2.AsyncClient`, but `transport` and `mounts`."""
    inner = httpx2.AsyncHTTPTransport(**transport_options(options))
    return httpx2.AsyncClient(transport=AsyncPolicyTransport(policy, door, inner), **options)
