"""The matcher of text families: wordings of one meaning, as data.

Every test is linear in the text, which the caller has lowered once: plain substring scans, "B later on the line
of A", "B within n characters of A". Which wordings exist is said in the sibling modules.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field


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

    is_composite: bool = field(init=False, default=False)
    """There is more to test than plain phrases."""

    def found_in(self, text: str) -> bool:
        """True if `text` (lower case) carries the meaning."""
        for phrase in self.phrases:
            if phrase in text:
                return True
        return self.is_composite and self._composed_in(text)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_composite", bool(self.lines or self.near or self.chains or self.patterns))

    def _composed_in(self, text: str) -> bool:
        for a, b in self.lines:
            if a in text and later_on_line(text, a, b):
                return True
        for a, b, n in self.near:
            if a in text and within(text, a, b, n):
                return True
        return any(in_order(text, words, n) for words, n in self.chains) or any(
            pattern.search(text) for pattern in self.patterns
        )

    def __or__(self, other: Family) -> Family:
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
