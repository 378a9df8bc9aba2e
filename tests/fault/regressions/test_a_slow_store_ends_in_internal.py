"""A slow store ended ReleasePermit of a probe in INTERNAL, which tells a gateway nothing that it could act on."""

from __future__ import annotations

from policy_service.application.ports import StoreUnavailableError
from policy_service.bootstrap.envoy_door import call_error
from policy_service.transport.grpc.gate import unforeseen


def test_whatever_use_case_lets_it_through_the_caller_hears_that_the_store_is_away() -> None:
    told = unforeseen("ReleasePermit", StoreUnavailableError("the server did not answer in time"))
    assert (told.reason, told.kind.value) == ("STORE_UNAVAILABLE", "unavailable")
    assert call_error(told).http_status == 503


def test_any_other_error_is_ours() -> None:
    assert unforeseen("ReleasePermit", ValueError("no")).reason == "INTERNAL"
