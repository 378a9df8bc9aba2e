"""One outcome made ready for reading: lower-case text, structured names, the waiting time it states.

Read by classification, guards and the public verdict, so that each answer is lowered and parsed once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Final

from policy_service.domain import signals
from policy_service.domain.decision_record import Hint
from policy_service.domain.error_object import json_text, read_json
from policy_service.domain.ids import AuthClass, DurationMs, Instant
from policy_service.domain.outcome import Outcome
from policy_service.domain.policy import ConnectionPolicy
from policy_service.domain.retry_hints import read_hint, stated_wait_ms

_UNREAD: Final = object()
_NAIVE_TIME: Final = re.compile(r"(\d{4}-\d{2}-\d{2}[ T]\d{2}:\d{2}:\d{2})(?![\d.:]|\s?(?:Z|UTC|GMT|[+-]\d))")


_QUOTED: Final = re.compile(r"(?<!\w)(?:'[^'\n]{1,200}'|`[^`\n]{1,200}`|\"[^\"\n]{1,200}\")(?!\w)")
_PLACE: Final = re.compile(r"[\"']loc\\{0,3}[\"']\s{0,4}:\s{0,4}\[")
"""Path to what did not pass, as FastAPI and Pydantic write it."""
_NUMBER_BEHIND: Final = re.compile(r"\(([0-9]{3,6})\)\s{0,4}(?:\([^()]{1,80}\)\s{0,4})?$")
"""A code behind the words of a message; the id of the request may follow."""
_NUMBER_SPAN: Final = 100
_HEAD: Final = 4_096
_TAIL: Final = 2_048


def lowered_text(outcome: Outcome) -> str:
    """The text that signals are looked for in: lower case, and of a long one its beginning and its end.

    What an error says stands at the beginning of its message; the middle of a long body is a page or the caller's
    own input sent back. The bound keeps the cost of a hostile body small.
    """
    text = outcome.text
    if len(text) > _HEAD + _TAIL:
        text = f"{text[:_HEAD]}\n{text[-_TAIL:]}"
    return text.lower()


class Reading:
    """An outcome with what the rules look at; the hint is read on first use."""

    __slots__ = (
        "_hint", "_usable", "account_text", "code", "meaning", "now", "outcome", "policy", "status", "text", "type",
    )  # fmt: skip

    def __init__(self, outcome: Outcome, policy: ConnectionPolicy, now: Instant) -> None:
        self.outcome = outcome
        self.policy = policy
        self.now = now
        self.status = outcome.status
        self.code = outcome.code.lower()
        self.type = outcome.type.lower()
        self.text = lowered_text(outcome)
        self.account_text = account_text(outcome, self.text)
        """Text for account signals: without what the caller sent and the message only quotes."""
        table = policy.provider.code_meanings
        self.meaning: str = _meaning(table, outcome, self.code, self.type) if table else ""
        """What the provider's catalogue says about the structured code or type; empty where it says nothing."""
        self._hint: object = _UNREAD
        self._usable: bool | None = None

    @property
    def hint(self) -> Hint | None:
        """Waiting time stated by the answer, None without one."""
        if self._hint is _UNREAD:
            self._hint = read_hint(self.outcome.headers, *self._timed(), self.now, self.policy.hints)
        return self._hint  # type: ignore[return-value]

    @property
    def stated_wait_ms(self) -> DurationMs | None:
        """The stated wait for display: also a wait of zero."""
        return stated_wait_ms(self.outcome.headers, *self._timed(), self.now, self.policy.hints)

    def _timed(self) -> tuple[object, str]:
        """Body and text with the provider's own zone written behind times that name none."""
        of, offset = self.outcome, self.policy.provider.naive_times_offset
        if not offset or not _NAIVE_TIME.search(of.text):
            return of.body, of.text
        zoned = partial(_NAIVE_TIME.sub, rf"\g<1>{offset}")
        return read_json(zoned(json_text(of.body))), zoned(of.text)

    @property
    def is_api_key(self) -> bool:
        """The credential is a key."""
        return self.policy.auth_class is AuthClass.API_KEY

    @property
    def is_signal_usable(self) -> bool:
        """Quota words count (classification.md section 1): not for a plain 429 of a key."""
        if self._usable is None:
            self._usable = self._find_usable()
        return self._usable

    def _find_usable(self) -> bool:
        if self.status != 429 or self.policy.auth_class in (AuthClass.OAUTH, AuthClass.NONE):
            return True
        return self.is_api_key and signals.LONG_PERIOD.found_in(self.account_text)


def _meaning(table: Mapping[str, str], outcome: Outcome, code: str, kind: str) -> str:
    """What a provider's table says: of the code, the type, the number at the end of the message ("busy (1041)"), or a
    status of its own that stands in a 200."""
    told = table.get(code) or table.get(kind)
    if told is not None:
        return told
    number = _NUMBER_BEHIND.search(outcome.message[-_NUMBER_SPAN:])
    own = table.get(number[1]) if number else None
    return own or (table.get(str(outcome.inner_status), "") if outcome.is_error_in_success else "")


def account_text(outcome: Outcome, text: str) -> str:
    """What of the lower-case `text` may speak of an account; nothing quoted, where the request is blamed."""
    if echoes_request(outcome):
        return ""
    if outcome.status not in (400, 404, 422) or outcome.type.lower() != "invalid_request_error":
        return text
    return _QUOTED.sub(" ", f"{outcome.code} {outcome.message[:_HEAD]}").lower()


def echoes_request(outcome: Outcome) -> bool:
    """True for a 400 or 422 that says by its code, or by naming the place, that a parameter did not pass: its message
    quotes the caller's input, in which the name of any signal may stand."""
    if outcome.status not in (400, 422):
        return False
    return outcome.code.lower() in signals.VALIDATION_CODES or _PLACE.search(outcome.text, 0, _HEAD) is not None
