"""What the operator chooses for the generated configuration; everything else is in the catalogue."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_address


class FailMode(StrEnum):
    """What Envoy does while the door is away."""

    OPEN = "open"
    """Traffic passes in the catalogue's order, never to capped or leased connections."""
    CLOSED = "closed"
    """Traffic is answered 503."""


class Layout(StrEnum):
    """How the connections become clusters."""

    SEPARATE = "separate"
    """A cluster a connection, ordered by the priority group specifier: any host, TLS and SNI of its own."""
    SHARED = "shared"
    """One cluster with the load balancing policy override_host: addresses must be IP:port."""


class CredentialSource(StrEnum):
    """Where Envoy takes the credential of a connection from. The door never sees one."""

    NONE = "none"
    """The client's own goes upstream."""
    ENVIRONMENT = "environment"
    """The variable CREDENTIAL_<CONNECTION> of the Envoy process."""
    FILES = "files"
    """A secret file a connection, <directory>/<connection>.yaml, followed while Envoy runs."""


@dataclass(frozen=True, slots=True)
class Choices:
    """Choices of the operator."""

    listen: str = "127.0.0.1:10000"
    admin: str = "127.0.0.1:9901"
    """Empty: no admin interface."""
    policy: str = "127.0.0.1:50051"
    """host:port or unix:/path of the door; of several processes of it, with commas."""
    policy_key: str = ""
    """Name of the environment variable of Envoy with the bearer key for the door; empty: none."""
    fail_mode: FailMode = FailMode.CLOSED
    layout: Layout = Layout.SEPARATE
    credentials: CredentialSource = CredentialSource.NONE
    credential_directory: str = ""
    max_wait_ms: int = 0
    """`envoy.max_wait_ms` of the door: the listener stage's timeout is longer by it."""
    ca_file: str = "/etc/ssl/certs/ca-certificates.crt"
    """Authorities of upstream certificates."""
    body_limit_bytes: int = 16_777_216
    """Largest request that can still be retried, and largest error body that is read."""

    @property
    def doors(self) -> tuple[str, ...]:
        """Addresses of the door."""
        return tuple(self.policy.split(","))

    @property
    def has_named_doors(self) -> bool:
        """A name stands for any number of addresses."""
        return not all(door.startswith("unix:") or is_numeric(door) for door in self.doors)

    @property
    def may_have_several_doors(self) -> bool:
        """The stages of one request could meet in different processes."""
        return len(self.doors) > 1 or self.has_named_doors


def is_numeric(address: str) -> bool:
    """The host of host:port is an IP address."""
    try:
        ip_address(address.rpartition(":")[0].strip("[]"))
    except ValueError:
        return False
    return True
