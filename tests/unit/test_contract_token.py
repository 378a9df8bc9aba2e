"""Decision tokens: what is sealed comes back, and nothing else is ever opened."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy_service.application.errors import TokenError
from policy_service.application.events import ProbeRef
from policy_service.application.messages import (
    DecisionToken,
    LaneWindow,
    LeaseFence,
    PermitRef,
    PinRef,
    TokenTarget,
    WaitSpent,
)
from policy_service.domain.ids import ConnectionId, Generations, ModelId, ProviderId, Target
from policy_service.domain.outcome import CallKind
from policy_service.transport.grpc.memo import Memo
from policy_service.transport.grpc.token import FORMAT, MAX_TOKEN_BYTES, TokenSeal, TokenTooLargeError

NOW = 1_800_000_000_000
SEAL = TokenSeal({1: b"a" * 32})

ids = st.text(st.characters(categories=("L", "N", "P", "S")), max_size=40)
count = st.integers(0, 2**31 - 1)
number = st.integers(1, 2**53 - 1)
targets = st.builds(
    TokenTarget,
    st.builds(lambda p, c, m: Target(ProviderId(p), ConnectionId(c), ModelId(m)), ids, ids, ids),
    st.just(Generations()) | st.builds(Generations, number, number, number),
    ids,
    address=st.just(""),
)
tokens = st.builds(
    DecisionToken,
    decision_id=ids,
    started_at=st.integers(NOW - 1_000, NOW),
    targets=st.lists(targets, max_size=5).map(tuple),
    request_id=ids,
    route=ids,
    caller_id=ids,
    probes=st.lists(st.builds(ProbeRef, ids, ids, number, number, st.booleans()), max_size=2).map(tuple),
    permits=st.lists(st.builds(PermitRef, ids, ids), max_size=2).map(tuple),
    reservation_id=ids,
    lease=st.none() | st.builds(LeaseFence, st.binary(min_size=32, max_size=32).map(bytes.hex), number, ids, ids),
    pin=st.none() | st.builds(PinRef, ids, ids, ids, number, number),
    waited=st.builds(WaitSpent, st.integers(0, 10), st.integers(0, 2**53)),
    lane=st.none() | st.builds(LaneWindow, number, count, number),
    call_kind=st.sampled_from(CallKind),
    is_pool=st.booleans(),
    attempts_made=count,
    policy_revision=number,
)


@settings(max_examples=60, deadline=None)
@given(tokens)
def test_what_is_sealed_comes_back_whole(token: DecisionToken) -> None:
    try:
        sealed = SEAL.seal(token)
    except TokenTooLargeError:
        return
    assert len(sealed) <= MAX_TOKEN_BYTES
    assert SEAL.open(sealed, NOW) == token


TOKEN = DecisionToken("d", NOW, (TokenTarget(Target(ProviderId("p"), ConnectionId("c"), ModelId("m"))),))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_token_with_any_bit_changed_is_refused(data: st.DataObject) -> None:
    sealed = bytearray(SEAL.seal(TOKEN))
    sealed[data.draw(st.integers(0, len(sealed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(TokenError):
        SEAL.open(bytes(sealed), NOW)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(TokenError):
        SEAL.open(data, NOW)


@pytest.mark.parametrize("length", range(0, len(SEAL.seal(TOKEN)), 7))
def test_a_token_cut_anywhere_is_refused(length: int) -> None:
    with pytest.raises(TokenError) as failed:
        SEAL.open(SEAL.seal(TOKEN)[:length], NOW)
    assert failed.value.reason == "DECISION_TOKEN_INVALID"


def test_tokens_of_an_older_key_stay_valid_after_a_rotation() -> None:
    sealed = SEAL.seal(TOKEN)
    rotated = TokenSeal({1: b"a" * 32, 2: b"b" * 32})
    assert rotated.open(sealed, NOW) == TOKEN
    assert rotated.seal(TOKEN)[1:3] == b"\x00\x02"


def test_a_replica_that_learns_a_new_key_opens_the_tokens_of_the_others() -> None:
    late = TokenSeal({1: b"a" * 32})
    sealed = TokenSeal({1: b"a" * 32, 2: b"b" * 32}).seal(TOKEN)
    with pytest.raises(TokenError) as failed:
        late.open(sealed, NOW)
    late.renew({1: b"a" * 32, 2: b"b" * 32})
    assert failed.value.reason == "DECISION_TOKEN_FOREIGN"
    assert late.open(sealed, NOW) == TOKEN


@pytest.mark.parametrize(("age_ms", "is_taken"), [(1_000, True), (1_001, False), (-5_000, True)])
def test_the_age_is_judged_by_the_start_of_the_decision(age_ms: int, is_taken: bool) -> None:
    seal = TokenSeal({1: b"a" * 32}, max_age_ms=1_000)
    sealed = seal.seal(TOKEN)
    if is_taken:
        assert seal.open(sealed, NOW + age_ms) == TOKEN
        return
    with pytest.raises(TokenError) as failed:
        seal.open(sealed, NOW + age_ms)
    assert failed.value.reason == "DECISION_TOKEN_EXPIRED"


def test_a_token_carries_format_and_key_version() -> None:
    assert SEAL.seal(TOKEN)[:3] == bytes([FORMAT, 0, 1])


def test_a_decision_that_does_not_fit_is_refused_when_it_is_sealed() -> None:
    many = tuple(TokenTarget(Target(ProviderId("p" * 256), ConnectionId(str(i)), ModelId(""))) for i in range(20))
    with pytest.raises(TokenTooLargeError):
        SEAL.seal(TOKEN._replace(targets=many))


def test_a_memory_is_bounded_and_changes_no_result() -> None:
    double: Memo[int, int] = Memo(lambda key: key * 2, limit=3)
    assert [double(key) for key in (1, 2, 3, 4, 1)] == [2, 4, 6, 8, 2]
    assert len(double) <= 3
