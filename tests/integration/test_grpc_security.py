"""Bearer keys, TLS, mutual TLS and reload over real sockets, with certificates made for the test."""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from grpc_health.v1 import health_pb2, health_pb2_grpc

from policy_service.generated.policy.v1 import admin_pb2, admin_pb2_grpc, policy_pb2, policy_pb2_grpc, types_pb2
from policy_service.transport.grpc.admin_servicer import actor_name
from policy_service.transport.grpc.auth import KeyRing, bearer_keys
from policy_service.transport.grpc.server import ServerOptions
from policy_service.transport.grpc.tls import ListenError, TlsFiles, TlsReloader
from tests.integration.grpc_shell import LOOPBACK, Shell, reason, shell

DISPATCH = policy_pb2.SelectTargetRequest(candidates=[types_pb2.Candidate(provider="openai", connection="a")])
OLD_KEY, NEW_KEY, ADMIN_KEY = "old-policy-key-000", "new-policy-key-000", "admin-key-00000000"


def hashed(key: str) -> str:
    return sha256(key.encode()).hexdigest()


RING = KeyRing(bearer_keys([hashed(OLD_KEY), hashed(NEW_KEY)], [hashed(ADMIN_KEY)]))


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


async def select(running: Shell, *metadata: tuple[str, str]) -> policy_pb2.SelectTargetResponse:
    stub = policy_pb2_grpc.PolicyServiceStub(running.channel)
    answer: policy_pb2.SelectTargetResponse = await stub.SelectTarget(DISPATCH, metadata=metadata)
    return answer


# --- bearer keys --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [OLD_KEY, NEW_KEY, ADMIN_KEY])
async def test_every_configured_key_may_ask_for_decisions(key: str) -> None:
    async with shell(keys=RING) as running:
        assert (await select(running, *bearer(key))).HasField("dispatch")


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ((), "CREDENTIALS_MISSING"),
        ((("authorization", "Basic abc"),), "CREDENTIALS_MISSING"),
        (bearer("wrong-key"), "CREDENTIALS_INVALID"),
        (bearer(""), "CREDENTIALS_INVALID"),
        (bearer(hashed(OLD_KEY)), "CREDENTIALS_INVALID"),
    ],
)
async def test_calls_without_a_known_key_are_not_authenticated(
    metadata: tuple[tuple[str, str], ...], expected: str
) -> None:
    async with shell(keys=RING) as running:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await select(running, *metadata)
        assert not running.selects.seen
    assert failed.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert reason(failed.value) == expected


async def test_a_policy_key_may_not_administer_and_an_admin_key_may() -> None:
    actors: list[str] = []

    async def health(request: admin_pb2.GetHealthRequest) -> admin_pb2.GetHealthResponse:
        actors.append(actor_name(admin_pb2.Actor()))
        return admin_pb2.GetHealthResponse(version="1")

    async with shell(keys=RING, operations={"GetHealth": health}) as running:
        admin = admin_pb2_grpc.AdminServiceStub(running.channel)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await admin.GetHealth(admin_pb2.GetHealthRequest(), metadata=bearer(OLD_KEY))
        answer = await admin.GetHealth(admin_pb2.GetHealthRequest(), metadata=bearer(ADMIN_KEY))
    assert failed.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert reason(failed.value) == "SCOPE_MISSING"
    assert answer.version == "1"
    assert actors == [f"admin-key-{hashed(ADMIN_KEY)[:8]}"]


async def test_health_needs_no_key() -> None:
    async with shell(keys=RING) as running:
        answer = await health_pb2_grpc.HealthStub(running.channel).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_without_keys_an_exposed_server_keeps_its_admin_service_shut() -> None:
    async with shell(keys=KeyRing(admin_is_open=False)) as running:
        assert (await select(running)).HasField("dispatch")
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await admin_pb2_grpc.AdminServiceStub(running.channel).GetHealth(admin_pb2.GetHealthRequest())
    assert failed.value.code() is grpc.StatusCode.UNAUTHENTICATED


# --- TLS ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Authority:
    """A certificate authority for one test."""

    name: str
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def issue(self, name: str) -> tuple[bytes, bytes]:
        """Key and certificate, as PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        return private_pem(key), signed(name, key, self.name, self.key).public_bytes(serialization.Encoding.PEM)


def authority(name: str) -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    return Authority(name, key, signed(name, key, name, key, is_authority=True))


def signed(
    subject: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    by: ec.EllipticCurvePrivateKey,
    *,
    is_authority: bool = False,
) -> x509.Certificate:
    now = dt.datetime.now(dt.UTC)
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .sign(by, hashes.SHA256())
    )


def private_pem(key: ec.EllipticCurvePrivateKey, password: bytes | None = None) -> bytes:
    guard = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, guard)


def write_pair(folder: Path, pair: tuple[bytes, bytes], *, client_ca: bytes | None = None) -> TlsFiles:
    """Server files in a folder."""
    files = TlsFiles(folder / "tls.crt", folder / "tls.key", folder / "ca.crt" if client_ca else None)
    files.key.write_bytes(pair[0])
    files.certificate.write_bytes(pair[1])
    if files.client_ca and client_ca:
        files.client_ca.write_bytes(client_ca)
    return files


def tls_options(files: TlsFiles) -> ServerOptions:
    return ServerOptions(tcp=LOOPBACK, tls=files, notice_ms=0, drain_ms=2_000)


async def decide(address: str, credentials: grpc.ChannelCredentials | None) -> policy_pb2.SelectTargetResponse:
    """One decision over a channel of its own."""
    # A channel of its own connection pool, so that each call makes its handshake.
    local = [("grpc.use_local_subchannel_pool", 1)]
    channel = (
        grpc.aio.secure_channel(address, credentials, options=local)
        if credentials
        else grpc.aio.insecure_channel(address, options=local)
    )
    async with channel:
        answer: policy_pb2.SelectTargetResponse = await policy_pb2_grpc.PolicyServiceStub(channel).SelectTarget(
            DISPATCH, timeout=3
        )
        return answer


async def cannot_connect(address: str, credentials: grpc.ChannelCredentials | None) -> bool:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await decide(address, credentials)
    return failed.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


async def test_tls_serves_those_who_trust_the_authority_and_nobody_in_the_clear(tmp_path: Path) -> None:
    ours, other = authority("ours"), authority("other")
    async with shell(tls_options(write_pair(tmp_path, ours.issue("server")))) as running:
        assert (await decide(running.address, grpc.ssl_channel_credentials(ours.pem))).HasField("dispatch")
        assert await cannot_connect(running.address, grpc.ssl_channel_credentials(other.pem))
        assert await cannot_connect(running.address, None)


async def test_mutual_tls_asks_for_a_certificate_of_the_client_authority(tmp_path: Path) -> None:
    ours, clients, other = authority("ours"), authority("clients"), authority("other")
    files = write_pair(tmp_path, ours.issue("server"), client_ca=clients.pem)
    async with shell(tls_options(files)) as running:
        known = grpc.ssl_channel_credentials(ours.pem, *clients.issue("gateway"))
        assert (await decide(running.address, known)).HasField("dispatch")
        assert await cannot_connect(running.address, grpc.ssl_channel_credentials(ours.pem))
        assert await cannot_connect(running.address, grpc.ssl_channel_credentials(ours.pem, *other.issue("gateway")))


async def test_a_new_certificate_is_used_from_the_next_handshake_on(tmp_path: Path) -> None:
    before, after = authority("before"), authority("after")
    files = write_pair(tmp_path, before.issue("server"))
    async with shell(tls_options(files)) as running:
        assert (await decide(running.address, grpc.ssl_channel_credentials(before.pem))).HasField("dispatch")
        write_pair(tmp_path, after.issue("server"))
        assert (await decide(running.address, grpc.ssl_channel_credentials(after.pem))).HasField("dispatch")
        assert await cannot_connect(running.address, grpc.ssl_channel_credentials(before.pem))


async def test_a_new_client_authority_is_used_from_the_next_handshake_on(tmp_path: Path) -> None:
    ours, before, after = authority("ours"), authority("before"), authority("after")
    pair, client = ours.issue("server"), after.issue("gateway")
    files = write_pair(tmp_path, pair, client_ca=before.pem)
    async with shell(tls_options(files)) as running:
        assert await cannot_connect(running.address, grpc.ssl_channel_credentials(ours.pem, *client))
        write_pair(tmp_path, pair, client_ca=after.pem)
        assert (await decide(running.address, grpc.ssl_channel_credentials(ours.pem, *client))).HasField("dispatch")


async def test_a_broken_new_file_keeps_the_old_certificate(tmp_path: Path) -> None:
    ours = authority("ours")
    files = write_pair(tmp_path, ours.issue("server"))
    async with shell(tls_options(files)) as running:
        files.certificate.write_bytes(b"half a file")
        assert (await decide(running.address, grpc.ssl_channel_credentials(ours.pem))).HasField("dispatch")


def test_a_broken_new_file_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = write_pair(tmp_path, authority("ours").issue("server"))
    reloader = TlsReloader(files)
    files.key.write_bytes(b"nothing")
    assert [reloader.changed() for _ in range(5)] == [None] * 5
    assert len(caplog.records) == 1
    assert "the old ones stay in use" in caplog.text


async def test_files_that_cannot_be_used_are_named_before_anything_listens(tmp_path: Path) -> None:
    ours = authority("ours")
    key, certificate = ours.issue("server")
    locked = private_pem(ec.generate_private_key(ec.SECP256R1()), b"secret")
    cases = {
        "cannot read": (None, certificate),
        "no certificate and key": (key, b"not pem"),
        "belong together": (ours.issue("another")[0], certificate),
        "unencrypted": (locked, certificate),
    }
    for number, (message, pair) in enumerate(cases.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        files = write_pair(folder, (pair[0] or b"", pair[1]))
        if pair[0] is None:
            files.key.unlink()
        with pytest.raises(ListenError, match=message):
            TlsReloader(files)


def test_a_client_authority_that_is_no_certificate_is_refused(tmp_path: Path) -> None:
    files = write_pair(tmp_path, authority("ours").issue("server"), client_ca=b"not pem")
    with pytest.raises(ListenError, match="give the client authorities as PEM"):
        TlsReloader(files)
