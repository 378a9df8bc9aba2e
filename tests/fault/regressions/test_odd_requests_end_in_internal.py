"""Requests that are merely odd ended in INTERNAL: numbers that JSON does not know, ids that fill the token. One such
item took the answers of a whole batch with it."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import grpc
import pytest
from google.protobuf.struct_pb2 import Struct
from google.rpc import code_pb2

from policy_service.application.errors import InvalidRequestError
from policy_service.generated.policy.v1 import admin_pb2, policy_pb2, policy_pb2_grpc
from policy_service.generated.policy.v1.policy_pb2 import SelectTargetRequest
from policy_service.transport.grpc.limits import Problems
from policy_service.transport.grpc.mapping.admin_request import patch_body, read_place
from tests.integration.grpc_shell import Shell, fields, shell

OPENAI: Any = {"provider": "openai", "connection": "a", "model": "m"}
WIDE = "\U0001f600" * 256


def stub(running: Shell) -> policy_pb2_grpc.PolicyServiceStub:
    return policy_pb2_grpc.PolicyServiceStub(running.channel)


def struct(value: float) -> Struct:
    made = Struct()
    made.update({"outer": {"list": [1.5, "text", None, True, value]}})
    return made


async def refusal(running: Shell, request: SelectTargetRequest) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await stub(running).SelectTarget(request)
    return failed.value


@pytest.mark.parametrize("number", [nan, inf, -inf])
async def test_an_option_that_is_no_number_is_named(number: float) -> None:
    async with shell() as running:
        failed = await refusal(running, SelectTargetRequest(candidates=[OPENAI], strategy_options=struct(number)))
    assert failed.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert fields(failed) == {"strategy_options.outer.list[4]": "INVALID_FIELD"}


async def test_options_are_read_as_json_has_them() -> None:
    async with shell() as running:
        await stub(running).SelectTarget(SelectTargetRequest(candidates=[OPENAI], strategy_options=struct(3)))
        assert running.selects.seen[-1].strategy_options == {"outer": {"list": [1.5, "text", None, True, 3.0]}}


def test_a_setting_that_is_no_number_is_named() -> None:
    problems = Problems()
    patch_body(admin_pb2.PatchSettingsRequest(patch=struct(nan)), problems)
    with pytest.raises(InvalidRequestError, match=r"patch\.outer\.list\[4\]"):
        problems.settle()


def test_a_page_token_that_nests_without_end_is_refused() -> None:
    problems = Problems()
    token = "W1tb" * 30_000  # [[[ in base64
    assert read_place(token, problems) is None
    assert [each.path for each in problems.found] == ["page_token"]


async def test_ids_that_do_not_fit_into_a_token_are_refused_as_too_large() -> None:
    candidate: Any = {"provider": WIDE, "connection": WIDE, "model": WIDE, "key": WIDE}
    async with shell() as running:
        failed = await refusal(running, SelectTargetRequest(candidates=[candidate]))
    assert failed.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert fields(failed) == {"candidates": "TOO_LARGE"}


async def test_an_item_that_fails_in_whatever_way_leaves_the_others_their_answers() -> None:
    candidate: Any = {"provider": WIDE, "connection": WIDE, "model": WIDE, "key": WIDE}
    items = [
        SelectTargetRequest(candidates=[OPENAI]),
        SelectTargetRequest(candidates=[candidate]),
        SelectTargetRequest(route="broken"),
        SelectTargetRequest(candidates=[OPENAI]),
    ]
    async with shell() as running:
        answer = await stub(running).SelectTargets(policy_pb2.SelectTargetsRequest(items=items))
    assert [each.WhichOneof("result") for each in answer.results] == ["answer", "error", "error", "answer"]
    assert [each.error.code for each in answer.results] == [0, code_pb2.INVALID_ARGUMENT, code_pb2.INTERNAL, 0]
    assert "password" not in answer.results[2].error.message
