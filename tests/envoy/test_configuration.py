"""The generated configuration: real Envoy accepts every form of it, and it says what the catalogue says."""

from __future__ import annotations

import ssl
import subprocess
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from policy_envoy.configuration import Choices, CredentialSource, FailMode, Layout, UpstreamError, bootstrap
from policy_envoy.configuration.filters import listener_filters

from policy_service.cli import envoy_config
from policy_service.cli.main import main
from policy_service.domain.catalogue import Catalogue
from policy_service.settings.catalogue_file import load_catalogue
from tests.envoy.upstreams import says
from tests.envoy.world import ENVOY, gateway
from tests.integration.test_grpc_security import authority

ADDRESSED = """
version: 1
connections:
  - {id: one, provider: openai, address: "127.0.0.1:9101"}
  - {id: two, provider: anthropic, address: "10.0.0.2:443"}
  - {id: six, provider: openai, address: "[::1]:9106"}
  - {id: capped, provider: openai, address: "127.0.0.1:9103", max_concurrent: 2}
  - {id: leased, provider: openai, address: "127.0.0.1:9104"}
  - {id: idle, provider: nobody, enabled: false}
routes:
  - name: chat
    strategy: priority
    targets: [{connection: two, model: m}, {connection: capped, model: m}, {connection: one, model: m}]
  - {name: closed, strategy: priority, targets: [{connection: leased, model: m}]}
  - {name: any, strategy: priority, targets: [{provider: openai, model: m}]}
callers:
  - {id: agent, key_sha256: "%s", scopes: ["lease:exclusive"], allowed_connections: [leased]}
""" % ("a" * 64)
NAMED = """
version: 1
connections:
  - {id: main, provider: openai}
  - {id: claude, provider: anthropic}
  - {id: fast, provider: groq}
  - {id: own, provider: openai, base_url: "http://llm.internal:8080/proxy/openai/"}
"""


def read(text: str) -> Catalogue:
    return load_catalogue(text, source="test").catalogue


def made(text: str, **choices: Any) -> dict[str, Any]:
    """Clusters by name."""
    return {each["name"]: each for each in bootstrap(read(text), Choices(**choices))["static_resources"]["clusters"]}


def accepted(data: Any, directory: Path) -> str:
    """Empty where Envoy takes the configuration, else what it says."""
    file = directory / "envoy.yaml"
    file.write_text(yaml.safe_dump(data))
    command = [str(ENVOY), "--mode", "validate", "-c", str(file), "-l", "error"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


SEPARATE = [(Layout.SEPARATE, source, text) for source, text in product(CredentialSource, (ADDRESSED, NAMED))]


@pytest.mark.parametrize(
    ("layout", "credentials", "text"), [*SEPARATE, (Layout.SHARED, CredentialSource.NONE, ADDRESSED)]
)
def test_envoy_accepts_every_form(tmp_path: Path, layout: Layout, credentials: CredentialSource, text: str) -> None:
    for name in ("one", "two", "six", "capped", "leased", "main", "claude", "fast", "own"):
        (tmp_path / f"{name}.yaml").write_text("resources: []")
    for fail_mode in [*FailMode][layout is Layout.SHARED :]:  # a shared cluster cannot pass reserved connections over
        choices = Choices(
            layout=layout,
            credentials=credentials,
            credential_directory=str(tmp_path),
            fail_mode=fail_mode,
            policy_key="KEY",
            policy="unix:/run/policy.sock" if fail_mode is FailMode.OPEN else "policy.internal:50051",
        )
        assert accepted(bootstrap(read(text), choices), tmp_path) == ""


@pytest.mark.parametrize(
    ("policy", "kind", "is_several"),
    [
        ("127.0.0.1:50051", "STATIC", False),
        ("unix:/run/policy.sock", "STATIC", False),
        ("[::1]:50051,127.0.0.1:50052,unix:/run/policy.sock", "STATIC", True),
        ("policy.internal:50051", "STRICT_DNS", True),
    ],
)
def test_both_stages_of_a_request_ask_one_door_where_there_may_be_several(
    tmp_path: Path, policy: str, kind: str, is_several: bool
) -> None:
    data = bootstrap(read(ADDRESSED), Choices(policy=policy))
    assert accepted(data, tmp_path) == ""
    clusters = {each["name"]: each for each in data["static_resources"]["clusters"]}
    door = clusters["policy_service"]
    assert door["type"] == kind
    assert ("load_balancing_policy" in door, "health_checks" in door) == (is_several, is_several)
    sent = {each["key"]: each["value"] for each in initial_metadata(clusters["one"])}
    assert sent.get("x-policy-request") == ("%STREAM_ID%" if is_several else None)


def test_a_door_on_a_socket_and_one_by_name_are_refused_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = written(tmp_path, capsys, "--policy", "unix:/run/policy.sock, policy.internal:50051")
    assert code == 2
    assert "--policy: a host name and a Unix socket do not go together" in found
    assert written(tmp_path, capsys, "--policy", "127.0.0.1:50051, 127.0.0.1:50052")[0] == 0


def test_hosts_tls_and_base_paths_come_from_connection_or_provider() -> None:
    clusters = made(NAMED)
    own = clusters["own"]["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]
    assert own["address"]["socket_address"] == {"address": "llm.internal", "port_value": 8080}
    assert "transport_socket" not in clusters["own"]
    tls = clusters["fast"]["transport_socket"]["typed_config"]
    assert tls["sni"] == "api.groq.com"
    assert {"key": "x-policy-base-path", "value": "/openai"} in initial_metadata(clusters["fast"])
    assert {"key": "x-policy-base-path", "value": "/proxy/openai"} in initial_metadata(clusters["own"])


def initial_metadata(cluster: dict[str, Any]) -> list[dict[str, str]]:
    options = cluster["typed_extension_protocol_options"]["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"]
    found: list[dict[str, str]] = options["http_filters"][0]["typed_config"]["grpc_service"]["initial_metadata"]
    return found


def test_credentials_are_named_by_connection_and_never_written() -> None:
    text = yaml.safe_dump(bootstrap(read(NAMED), Choices(credentials=CredentialSource.ENVIRONMENT)))
    assert "Bearer %ENVIRONMENT(CREDENTIAL_MAIN)%" in text
    assert "key: x-api-key" in text
    assert "value: '%ENVIRONMENT(CREDENTIAL_CLAUDE)%'" in text


def test_capped_leased_and_disabled_connections_serve_nobody_while_the_service_is_away() -> None:
    data = bootstrap(read(ADDRESSED), Choices(fail_mode=FailMode.OPEN))
    manager = data["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    routes = manager["route_config"]["virtual_hosts"][0]["routes"]
    orders = {str(route["match"]): default_order(route) for route in routes}
    assert orders["{'prefix': '/routes/chat/'}"] == ["two", "one"]
    assert orders["{'prefix': '/routes/closed/'}"] == ["no_connection"]
    assert orders["{'prefix': '/routes/any/'}"] == ["one", "six"]
    assert orders["{'prefix': '/'}"] == ["one", "two", "six"]


def default_order(route: dict[str, Any]) -> list[str]:
    specifier = route["route"]["inline_cluster_specifier_plugin"]["extension"]["typed_config"]
    return [group["name"] for group in specifier["priority_groups"]]


def test_a_shared_cluster_takes_addresses_only_and_says_which_it_cannot() -> None:
    with pytest.raises(UpstreamError, match=r"connections\[main\]: api.openai.com is no IP address; only the separate"):
        made(NAMED, layout=Layout.SHARED)
    with pytest.raises(UpstreamError, match=r"connections\[leased\]: capped or leased, so that fail mode open"):
        made(ADDRESSED, layout=Layout.SHARED, fail_mode=FailMode.OPEN)


def test_a_connection_that_is_nowhere_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "catalogue.yaml"
    file.write_text("version: 1\nconnections: [{id: lost, provider: house}]\n")
    assert main(["envoy-config", "--catalogue", str(file)]) == 2
    assert "connections[lost]: no upstream; set base_url or address" in capsys.readouterr().err


def test_the_command_writes_what_envoy_accepts(tmp_path: Path) -> None:
    catalogue, out = tmp_path / "catalogue.yaml", tmp_path / "out.yaml"
    catalogue.write_text(NAMED)
    assert main(["envoy-config", "--catalogue", str(catalogue), "--out", str(out), "--fail-mode", "open"]) == 0
    assert accepted(yaml.safe_load(out.read_text()), tmp_path) == ""
    assert main(["envoy-config", "--catalogue", str(catalogue), "--fail-mode", "ajar"]) == 2


async def test_tls_host_name_base_path_and_credential_reach_the_upstream(
    tmp_path: Path, embedded_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CREDENTIAL_OPENAI_ONE", "sk-of-the-account")
    issuer = authority("upstreams")
    key, certificate = issuer.issue("localhost")
    (tmp_path / "ca.pem").write_bytes(issuer.pem)
    (tmp_path / "pair.pem").write_bytes(certificate + key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "pair.pem")
    seen: list[web.Request] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append(request)
        return web.json_response({"id": "1"})

    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    base_url = f"https://localhost:{runner.addresses[0][1]}/api"
    catalogue = {"connections": {"openai-one": {"base_url": base_url}}}
    choices: dict[str, Any] = {"credentials": CredentialSource.ENVIRONMENT, "ca_file": str(tmp_path / "ca.pem")}
    scripts = {"openai-one": [says(500)]}
    async with (
        gateway(tmp_path, embedded_url, scripts, catalogue=catalogue, **choices) as world,
        world.post(headers={"authorization": "Bearer of-the-client"}) as response,
    ):
        assert response.status == 200, await response.text()
    await runner.cleanup()
    assert seen[0].path == "/api/v1/chat/completions"
    assert seen[0].host.startswith("localhost")
    assert seen[0].headers["authorization"] == "Bearer sk-of-the-account"


def test_what_cannot_be_written_or_listened_on_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    catalogue = tmp_path / "empty.yaml"
    catalogue.write_text("version: 1\n")
    assert main(["envoy-config", "--catalogue", str(catalogue), "--out", str(tmp_path / "nowhere" / "x.yaml")]) == 2
    assert main(["envoy", "--door", "50061"]) == 2
    assert main(["envoy", "--door", "192.0.2.1:1"]) == 1
    told = capsys.readouterr().err
    assert "--out: cannot be written" in told
    assert "--door: not an address" in told
    assert "cannot listen on 192.0.2.1:1" in told


def written(directory: Path, capsys: pytest.CaptureFixture[str], *options: str, text: str = NAMED) -> tuple[int, str]:
    """Exit code of the command, and what it says beside the result."""
    catalogue = directory / "catalogue.yaml"
    catalogue.write_text(text)
    code = main(["envoy-config", "--catalogue", str(catalogue), "--out", str(directory / "made.yaml"), *options])
    return code, capsys.readouterr().err


def test_a_file_that_envoy_will_miss_is_a_warning_since_envoy_may_run_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ca, secrets = tmp_path / "ca.pem", tmp_path / "secrets"
    options = ("--ca-file", str(ca), "--credentials", f"files:{secrets}")
    code, told = written(tmp_path, capsys, *options)
    assert code == 0
    assert f"warning: --ca-file: no file {ca} on this machine" in told
    assert (
        f"warning: --credentials: {secrets} on this machine lacks claude.yaml, fast.yaml, main.yaml, own.yaml" in told
    )
    ca.write_text("")
    secrets.mkdir()
    for name in ("claude", "fast", "main"):
        (secrets / f"{name}.yaml").write_text("")
    code, told = written(tmp_path, capsys, *options)
    assert (code, told.count("warning")) == (0, 1)
    assert f"{secrets} on this machine lacks own.yaml; Envoy starts only where" in told
    (secrets / "own.yaml").write_text("")
    assert "warning" not in written(tmp_path, capsys, *options)[1]


def test_the_authorities_are_missed_only_where_an_upstream_has_tls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = "version: 1\nconnections: [{id: one, provider: openai, address: '127.0.0.1:9101'}]\n"
    absent = str(tmp_path / "none.crt")
    monkeypatch.setattr(envoy_config, "Choices", partial(Choices, ca_file=absent))
    assert "warning" not in written(tmp_path, capsys, text=plain)[1]
    assert f"warning: --ca-file: no file {absent}" in written(tmp_path, capsys)[1]


@pytest.mark.parametrize("name", ["sk-a-key-itself", "1KEY", "KEY%", "A B", "KEY\n"])
def test_a_policy_key_that_names_no_variable_is_refused_and_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    code, told = written(tmp_path, capsys, "--policy-key", name)
    assert code == 2
    assert "--policy-key: no name of an environment variable" in told
    assert name not in told
    assert written(tmp_path, capsys, "--policy-key", "_KEY_2")[0] == 0


@pytest.mark.parametrize("given", ["files", "files:", "none:", "environment:/etc/secrets"])
def test_credentials_have_a_directory_where_they_are_files_and_only_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    code, told = written(tmp_path, capsys, "--credentials", given)
    assert code == 2
    assert f"--credentials: files needs a directory, nothing else has one; given: {given}" in told


def test_what_config_check_warns_of_is_told_here_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "catalogue.yaml"
    routes = "routes:\n  - {name: r, strategy: random, targets: [{connection: one}]}\n"
    file.write_text(f"version: 1\nconnections:\n  - {{id: one, provider: acme, address: 127.0.0.1:1}}\n{routes}")
    assert main(["envoy-config", "--catalogue", str(file), "--out", str(tmp_path / "envoy.yaml")]) == 0
    told = capsys.readouterr().err
    assert "random" in told
    assert "1 connection, 1 route" in told


def test_the_door_is_told_which_connections_have_clusters() -> None:
    def told(names: list[str], layout: Layout = Layout.SEPARATE) -> list[str]:
        data = listener_filters(Choices(layout=layout), names)[1]["typed_config"]["grpc_service"]["initial_metadata"]
        return [each["value"] for each in data if each["key"] == "x-policy-connections"]

    assert told(["two", "one"]) == ["one two"]
    assert told(["half%"]) == ["half%%"]
    assert told([]) == told(["é"]) == told(["x" * 5_000]) == told(["one"], Layout.SHARED) == []
