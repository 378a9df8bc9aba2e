"""Compiled policies of connections: kept up to a bound, and shared where a connection says nothing of its own."""

from __future__ import annotations

import pytest

from policy_service.domain import policy as policy_module
from policy_service.domain import setting_specs  # noqa: F401  (fills the registry)
from policy_service.domain.catalogue import Catalogue, Connection
from policy_service.domain.ids import AuthClass
from policy_service.domain.policy import Policy


def is_kept(policy: Policy, provider: str, connection: str) -> bool:
    """Is the second answer the first one?"""
    return policy.for_connection(provider, connection) is policy.for_connection(provider, connection)


def are_shared(policy: Policy, provider: str) -> bool:
    """Do two connections of a provider have the same profiles?"""
    breakers = [policy.for_connection(provider, name).breaker for name in ("a", "b")]
    return breakers[0] is breakers[1]


def test_so_many_connections_are_kept_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_module, "MEMO_ENTRIES", 2)
    policy = Policy(Catalogue())
    assert [is_kept(policy, "p", name) for name in ("a", "b", "c")] == [True, True, False]
    assert [is_kept(policy, "p", name) for name in ("a", "b")] == [True, True]


def test_so_many_providers_share_profiles_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_module, "MEMO_ENTRIES", 2)
    policy = Policy(Catalogue())
    assert [are_shared(policy, provider) for provider in ("p", "q", "r")] == [True, True, False]


def test_what_tells_connections_apart_is_not_shared() -> None:
    own = Connection("own", "p", settings={"breaker.half_open_probes": 7})
    paced = {"queue.auto_enable_api_key_providers": True}
    off, oauth = Connection("off", "p", enabled=False), Connection("oauth", "p", auth_class=AuthClass.OAUTH)
    connections = {each.id: each for each in (own, off, oauth, Connection("plain", "p"))}
    policy = Policy(Catalogue(connections=connections, stored_settings=paced), unlisted=AuthClass.API_KEY)
    plain = policy.for_connection("p", "plain")
    assert (plain.auth_class, plain.breaker.half_open_probes, plain.queue is None) == (AuthClass.API_KEY, 1, False)
    assert policy.for_connection("p", "own").breaker.half_open_probes == 7
    assert policy.for_connection("p", "off").queue is None
    assert policy.for_connection("p", "oauth").auth_class is AuthClass.OAUTH
    assert policy.for_connection("p", "plain", AuthClass.OAUTH).auth_class is AuthClass.OAUTH
    assert policy.for_connection("q", "plain").provider.id == "q"


def test_connections_that_share_profiles_keep_their_own_declaration() -> None:
    connections = {name: Connection(name, "p", passthrough_models=name == "b") for name in ("a", "b")}
    policy = Policy(Catalogue(connections=connections))
    assert [policy.for_connection("p", name).connection for name in ("a", "b")] == list(connections.values())


def test_settings_of_one_connection_are_not_those_of_another() -> None:
    connections = {n: Connection(n, "p", settings={"breaker.half_open_probes": int(n)}) for n in ("3", "4")}
    policy = Policy(Catalogue(connections=connections))
    assert [policy.for_connection("p", name).breaker.half_open_probes for name in ("3", "4")] == [3, 4]
