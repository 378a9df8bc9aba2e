"""Golden vectors: what the scripted service and upstreams do in a case, what the client sends, what must follow.

Read from `cases/*.yaml`; the format is described in docs/doors/conformance.md. A word that the format does not have is
an error, so that a misspelt expectation cannot pass unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

PLACE: Final = Path(__file__).with_name("cases")
CONNECTIONS: Final = ("alpha", "bravo", "charlie", "closed")
"""Connections of every case. Nobody listens at the address of `closed`."""


PLAIN_BODY: Final = (
    '{"object": "chat.completion", "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}}]}'
)


@dataclass(frozen=True, slots=True)
class Step:
    """One answer of the scripted service.

    Args:
        answer: message of the contract in its JSON form; connections by name where a target is due.
        error: `code`, and `reason` where ErrorInfo comes with it, and `pushback_ms`; -1: not to be repeated.
        after_ms: pause before it.
        repeats: also the answer to every further call.
        request: only for calls that are made during the client request of this number; None: for any.
        calls: only for calls that are made when so many upstream calls were made; None: for any.
    """

    answer: Mapping[str, Any] = field(default_factory=dict)
    error: Mapping[str, Any] | None = None
    after_ms: int = 0
    repeats: bool = False
    request: int | None = None
    calls: int | None = None


@dataclass(frozen=True, slots=True)
class Behaviour:
    """One answer of an upstream.

    Args:
        status: HTTP status.
        headers: of the answer.
        body: text of the answer.
        padding: that many bytes are appended to the body.
        events: data of server-sent events, instead of a body.
        gap_ms: pause before each event but the first.
        after_ms: pause before the answer begins.
        end: `whole`, or how it breaks off: `reset` (RST instead of an answer), `cut` (a stream that is closed before
            its framing ends), `silence` (nothing more comes, the connection stays open), `garbage` (no HTTP).
    """

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str = PLAIN_BODY
    padding: int = 0
    events: Sequence[str] = ()
    gap_ms: int = 0
    after_ms: int = 0
    end: str = "whole"


@dataclass(frozen=True, slots=True)
class ClientScript:
    """One client request.

    Args:
        stream: asks for an event stream.
        headers: beside those that every request has.
        body: fields of the request beside model, messages and stream.
        leave_after_ms: the client hangs up then.
        leave_after_events: the client hangs up after that many events.
        patience_ms: the client hangs up then, and that is no part of the case.
        after_ms: pause before the request.
    """

    stream: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)
    leave_after_ms: int | None = None
    leave_after_events: int | None = None
    patience_ms: int = 8_000
    after_ms: int = 0


@dataclass(frozen=True, slots=True)
class Case:
    """One case.

    Args:
        name: unique.
        says: the case in one sentence.
        policy: steps by method; past their end the defaults of the scripted service answer.
        upstreams: behaviours by connection; past their end a plain 200.
        clients: requests, sent one after the other, or all at once.
        together: all at once.
        expect: arguments of the rules that this case judges.
        exempt: rules for every case that are not judged here.
        settle_ms: how long late calls are waited for at most.
        rest_ms: pause before the case: a gateway may leave a service that was away alone for a moment.
        watch_ms: how long they are waited for at least, where what must not happen would come late.
        token_bytes: length of the decision tokens.
    """

    name: str
    says: str
    policy: Mapping[str, Sequence[Step]] = field(default_factory=dict)
    upstreams: Mapping[str, Sequence[Behaviour]] = field(default_factory=dict)
    clients: Sequence[ClientScript] = (ClientScript(),)
    expect: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    exempt: frozenset[str] = frozenset()
    settle_ms: int = 1_500
    watch_ms: int = 0
    rest_ms: int = 0
    together: bool = False
    token_bytes: int = 96


def load_cases(place: Path = PLACE) -> list[Case]:
    """Every case, in the order of the file names and within the files.

    Raises:
        TypeError: a word that the format does not have.
        ValueError: two cases of one name.
    """
    cases = [case for file in sorted(place.glob("*.yaml")) for case in _of_file(file)]
    names = [case.name for case in cases]
    if len(set(names)) != len(names):
        raise ValueError(f"cases of one name: {sorted({name for name in names if names.count(name) > 1})}")
    return cases


def _of_file(file: Path) -> Iterator[Case]:
    for raw in yaml.safe_load(file.read_text(encoding="utf-8")):
        yield read_case(raw)


def read_case(raw: Mapping[str, Any]) -> Case:
    """One case from its YAML form."""
    readers: dict[str, Callable[[Any], Any]] = {
        "policy": lambda found: {method: [Step(**step) for step in steps] for method, steps in found.items()},
        "upstreams": lambda found: {name: [Behaviour(**each) for each in found[name]] for name in found},
        "clients": lambda found: [ClientScript(**each) for each in found],
        "expect": lambda found: {rule: given or {} for rule, given in found.items()},
        "exempt": frozenset,
    }
    return Case(**{word: readers[word](value) if word in readers else value for word, value in raw.items()})
