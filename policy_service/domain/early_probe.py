"""Early probe of long blocks: one permit per interval tests a block before its end (spec/guards.md section 7). Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from policy_service.domain.connection_state import EarlyProbe
from policy_service.domain.ids import SERVER_STATED, DurationMs, Instant
from policy_service.domain.profiles import EarlyProbeProfile


@dataclass(frozen=True, slots=True)
class Block:
    """A connection timer or model lock: its start, its end, and who stated the end."""

    start: Instant
    until: Instant
    hint_source: str = ""
    permit: EarlyProbe | None = None
    """Permit of the last test; None if there was none or it told nothing."""


def next_permit_at(block: Block, profile: EarlyProbeProfile) -> Instant | None:
    """Instant from which the next permit may be granted; None: this block is not tested early.

    The first permit comes one interval after the start. After a failed test the next one comes one interval after
    the grant of the last; a permit that ran out unused gives its place back at its expiry.
    """
    server_stated = block.hint_source in SERVER_STATED and not profile.include_server_stated
    if not profile.enabled or server_stated or block.until - block.start <= profile.min_block_ms:
        return None
    first = block.start + profile.interval_ms
    last = block.permit
    due = first if last is None else last.granted_at + profile.interval_ms if last.used else last.expires_at
    return due if due < block.until else None


def grant(
    block: Block, profile: EarlyProbeProfile, now: Instant, permit_id: str, ttl_ms: DurationMs
) -> EarlyProbe | None:
    """Permit to test the block now, or None. `ttl_ms` is the breaker's reset timeout.

    Runs under the guard row of the provider, so that the whole fleet grants one.
    """
    due = next_permit_at(block, profile)
    if due is None or not due <= now < block.until:
        return None
    return EarlyProbe(permit_id, now, now + ttl_ms)


def holds(permit: EarlyProbe | None, permit_id: str) -> bool:
    """True if `permit_id` is the permit that is out."""
    return permit is not None and bool(permit_id) and permit.id == permit_id and not permit.used


def failed(permit: EarlyProbe) -> EarlyProbe:
    """Permit after a failed test: the interval runs from its grant."""
    return replace(permit, used=True)
