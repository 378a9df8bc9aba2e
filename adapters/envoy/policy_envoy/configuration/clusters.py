"""Clusters of the generated configuration: the connections, and the door itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from policy_envoy.configuration.choices import Choices, CredentialSource, FailMode, Layout
from policy_envoy.configuration.filters import POLICY_CLUSTER, Data, typed, upstream_filters
from policy_envoy.configuration.upstreams import Upstream, UpstreamError
from policy_envoy.names import ENDPOINT_HEADER, LB_NAMESPACE, REQUEST

SHARED_CLUSTER = "connections"
NO_CLUSTER = "no_connection"
"""Without endpoints: stands where no connection may serve while the door is away."""
_HTTP = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_MANY = 100_000
_CONNECT_TIMEOUT = "5s"


def clusters(choices: Choices, upstreams: Mapping[str, Upstream]) -> list[Data]:
    """Every cluster.

    Raises:
        UpstreamError: a shared cluster cannot hold these upstreams.
    """
    return [*_LAYOUTS[choices.layout](choices, upstreams.values()), _empty(), _policy(choices)]


def _separate(choices: Choices, upstreams: Iterable[Upstream]) -> list[Data]:
    return [_cluster(choices, upstream) for upstream in upstreams]


def _cluster(choices: Choices, upstream: Upstream) -> Data:
    kind = "STATIC" if upstream.is_numeric else "LOGICAL_DNS"
    http = _http_options(upstream.tls, upstream_filters(choices, upstream))
    cluster = _base(choices, upstream.connection, kind, [_endpoint(upstream)], http)
    return {**cluster, **({"transport_socket": _tls(choices, upstream)} if upstream.tls else {})}


def _shared(choices: Choices, upstreams: Iterable[Upstream]) -> list[Data]:
    found = list(upstreams)
    if problems := [*_unshareable(choices, found)]:
        raise UpstreamError(f"{problem}; only the separate layout can do that" for problem in problems)
    http = _http_options(False, upstream_filters(choices, None))
    cluster = _base(choices, SHARED_CLUSTER, "STATIC", [_endpoint(each) for each in found], http)
    matches = [_socket_match(choices, each) for each in found if each.tls]
    return [{**cluster, **_override_host(), **({"transport_socket_matches": matches} if matches else {})}]


def _unshareable(choices: Choices, upstreams: Iterable[Upstream]) -> Iterator[str]:
    """What a cluster that connections share cannot do for them."""
    if choices.credentials != CredentialSource.NONE:
        yield "credentials by connection"
    for each in upstreams:
        if not each.is_numeric:
            yield f"connections[{each.connection}]: {each.host} is no IP address"
        if each.base_path:
            yield f"connections[{each.connection}]: a base path"
        if each.is_reserved and choices.fail_mode == FailMode.OPEN:
            yield f"connections[{each.connection}]: capped or leased, so that fail mode open has to pass it over"


def _override_host() -> Data:
    sources = [{"header": ENDPOINT_HEADER}, {"metadata": {"key": LB_NAMESPACE, "path": [{"key": ENDPOINT_HEADER}]}}]
    round_robin = typed(
        "envoy.load_balancing_policies.round_robin", "load_balancing_policies.round_robin.v3.RoundRobin"
    )
    policy = typed(
        "envoy.load_balancing_policies.override_host",
        "load_balancing_policies.override_host.v3.OverrideHost",
        override_host_sources=sources,
        fallback_policy={"policies": [{"typed_extension_config": round_robin}]},
    )
    return {"load_balancing_policy": {"policies": [{"typed_extension_config": policy}]}}


def _base(choices: Choices, name: str, kind: str, endpoints: list[Data], http: Data) -> Data:
    return {
        "name": name,
        "type": kind,
        **({} if kind == "STATIC" else {"dns_lookup_family": "ALL"}),  # both families are tried
        "connect_timeout": _CONNECT_TIMEOUT,
        "per_connection_buffer_limit_bytes": choices.body_limit_bytes,
        "circuit_breakers": {"thresholds": [dict.fromkeys(_LIMITS, _MANY)]},
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
        "typed_extension_protocol_options": {_HTTP: http},
    }


_LIMITS = ("max_connections", "max_pending_requests", "max_requests", "max_retries")
"""Raised: Envoy's default of three retries at a time would end a failover under load; the service has its own caps."""


def _endpoint(upstream: Upstream) -> Data:
    address = {"socket_address": {"address": upstream.host, "port_value": upstream.port}}
    known = {
        "policy": {"connection": upstream.connection},
        "envoy.transport_socket_match": {"connection": upstream.connection},
    }
    return {"endpoint": {"hostname": upstream.host, "address": address}, "metadata": {"filter_metadata": known}}


def _tls(choices: Choices, upstream: Upstream) -> Data:
    """TLS with the host's own name in SNI and in the certificate."""
    matcher = {"san_type": "IP_ADDRESS" if upstream.is_numeric else "DNS", "matcher": {"exact": upstream.host}}
    trusted = {"trusted_ca": {"filename": choices.ca_file}, "match_typed_subject_alt_names": [matcher]}
    return typed(
        "envoy.transport_sockets.tls",
        "transport_sockets.tls.v3.UpstreamTlsContext",
        **({} if upstream.is_numeric else {"sni": upstream.host}),
        common_tls_context={"validation_context": trusted, "alpn_protocols": ["h2", "http/1.1"]},
    )


def _socket_match(choices: Choices, upstream: Upstream) -> Data:
    name = {"connection": upstream.connection}
    return {"name": upstream.connection, "match": name, "transport_socket": _tls(choices, upstream)}


def _http_options(is_tls: bool, filters: list[Data]) -> Data:
    """HTTP/2 where the upstream offers it by ALPN."""
    protocol: Data = {"auto_config": {}} if is_tls else {"explicit_http_config": {"http_protocol_options": {}}}
    return {"@type": f"type.googleapis.com/{_HTTP}", **protocol, "http_filters": filters}


def _empty() -> Data:
    return {"name": NO_CLUSTER, "type": "STATIC", "load_assignment": {"cluster_name": NO_CLUSTER, "endpoints": []}}


def _policy(choices: Choices) -> Data:
    http = {"@type": f"type.googleapis.com/{_HTTP}", "explicit_http_config": {"http2_protocol_options": _KEEPALIVE}}
    endpoints = [{"endpoint": {"address": address_of(door)}} for door in choices.doors]
    return {
        "name": POLICY_CLUSTER,
        "type": "STRICT_DNS" if choices.has_named_doors else "STATIC",
        "connect_timeout": "0.5s",
        "per_connection_buffer_limit_bytes": 4 * choices.body_limit_bytes,  # see docs/adr/0019
        "circuit_breakers": {"thresholds": [dict.fromkeys(_LIMITS, _MANY)]},
        "load_assignment": {"cluster_name": POLICY_CLUSTER, "endpoints": [{"lb_endpoints": endpoints}]},
        "typed_extension_protocol_options": {_HTTP: http},
        **(_among_doors() if choices.may_have_several_doors else {}),
    }


def _among_doors() -> Data:
    """One door for both stages of a request, by the id of the request; none that does not answer, unless all are so."""
    maglev = typed(
        "envoy.load_balancing_policies.maglev",
        "load_balancing_policies.maglev.v3.Maglev",
        consistent_hashing_lb_config={"hash_policy": [{"header": {"header_name": REQUEST}}]},
    )
    return {
        "load_balancing_policy": {"policies": [{"typed_extension_config": maglev}]},
        "common_lb_config": {"healthy_panic_threshold": {"value": 1}},
        "health_checks": [_HEALTH],
    }


_HEALTH: Data = {
    "interval": "1s",
    "no_traffic_interval": "1s",
    "timeout": "1s",
    "unhealthy_threshold": 1,
    "healthy_threshold": 1,
    "grpc_health_check": {},
}
_KEEPALIVE: Data = {"connection_keepalive": {"interval": "30s", "timeout": "5s"}}


def address_of(text: str) -> Data:
    """An address of Envoy: host:port, [v6]:port or unix:/path."""
    if text.startswith("unix:"):
        return {"pipe": {"path": text.removeprefix("unix:")}}
    host, _, port = text.rpartition(":")
    return {"socket_address": {"address": host.strip("[]"), "port_value": int(port)}}


_LAYOUTS: Mapping[Layout, Callable[[Choices, Iterable[Upstream]], list[Any]]] = {
    Layout.SEPARATE: _separate,
    Layout.SHARED: _shared,
}
