"""`healthcheck`: asks a running service for its health over gRPC."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from policy_service.cli import exit_codes
from policy_service.cli.output import note, say
from policy_service.settings.load import LoadedConfig, read_text
from policy_service.settings.server import ServerConfig, split_address

_MAX_PEM = 1_048_576


class Probe(NamedTuple):
    """What to ask, and where; an empty address means where the configuration listens."""

    address: str
    service: str
    timeout_ms: int
    tls_ca: Path | None


def run(loaded: LoadedConfig, probe: Probe) -> int:
    """Print the status; 0 only where it is SERVING."""
    target = probe.address or own_address(loaded.config)
    try:
        status = _ask(target, loaded.config, probe)
    except grpc.RpcError as error:
        code = error.code().name if isinstance(error, grpc.Call) else "UNKNOWN"
        note(f"{probe.service} at {target}: {_explained(code, probe)}")
        return exit_codes.FAILED
    say(f"{probe.service} at {target}: {status}")
    return exit_codes.OK if status == "SERVING" else exit_codes.FAILED


def own_address(config: ServerConfig) -> str:
    """Where a server with this configuration can be asked: its Unix socket, else its first address, on loopback
    where it listens everywhere."""
    if config.listen.unix:
        return f"unix:{Path(config.listen.unix).expanduser().absolute()}"
    host, port = split_address(config.listen.tcp[0])
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _ask(target: str, config: ServerConfig, probe: Probe) -> str:
    with _channel(target, config, probe) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=probe.service)
        answer = stub.Check(request, timeout=probe.timeout_ms / 1000)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def _channel(target: str, config: ServerConfig, probe: Probe) -> grpc.Channel:
    options = [("grpc.enable_http_proxy", 0)]
    if target.startswith("unix:") or not (config.tls.enabled or probe.tls_ca):
        return grpc.insecure_channel(target, options)
    credentials = grpc.ssl_channel_credentials(
        _pem(probe.tls_ca or Path(config.tls.cert_file)),
        _pem(Path(config.tls.key_file)) if config.tls.client_ca_file else None,
        _pem(Path(config.tls.cert_file)) if config.tls.client_ca_file else None,
    )
    return grpc.secure_channel(target, credentials, options)


def _pem(path: Path) -> bytes:
    return read_text(path.expanduser(), "tls", _MAX_PEM).encode()


def _explained(code: str, probe: Probe) -> str:
    words = {
        "UNAVAILABLE": "nobody answers; check that the service runs and the address is right; over TLS, give --tls-ca",
        "DEADLINE_EXCEEDED": f"no answer within {probe.timeout_ms} ms",
        "NOT_FOUND": "unknown service; ask for readiness, liveness, or policy.v1.PolicyService",
    }
    return words.get(code, code)
