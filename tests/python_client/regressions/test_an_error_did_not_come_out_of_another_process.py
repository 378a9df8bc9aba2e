"""Errors raised in a worker process could not be pickled, or broke the pool that unpickled them."""

from __future__ import annotations

import copy
import pickle

import pytest

from policy_client import messages
from policy_client.errors import (
    ClientClosedError,
    FieldViolation,
    InvalidCallError,
    LeaseLostError,
    LeaseUnavailableError,
    NoTargetError,
    OverloadedError,
    PolicyClientError,
    RefusedWhileAwayError,
    ServiceAwayError,
)
from policy_client.testing import target

GONE = target("openai/main/gpt")
ERRORS = [
    ClientClosedError(),
    ServiceAwayError("DEADLINE_EXCEEDED: x", "DEADLINE_EXCEEDED"),
    RefusedWhileAwayError("no"),
    OverloadedError("full", "SPOOL_FULL", "RESOURCE_EXHAUSTED", retry_after_ms=5, metadata={"a": "b"}),
    InvalidCallError("x", "R", "INVALID_ARGUMENT", violations=(FieldViolation("f", "d", "r"),)),
    NoTargetError(
        messages.Reject(http_status=429, code="x", message="later", retry_after_ms=7),
        [messages.Exclusion(target=GONE, reason_text="cooling")],
        [messages.EarlierAttempt(target=GONE)],
    ),
    LeaseLostError("LEASE_FENCE_STALE"),
    LeaseUnavailableError(messages.LeaseUnavailable(code="none", message="none left")),
]


def all_of(error: PolicyClientError) -> tuple[type, str, dict[str, object]]:
    return type(error), str(error), vars(error)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_is_the_same_in_another_process(error: PolicyClientError) -> None:
    assert all_of(pickle.loads(pickle.dumps(error))) == all_of(error)
    assert all_of(copy.copy(error)) == all_of(error)


def test_every_error_of_the_package_is_tried() -> None:
    def kinds(root: type) -> set[type]:
        return {root}.union(*map(kinds, root.__subclasses__()))

    alike = {"ServiceError", "UnauthenticatedError", "ForbiddenError", "FenceError", "UnavailableError"}
    named = {kind.__name__ for kind in kinds(PolicyClientError) if kind.__module__ == "policy_client.errors"}
    assert named - alike - {"PolicyClientError"} == {type(error).__name__ for error in ERRORS}
