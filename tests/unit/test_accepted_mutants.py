"""The list of mutants that may stay alive: each is a change of a line that exists, has a reason, and is on the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutation.accepted import KINDS, Accepted, accepted, table

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "mutation.md"


@pytest.mark.parametrize("mutant", accepted().values(), ids=lambda each: f"{each.module}: {each.after[:60]}")
def test_an_accepted_mutant_changes_a_line_of_the_code_for_a_reason(mutant: Accepted) -> None:
    source = (ROOT / "policy_service" / "domain" / f"{mutant.module}.py").read_text(encoding="utf-8")
    assert mutant.before in [line.strip() for line in source.splitlines()]
    assert mutant.before != mutant.after
    assert mutant.kind in KINDS
    assert len(mutant.reason) > 10


def test_no_mutant_is_listed_twice() -> None:
    listed = (ROOT / "tests" / "mutation" / "accepted.toml").read_text(encoding="utf-8").count("[[mutant]]")
    assert listed == len(accepted())


def test_the_page_lists_what_the_gate_accepts() -> None:
    assert table() in PAGE.read_text(encoding="utf-8"), "run `python -m tests.mutation.accepted` and paste its table"
