"""A gateway on one page, for trying things out: ask for a target, report an outcome, see what the service makes of it.

    python docs/examples/ask.py select openai/main/gpt-4o openai/spare/gpt-4o
    python docs/examples/ask.py report openai/main/gpt-4o 429 --header retry-after=60
    python docs/examples/ask.py call openai/main/gpt-4o openai/spare/gpt-4o --answers 503,200
    python docs/examples/ask.py state
    python docs/examples/ask.py reset openai/main

A target is PROVIDER/CONNECTION/MODEL. The service is looked for where POLICY_LISTEN_TCP says, else at 127.0.0.1:50051.
Exit codes: 0 done, 1 the service did not answer or refused the call, 2 the command line cannot be followed, 3 the last
answer of `select`, or that of `call`, was a Wait or a Reject: there is no target now.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
import uuid
from collections.abc import Generator, Iterator
from typing import Any

import grpc

from policy_service.generated.policy.v1 import admin_pb2, admin_pb2_grpc, policy_pb2, policy_pb2_grpc, types_pb2

PAGE = 1_000
NO_TARGET = 3
"""Exit code where the service names none."""
Lines = Generator[str, None, int]
"""What a command prints; at the end its exit code."""


def main() -> None:
    """Run one command of the line."""
    arguments = _parser().parse_args()
    address = os.environ.get("POLICY_LISTEN_TCP", "127.0.0.1:50051")
    try:
        with grpc.insecure_channel(address) as channel:
            sys.exit(_printed(arguments.run(arguments.stub(channel), arguments)))
    except grpc.RpcError as error:
        raise SystemExit(f"{address}: {error.code().name}: {error.details()}") from None


def _printed(lines: Lines) -> int:
    try:
        while True:
            print(next(lines), flush=True)
    except StopIteration as end:
        return int(end.value)
    except BrokenPipeError:  # `| head -1` has read what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def select(stub: Any, given: argparse.Namespace) -> Lines:
    """SelectTarget over inline candidates or a route, with the exclusions."""
    for _ in range(given.times):
        answer = stub.SelectTarget(_selection(given))
        yield from _verdict(answer)
    yield from (_exclusion(each) for each in answer.exclusions)
    return 0 if answer.HasField("dispatch") else NO_TARGET


def call(stub: Any, given: argparse.Namespace) -> Lines:
    """One client request: a decision, then an attempt for each of the answers, all under the decision's token."""
    decision = stub.SelectTarget(_selection(given))
    yield from _verdict(decision)
    if not decision.HasField("dispatch"):
        return NO_TARGET
    target = decision.dispatch.target
    for attempt, outcome in enumerate(given.answers):
        request = policy_pb2.ReportOutcomeRequest(
            decision_token=decision.decision_token,
            attempt=attempt,
            target=target,
            final=attempt == len(given.answers) - 1,
            headers=_headers(given),
            **_end(outcome),
        )
        answer = stub.ReportOutcome(request)
        yield f"attempt {attempt}: {_name(target)} {outcome}, next: {answer.action.kind_text}"
        yield from (_effect(each) for each in answer.effects)
        yield from (f"ignored: {text}" for text in answer.ignored_texts)
        if answer.pin:
            yield f"pin: {_word(policy_pb2.PinEffect, answer.pin)}"
        target = answer.action.next_target
    return 0


def _selection(given: argparse.Namespace) -> Any:
    request = policy_pb2.SelectTargetRequest(
        route=given.route, caller_id=given.caller, session_key=given.session, allow_wait=not given.no_wait, explain=True
    )
    request.candidates.extend(types_pb2.Candidate(**_parts(text)) for text in given.targets)
    return request


def report(stub: Any, given: argparse.Namespace) -> Lines:
    """ReportOutcome without a decision, once or several times; `{n}` in the target counts."""
    for number in range(given.times):
        request = policy_pb2.ReportOutcomeRequest(
            report_id=uuid.uuid4().hex, elapsed_ms=5, final=True, body=given.body.encode(), **_end(given.outcome)
        )
        request.target.CopyFrom(types_pb2.Target(**_parts(given.target.replace("{n}", str(number)))))
        request.headers.extend(_headers(given))
        request.details.egress_address = given.egress
        request.details.sent_slow = given.slow
        answer = stub.ReportOutcome(request)
        yield from (_effect(each) for each in answer.effects)
    verdict = answer.verdict
    yield f"verdict: {verdict.reason_text or 'success'}, blamed on {verdict.scope_text}, rule {verdict.rule or 'none'}"
    if verdict.restated_status:
        yield f"restated: status {verdict.restated_status} by {verdict.rule_id}"
    yield f"next: {answer.action.kind_text}{_how(answer)}, durable: {str(answer.durable).lower()}"
    yield from (f"set {header.name}: {header.value}" for header in answer.action.set_headers)
    yield from (f"ignored: {text}" for text in answer.ignored_texts)
    return 0


def state(stub: Any, given: argparse.Namespace) -> Lines:
    """AdminService.ListState: every breaker, cooldown, terminal state and lock that is not as at the start."""
    request = admin_pb2.ListStateRequest(provider=given.provider, page_size=PAGE)
    while True:
        answer = stub.ListState(request)
        for row in answer.rows:
            if row.state == "present":  # a guard's memory, which takes nobody out
                continue
            end = f" for {_seconds(row.until_at_unix_ms - time.time() * 1000)}" if row.until_at_unix_ms else ""
            yield f"{row.mechanism_text} {row.key}: {row.state}{end}"
        if not answer.next_page_token:
            return 0
        request.page_token = answer.next_page_token


_CLEARED = (
    admin_pb2.RESET_SCOPE_BREAKERS,
    admin_pb2.RESET_SCOPE_PROVIDER_COOLDOWNS,
    admin_pb2.RESET_SCOPE_CONNECTION_COOLDOWNS,
    admin_pb2.RESET_SCOPE_TERMINAL_STATES,
    admin_pb2.RESET_SCOPE_MODEL_LOCKOUTS,
)


def reset(stub: Any, given: argparse.Namespace) -> Lines:
    """AdminService.ResetState: forget what is held against a provider, or against one connection of it."""
    provider, _, connection = given.place.partition("/")
    request = admin_pb2.ResetStateRequest(
        scopes=_CLEARED,
        provider=provider,
        connection=connection,
        actor=admin_pb2.Actor(name="ask.py"),
    )
    yield stub.ResetState(request).message
    return 0


def _verdict(answer: Any) -> Iterator[str]:
    kind = answer.WhichOneof("verdict")
    if kind == "dispatch":
        mark = " (probe)" if answer.dispatch.probe else " (panic)" if answer.dispatch.panic else ""
        mark += f" (pin {_word(policy_pb2.Affinity, answer.dispatch.affinity)})" if answer.dispatch.affinity else ""
        mark += f" (waited {_seconds(answer.dispatch.waited_ms)})" if answer.dispatch.waited_ms >= 500 else ""
        yield " then ".join(map(_name, [answer.dispatch.target, *answer.dispatch.fallbacks])) + mark
        yield from (f"set {header.name}: {header.value}" for header in answer.dispatch.set_headers)
    elif kind == "wait":
        yield f"wait {_seconds(answer.wait.wait_ms)}: {answer.wait.reason_text}"
    else:
        again = f", retry after {_seconds(answer.reject.retry_after_ms)}" if answer.reject.retry_after_ms else ""
        yield f"reject {answer.reject.http_status} {answer.reject.code}{again}"


def _how(answer: Any) -> str:
    """What the usage wall adds to the next step: how a retry came about, or why its lane ended."""
    action = answer.action
    if action.via:
        return f" {action.via}" + (f" in {_seconds(action.delay_ms)}" if action.delay_ms else "")
    return f" {action.reason}" if action.reason not in ("", answer.verdict.reason_text) else ""


def _exclusion(out: Any) -> str:
    rest = f" for {_seconds(out.remaining_ms)}" if out.HasField("remaining_ms") else ""
    return f"out: {_name(out.target)}: {out.reason_text}{rest}"


def _effect(effect: Any) -> str:
    end = ""
    if effect.until_at_unix_ms:
        end = f" for {_seconds(effect.until_at_unix_ms - time.time() * 1000)}"
    return f"effect: {effect.mechanism_text} {effect.key}: {effect.from_state} -> {effect.to_state}{end}"


def _seconds(ms: float) -> str:
    return f"{round(ms / 1000)} s"


def _name(target: Any) -> str:
    return "/".join(filter(None, (target.provider, target.connection, target.model)))


def _parts(text: str) -> dict[str, str]:
    provider, connection, model = [*text.split("/", 2), "", ""][:3]
    return {"provider": provider, "connection": connection, "model": model}


def _target(text: str) -> str:
    """A target of the command line, checked."""
    if not all(_parts(text).values()):
        form = "write PROVIDER/CONNECTION/MODEL, such as openai/main/gpt-4o"
        raise argparse.ArgumentTypeError(f"{text!r} is no target; {form}, or name a route with --route")
    return text


def _headers(given: argparse.Namespace) -> list[Any]:
    pairs = (header.partition("=") for header in given.header)
    return [types_pb2.Header(name=name, value=value) for name, _, value in pairs]


def _word(enum: Any, number: int) -> str:
    """Value of an enum without the name of the enum in front, such as `hit`."""
    return str(enum.Name(number)).removeprefix(str(enum.Name(0)).removesuffix("UNSPECIFIED")).lower()


def _end(outcome: str) -> dict[str, Any]:
    return {"http_status": int(outcome)} if outcome.isdigit() else {"network_error": _NETWORK_ERRORS[outcome.lower()]}


def _outcome(text: str) -> str:
    """An outcome of the command line, checked."""
    if not re.fullmatch("[1-5][0-9][0-9]", text) and text.lower() not in _NETWORK_ERRORS:
        known = ", ".join(_NETWORK_ERRORS)
        raise argparse.ArgumentTypeError(f"{text!r} is neither an HTTP status (100 to 599) nor one of {known}")
    return text


def _outcomes(text: str) -> list[str]:
    return [_outcome(each) for each in text.split(",")]


_NETWORK_ERRORS = {
    _word(policy_pb2.NetworkErrorKind, kind): kind for kind in policy_pb2.NetworkErrorKind.values() if kind
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Ask a running policy service, or report an outcome.")
    commands = parser.add_subparsers(required=True)
    asks = commands.add_parser("select", help="Where may a request go now?")
    calls = commands.add_parser("call", help="One client request with the given answers of upstreams.")
    for command, run in ((asks, select), (calls, call)):
        command.add_argument("targets", nargs="*", type=_target, metavar="PROVIDER/CONNECTION/MODEL")
        for name in ("route", "caller", "session"):
            command.add_argument(f"--{name}", default="")
        command.add_argument("--no-wait", action="store_true")
        command.set_defaults(run=run)
    statuses = "HTTP statuses or network errors, separated by commas."
    calls.add_argument("--answers", required=True, type=_outcomes, help=statuses)
    tells = commands.add_parser("report", help="What came back: an HTTP status, or a network error such as dns.")
    tells.add_argument("target", type=_target, metavar="PROVIDER/CONNECTION/MODEL")
    tells.add_argument("outcome", type=_outcome)
    tells.add_argument("--body", default="")
    tells.add_argument("--egress", default="")
    tells.add_argument("--slow", action="store_true", help="The attempt carried the slow header of the usage wall.")
    tells.set_defaults(run=report)
    shows = commands.add_parser("state", help="What is held against whom now?")
    shows.add_argument("provider", nargs="?", default="")
    shows.set_defaults(run=state)
    forgets = commands.add_parser("reset", help="Forget what is held against a provider or a connection.")
    forgets.add_argument("place", metavar="PROVIDER[/CONNECTION]")
    forgets.set_defaults(run=reset)
    for command in (asks, calls, tells):
        command.set_defaults(stub=policy_pb2_grpc.PolicyServiceStub)
    for command in (shows, forgets):
        command.set_defaults(stub=admin_pb2_grpc.AdminServiceStub)
    for command in (asks, tells):
        command.add_argument("--times", type=int, default=1)
    for command in (calls, tells):
        command.add_argument("--header", action="append", default=[], help="NAME=VALUE")
    return parser


if __name__ == "__main__":
    main()
