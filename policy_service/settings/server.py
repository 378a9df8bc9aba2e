"""Settings of one running process: where it listens, which store it uses, its budgets and limits.

Unlike policy settings (`domain/setting_specs.py`), which belong to the fleet and live in the catalogue, these
belong to the process and are read once at start. Loading and precedence: `settings.load`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl, urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator

_HASHED = re.compile(r"(?:sha256:)?[0-9a-f]{64}")
_SHORTEST_KEY = 16
_ADDRESS = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.%]+)\]|(?P<host>[^\s:\[\]/]+)):(?P<port>[0-9]{1,5})")
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


def split_address(address: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port` as a pair.

    Raises:
        ValueError: not an address; the text says what one looks like.
    """
    match = _ADDRESS.fullmatch(address.strip())
    if match is None or int(match["port"]) > 65_535:
        raise ValueError("not an address; write host:port, such as 127.0.0.1:50051 or [::1]:50051")
    return match["six"] or match["host"], int(match["port"])


def _address(value: str) -> str:
    split_address(value)
    return value.strip()


def _comma_list(value: object) -> object:
    """A list from the environment or a flag: `a,b`."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _replica_name(value: str) -> str:
    """It stands in rows of the database, in logs and as a directory of the spool."""
    if value in (".", "..") or not value.isprintable():
        raise ValueError("not a name; write printable characters, such as the host's name")
    return value


_SSL_MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
_DATABASE_FILES = frozenset({"sslrootcert", "sslcert", "sslkey", "sslcrl", "passfile"})
_DATABASE_PARAMETERS = _DATABASE_FILES | {
    "sslmode", "sslpassword", "ssl_min_protocol_version", "ssl_max_protocol_version", "target_session_attrs", "host",
    "port", "user", "password",
}  # fmt: skip
_NO_POSTGRES = "not a Postgres address; write postgresql://user:password@host:5432/database"


def _database_url(value: SecretStr | None) -> SecretStr | None:
    text = value.get_secret_value().strip() if value else ""
    if not text:
        return None
    if urlsplit(text).scheme not in ("postgresql", "postgres"):
        raise ValueError(_NO_POSTGRES)
    ports = re.findall(r":([0-9]+)(?=,|$)", urlsplit(text).netloc.rpartition("@")[2])
    if any(int(port) > 65_535 for port in ports):
        raise ValueError(f"no such port; {_NO_POSTGRES.partition('; ')[2]}")
    _check_parameters(dict(parse_qsl(urlsplit(text).query)))
    return SecretStr(text)


def _check_parameters(given: Mapping[str, str]) -> None:
    """What stands behind the `?` of a database's address, by libpq's names."""
    for name, value in given.items():
        if name not in _DATABASE_PARAMETERS:
            raise ValueError(f"unknown parameter {name!r}; allowed are {', '.join(sorted(_DATABASE_PARAMETERS))}")
        if name == "sslmode" and value not in _SSL_MODES:
            raise ValueError(f"unknown sslmode; write one of {', '.join(_SSL_MODES)}")
        if name in _DATABASE_FILES and not Path(value).expanduser().is_file():
            raise ValueError(f"no file at {name}={value}; name one that this process can read")


def _key(value: SecretStr) -> SecretStr:
    text = value.get_secret_value()
    if _HASHED.fullmatch(text.lower()) is None and len(text) < _SHORTEST_KEY:
        raise ValueError(f"key too short; use at least {_SHORTEST_KEY} characters, or sha256:<64 hex digits>")
    return value


def key_hash(key: SecretStr) -> str:
    """SHA-256 (lower-case hex) of a key that is given plain or hashed already."""
    text = key.get_secret_value()
    if _HASHED.fullmatch(text.lower()):
        return text.lower().removeprefix("sha256:")
    return hashlib.sha256(text.encode()).hexdigest()


Address = Annotated[str, AfterValidator(_address)]
Addresses = Annotated[tuple[Address, ...], BeforeValidator(_comma_list)]
Keys = Annotated[tuple[Annotated[SecretStr, AfterValidator(_key)], ...], BeforeValidator(_comma_list)]


def number(default: int, low: int, high: int, doc: str, unit: str = "") -> Any:
    """A whole number with range, unit and meaning."""
    return Field(default, ge=low, le=high, description=doc, json_schema_extra={"unit": unit})


def _ms(default: int, low: int, high: int, doc: str) -> Any:
    return number(default, low, high, doc, "ms")


class Section(BaseModel):
    """Base of every block: frozen, no unknown keys, secrets never in messages."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ListenConfig(Section):
    """Where the process listens."""

    tcp: Addresses = Field(
        default=("127.0.0.1:50051",), description="gRPC addresses, host:port; port 0 takes a free one; empty: no TCP."
    )
    unix: str = Field(default="", description="Path of a gRPC Unix socket (mode 0660); empty: none.", max_length=100)

    @model_validator(mode="after")
    def _somewhere(self) -> ListenConfig:
        if not self.tcp and not self.unix:
            raise ValueError("nothing to listen on; set listen.tcp or listen.unix")
        return self

    @property
    def open_addresses(self) -> tuple[str, ...]:
        """Addresses that other machines can reach."""
        return tuple(address for address in self.tcp if split_address(address)[0] not in LOOPBACK)


class TlsConfig(Section):
    """TLS of the gRPC TCP addresses."""

    cert_file: str = Field(default="", description="PEM file with the server's certificate chain; empty: no TLS.")
    key_file: str = Field(default="", description="PEM file with its private key.")
    client_ca_file: str = Field(
        default="", description="PEM file of the authorities whose client certificates are required."
    )

    @model_validator(mode="after")
    def _pair(self) -> TlsConfig:
        if bool(self.cert_file) is not bool(self.key_file):
            raise ValueError("certificate and key belong together; set both tls.cert_file and tls.key_file")
        if self.client_ca_file and not self.cert_file:
            raise ValueError("client certificates need TLS; set tls.cert_file and tls.key_file too")
        return self

    @property
    def enabled(self) -> bool:
        return bool(self.cert_file)


class AuthConfig(Section):
    """Bearer keys. Several at a time, so that they can be rotated."""

    keys: Keys = Field(
        default=(),
        description="Keys that may call PolicyService: sha256:<hex> or the key itself; empty: no key is asked for.",
    )
    admin_keys: Keys = Field(
        default=(),
        description="Keys that may call AdminService too; empty: only without any keys is it open, on loopback.",
    )

    @property
    def key_hashes(self) -> frozenset[str]:
        return frozenset(map(key_hash, self.keys))

    @property
    def admin_key_hashes(self) -> frozenset[str]:
        return frozenset(map(key_hash, self.admin_keys))


class StoreConfig(Section):
    """How the process talks to Postgres (spec/fleet.md sections 4 and 7)."""

    select_ms: int = _ms(20, 1, 10_000, "Longest time that a selection waits for the database.")
    report_ms: int = _ms(200, 1, 60_000, "Longest time that a report waits for its commit before it is spooled.")
    operation_ms: int = _ms(2_000, 10, 60_000, "Longest time of a lease, permit or admin transaction.")
    connect_ms: int = _ms(5_000, 100, 120_000, "Longest time to connect.")
    commit_interval_ms: int = _ms(20, 20, 1_000, "Shortest time between the starts of two grouped commits.")
    poll_ms: int = _ms(500, 50, 60_000, "How often the change feed is polled beside notifications.")
    max_view_age_ms: int = _ms(5_000, 100, 600_000, "View older than this counts as degraded.")
    away_after_timeouts: int = number(3, 1, 100, "Time-outs in a row after which the store counts as away.")
    retry_ms: int = _ms(500, 50, 60_000, "How often an absent store is tried again.")
    pool_size: int = number(8, 1, 200, "Database connections of one worker.")
    notifications: bool = Field(default=True, description="Use LISTEN and NOTIFY; off: polling alone.")
    pgbouncer: bool = Field(
        default=False, description="A transaction-pooling proxy is in between: no prepared statements, no LISTEN."
    )
    failover: Literal["sync", "async"] = Field(
        default="sync", description="Replication of the database; async holds leases and permits back after a failover."
    )

    @property
    def listens(self) -> bool:
        """Notifications are wanted and can work."""
        return self.notifications and not self.pgbouncer


class SpoolConfig(Section):
    """Local file for reports that Postgres did not take in time (spec/fleet.md section 7)."""

    dir: str = Field(default="", description="Directory; empty: spool below the data directory.")
    max_bytes: int = number(268_435_456, 1_048_576, 68_719_476_736, "Size at which further reports are refused.", "B")


class LimitsConfig(Section):
    """What one call may ask for."""

    max_message_bytes: int = number(
        16_777_216, 65_536, 67_108_864, "Largest request message; larger ones are refused with a reason.", "B"
    )
    max_concurrent_rpcs: int = number(2_000, 1, 100_000, "Calls in progress; further ones get RESOURCE_EXHAUSTED.")
    max_candidates: int = number(10_000, 1, 100_000, "Inline candidates of one selection.")
    max_batch: int = number(1_000, 1, 10_000, "Items of one batch call.")
    max_headers: int = number(256, 1, 10_000, "Headers kept of one outcome; the rest is dropped.")
    body_bytes: int = number(65_536, 0, 1_048_576, "Bytes kept of the body of one outcome.", "B")


class DeadlinesConfig(Section):
    """Longest time of a call, whatever deadline the client set."""

    select_ms: int = _ms(5_000, 10, 600_000, "SelectTarget and SelectTargets without waiting in line.")
    report_ms: int = _ms(
        45_000, 10, 600_000, "ReportOutcome and ReportOutcomes; a report may share the verdict of a limit reset."
    )
    lease_ms: int = _ms(10_000, 10, 600_000, "Lease calls.")
    permit_ms: int = _ms(605_000, 10, 3_600_000, "Permit calls and selections that wait in line.")
    admin_ms: int = _ms(60_000, 10, 3_600_000, "AdminService.")


class LogConfig(Section):
    """What the process writes to standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least level that is written."
    )
    format: Literal["auto", "text", "json"] = Field(
        default="auto", description="auto: text on a terminal, else JSON lines."
    )


class TelemetryConfig(Section):
    """Traces; the exporter is set by the standard OTEL_* variables."""

    traces: bool = Field(
        default=True, description="Spans where OTEL_EXPORTER_OTLP_ENDPOINT (or _TRACES_ENDPOINT) is set."
    )
    max_span_events: int = number(64, 0, 1_000, "Exclusions and facts written as events of one span.")


class EnvoyConfig(Section):
    """The ext_proc service for Envoy, on the same addresses (docs/doors/envoy.md)."""

    enabled: bool = Field(default=False, description="Serve envoy.service.ext_proc.v3 too; needs the extra `envoy`.")
    reads_body: bool = Field(
        default=False, description="Read the body's model where neither path nor header names a route."
    )
    writes_model: bool = Field(default=False, description="Put the model of the served target into the request body.")
    default_route: str = Field(
        default="", max_length=256, description="Route of requests that name none; empty: they are answered 404."
    )
    caller_header: str = Field(
        default="",
        pattern=r"^[a-z0-9-]*$",
        max_length=64,
        description="Header with the caller's id, set by an earlier filter; empty: the caller is known by its key.",
    )
    max_wait_ms: int = _ms(0, 0, 300_000, "Longest wait in line or for a cooldown before an answer.")
    explains_always: bool = Field(default=False, description="Answer with x-policy-decision also unasked.")
    holds_streams: bool = Field(
        default=True, description="Hold the head of a streamed answer until its first output, so that it can fail over."
    )


class ServerConfig(Section):
    """Everything one process needs to start."""

    database_url: Annotated[SecretStr | None, AfterValidator(_database_url)] = Field(
        default=None, description="Existing Postgres 13 or newer; empty: the embedded one in the data directory."
    )
    data_dir: str = Field(
        default="", description="Directory of embedded database and spool; empty: the user's data home."
    )
    catalogue: str = Field(
        default="", description="Catalogue file (YAML); empty: the built-in providers and what is stored."
    )
    catalogue_poll_ms: int = _ms(1_000, 100, 3_600_000, "How often the catalogue file is looked at for a change.")
    workers: int = number(1, 1, 64, "Processes that share the port.")
    replica: Annotated[str, AfterValidator(_replica_name)] = Field(
        default="", description="Name of this replica in facts and health; empty: the host's name.", max_length=128
    )
    drain_ms: int = _ms(10_000, 0, 600_000, "Longest time that running calls are given after SIGTERM.")
    token_max_age_s: int = number(86_400, 60, 604_800, "Age at which a decision token is refused.", "s")
    listen: ListenConfig = Field(default_factory=ListenConfig)
    tls: TlsConfig = Field(default_factory=TlsConfig)
    auth: AuthConfig = Field(default_factory=AuthConfig)
    store: StoreConfig = Field(default_factory=StoreConfig)
    spool: SpoolConfig = Field(default_factory=SpoolConfig)
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    deadlines: DeadlinesConfig = Field(default_factory=DeadlinesConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig)
    envoy: EnvoyConfig = Field(default_factory=EnvoyConfig)

    @property
    def data_path(self) -> Path:
        """The data directory in use."""
        return Path(self.data_dir).expanduser() if self.data_dir else default_data_dir(os.environ)

    @property
    def spool_path(self) -> Path:
        """The spool directory in use."""
        return Path(self.spool.dir).expanduser() if self.spool.dir else self.data_path / "spool"

    @property
    def database_text(self) -> str | None:
        """The database address with its password, for the driver alone."""
        return self.database_url.get_secret_value() if self.database_url else None


def default_data_dir(environment: Any) -> Path:
    """`policy-service` below the user's data home (XDG_DATA_HOME, else ~/.local/share)."""
    home = environment.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(home) / "policy-service"


def server_schema() -> dict[str, Any]:
    """JSON schema of a configuration file."""
    schema = ServerConfig.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "policy-service process configuration"
    return schema
