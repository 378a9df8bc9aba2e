"""Bodies from hell: mutated and hostile answers never raise, always get a whole verdict, and cost little.

POLICY_FUZZ_EXAMPLES is the number of mutated records of the volume test.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy_service.application.classify import classify_lines, classify_record
from policy_service.domain.catalogue import Catalogue
from policy_service.domain.policy import Policy
from policy_service.settings.provider_data import builtin_providers

EXAMPLES = int(os.environ.get("POLICY_FUZZ_EXAMPLES", "10000"))
VERDICT_BUDGET_S = 0.002
SECOND_LOOKS = 8
FIXTURES = Path(__file__).parents[1] / "fixtures" / "provider_errors.jsonl"
POLICY = Policy(Catalogue(providers=builtin_providers()))
NOW = 1_800_000_000_000
SCOPES = {"none", "model_lockout", "connection_cooldown", "connection_terminal", "provider_failure"}
TERMINAL = {None, "banned", "expired", "credits_exhausted"}
SEEDS = [json.loads(line) for line in FIXTURES.read_text(encoding="utf-8").splitlines()]
Mutation = Callable[[random.Random, str], str]


def _flip(dice: random.Random, text: str) -> str:
    place = dice.randrange(len(text) + 1)
    return text[:place] + chr(dice.choice((0, 34, 92, 123, 160, 0x130, 0xD7FF, 0x1F600))) + text[place + 1 :]


def _cut(dice: random.Random, text: str) -> str:
    return text[: dice.randrange(len(text) + 1)]


def _double(dice: random.Random, text: str) -> str:
    start = dice.randrange(len(text) + 1)
    part = text[start : start + dice.randrange(1, 40)]
    return text[:start] + part * dice.randrange(1, 8) + text[start:]


def _wrap(dice: random.Random, text: str) -> str:
    return json.dumps({dice.choice(("error", "message", "detail")): text})


def _splice(dice: random.Random, text: str) -> str:
    other = str(dice.choice(SEEDS).get("body") or "")
    return text[: dice.randrange(len(text) + 1)] + other[dice.randrange(len(other) + 1) :]


HINTS = (
    ("retry-after", "120"),
    ("retry-after", "Mon, 01 Jun 2026 12:01:30 GMT"),
    ("x-ratelimit-reset", "1780315260"),
    ("x-ratelimit-reset-tokens", "6m0s"),
    ("x-ratelimit-remaining-tokens", "0"),
    ("anthropic-ratelimit-unified-5h-reset", "1780318800"),
    ("anthropic-ratelimit-unified-status", "rejected"),
    ("content-type", "text/html; charset=utf-8"),
)
MUTATIONS: tuple[Mutation, ...] = (_flip, _cut, _double, _wrap, _splice)


def mutated(seed: int) -> dict[str, Any]:
    """A record of the fixtures with one to four mutations of its body, perhaps of headers, perhaps another status."""
    dice = random.Random(seed)
    record = dict(dice.choice(SEEDS))
    body = record.get("body") or ""
    text = body if isinstance(body, str) else json.dumps(body)
    for _ in range(dice.randrange(1, 5)):
        text = dice.choice(MUTATIONS)(dice, text)[:20_000]
    if dice.random() < 0.3:
        record["status"] = dice.choice((200, 400, 401, 402, 403, 404, 413, 422, 429, 432, 499, 500, 503, 529, 599))
    hints = dice.sample(HINTS, dice.randrange(3))
    headers = {name: dice.choice(MUTATIONS)(dice, value) if dice.random() < 0.5 else value for name, value in hints}
    return {**record, "headers": (record.get("headers") or {}) | headers, "body": text}


def is_whole(verdict: dict[str, Any]) -> bool:
    """The verdict uses the public vocabulary."""
    wait = verdict["retry_after_ms"]
    terminal = verdict["terminal"]
    return (
        verdict["scope"] in SCOPES
        and terminal in TERMINAL
        and bool(verdict["rule"])
        and (wait is None or wait >= 0)
        and (terminal is not None) == (verdict["scope"] == "connection_terminal")
    )


def quickest(record: dict[str, Any], attempts: int = 3) -> float:
    """Processor time of the quickest of a few runs: what the verdict costs, not what the machine is busy with."""
    costs = []
    for _ in range(attempts):
        started = time.process_time()
        classify_record(record, POLICY, NOW)
        costs.append(time.process_time() - started)
        if costs[-1] <= VERDICT_BUDGET_S:
            break
    return min(costs)


@pytest.mark.alone
def test_mutated_bodies_always_get_a_whole_verdict_within_the_budget() -> None:
    slow: list[int] = []
    for seed in range(EXAMPLES):
        record = mutated(seed)
        started = time.process_time()
        verdict = classify_record(record, POLICY, NOW)
        assert is_whole(verdict), (seed, verdict)
        if time.process_time() - started > VERDICT_BUDGET_S:
            slow.append(seed)
    for round_ in range(SECOND_LOOKS):
        slow = [seed for seed in slow if quickest(mutated(seed)) > VERDICT_BUDGET_S]
        _pass_the_time(round_)
    assert not slow, {seed: quickest(mutated(seed)) for seed in slow}


def _pass_the_time(round_: int) -> None:
    """Some 0.1 s of other records: a processor lent to a neighbour is charged to whoever ran, for a slice at a time."""
    for seed in range(round_ * 300, (round_ + 1) * 300):
        classify_record(mutated(seed), POLICY, NOW)


@settings(max_examples=max(50, EXAMPLES // 50), deadline=None)
@given(
    body=st.one_of(st.text(max_size=400), st.recursive(st.none() | st.text(max_size=20), st.lists).map(json.dumps)),
    status=st.integers(100, 599),
    headers=st.dictionaries(st.sampled_from(["retry-after", "x-ratelimit-reset", "date"]), st.text(max_size=30)),
    provider=st.sampled_from([*builtin_providers(), "acme"]),
)
def test_any_text_under_any_status_gets_a_whole_verdict(
    body: str, status: int, headers: dict[str, str], provider: str
) -> None:
    record = {"provider": provider, "status": status, "headers": headers, "body": body}
    assert is_whole(classify_record(record, POLICY, NOW))


HOSTILE = [
    "daily ",
    "quota exceed ",
    "suspended ",
    "model ",
    "function degrade ",
    "invalid message ",
    "extra input ",
    "no longer available ",
    "weekly quota ",
    '{"a":',
    "[",
    "try again in ",
    "1h2m",
    "key ",
    "a",
    "é",
    "İ",
    "2026-01-01 00:00:00 ",
]


@pytest.mark.alone
@pytest.mark.parametrize("seed", HOSTILE)
@pytest.mark.parametrize("status", [400, 403, 429])
def test_cost_of_a_hostile_body_does_not_grow_with_its_length(seed: str, status: int) -> None:
    def cost(length: int) -> float:
        body = (seed * (length // len(seed) + 1))[:length]
        return quickest({"provider": "glm", "auth": "api_key", "status": status, "body": body})

    small, large = cost(8_192), cost(65_536)
    assert large < 0.05
    assert large < 16 * max(small, 0.002)


@given(st.lists(st.text(max_size=60), max_size=5))
def test_lines_that_are_no_records_are_answered_one_by_one(lines: list[str]) -> None:
    good = json.dumps({"id": "last", "provider": "openai", "status": 500})
    *_, last = classify_lines([*(line.replace("\n", " ") for line in lines), good], POLICY, NOW)
    assert json.loads(last)["scope"] == "provider_failure"
