"""Where each connection of a catalogue is dialled: host, port, TLS, base path. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from policy_service.domain.catalogue import Catalogue, Connection, ProviderDirectory
from policy_service.domain.lease_selection import managed_connections

_TLS_PORT = 443


class UpstreamError(ValueError):
    """The catalogue does not say where connections are; `problems` has a line for each."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


@dataclass(frozen=True, slots=True)
class Upstream:
    """One connection as Envoy dials it."""

    connection: str
    provider: str
    host: str
    port: int
    tls: bool
    base_path: str = ""
    is_reserved: bool = False
    """Capped, or leased to certain callers: never used without the service (spec/fleet.md section 6)."""

    @property
    def is_numeric(self) -> bool:
        """The host is an IP address."""
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return False
        return True


def upstreams(catalogue: Catalogue) -> Mapping[str, Upstream]:
    """Every enabled connection by id.

    Raises:
        UpstreamError: some have neither base_url nor address, nor a provider with a base URL.
    """
    directory = ProviderDirectory(catalogue.providers)
    managed = managed_connections(tuple(catalogue.callers.values()))
    found = {c.id: _upstream(c, directory, c.id in managed) for c in catalogue.connections.values() if c.enabled}
    missing = [name for name, upstream in found.items() if upstream is None]
    if missing:
        raise UpstreamError(f"connections[{name}]: no upstream; set base_url or address" for name in missing)
    return {name: upstream for name, upstream in found.items() if upstream is not None}


def _upstream(connection: Connection, directory: ProviderDirectory, is_managed: bool) -> Upstream | None:
    provider = directory.get(connection.provider)
    url = connection.base_url or _url_of(connection.address) or provider.base_url
    if not url:
        return None
    parts = urlsplit(url)
    is_tls = parts.scheme == "https"
    return Upstream(
        connection.id,
        provider.id,
        parts.hostname or "",
        parts.port or (_TLS_PORT if is_tls else 80),
        is_tls,
        parts.path.rstrip("/"),
        is_managed or bool(connection.max_concurrent),
    )


def _url_of(address: str) -> str:
    """An address names no scheme: TLS on port 443, plain HTTP on any other."""
    if not address:
        return ""
    return f"https://{address}" if address.rpartition(":")[2] == str(_TLS_PORT) else f"http://{address}"
