"""Exit codes of the command line; they are part of its interface."""

from __future__ import annotations

OK = 0
FAILED = 1
"""The command ran and the answer is no: unhealthy, drift, a demo that lost requests."""
CONFIGURATION = 2
"""A flag, variable or file cannot be used; nothing was started or changed."""
STORE_AWAY = 3
"""The database refused, hung or is not there."""
SCHEMA = 4
"""The database has an older or newer schema than this release."""
INTERRUPTED = 130

MEANINGS = {
    OK: "done",
    FAILED: "the answer is no: not serving, a document out of date, a check that failed",
    CONFIGURATION: "a flag, variable or file cannot be used; nothing was started or changed",
    STORE_AWAY: "the database refused, hung or is not there",
    SCHEMA: "the database has an older or newer schema than this release",
    INTERRUPTED: "interrupted from the keyboard",
}
"""For the documentation."""
