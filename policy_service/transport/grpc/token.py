"""Sealing and opening of decision tokens (DESIGN section 5, spec/fleet.md section 8).

A token is opaque to gateways and self-contained for replicas: format byte, key version, keyed BLAKE2b, protobuf
payload. It is authenticated, not encrypted; it carries ids and generations, never a secret.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b
from hmac import compare_digest

from google.protobuf.message import DecodeError

from policy_service.application.errors import TokenError
from policy_service.application.events import ProbeRef
from policy_service.application.messages import (
    NO_GENERATIONS,
    NOT_WAITED,
    DecisionToken,
    LaneWindow,
    LeaseFence,
    PermitRef,
    PinRef,
    TokenTarget,
    WaitSpent,
)
from policy_service.domain.ids import ConnectionId, DurationMs, Generations, Instant, ModelId, ProviderId, Target
from policy_service.domain.outcome import CallKind
from policy_service.generated.policy.internal.v1 import token_pb2 as pb
from policy_service.transport.grpc.memo import Memo

FORMAT = 1
MAX_TOKEN_BYTES = 4_096
DEFAULT_MAX_AGE_MS = 86_400_000
_MAC_BYTES = 16
_HEAD_BYTES = 3
_PAYLOAD_AT = _HEAD_BYTES + _MAC_BYTES
_REMEDY = "send the decision_token of the answer back unchanged, as bytes"
_CALL_KINDS = (CallKind.CLIENT, CallKind.HEALTH_CHECK, CallKind.LIVE_TEST)
_SEPARATOR = "\x1f"
_KIND_NUMBERS = {kind: number for number, kind in enumerate(_CALL_KINDS)}


class TokenTooLargeError(ValueError):
    """The sealed token would exceed 4 KiB; drop fallbacks and seal again."""


class TokenSeal:
    """Seals with the newest fleet secret and opens with any known one.

    Args:
        secrets: fleet secrets by key version (1 .. 65 535).
        max_age_ms: age at which a token is refused.
    """

    def __init__(self, secrets: Mapping[int, bytes], max_age_ms: DurationMs = DEFAULT_MAX_AGE_MS) -> None:
        self._max_age_ms = max_age_ms
        self.renew(secrets)

    def renew(self, secrets: Mapping[int, bytes]) -> None:
        """Take over a changed set of secrets; the highest version seals."""
        self._macs = {version: blake2b(key=key, digest_size=_MAC_BYTES) for version, key in secrets.items()}
        newest = max(self._macs)
        self._head = bytes((FORMAT,)) + newest.to_bytes(2, "big")
        self._sealing = self._macs[newest]

    def seal(self, token: DecisionToken) -> bytes:
        """The token as bytes.

        Raises:
            TokenTooLargeError: it would exceed 4 KiB.
        """
        payload = _payload(token).SerializeToString()
        if len(payload) > MAX_TOKEN_BYTES - _PAYLOAD_AT:
            raise TokenTooLargeError(f"{len(payload) + _PAYLOAD_AT} bytes")
        mac = self._sealing.copy()
        mac.update(self._head)
        mac.update(payload)
        return self._head + mac.digest() + payload

    def open(self, sealed: bytes, now: Instant, path: str = "decision_token") -> DecisionToken:
        """The content of a token of this fleet.

        Raises:
            TokenError: with reason DECISION_TOKEN_INVALID, _FORMAT, _FOREIGN or _EXPIRED.
        """
        read = self._reader(sealed, path)
        mac = self._mac(sealed, path)
        payload = sealed[_PAYLOAD_AT:]
        mac.update(sealed[:_HEAD_BYTES])
        mac.update(payload)
        if not compare_digest(mac.digest(), sealed[_HEAD_BYTES:_PAYLOAD_AT]):
            raise TokenError("DECISION_TOKEN_INVALID", "altered, truncated or not made by this fleet", _REMEDY, path)
        return self._fresh(_read(read, payload, path), now, path)

    def _fresh(self, token: DecisionToken, now: Instant, path: str) -> DecisionToken:
        if now - token.started_at > self._max_age_ms:
            limit = f"report within {self._max_age_ms // 1000} s, or without a token under a report_id"
            raise TokenError("DECISION_TOKEN_EXPIRED", "older than the token age", limit, path)
        return token

    def _reader(self, sealed: bytes, path: str) -> Callable[[bytes], DecisionToken]:
        if not _PAYLOAD_AT < len(sealed) <= MAX_TOKEN_BYTES:
            raise TokenError("DECISION_TOKEN_INVALID", f"{len(sealed)} bytes are no token", _REMEDY, path)
        reader = _READERS.get(sealed[0])
        if reader is None:
            raise TokenError("DECISION_TOKEN_FORMAT", f"format {sealed[0]} is not known here", _REMEDY, path)
        return reader

    def _mac(self, sealed: bytes, path: str) -> blake2b:
        version = int.from_bytes(sealed[1:_HEAD_BYTES], "big")
        keyed = self._macs.get(version)
        if keyed is None:
            raise TokenError("DECISION_TOKEN_FOREIGN", f"sealed with key {version} of another fleet", _REMEDY, path)
        return keyed.copy()


def _payload(token: DecisionToken) -> pb.TokenPayload:
    payload = pb.TokenPayload(
        decision_id=token.decision_id,
        started_at_unix_ms=token.started_at,
        targets=_targets_text(token.targets),
        request_id=token.request_id,
        route=token.route,
        caller_id=token.caller_id,
        reservation_id=token.reservation_id,
        is_pool=token.is_pool,
        attempts_made=token.attempts_made,
        policy_revision=token.policy_revision,
    )
    if token.waited != NOT_WAITED:
        payload.wait_attempts, payload.wait_spent_ms = token.waited
    if token.call_kind is not CallKind.CLIENT:
        payload.call_kind = _KIND_NUMBERS[token.call_kind]
    if token.probes or token.permits:
        _put_grants(payload, token)
    if token.lease or token.pin or token.lane:
        _put_context(payload, token)
    return payload


def _put_grants(payload: pb.TokenPayload, token: DecisionToken) -> None:
    payload.probes.extend(
        pb.TokenProbe(
            permit_id=p.permit_id, breaker_key=p.breaker_key, generation=p.generation, round=p.round, local=p.local
        )
        for p in token.probes
    )
    payload.permits.extend(pb.TokenPermit(permit_id=p.permit_id, gate=p.gate) for p in token.permits)


def _put_context(payload: pb.TokenPayload, token: DecisionToken) -> None:
    if lease := token.lease:
        payload.lease.CopyFrom(
            pb.TokenLease(
                owner_hash=bytes.fromhex(lease.owner_hash),
                generation=lease.generation,
                caller_id=lease.caller_id,
                connection=lease.connection,
            )
        )
    if pin := token.pin:
        payload.pin.CopyFrom(pb.TokenPin(**pin._asdict()))
    if lane := token.lane:
        window = pb.TokenLane(since_unix_ms=lane.since, attempts=lane.attempts, next_try_at_unix_ms=lane.next_try_at)
        payload.lane.CopyFrom(window)


def _read(reader: Callable[[bytes], DecisionToken], payload: bytes, path: str) -> DecisionToken:
    try:
        return reader(payload)
    except (DecodeError, ValueError, IndexError, TypeError) as error:
        raise TokenError("DECISION_TOKEN_INVALID", "payload cannot be read", _REMEDY, path) from error


def _read_first_format(data: bytes) -> DecisionToken:
    payload = pb.TokenPayload.FromString(data)
    has = payload.HasField
    return DecisionToken(
        decision_id=payload.decision_id,
        started_at=payload.started_at_unix_ms,
        targets=_targets(payload.targets) if payload.targets else (),
        request_id=payload.request_id,
        route=payload.route,
        caller_id=payload.caller_id,
        probes=tuple(map(_probe, payload.probes)),
        permits=tuple(map(_permit, payload.permits)),
        reservation_id=payload.reservation_id,
        lease=_lease(payload.lease) if has("lease") else None,
        pin=_pin(payload.pin) if has("pin") else None,
        waited=_waited(payload),
        lane=_lane(payload.lane) if has("lane") else None,
        call_kind=_CALL_KINDS[payload.call_kind],
        is_pool=payload.is_pool,
        attempts_made=payload.attempts_made,
        policy_revision=payload.policy_revision,
    )


_READERS: Mapping[int, Callable[[bytes], DecisionToken]] = {FORMAT: _read_first_format}
"""By format; a new format keeps the one before it here for one release."""


def _join(targets: tuple[TokenTarget, ...]) -> str:
    parts: list[str] = []
    for target, fence, key, _ in targets:
        parts += target
        parts += (key, "" if fence == NO_GENERATIONS else "{}.{}.{}".format(*fence))
    return _SEPARATOR.join(parts)


def _split(text: str) -> tuple[TokenTarget, ...]:
    parts = iter(text.split(_SEPARATOR))
    fives = zip(parts, parts, parts, parts, parts, strict=True)
    return tuple(
        TokenTarget(Target(ProviderId(provider), ConnectionId(connection), ModelId(model)), _fence(fence), key)
        for provider, connection, model, key, fence in fives
    )


def _fence(text: str) -> Generations:
    return Generations(*map(int, text.split("."))) if text else NO_GENERATIONS


_targets_text = Memo(_join)
_targets = Memo(_split)


def _waited(p: pb.TokenPayload) -> WaitSpent:
    return WaitSpent(p.wait_attempts, p.wait_spent_ms) if p.wait_attempts or p.wait_spent_ms else NOT_WAITED


def _probe(p: pb.TokenProbe) -> ProbeRef:
    return ProbeRef(p.permit_id, p.breaker_key, p.generation, p.round, p.local)


def _permit(p: pb.TokenPermit) -> PermitRef:
    return PermitRef(p.permit_id, p.gate)


def _lease(p: pb.TokenLease) -> LeaseFence:
    return LeaseFence(p.owner_hash.hex(), p.generation, p.caller_id, p.connection)


def _pin(p: pb.TokenPin) -> PinRef:
    return PinRef(p.session_hash, p.provider, p.connection, p.version, p.ttl_ms)


def _lane(p: pb.TokenLane) -> LaneWindow:
    return LaneWindow(p.since_unix_ms, p.attempts, p.next_try_at_unix_ms)
