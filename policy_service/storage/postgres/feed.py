"""The change feed: polls by transaction snapshot, and the full load (spec/fleet.md section 4).

Every poll is one statement with one snapshot. Its xmin says from where the next poll reads: every transaction
below it was visible or had failed, whatever the order of the commits. What the snapshot itself could see is left out:
while some transaction stays open the xmin stands still, and every poll would bring the same rows again.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from policy_service.application.ports import Feed, Versioned
from policy_service.storage.postgres import statements
from policy_service.storage.postgres.session import Session
from policy_service.storage.rows import decode_row

AT_ONCE = 250
"""Records that are read in one step of the event loop: decisions go on while a large state is loaded."""

_WATERMARK = re.compile(r"([0-9]+)/(([0-9]+):[0-9]+:[0-9,]*)")


class Watermark(NamedTuple):
    """What was seen: a `pg_snapshot`; the epoch tells transaction ids of one server from another's."""

    epoch: int
    snapshot: str
    xmin: int
    """The snapshot's own: every older transaction had ended."""

    def __str__(self) -> str:
        return f"{self.epoch}/{self.snapshot}"

    @classmethod
    def parse(cls, text: str) -> Watermark | None:
        """None for a text that is no watermark of this store."""
        found = _WATERMARK.fullmatch(text)
        return cls(int(found[1]), found[2], int(found[3])) if found else None


@dataclass(slots=True)
class Reading:
    """Records of one statement of the feed."""

    head: Mapping[str, Any] = field(default_factory=dict)
    progress: dict[str, int] = field(default_factory=dict)
    rows: list[Versioned] = field(default_factory=list)
    written: dict[int, int] = field(default_factory=dict)

    def take(self, tag: str, body: Mapping[str, Any]) -> None:
        """Take one tagged record."""
        if tag == "head":
            self.head = body
        elif tag == "progress":
            self.progress[body["incarnation"]] = body["number"]
        else:
            self._take_row(tag, body)

    def _take_row(self, kind: str, body: Mapping[str, Any]) -> None:
        row = decode_row(kind, body["row"])
        if row is not None:
            self.rows.append(Versioned(body["version"], row))
            if "written_at" in body:
                self.written[body["version"]] = body["written_at"]

    def continues(self, since: Watermark) -> bool:
        """True where nothing between the two polls can have been pruned or lost with another server."""
        return bool(self.head["epoch"] == since.epoch and since.xmin > int(self.head["pruned"]))

    def feed(self, *, is_full: bool) -> Feed:
        """The reading as the port's value."""
        head = self.head
        return Feed(
            rows=tuple(self.rows),
            as_of=head["as_of"],
            watermark=f"{head['epoch']}/{head['snapshot']}",
            is_full=is_full,
            catalogue_revision=head["revision"],
            progress=self.progress,
            written=self.written,
            epoch=head["epoch"],
        )


async def load(session: Session) -> Feed:
    """The whole state, tombstones included."""
    return (await _read(session, statements.LOAD)).feed(is_full=True)


async def poll(session: Session, watermark: str) -> Feed:
    """Changes since a watermark; the whole state where the watermark is unknown, too old or of another server."""
    since = Watermark.parse(watermark)
    if since is None:
        return await load(session)
    reading = await _read(session, statements.POLL, str(since.xmin), since.snapshot)
    return reading.feed(is_full=False) if reading.continues(since) else await load(session)


async def _read(session: Session, statement: str, *parameters: Any) -> Reading:
    reading = Reading()
    async with session.connect() as connection:
        records = await session.execute(connection, statement, *parameters)
    for first in range(0, len(records), AT_ONCE):
        if first:
            await asyncio.sleep(0)
        for tag, body in records[first : first + AT_ONCE]:
            reading.take(tag, json.loads(body))
    return reading
