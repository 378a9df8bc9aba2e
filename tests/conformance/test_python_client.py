"""The Python client keeps the rules of the kit: a gateway that does nothing by itself, judged like any other."""

from __future__ import annotations

import pytest

from policy_service.cli.conformance.cases import load_cases
from policy_service.cli.conformance.checks import Status
from policy_service.cli.conformance.judge import judge
from policy_service.cli.conformance.rules import load_rules
from policy_service.cli.conformance.stage import staged
from tests.conformance.python_client_gateway import serving

WITHOUT = ("degradations",)
"""`tool_limit` is handed to the caller of the client, who builds the body."""
LONGER_THAN_THE_CASE = {"silent-service"}
"""The client stands in line for up to its whole budget, so its deadline is longer than the case."""


@pytest.mark.timeout(180)
async def test_the_python_client_keeps_every_rule() -> None:
    async with staged() as stage, serving(stage) as access:
        records = [await stage.play(case, access) for case in load_cases()]
    results = judge(load_rules(), records, WITHOUT)
    assert [(each.rule.id, each.failures) for each in results if each.status is Status.FAIL] == []
    skipped = {each.rule.id for each in results if each.status is Status.NOT_APPLICABLE} - {"tool-limit"}
    assert skipped == LONGER_THAN_THE_CASE
