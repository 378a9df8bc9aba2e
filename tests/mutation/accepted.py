"""The list of mutants that no test has to notice (`accepted.toml`), and its table for the reference page.

`python -m tests.mutation.accepted` prints the table; a test compares it with the page and with the code.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LIST = Path(__file__).with_name("accepted.toml")
KINDS = {
    "equivalent": "no input tells the difference",
    "cost": "only the cost differs",
    "bound": "moves a bound of the work that is done for junk, between two values that serve as well",
}


@dataclass(frozen=True, slots=True)
class Accepted:
    """One mutant: module below the domain, the changed line before and after, and why it may stay."""

    module: str
    before: str
    after: str
    kind: str
    reason: str

    @property
    def change(self) -> str:
        """As `mutants.difference` words it."""
        return f"{self.before}  ->  {self.after}"


@cache
def accepted() -> Mapping[tuple[str, str], Accepted]:
    """By module and change."""
    found = [Accepted(**each) for each in tomllib.loads(LIST.read_text(encoding="utf-8"))["mutant"]]
    return {(each.module, each.change): each for each in found}


def table() -> str:
    """Markdown, one row a mutant."""
    head = ["| module | change | kind | reason |", "|---|---|---|---|"]
    rows = [f"| {each.module} | {_code(each)} | {each.kind} | {each.reason} |" for each in accepted().values()]
    return "\n".join([*head, *sorted(rows)])


def _code(each: Accepted) -> str:
    """Only what differs of the two lines, with a word of context on both sides."""
    before, after = each.before.split(" "), each.after.split(" ")
    start = next((at for at, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), 0)
    end = next((at for at, pair in enumerate(zip(before[::-1], after[::-1], strict=False)) if pair[0] != pair[1]), 0)
    sides = (" ".join(side[max(0, start - 2) : max(start + 1, len(side) - end + 1)]) for side in (before, after))
    return " to ".join(f"`{side.replace('|', chr(92) + '|')}`" for side in sides)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
