"""The rules that a gateway is judged by, read from `rules.yaml`: what each demands, which document says so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

FILE: Final = Path(__file__).with_name("rules.yaml")


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    Args:
        id: name in the table and of `--only`.
        says: the rule in one sentence.
        sources: documents, `file` or `file: Message.field` for the contract.
        checks: names of functions of `checks`; all of them judge.
        always: judged in every case that does not exempt it, else in the cases that name it.
        feature: what a gateway may do without, see `--without`; empty: nothing.
        level: `must`, or `should` where a breach costs quality and breaks nothing.
    """

    id: str
    says: str
    sources: Sequence[str]
    checks: Sequence[str]
    always: bool = False
    feature: str = ""
    level: str = "must"


def load_rules(file: Path = FILE) -> list[Rule]:
    """Every rule, in the order of the file."""
    return list(_read(yaml.safe_load(file.read_text(encoding="utf-8"))))


def _read(raw: list[dict[str, Any]]) -> Iterator[Rule]:
    yield from (Rule(**each) for each in raw)


def features(rules: Sequence[Rule]) -> list[str]:
    """What a gateway may do without."""
    return sorted({rule.feature for rule in rules if rule.feature})
