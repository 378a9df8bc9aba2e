"""When a daily quota comes back (spec/classification.md section 7). Pure: `now` is an argument, zones are IANA data."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final
from zoneinfo import ZoneInfo

from policy_service.domain.ids import DurationMs, Instant

DAY_MS: Final = 86_400_000


def until_midnight(now: Instant, zone: str | None) -> DurationMs:
    """Time to the next midnight in `zone` (None: the zone of the host), at most 24 h."""
    return until_hour(now, zone, 0)


def until_hour(now: Instant, zone: str | None, hour: int) -> DurationMs:
    """Time to the next full `hour` (0..23) strictly after `now`; an exact hit means the next day. At most 24 h."""
    return min(whole_wait(now, zone, hour), DAY_MS)


def whole_wait(now: Instant, zone: str | None, hour: int) -> DurationMs:
    """As `until_hour`, but the day on which a zone goes back to winter time lasts its 25 h."""
    local = _local(now, zone)
    wanted = local.replace(hour=hour, minute=0, second=0, microsecond=0)
    if wanted <= local:
        wanted = _same_wall_time_tomorrow(wanted)
    return round(wanted.timestamp() * 1000) - now


def _local(now: Instant, zone: str | None) -> datetime:
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=now)
    return moment.astimezone(ZoneInfo(zone) if zone else None)


def _same_wall_time_tomorrow(moment: datetime) -> datetime:
    """The same hour a day later; a zone with daylight saving changes the distance, not the hour."""
    return moment + timedelta(days=1)
