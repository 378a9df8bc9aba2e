"""The matcher of text families: wordings of one meaning, as data.

Every test is linear in the text, which the caller has lowered once: plain substring scans, "B later on the line
of A", "B within n characters of A". Which wordings exist is said in the sibling modules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

Test = Callable[[str], bool]

_WORD = re.compile(r"[a-z0-9]{4,}|[^\x00-\x7f]{2}")
_COMMON = frozenset(
    "rate limit limits quota request requests model error errors tokens token exceeded reached account organization "  # noqa: SIM905
    "please your this that with have been https code type message".split()
)
"""Words of any refusal: their absence rules nothing out."""


class _Group(NamedTuple):
    """Wordings that all contain `shared`: a text without it has none of them."""

    shared: str
    phrases: tuple[str, ...]
    tests: tuple[Test, ...]


def _grouped(entries: Sequence[tuple[tuple[str, ...], str | Test]]) -> tuple[_Group, ...]:
    """Wordings by the words that most of them share, so that few searches rule all of them out.

    Args:
        entries: the parts that a text must contain, each, and the phrase or test itself.
    """
    left = list(entries)
    groups: list[_Group] = []
    while left:
        words = sorted({word for parts, _ in left for word in _telling(parts)})
        shared = max(words, key=lambda word: (sum(_needs(each, word) for each in left), len(word)))
        having = [each for each in left if _needs(each, shared)]
        phrases = tuple(what for _, what in having if isinstance(what, str))
        groups.append(_Group(shared, phrases, tuple(what for _, what in having if not isinstance(what, str))))
        left = [each for each in left if not _needs(each, shared)]
    return tuple(groups)


def _telling(parts: tuple[str, ...]) -> set[str]:
    """The parts and their words, without what any refusal says if that leaves something."""
    words = {word for part in parts for word in (part, *_WORD.findall(part))}
    return words - _COMMON or words


def _needs(entry: tuple[tuple[str, ...], object], word: str) -> bool:
    return any(word in part for part in entry[0])


@dataclass(frozen=True, slots=True)
class Family:
    """Wordings of one meaning; all parts lower case."""

    phrases: tuple[str, ...] = ()
    lines: tuple[tuple[str, str], ...] = ()
    """(A, B): B anywhere later on the line of A."""
    near: tuple[tuple[str, str, int], ...] = ()
    """(A, B, n): at most n characters between A and B, in either order."""
    chains: tuple[tuple[tuple[str, ...], int], ...] = ()
    """(words, n): the words in this order with at most n characters between neighbours."""
    patterns: tuple[re.Pattern[str], ...] = ()
    """Only patterns that are linear: no nested or unbounded adjacent repetition."""

    groups: tuple[_Group, ...] = field(init=False, default=(), compare=False)
    """All but the patterns, as they are searched for."""

    def __post_init__(self) -> None:
        entries: list[tuple[tuple[str, ...], str | Test]] = [((phrase,), phrase) for phrase in self.phrases]
        entries += [((a, b), partial(later_on_line, a=a, b=b)) for a, b in self.lines]
        entries += [((a, b), partial(within, a=a, b=b, n=n)) for a, b, n in self.near]
        entries += [(words, partial(in_order, words=words, n=n)) for words, n in self.chains]
        object.__setattr__(self, "groups", _grouped(entries))

    def found_in(self, text: str) -> bool:
        """True if `text` (lower case) carries the meaning."""
        for shared, phrases, tests in self.groups:
            if shared in text:
                for phrase in phrases:
                    if phrase in text:
                        return True
                for test in tests:
                    if test(text):
                        return True
        for pattern in self.patterns:  # noqa: SIM110 (a generator costs more than the search)
            if pattern.search(text):
                return True
        return False

    def __or__(self, other: Family) -> Family:
        """Both together; made once, at import: the grouping costs milliseconds."""
        return Family(
            self.phrases + other.phrases,
            self.lines + other.lines,
            self.near + other.near,
            self.chains + other.chains,
            self.patterns + other.patterns,
        )


def later_on_line(text: str, a: str, b: str) -> bool:
    """True if `b` stands after `a` on one line. Each line is looked at once, from its first `a`."""
    if b not in text:
        return False
    start = text.find(a)
    while start >= 0:
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        if text.find(b, start + len(a), end) >= 0:
            return True
        start = text.find(a, end)
    return False


def within(text: str, a: str, b: str, n: int) -> bool:
    """True if at most `n` characters lie between some `a` and some `b`, in either order."""
    if b not in text:
        return False
    start = text.find(a)
    while start >= 0:
        after = start + len(a)
        if text.find(b, max(0, start - n - len(b)), start) >= 0 or text.find(b, after, after + n + len(b)) >= 0:
            return True
        start = text.find(a, start + 1)
    return False


def in_order(text: str, words: tuple[str, ...], n: int) -> bool:
    """True if the words follow each other with at most `n` characters between neighbours."""
    if any(word not in text for word in words):
        return False
    start = text.find(words[0])
    while start >= 0:
        if _follows(text, start + len(words[0]), words[1:], n):
            return True
        start = text.find(words[0], start + 1)
    return False


def _follows(text: str, position: int, words: tuple[str, ...], n: int) -> bool:
    for word in words:
        found = text.find(word, position, position + n + len(word))
        if found < 0:
            return False
        position = found + len(word)
    return True


def one_of(*phrases: str) -> Family:
    """A family of plain substrings."""
    return Family(phrases)
