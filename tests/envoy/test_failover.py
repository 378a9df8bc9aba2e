"""Failover inside one client request, with real Envoy: across accounts, restated statuses, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.envoy.upstreams import ERROR, says
from tests.envoy.world import gateway

SERVER_ERROR = says(503, ERROR % "upstream is down")
LIMITED = says(429, ERROR % "slow down", {"retry-after": "7"})
GOOD = says(200)


@pytest.mark.parametrize("layout", ["separate", "shared"])
async def test_one_request_fails_over_across_accounts_and_every_attempt_is_heard(
    tmp_path: Path, embedded_url: str, layout: str
) -> None:
    scripts = {"openai-one": [SERVER_ERROR], "mistral-two": [LIMITED], "groq-three": [GOOD]}
    async with gateway(tmp_path, embedded_url, scripts, layout=layout) as world:
        async with world.post() as answer:
            assert answer.status == 200
            assert await answer.json() == {"id": "1"}
        assert await world.heard(3) == [("openai-one", 503, 0), ("mistral-two", 429, 1), ("groq-three", 200, 2)]
        assert [report.final for report in world.reports] == [False, False, True]
        assert all(len(upstream.requests) == 1 for upstream in world.upstreams.values())


async def test_a_misstated_403_is_restated_and_goes_on(tmp_path: Path, embedded_url: str) -> None:
    misstated = says(
        403, '{"error": {"message": "You have exceeded your current quota", "code": "insufficient_quota"}}'
    )
    async with gateway(tmp_path, embedded_url, {"openai-one": [misstated], "openai-two": [GOOD]}) as world:
        async with world.post() as answer:
            assert answer.status == 200
        heard = await world.heard(2)
        assert heard == [("openai-one", 403, 0), ("openai-two", 200, 1)]
        assert world.answers[0].verdict.failure_kind_text == "quota"


async def test_the_client_of_a_lone_account_sees_the_restated_status_and_when_to_come_back(
    tmp_path: Path, embedded_url: str
) -> None:
    limited = says(429, ERROR % "slow down", {"retry-after": "7"})
    async with gateway(tmp_path, embedded_url, {"openai-one": [limited]}) as world:
        async with world.post() as answer:
            assert (answer.status, answer.headers["retry-after"]) == (429, "7")
            assert "x-policy-retry" not in answer.headers
            assert "slow down" in await answer.text()
        assert await world.heard(1) == [("openai-one", 429, 0)]
        async with world.post() as refused:
            assert refused.status == 429
            assert int(refused.headers["retry-after"]) <= 7
            assert refused.headers["x-policy-drop-reason"] == "all_targets_skipped"
            body = await refused.json()
        assert body["error"]["code"] == "ALL_TARGETS_SKIPPED"
        assert body["diagnostics"]["excluded"][0]["reason"] == "connection_cooldown"
        assert len(world.upstreams["openai-one"].requests) == 1


async def test_an_open_breaker_is_a_503_with_retry_after(tmp_path: Path, embedded_url: str) -> None:
    settings = {"breaker.api_key.failure_threshold": 1, "breaker.api_key.degradation_threshold": 1}
    catalogue = {"settings": settings, "connections": {"openai-one": {"disable_cooling": True}}}
    async with gateway(tmp_path, embedded_url, {"openai-one": [SERVER_ERROR]}, catalogue=catalogue) as world:
        async with world.post() as answer:
            assert answer.status == 503
        async with world.post() as refused:
            assert refused.status == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert (await refused.json())["error"]["code"] == "all_targets_cooling_down"
        assert len(world.upstreams["openai-one"].requests) == 1


async def test_an_upstream_that_refuses_connections_is_passed_over_and_heard(tmp_path: Path, embedded_url: str) -> None:
    scripts = {"openai-one": [GOOD], "mistral-two": [GOOD]}
    async with gateway(tmp_path, embedded_url, scripts, dead=["openai-one"]) as world:
        async with world.post() as answer:
            assert answer.status == 200
        heard = await world.heard(2)
        assert sorted(heard) == [("mistral-two", 200, 1), ("openai-one", "network_error", 0)]


async def test_the_last_upstream_that_refuses_connections_is_heard_with_its_kind(
    tmp_path: Path, embedded_url: str
) -> None:
    async with gateway(tmp_path, embedded_url, {"openai-one": [GOOD]}, dead=["openai-one"]) as world:
        async with world.post() as answer:
            assert answer.status == 503
            assert (await answer.json())["error"]["code"] == "NO_UPSTREAM_RESPONSE"
        heard = await world.heard(1)
        assert heard == [("openai-one", "network_error", 0)]
        assert world.reports[0].final


async def test_capped_accounts_fail_over_by_a_new_selection_and_give_their_slots_back(
    tmp_path: Path, embedded_url: str
) -> None:
    capped = {name: {"max_concurrent": 1} for name in ("openai-one", "mistral-two")}
    scripts = {"openai-one": [SERVER_ERROR], "mistral-two": [GOOD]}
    async with gateway(tmp_path, embedded_url, scripts, catalogue={"connections": capped}) as world:
        for served in (1, 2, 3):
            async with world.post() as answer:
                assert answer.status == 200, await answer.text()
            await world.free_of_permits()
            assert len(world.upstreams["mistral-two"].requests) == served


async def test_control_headers_reach_no_upstream_and_internal_ones_no_client(tmp_path: Path, embedded_url: str) -> None:
    sent = {
        "x-session-id": "s1",
        "x-policy-explain": "1",
        "x-gateway-destination-endpoint": "10.0.0.1:80",
        "x-envoy-max-retries": "0",
        "x-policy-lease-generation": "",
    }
    async with gateway(tmp_path, embedded_url, {"openai-one": [SERVER_ERROR], "mistral-two": [GOOD]}) as world:
        async with world.post(headers=sent) as answer:
            assert answer.status == 200
            assert answer.headers["x-policy-decision"].startswith("target=mistral/mistral-two/gpt-4o; attempt=2; ")
            assert not [name for name in answer.headers if name.lower().startswith("x-envoy")]
        for upstream in world.upstreams.values():
            names = {name.lower() for name in upstream.requests[0].headers}
            assert not [name for name in names if name.startswith(("x-policy", "x-session", "x-gateway", "x-ai-eg"))]
            assert "x-envoy-attempt-count" not in names


async def test_without_a_route_the_answer_says_what_to_do(tmp_path: Path, embedded_url: str) -> None:
    async with gateway(tmp_path, embedded_url, {"openai-one": [GOOD]}) as world:
        async with world.client.post(world.url + "/v1/chat/completions", json={"model": "gpt-4o"}) as answer:
            assert answer.status == 404
            assert "x-policy-route" in (await answer.json())["error"]["message"]
        async with world.client.post(world.url + "/routes/chat/v1/chat/completions", json={}) as answer:
            assert answer.status == 200
        assert world.upstreams["openai-one"].requests[0].path == "/v1/chat/completions"


async def test_the_route_is_read_from_the_body_and_the_model_written_into_it(tmp_path: Path, embedded_url: str) -> None:
    door = {"reads_body": True, "writes_model": True}
    scripts = {"openai-one": [SERVER_ERROR], "mistral-two": [GOOD]}
    async with gateway(tmp_path, embedded_url, scripts, door=door) as world:
        asked = {"model": "chat", "messages": [{"role": "user", "content": "ö" * 5_000}]}
        async with world.client.post(world.url + "/v1/chat/completions", json=asked) as answer:
            assert answer.status == 200
        for upstream in world.upstreams.values():
            assert b'"model":"gpt-4o"' in upstream.bodies[0]


@pytest.mark.parametrize(("key", "status"), [("of-the-gateway-0123456789", 200), ("another-key-0123456789", 503)])
async def test_a_service_with_keys_is_asked_with_the_key_of_envoy(
    tmp_path: Path, embedded_url: str, monkeypatch: pytest.MonkeyPatch, key: str, status: int
) -> None:
    monkeypatch.setenv("ENVOY_POLICY_KEY", key)
    keys = {"auth": {"keys": ["of-the-gateway-0123456789"]}}
    scripts = {"openai-one": [GOOD]}
    async with gateway(tmp_path, embedded_url, scripts, process=keys, policy_key="ENVOY_POLICY_KEY") as world:
        async with world.post() as answer:
            assert answer.status == status
        assert len(world.upstreams["openai-one"].requests) == (status == 200)


@pytest.mark.parametrize("size", [70_000, 1_100_000, 5_000_000])
async def test_an_error_page_of_any_size_is_read_and_passed_over(tmp_path: Path, embedded_url: str, size: int) -> None:
    page = says(503, "the start of a long page " + "x" * size)
    async with gateway(tmp_path, embedded_url, {"openai-one": [page], "mistral-two": [GOOD]}) as world:
        async with world.post() as answer:
            assert answer.status == 200
        assert await world.heard(2) == [("openai-one", 503, 0), ("mistral-two", 200, 1)]
        assert world.reports[0].body.startswith(b"the start of a long page")
        async with world.post(headers={"x-policy-route": "none"}) as answer:
            assert answer.status == 404


@pytest.mark.parametrize("size", [70_000, 1_100_000, 5_000_000])
async def test_an_error_page_of_any_size_reaches_the_client_whole(tmp_path: Path, embedded_url: str, size: int) -> None:
    page = says(503, "the start of a long page " + "x" * size)
    async with gateway(tmp_path, embedded_url, {"openai-one": [page]}) as world, world.post() as answer:
        assert answer.status == 503
        assert len(await answer.read()) == size + 25
