"""Flags of the process configuration as data; imports nothing, so that the command line starts fast."""

from __future__ import annotations

from typing import NamedTuple


class Flag(NamedTuple):
    """A flag for one field of `ServerConfig`. `is_list`: may be given several times; `is_switch`: takes no value."""

    text: str
    help: str
    is_list: bool = False
    is_switch: bool = False


FLAGS: dict[str, Flag] = {
    "catalogue": Flag("--catalogue", "Catalogue file (YAML)."),
    "database_url": Flag("--database-url", "Existing Postgres; without it the embedded one starts."),
    "data_dir": Flag("--data-dir", "Directory of embedded database and spool."),
    "listen.tcp": Flag("--listen", "gRPC address host:port; may be given several times.", is_list=True),
    "listen.unix": Flag("--unix-socket", "Path of a gRPC Unix socket."),
    "workers": Flag("--workers", "Processes that share the port."),
    "replica": Flag("--replica", "Name of this replica."),
    "tls.cert_file": Flag("--tls-cert", "Certificate chain (PEM)."),
    "tls.key_file": Flag("--tls-key", "Private key (PEM)."),
    "tls.client_ca_file": Flag("--tls-client-ca", "Authorities of required client certificates (PEM)."),
    "envoy.enabled": Flag("--envoy", "Serve Envoy's external processing on the same addresses.", is_switch=True),
    "log.level": Flag("--log-level", "debug, info, warning or error."),
    "log.format": Flag("--log-format", "auto, text or json."),
}
"""By dotted field name; every field can also be given as `--set name=value`."""
