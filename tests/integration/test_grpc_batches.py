"""Batch calls: each item has its own result, in order."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from policy_service.generated.policy.v1 import policy_pb2, policy_pb2_grpc
from policy_service.generated.policy.v1.policy_pb2 import ReportOutcomeRequest, SelectTargetRequest
from policy_service.transport.grpc.limits import Limits
from tests.integration.grpc_shell import Shell, detail, fields, shell

OPENAI: Any = {"provider": "openai", "connection": "a", "model": "m"}


def stub(running: Shell) -> policy_pb2_grpc.PolicyServiceStub:
    return policy_pb2_grpc.PolicyServiceStub(running.channel)


async def refusal(running: Shell, request: Any) -> grpc.aio.AioRpcError:
    call = stub(running).SelectTarget if isinstance(request, SelectTargetRequest) else stub(running).ReportOutcome
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call(request)
    return failed.value


def select(**given: Any) -> SelectTargetRequest:
    return SelectTargetRequest(**{"candidates": [OPENAI], **given})


def report(**given: Any) -> ReportOutcomeRequest:
    return ReportOutcomeRequest(**{"report_id": "r", "target": OPENAI, "http_status": 503, **given})


def candidate(**given: Any) -> SelectTargetRequest:
    second: Any = {**OPENAI, **given}
    return SelectTargetRequest(candidates=[OPENAI, second])


async def test_each_item_of_a_batch_has_its_own_result() -> None:
    items = [select(), candidate(weight=-1.0), SelectTargetRequest(route="empty")]
    async with shell() as running:
        results = (await stub(running).SelectTargets(policy_pb2.SelectTargetsRequest(items=items))).results
    assert [each.WhichOneof("result") for each in results] == ["answer", "error", "answer"]
    assert results[1].error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert detail(results[1].error, error_details_pb2.ErrorInfo).reason == "INVALID_FIELD"


async def test_items_that_wait_do_so_together_with_the_others_kept_in_order() -> None:
    items = [SelectTargetRequest(route="hold"), select(), SelectTargetRequest(route="hold")]
    async with shell() as running:
        running.selects.release.set()
        results = (await stub(running).SelectTargets(policy_pb2.SelectTargetsRequest(items=items))).results
    assert [each.answer.WhichOneof("verdict") for each in results] == ["reject", "dispatch", "reject"]


async def test_reports_of_a_batch_are_answered_in_order() -> None:
    items = [report(), report(attempt=1), report(report_id="")]
    async with shell() as running:
        results = (await stub(running).ReportOutcomes(policy_pb2.ReportOutcomesRequest(items=items))).results
    assert [each.WhichOneof("result") for each in results] == ["answer", "answer", "error"]
    assert results[0].answer.verdict.reason_text == "server_error"
    assert list(results[0].answer.ignored_texts) == ["suppressed"]


@pytest.mark.parametrize(("size", "expected"), [(0, "FIELD_REQUIRED"), (4, "TOO_LARGE")])
async def test_a_batch_has_between_one_item_and_the_limit(size: int, expected: str) -> None:
    async with shell(limits=Limits(batch=3)) as running:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub(running).SelectTargets(policy_pb2.SelectTargetsRequest(items=[select()] * size))
    assert fields(failed.value) == {"items": expected}
