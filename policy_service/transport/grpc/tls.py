"""TLS and mutual TLS with reload: files are looked at again at each handshake, a broken new file keeps the old one."""

from __future__ import annotations

import logging
import os
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

log = logging.getLogger(__name__)


class ListenError(Exception):
    """The server cannot listen as configured; `remedy` says what to do."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}; {remedy}")
        self.problem, self.remedy = problem, remedy


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of the server; with `client_ca` client certificates are required."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        """Every file in use."""
        return (self.certificate, self.key, *([self.client_ca] if self.client_ca else []))


class TlsReloader:
    """Server credentials that follow their files.

    Raises:
        ListenError: on construction, if a file is missing, unreadable or wrong.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._stamp = _stamp(files)
        self._first = _load(files)

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials for `add_secure_port`."""
        return grpc.dynamic_ssl_server_credentials(
            self._first, self.changed, require_client_authentication=self._files.client_ca is not None
        )

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """The new configuration if the files have changed and are fit for use; called by grpc at each handshake,
        on a thread of its own."""
        try:
            stamp = _stamp(self._files)
            if stamp == self._stamp:
                return None
            # Remembered first: a broken file is reported once, not at every handshake.
            self._stamp = stamp
            return _load(self._files)
        except ListenError as error:
            log.error("TLS files not reloaded, the old ones stay in use: %s", error)
            return None


def _stamp(files: TlsFiles) -> tuple[tuple[int, int, int], ...]:
    return tuple(_file_stamp(path) for path in files.paths)


def _file_stamp(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError as error:
        raise ListenError(f"cannot read {path}: {error.strerror}", "check tls.cert_file and its neighbours") from error
    return (found.st_mtime_ns, found.st_size, found.st_ino)


def _load(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    certificate, key = _bytes(files.certificate), _bytes(files.key)
    authority = _bytes(files.client_ca) if files.client_ca else None
    _check(files)
    return grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=authority)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ListenError(
            f"cannot read {path}: {error.strerror}", f"make it readable for uid {os.geteuid()}"
        ) from error


def _check(files: TlsFiles) -> None:
    """grpc accepts any bytes and then fails each handshake; OpenSSL says now what is wrong."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(files.certificate, files.key, password=_no_password)
    except (ssl.SSLError, ValueError, OSError) as error:
        problem = f"{files.certificate} and {files.key} are no certificate and key that belong together"
        raise ListenError(problem, "give a PEM chain and its unencrypted PEM key") from error
    try:
        if files.client_ca:
            context.load_verify_locations(files.client_ca)
    except (ssl.SSLError, ValueError, OSError) as error:
        raise ListenError(f"{files.client_ca} is no PEM certificate", "give the client authorities as PEM") from error


def _no_password() -> str:
    raise ValueError("the key is encrypted")
