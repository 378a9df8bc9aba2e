"""PATCH of stored settings: all or nothing, refused and not clamped, null takes back."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy_service.domain.settings import REGISTRY, SettingSources
from policy_service.settings.patch import Patched, patch
from policy_service.settings.problems import ConfigError
from policy_service.settings.resolved import REST_NAMES, nested, rest_document


def refused(body: object) -> dict[str, dict[str, str]]:
    with pytest.raises(ConfigError) as caught:
        patch({}, body)
    return {problem.path: problem.as_dict() for problem in caught.value.problems}


def test_a_patch_names_every_problem_with_path_given_allowed_and_remedy() -> None:
    found = refused({"requestQueue": {"maxWaitMs": 0, "maxDepth": 5}, "providerCooldown": 1, "x": {"y": 1}})

    assert set(found) == {"requestQueue.maxWaitMs", "requestQueue.maxDepth", "providerCooldown", "x"}
    assert found["requestQueue.maxWaitMs"]["given"] == "0"
    assert found["requestQueue.maxWaitMs"]["allowed"] == "whole number 1 .. 86400000"
    assert found["requestQueue.maxDepth"]["remedy"] == "did you mean maxQueueDepth?"


@pytest.mark.parametrize("body", [None, [], "x", 1, True])
def test_a_body_that_is_no_object_is_refused(body: object) -> None:
    assert set(refused(body)) == {"body"}


@pytest.mark.parametrize(
    ("rest", "value"),
    [
        ("requestQueue.requestsPerMinute", True),
        ("requestQueue.requestsPerMinute", 12.0),
        ("requestQueue.requestsPerMinute", "12"),
        ("comboCooldownWait.enabled", "true"),
        ("comboCooldownWait.enabled", 0),
        ("modelLockout.errorCodes", [429, 99]),
        ("modelLockout.errorCodes", [429, "x"]),
        ("modelLockout.errorCodes", 429),
        ("sessionAffinityOnIneligible", "Detour"),
        ("emergencyTarget.model", 5),
        ("quotaPreflight.cutoffPercent", 100),
    ],
)
def test_wrong_types_and_ranges_are_refused_not_converted(rest: str, value: object) -> None:
    assert set(refused(nested(iter([(rest, value)])))) == {rest}


def test_a_list_replaces_a_list() -> None:
    stored = patch({"model_lockout.error_codes": (429,)}, {"modelLockout": {"errorCodes": [500]}}).stored

    assert stored == {"model_lockout.error_codes": (500,)}


def test_null_for_a_block_takes_all_of_it_back() -> None:
    stored = {"queue.max_wait_ms": 5, "queue.max_queue_depth": 6, "cooldown_wait.max_attempts": 1}

    done = patch(stored, {"requestQueue": None})

    assert done.stored == {"cooldown_wait.max_attempts": 1}
    assert set(done.changed) == {"queue.max_wait_ms", "queue.max_queue_depth"}


def test_only_names_whose_stored_value_differs_count_as_changed() -> None:
    done = patch(
        {"queue.max_wait_ms": 5}, {"requestQueue": {"maxWaitMs": 5, "wedgeAfterMs": 7000, "maxQueueDepth": None}}
    )

    assert done.changed == ("queue.wedge_after_ms",)


def test_the_document_shows_sources_on_request() -> None:
    sources = SettingSources({"queue.max_wait_ms": 5}, {"POLICY_QUEUE_MAX_QUEUE_DEPTH": "3"})

    body = rest_document(sources, with_sources=True)

    assert body["requestQueue"]["maxWaitMs"] == 5
    assert body["sources"]["requestQueue.maxWaitMs"] == "stored"
    assert body["sources"]["requestQueue.maxQueueDepth"] == "environment"
    assert body["sources"]["requestQueue.wedgeAfterMs"] == "default"
    assert "sources" not in rest_document(sources)


def test_every_default_of_the_document_can_be_patched_back() -> None:
    body = rest_document(SettingSources())

    assert patch({}, body).stored == {
        name: REGISTRY[name].default for name in REST_NAMES.values() if REGISTRY[name].default is not None
    }


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*REST_NAMES, "requestQueue", "maxWaitMs", "modelLockout", "x"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@given(JSON)
def test_any_body_is_either_stored_whole_or_refused(body: Any) -> None:
    before = {"queue.max_wait_ms": 5}
    with contextlib.suppress(ConfigError):
        after = patch(before, body).stored
        assert patch(after, body) == Patched(after, ())
    assert before == {"queue.max_wait_ms": 5}
