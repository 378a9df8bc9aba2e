"""A gateway that streams one answer: ask for a target, tell of each event, hear what the service says, report the end.

    python docs/examples/watch.py openai/main/gpt-4o --events 40,0,0,0 --pause 0.5
    python docs/examples/watch.py --route chat --events tool,0,60

An event is its number of useful bytes, or `tool` for one of a tool or reasoning phase. The service is looked for where
POLICY_LISTEN_TCP says, else at 127.0.0.1:50051.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Any

import grpc

from policy_service.generated.policy.v1 import policy_pb2, policy_pb2_grpc, stream_pb2, types_pb2

ADDRESS = os.environ.get("POLICY_LISTEN_TCP", "127.0.0.1:50051")
STREAM = 1


async def run(given: argparse.Namespace) -> None:
    """One streamed attempt from the decision to its report."""
    async with grpc.aio.insecure_channel(ADDRESS) as channel:
        stub = policy_pb2_grpc.PolicyServiceStub(channel)
        decision = await stub.SelectTarget(selection(given))
        call = stub.WatchStream()
        opening = stream_pb2.StreamOpen(decision_token=decision.decision_token)
        await call.write(stream_pb2.WatchStreamRequest(stream_id=STREAM, open=opening))
        watching = (await call.read()).opened.watchdog_enabled
        print(
            f"{decision.dispatch.target.connection}{' (probe)' if decision.dispatch.probe else ''}, judged: {watching}"
        )
        orders = asyncio.create_task(listen(call))
        await send(call, given, orders)
        await call.done_writing()
        await report(stub, decision, await orders)


def selection(given: argparse.Namespace) -> Any:
    """A route, or one target."""
    if given.route:
        return policy_pb2.SelectTargetRequest(route=given.route)
    return policy_pb2.SelectTargetRequest(candidates=[given.target])


def target(text: str) -> types_pb2.Candidate:
    """PROVIDER/CONNECTION/MODEL; the model may hold slashes."""
    provider, _, rest = text.partition("/")
    connection, _, model = rest.partition("/")
    if not (provider and connection and model):
        raise argparse.ArgumentTypeError(f"{text!r} is not PROVIDER/CONNECTION/MODEL")
    return types_pb2.Candidate(provider=provider, connection=connection, model=model)


def events(text: str) -> list[stream_pb2.StreamEvent]:
    """Numbers of useful bytes and `tool`, separated by commas."""
    parts = text.split(",")
    if not all(part == "tool" or part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: write numbers of bytes and `tool`, such as 40,tool,0")
    tool = stream_pb2.StreamEvent(protected=True)
    return [tool if part == "tool" else stream_pb2.StreamEvent(useful_bytes=int(part)) for part in parts]


async def send(call: Any, given: argparse.Namespace, orders: asyncio.Task[str]) -> None:
    """The events of the upstream, until there are none left or the attempt is to be ended."""
    for number, event in enumerate(given.events):
        progress = stream_pb2.StreamProgress(events=[event], first_byte=number == 0)
        await call.write(stream_pb2.WatchStreamRequest(stream_id=STREAM, progress=progress))
        await asyncio.wait({orders}, timeout=given.pause)
        if orders.done():
            return


async def listen(call: Any) -> str:
    """Print what the service says; the code of an order to abort, or nothing."""
    renewed = 0
    while (answer := await call.read()) is not grpc.aio.EOF:
        if answer.HasField("abort"):
            print(f"abort: {answer.abort.code}")
            return str(answer.abort.code)
        renewed += answer.permit.HasField("expires_at_unix_ms")
        if not answer.permit.HasField("expires_at_unix_ms"):
            print("a permit has expired")
    if renewed:
        print("the permit was renewed")
    return ""


async def report(stub: Any, decision: Any, abort: str) -> None:
    """The outcome goes to ReportOutcome, whatever WatchStream said."""
    slow = policy_pb2.NETWORK_ERROR_KIND_STREAM_TOO_SLOW
    end: dict[str, Any] = {"network_error": slow} if abort else {"http_status": 200}
    request = policy_pb2.ReportOutcomeRequest(decision_token=decision.decision_token, streamed=True, final=True, **end)
    answer = await stub.ReportOutcome(request)
    print(f"verdict: {answer.verdict.failure_kind_text or 'success'}")
    for effect in answer.effects:
        print(f"effect: {effect.mechanism_text} {effect.key}: {effect.from_state} -> {effect.to_state}")


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description="Stream one answer under the eyes of a running policy service.")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("target", nargs="?", type=target, help="PROVIDER/CONNECTION/MODEL")
    asked.add_argument("--route", default="")
    parser.add_argument("--events", required=True, type=events, help="Useful bytes, or `tool`, separated by commas.")
    parser.add_argument("--pause", type=float, default=0.5, help="Seconds between two events.")
    try:
        asyncio.run(run(parser.parse_args()))
    except grpc.RpcError as error:
        raise SystemExit(f"{ADDRESS}: {error.code().name}: {error.details()}") from None


if __name__ == "__main__":
    main()
