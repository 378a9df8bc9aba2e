"""Runs the vectors of spec/leases.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from policy_service.domain.lease import visible_label
from policy_service.domain.lease_context import (
    LeaseCode,
    LeaseRefusal,
    capacity_retry_s,
    owner_hash,
    read_headers,
)
from tests.vectors.harness import Vector
from tests.vectors.matching import assert_expected, matches
from tests.vectors.worlds_leases import Fields, LeaseWorld, token_of

_ACCOUNT_KINDS = frozenset({"oauth", "access_token", "access-token", "token"})


def _headers(given: Fields) -> Fields:
    found = read_headers(given["headers"])
    if isinstance(found, LeaseRefusal):
        return {"http_status": found.http_status, "code": found.code, "grpc": found.grpc}
    owners = {owner_hash(token_of(letter)): letter for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"}
    return {"owner": owners.get(found.owner_hash), "generation": found.generation}


def _code(given: Fields) -> Fields:
    refusal = LeaseRefusal(LeaseCode(given["code"]))
    return {"grpc": refusal.grpc, "http_status": refusal.http_status}


def _label(given: Fields) -> Fields:
    asked = given["label_of"]
    identities = [asked[name] for name in ("email", "display_name", "e_mail", "account") if asked.get(name)]
    is_account = asked.get("kind") in _ACCOUNT_KINDS
    return {"label": visible_label(asked.get("label") or "", is_account=is_account, identities=identities)}


_CHECKS: dict[str, Callable[[Fields], Fields]] = {
    "owner_token": lambda given: {"owner_hash": owner_hash(given["owner_token"])},
    "headers": _headers,
    "earliest_free_at_ms": lambda given: {
        "retry_after_s": capacity_retry_s(given["earliest_free_at_ms"], given["now_ms"])
    },
    "label_of": _label,
    "code": _code,
}


def run(vector: Vector) -> None:
    """Raise AssertionError where an answer differs."""
    given: Fields = vector.get("given") or {}
    world = LeaseWorld(given)
    answer: Fields = {}
    for step in vector.get("steps", ()):
        answer = world.run(step)
        _check(step.get("expect", {}), answer, f"at {world.now}")
    if "http" in given:
        answer = world.http(given["http"]) | {"state": world.state()}
    for name, check in _CHECKS.items():
        if name in given:
            answer = check(given)
    _check(vector["expect"], answer, "result")


def _check(expected: Fields, answer: Fields, where: str) -> None:
    plain = {name: value for name, value in expected.items() if name != "state"}
    _with_lists(plain, answer, where)
    state = dict(expected.get("state", {}))
    for wanted in state.pop("rows", ()):
        wanted = dict(wanted)
        if "owner" in wanted:
            wanted["owner_hash"] = owner_hash(token_of(wanted.pop("owner")))
        assert any(matches(wanted, row) for row in answer["state"]["rows"]), f"{where}: no row {wanted}"
    assert_expected(state, answer.get("state", {}), where)


def _with_lists(expected: dict[str, Any], answer: Fields, where: str) -> None:
    """Exclusions are rows that must exist; everything else is compared as it stands."""
    for wanted in expected.pop("exclusions", ()):
        assert any(matches(wanted, each) for each in answer["exclusions"]), f"{where}: not excluded: {wanted}"
    assert_expected(expected, answer, where)
