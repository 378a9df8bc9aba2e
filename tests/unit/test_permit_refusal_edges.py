"""What a refusal at a gate is called: code, status, length of the line, seconds (spec/concurrency.md 2, 4 and 5)."""

from __future__ import annotations

import pytest

from policy_service.domain.gates import PermitState
from policy_service.domain.line import Answer, PermitAnswer
from policy_service.domain.permits import PermitCode, Refusal, ended_refusal, refusal, store_unavailable
from tests.unit.test_line_edges import NOW, book, held, row


@pytest.mark.parametrize(
    ("state", "code", "status"),
    [
        (PermitState.TIMED_OUT, PermitCode.TIMEOUT, 429), (PermitState.RESET, PermitCode.RESET, 503),
        (PermitState.CANCELLED, PermitCode.CANCELLED, 499), (PermitState.WAITER_LOST, PermitCode.WAITER_LOST, 499),
        (PermitState.EXPIRED, PermitCode.EXPIRED, 409),
    ],
)  # fmt: skip
def test_an_end_is_told_with_its_status(state: PermitState, code: PermitCode, status: int) -> None:
    ended = row("a", state, ended_at=NOW)
    line = book(ended, held("h", expires_at=NOW + 1_500), row("w", ticket=2, waiter_seen_at=NOW))
    told = Refusal(code, status, depth=1, retry_after_s=2)
    assert refusal(PermitAnswer(Answer.ALREADY_ENDED, ended), line, NOW) == told
    assert ended_refusal(state, line, "g", NOW) == told


@pytest.mark.parametrize(
    ("answer", "code", "status"),
    [
        (Answer.QUEUE_FULL, PermitCode.QUEUE_FULL, 429), (Answer.TIMEOUT, PermitCode.TIMEOUT, 429),
        (Answer.EXPIRED, PermitCode.EXPIRED, 409),
    ],
)  # fmt: skip
def test_a_refusal_at_once_is_told_with_its_status(answer: Answer, code: PermitCode, status: int) -> None:
    line = book(held("h", expires_at=NOW + 1_000))
    assert refusal(PermitAnswer(answer), line, NOW) == Refusal(code, status, 0, 1)
    assert refusal(PermitAnswer(answer, gate="g"), line, NOW) == Refusal(code, status, 0, 1)
    assert Refusal(code, status).reason == "concurrency_saturated"


def test_a_renewal_that_comes_too_late_is_told_so_whatever_ended_the_permit() -> None:
    released = row(state=PermitState.RELEASED, ended_at=NOW)
    told = refusal(PermitAnswer(Answer.EXPIRED, released), book(released), NOW)
    assert told is not None
    assert told.code is PermitCode.EXPIRED


@pytest.mark.parametrize("answer", [Answer.HELD, Answer.WAITING, Answer.RENEWED, Answer.RELEASED, Answer.UNKNOWN])
def test_what_is_no_refusal_is_told_as_none(answer: Answer) -> None:
    assert refusal(PermitAnswer(answer, row()), book(row()), NOW) is None
    assert refusal(PermitAnswer(Answer.ALREADY_ENDED, row(state=PermitState.RELEASED)), book(), NOW) is None


def test_a_store_that_is_away_is_told_as_such() -> None:
    assert store_unavailable() == Refusal(PermitCode.STORE_UNAVAILABLE, 503, 0, None, "store_unavailable")
