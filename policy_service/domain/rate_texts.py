"""Limits that an error text states as "N per window" (spec/queue_admission.md section 5). Pure.

A count of requests and nothing else: "40000 tokens per minute" and "$5 per day" are other limits.
"""

from __future__ import annotations

import re

from policy_service.domain.ids import DurationMs
from policy_service.domain.retry_phrases import UNITS

_READ = 8_192
"""Characters of a text that are looked at."""
_CAP = re.compile(
    r"(?<![\w.,:$€£¥/-])([0-9]{1,9})[ ]?(?:(?:api[ ])?(?:requests?|reqs?|calls?|queries)[ ]?)?"
    r"(?:per|every|/)[ ]?([0-9]{1,6})?[ ]?([a-z]{1,7})(?![a-z])",
    re.IGNORECASE,
)


def body_cap(text: str) -> tuple[float, DurationMs] | None:
    """(count, window) of the first such limit, None where the text states none."""
    for found in _CAP.finditer(text[:_READ]):
        count, window_ms = int(found[1]), int(found[2] or 1) * UNITS.get(found[3].lower(), 0)
        if count and window_ms:
            return count, window_ms
    return None
