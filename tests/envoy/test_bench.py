"""The measurement of the door runs, loads what it says, and refuses to count answers that are none."""

from __future__ import annotations

import json

import pytest
from aiohttp import web

from policy_service.cli.bench import http_load
from policy_service.cli.bench.processes import BenchError
from policy_service.cli.main import main
from tests.envoy.upstreams import running, says

FIGURES = ("added_p50", "alone_p50", "added_p99", "alone_p99", "throughput", "alone")


def test_every_figure_is_measured_for_headers_and_for_bodies(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--envoy", "--seconds", "0.3", "--json"]) == 0
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)["figures"]}
    assert set(found) == {f"envoy.{kind}.{name}" for kind in ("headers", "body") for name in FIGURES}
    for kind in ("headers", "body"):
        assert found[f"envoy.{kind}.throughput"]["service"] < found[f"envoy.{kind}.alone"]["service"]
        assert found[f"envoy.{kind}.added_p50"]["goal"] == "ratio <= 1.5"


async def test_the_client_counts_answers_and_stops_at_one_that_is_wrong() -> None:
    good, bad = [says(200)], [says(500)]
    async with running({"good": good, "bad": bad}) as upstreams:
        request = http_load.post("/v1/x", b"{}", {"x-policy-route": "chat"})
        sample = await http_load.load(upstreams["good"].address, request, 3, 0.2)
        assert sample.calls == len(upstreams["good"].requests) == len(sample.latencies_us) > 3
        assert upstreams["good"].requests[0].headers["x-policy-route"] == "chat"
        with pytest.raises(BenchError, match="not answered 200"):
            await http_load.load(upstreams["bad"].address, request, 1, 0.2)


async def test_a_connection_that_is_lost_is_no_answer() -> None:
    async def hangs_up(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with running({"one": [hangs_up]}) as upstreams:
        with pytest.raises(BenchError, match="lost"):
            await http_load.load(upstreams["one"].address, http_load.post("/", b"", {}), 1, 0.2)
