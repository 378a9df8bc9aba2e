"""How an HTTP request of an SDK goes to a target: its address, its credential, its model. Pure.

The SDK's own host and credential never travel: they are replaced by those of the target.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from policy_client import messages, outcomes
from policy_client._carried.stream_events import carries_error
from policy_client._carried.watchdog import WatchdogSettings
from policy_client.outcomes import BODY_BYTES, Outcome
from policy_client.steps import Attempt, Budget

CREDENTIAL_HEADERS = frozenset({"authorization", "proxy-authorization", "x-api-key", "api-key", "x-goog-api-key"})
CONTROL_PREFIX = "x-policy-"
"""Headers for the policy itself."""
_MADE_ANEW = frozenset({"host", "content-length", "transfer-encoding", "connection", "accept-encoding"})


@dataclass(frozen=True, slots=True)
class Upstream:
    """Where a target is.

    Args:
        base_url: takes the place of the SDK's address, version path included: `https://api.openai.com/v1`,
            `https://api.anthropic.com/v1`.
        headers: set on each request; the credential belongs here.
    """

    base_url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


Upstreams: TypeAlias = Mapping[str, Upstream] | Callable[[messages.Target], Upstream]
"""Where each target is: a function, or a table by `provider/connection`, connection, or provider."""


@dataclass(frozen=True)
class Sent:
    """A request as the SDK sent it. `path` with its query."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    @cached_property
    def json(self) -> dict[str, Any]:
        """The body, where it is a JSON object; else empty."""
        try:
            found = json.loads(self.body) if self.body[:1] == b"{" else {}
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def model(self) -> str:
        """Model that the SDK asks for; empty: none."""
        model = self.json.get("model")
        return outcomes.sound(model) if isinstance(model, str) else ""


Asking: TypeAlias = messages.SelectTargetRequest | Callable[[Sent], messages.SelectTargetRequest]
"""What to select from: the same for every request, or made of it."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A request to a target."""

    url: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


@dataclass(frozen=True, slots=True)
class Door:
    """How requests of an SDK pass the policy.

    Args:
        upstreams: where each target is.
        asking: what to select from; unless given the route named like the model of the request.
        base_path: path of the SDK's base URL that `Upstream.base_url` takes the place of.
        budget: bounds of a request.
        rewrites_model: put the target's model into JSON bodies that name one.
        watchdog: when a stream is too slow; disabled unless given (spec/watchdog.md).
        held_bytes: of a stream that shows no output yet, so much is held back to be able to go elsewhere.
    """

    upstreams: Upstreams
    asking: Asking | None = None
    base_path: str = "/v1"
    budget: Budget = field(default_factory=Budget)
    rewrites_model: bool = True
    watchdog: WatchdogSettings | None = None
    held_bytes: int = 65_536

    def asked(self, sent: Sent) -> messages.SelectTargetRequest:
        """What to ask the policy for a request."""
        if self.asking is None:
            return messages.route(sent.model)
        return self.asking if isinstance(self.asking, messages.SelectTargetRequest) else self.asking(sent)

    def outgoing(self, sent: Sent, attempt: Attempt) -> Outgoing:
        """The request for one attempt.

        Raises:
            LookupError: no upstream is known for the target.
        """
        upstream = upstream_of(self.upstreams, attempt.target)
        rest = sent.path.removeprefix(self.base_path) if sent.path.startswith(self.base_path) else sent.path
        dropped = CREDENTIAL_HEADERS | _MADE_ANEW | frozenset(attempt.strip_headers)
        set_here = {name.lower(): value for name, value in (*upstream.headers.items(), *attempt.headers)}
        replaced = dropped | set_here.keys()
        kept = (each for each in sent.headers if not _stays_here(each[0].lower(), replaced))
        # Identity: what passes is read on the way.
        headers = (*kept, *set_here.items(), ("accept-encoding", "identity"))
        return Outgoing(upstream.base_url.rstrip("/") + rest, headers, self._body(sent, attempt.target.model))

    def _body(self, sent: Sent, model: str) -> bytes:
        if not self.rewrites_model or not model or sent.model in ("", model):
            return sent.body
        text = json.dumps({**sent.json, "model": model}, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "backslashreplace")  # half of a surrogate pair stays the escape that it was


def _stays_here(name: str, replaced: frozenset[str]) -> bool:
    return name in replaced or name.startswith(CONTROL_PREFIX)


def upstream_of(upstreams: Upstreams, target: messages.Target) -> Upstream:
    """Where a target is.

    Raises:
        LookupError: the table has no entry for it.
    """
    if callable(upstreams):
        return upstreams(target)
    names = (f"{target.provider}/{target.connection}", target.connection, target.provider)
    found = next((upstreams[name] for name in names if name in upstreams), None)
    if found is None:
        raise LookupError(f"no upstream for {names[0]}: add one under {', '.join(map(repr, filter(None, names)))}")
    return found


def whole_outcome(status: int, headers: tuple[tuple[str, str], ...], body: bytes, first_byte_ms: int) -> Outcome:
    """Outcome of an answer that has been read whole; of a success the body is told only where it is an error."""
    is_told = status >= 400 or _is_error_inside(headers, body)
    told = outcomes.http(status, headers, body[:BODY_BYTES] if is_told else b"")
    return outcomes.Outcome(
        status, headers=told.headers, body=told.body, first_byte_ms=first_byte_ms, bytes_streamed=len(body)
    )


def _is_error_inside(headers: tuple[tuple[str, str], ...], body: bytes) -> bool:
    if "json" not in header(headers, "content-type") or len(body) > BODY_BYTES:
        return False
    try:
        return carries_error(json.loads(body))
    except (ValueError, RecursionError):
        return bool(body)


def header(headers: tuple[tuple[str, str], ...], name: str) -> str:
    """Value of a header; empty without it."""
    return next((value for known, value in headers if known.lower() == name), "")


def is_event_stream(status: int, headers: tuple[tuple[str, str], ...]) -> bool:
    """A success that streams events, readable as it comes."""
    is_plain = header(headers, "content-encoding") in ("", "identity")
    return status < 400 and is_plain and header(headers, "content-type").startswith("text/event-stream")


_OF_THE_WIRE = ("content-encoding", "content-length", "transfer-encoding")


def restated(headers: tuple[tuple[str, str], ...], retry_after_ms: int | None) -> Iterator[tuple[str, str]]:
    """Headers of a failed answer that is given back decoded, with the waiting time that the service states anew."""
    stale = {*_OF_THE_WIRE, "x-should-retry"} | ({"retry-after"} if retry_after_ms is not None else set())
    yield from ((name, value) for name, value in headers if name.lower() not in stale)
    if retry_after_ms is not None:
        yield "retry-after", str(-(-retry_after_ms // 1000))
