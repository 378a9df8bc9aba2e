"""Encoding of events for the spool: JSON, readable by the next release (unknown fields are passed over)."""

from __future__ import annotations

from pydantic import TypeAdapter

from policy_service.application.events import OutcomeEvent

_ADAPTER: TypeAdapter[OutcomeEvent] = TypeAdapter(OutcomeEvent)


def encode(event: OutcomeEvent) -> bytes:
    """JSON bytes of an event."""
    return _ADAPTER.dump_json(event, exclude_defaults=True)


def decode(data: bytes) -> OutcomeEvent:
    """The event; ValueError where the bytes are not one."""
    return _ADAPTER.validate_json(data)
