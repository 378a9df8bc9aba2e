"""What is wrapped is wrapped whole: a new method of a transport, a new network error of a library, shows here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import httpx2
import pytest

import policy_client.httpx
import policy_client.httpx2
from policy_client import outcomes


def _public(kind: type) -> Iterator[str]:
    yield from (name for name in vars(kind) if not name.startswith("_"))


@pytest.mark.parametrize(
    ("wrapper", "base"),
    [
        (policy_client.httpx.PolicyTransport, httpx.BaseTransport),
        (policy_client.httpx.AsyncPolicyTransport, httpx.AsyncBaseTransport),
        (policy_client.httpx2.PolicyTransport, httpx2.BaseTransport),
        (policy_client.httpx2.AsyncPolicyTransport, httpx2.AsyncBaseTransport),
    ],
)
def test_every_method_of_a_transport_is_wrapped(wrapper: type, base: type) -> None:
    assert [name for name in _public(base) if getattr(wrapper, name) is getattr(base, name)] == []


OURS = {"TransportError", "PoolTimeout", "UnsupportedProtocol", "SSEError"}
"""The root, a queue of our own, a wrong address in the table, and a reader that is not used."""


@pytest.mark.parametrize("kit", [httpx, httpx2])
def test_every_network_error_of_the_libraries_has_a_kind(kit: Any) -> None:
    kinds: list[Callable[[str], Exception]] = [
        error
        for error in vars(kit).values()
        if isinstance(error, type) and issubclass(error, kit.TransportError) and error.__name__ not in OURS
    ]
    unknown = [error for error in kinds if outcomes.network_kind(error("x")) is None]
    assert [getattr(error, "__name__", "") for error in unknown] == []
