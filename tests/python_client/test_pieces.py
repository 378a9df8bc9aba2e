"""Errors, outcomes, the backlog, orders known from before, channel options: the small pieces, each alone."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from policy_client import Connection, Tls, messages, outcomes, pool
from policy_client._generated.policy.v1 import policy_pb2, reasons_pb2
from policy_client.away import AwayPolicy, KnownOrders, local_order, look_again_ms
from policy_client.backlog import Backlog
from policy_client.connection import METHODS, SERVICE_CONFIG
from policy_client.errors import (
    Failure,
    FenceError,
    InvalidCallError,
    OverloadedError,
    PolicyClientError,
    ServiceAwayError,
    ServiceError,
    UnavailableError,
    error_of,
)
from policy_client.outcomes import Outcome, network_kind
from policy_client.testing import target
from policy_service.application import errors as service_errors
from policy_service.transport.grpc.errors import to_status, trailers


# --- errors -----------------------------------------------------------------------------------------------------
def told(error: service_errors.PolicyError) -> PolicyClientError:
    """What the client makes of an error as the service really sends it."""
    status = to_status(error)
    names = {each.value[0]: each.name for each in _codes()}
    return error_of(Failure(names[status.code], status.message, trailers(error, status)))


def _codes() -> Iterator[Any]:
    import grpc

    yield from grpc.StatusCode


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (service_errors.StoreLostError("away", retry_after_ms=500), UnavailableError),
        (service_errors.DrainingError("ends", retry_after_ms=100), UnavailableError),
        (service_errors.OverloadedError("much", retry_after_ms=100), OverloadedError),
        (service_errors.FenceError("stale"), FenceError),
        (service_errors.DeadlineError("late"), ServiceError),
        (service_errors.NotFoundError("no"), ServiceError),
    ],
)
def test_an_error_of_the_service_keeps_its_reason_and_its_time(
    error: service_errors.PolicyError, kind: type[ServiceError]
) -> None:
    found = told(error)
    assert type(found) is kind
    assert isinstance(found, ServiceError)
    assert (found.reason, found.retry_after_ms) == (error.reason, error.retry_after_ms)


def test_every_wrong_field_is_told() -> None:
    problems = (service_errors.FieldProblem("a", "is wrong"), service_errors.FieldProblem("b", "is missing", "set it"))
    found = told(service_errors.InvalidRequestError(problems))
    assert isinstance(found, InvalidCallError)
    assert [each.field for each in found.violations] == ["a", "b"]


@pytest.mark.parametrize("code", ["UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL", "UNKNOWN"])
def test_a_failure_of_the_transport_without_a_word_of_the_service_means_away(code: str) -> None:
    assert isinstance(error_of(Failure(code, "refused")), ServiceAwayError)


@pytest.mark.parametrize("trailer", [b"", b"\xff\xff", status_pb2.Status(code=14).SerializeToString()])
def test_a_trailer_that_says_nothing_is_no_word_of_the_service(trailer: bytes) -> None:
    failure = Failure("UNAVAILABLE", "", (("grpc-status-details-bin", trailer),))
    assert isinstance(error_of(failure), ServiceAwayError)


def test_an_error_info_of_another_domain_is_no_word_of_the_service() -> None:
    status = status_pb2.Status(code=14)
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="STORE_UNAVAILABLE", domain="proxy.example"))
    failure = Failure("UNAVAILABLE", "", (("grpc-status-details-bin", status.SerializeToString()),))
    assert isinstance(error_of(failure), ServiceAwayError)


@pytest.mark.parametrize("code", ["UNIMPLEMENTED", "UNAUTHENTICATED", "INVALID_ARGUMENT"])
def test_a_refusal_without_a_reason_is_not_absence(code: str) -> None:
    assert not isinstance(error_of(Failure(code, "no")), ServiceAwayError)


def test_every_error_has_one_root() -> None:
    from policy_client import errors

    kinds = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, Exception)]
    own = [each for each in kinds if each.__module__ == errors.__name__]
    assert len(own) > 10
    assert all(issubclass(each, PolicyClientError) for each in own)


# --- outcomes ---------------------------------------------------------------------------------------------------
def _caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


class ConnectError(Exception):
    """Named as in httpx."""


class ReadTimeout(Exception):
    """Named as in httpx."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (socket.gaierror(), outcomes.DNS),
        (ConnectionRefusedError(), outcomes.CONNECT_REFUSED),
        (ConnectionResetError(), outcomes.CONNECTION_RESET),
        (BrokenPipeError(), outcomes.CONNECTION_RESET),
        (TimeoutError(), outcomes.READ_TIMEOUT),
        (ssl.SSLCertVerificationError(), outcomes.TLS),
        (ConnectError(), outcomes.CONNECT_REFUSED),
        (_caused(ConnectError(), socket.gaierror()), outcomes.DNS),
        (_caused(ConnectError(), ssl.SSLError()), outcomes.TLS),
        (_caused(ReadTimeout(), ConnectionRefusedError()), outcomes.READ_TIMEOUT),
        (ValueError(), None),
        (FileNotFoundError(), None),
    ],
)
def test_exceptions_are_told_apart(error: Exception, kind: Any) -> None:
    assert network_kind(error) == kind


@pytest.mark.parametrize(
    ("outcome", "goes_on"),
    [
        (outcomes.http(s, body=b"x"), s in (200, 401, 402, 403, 404, 408, 429, 500, 503, 529))
        for s in (200, 400, 401, 402, 403, 404, 405, 408, 413, 422, 429, 500, 503, 529)
    ],
    ids=lambda value: str(getattr(value, "status", value)),
)
def test_what_another_target_could_better_without_the_service(outcome: Outcome, goes_on: bool) -> None:
    assert outcome.may_fall_back is goes_on


def test_a_report_keeps_the_limits_of_the_contract() -> None:
    report = messages.ReportOutcomeRequest()
    headers = [(f"x-{n}", "1") for n in range(400)]
    outcomes.put(outcomes.http(503, headers, b"x" * 100_000), report)
    assert (len(report.headers), len(report.body), report.http_status) == (256, 65_536, 503)


# --- backlog ----------------------------------------------------------------------------------------------------
def kept(number: int) -> messages.ReportOutcomeRequest:
    return messages.ReportOutcomeRequest(report_id=f"r{number}", body=b"x" * 100)


@given(st.integers(1, 20), st.integers(0, 60), st.integers(1, 30))
def test_the_backlog_keeps_the_newest_within_its_bounds_in_order(most: int, count: int, take: int) -> None:
    backlog = Backlog(most, 10_000_000)
    for number in range(count):
        backlog.keep(kept(number))
    assert (len(backlog), backlog.dropped) == (min(most, count), max(0, count - most))
    taken = backlog.take(take)
    backlog.put_back(taken)
    ids = [each.request.report_id for each in backlog.take(100)]
    assert ids == [f"r{number}" for number in range(max(0, count - most), count)]


def test_the_backlog_is_bounded_in_bytes() -> None:
    backlog = Backlog(1_000, 1_000)
    for number in range(100):
        backlog.keep(kept(number))
    assert sum(each.request.ByteSize() for each in backlog.take(1_000)) <= 1_000
    assert backlog.dropped > 80


def test_a_report_without_token_says_how_long_ago_it_began() -> None:
    backlog = Backlog(10, 10_000)
    backlog.keep(kept(1), began_at=1_000)
    backlog.keep(kept(2))
    with_age, without = backlog.take()
    assert (with_age.due(4_500).elapsed_ms, without.due(4_500).HasField("elapsed_ms")) == (3_500, False)


# --- orders known from before -----------------------------------------------------------------------------------
ASKED = pool("p/a/m", "p/b/m", "p/c/m")


def order_after(*dispatches: messages.Dispatch, asked: Any = ASKED, **policy: Any) -> list[str]:
    known = KnownOrders()
    for each in dispatches:
        known.learn(ASKED, each)
    return [each.connection for each in local_order(asked, AwayPolicy(**policy), known)]


def dispatch(*names: str, **fields: Any) -> messages.Dispatch:
    first, *rest = (target(f"p/{name}/m") for name in names)
    return messages.Dispatch(target=first, fallbacks=rest, **fields)


def test_the_newest_order_leads_and_older_ones_follow() -> None:
    assert order_after(dispatch("a", "b", "c"), dispatch("c", "a")) == ["c", "a", "b"]


def test_a_mark_is_believed_until_it_is_taken_back() -> None:
    marked = dispatch("a", "b", no_fail_open=True)
    assert order_after(dispatch("a", "b"), marked) == ["b"]
    assert order_after(marked, dispatch("a", "b")) == ["a", "b"]


def test_a_request_that_narrows_is_narrowed_here_too() -> None:
    narrowed = messages.SelectTargetRequest(allowed_connections=["b"])
    narrowed.MergeFrom(ASKED)
    assert order_after(dispatch("a", "b"), asked=narrowed) == ["b"]


def test_candidates_with_a_cap_are_not_trusted() -> None:
    asked = messages.SelectTargetRequest()
    asked.candidates.add(provider="p", connection="x", max_concurrent=2)
    asked.candidates.add(provider="p", connection="y", priority=2)
    asked.candidates.add(provider="p", connection="z", priority=1)
    assert order_after(asked=asked, trusts_candidates=True) == ["z", "y"]


def test_pools_are_forgotten_the_oldest_first() -> None:
    known = KnownOrders(limit=2)
    asked = [pool(f"p/{name}/m") for name in "abc"]
    for each in asked:
        known.learn(each, dispatch("a"))
    assert [known.order(each) is not None for each in asked] == [False, True, True]


def test_the_service_is_looked_for_at_once_then_less_often() -> None:
    assert [look_again_ms(times) for times in range(7)] == [0, 100, 200, 400, 800, 1_000, 1_000]


# --- connection -------------------------------------------------------------------------------------------------
def test_every_unary_call_of_the_contract_is_there_under_its_types() -> None:
    methods = policy_pb2.DESCRIPTOR.services_by_name["PolicyService"].methods
    expected = {m.name: (m.input_type.full_name, m.output_type.full_name) for m in methods if not m.client_streaming}
    assert {m.name: (m.request.DESCRIPTOR.full_name, m.response.DESCRIPTOR.full_name) for m in METHODS} == expected


def test_retries_cover_every_call_and_only_what_a_repetition_cannot_harm() -> None:
    configs = json.loads(SERVICE_CONFIG)["methodConfig"]
    assert configs[-1]["name"] == [{"service": "policy.v1.PolicyService"}]
    assert all(config["retryPolicy"]["retryableStatusCodes"] == ["UNAVAILABLE"] for config in configs)


def test_a_key_is_sent_and_not_shown() -> None:
    where = Connection(key="secret-key")
    assert where.metadata == (("authorization", "Bearer secret-key"),)
    assert "secret-key" not in repr(where)


def test_options_of_the_caller_win() -> None:
    where = Connection(tls=Tls(server_name="policy"), options=(("grpc.keepalive_time_ms", 5),))
    options = dict(where.channel_options())
    assert (options["grpc.keepalive_time_ms"], options["grpc.ssl_target_name_override"]) == (5, "policy")


def test_both_sides_speak_of_the_same_messages_in_one_process() -> None:
    from policy_service.generated.policy.v1 import policy_pb2 as of_the_service
    from policy_service.generated.policy.v1 import reasons_pb2 as reasons_of_the_service

    request = messages.SelectTargetRequest(route="chat")
    assert of_the_service.SelectTargetRequest.FromString(request.SerializeToString()).route == "chat"
    assert of_the_service.DESCRIPTOR.serialized_pb == policy_pb2.DESCRIPTOR.serialized_pb
    assert reasons_of_the_service.ErrorReason.keys() == reasons_pb2.ErrorReason.keys()
