"""Logging set-up: text for a person at a terminal, JSON lines for a collector. Secrets are never fields."""

from __future__ import annotations

import json
import logging
import sys
import time

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """One JSON object a record: time (UTC), level, logger, message, and whatever `extra` names."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        entry: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry.update((k, v) for k, v in vars(record).items() if k not in _STANDARD)
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False)


def configure(level: str, style: str) -> None:
    """Write records to standard error; `style` is `auto`, `text` or `json`."""
    wants_json = style == "json" or (style == "auto" and not sys.stderr.isatty())
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if wants_json else logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("alembic").setLevel(logging.WARNING)
