"""The whole bootstrap: listener, routes, retry policy, clusters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from policy_envoy.configuration.choices import Choices, Layout
from policy_envoy.configuration.clusters import NO_CLUSTER, SHARED_CLUSTER, address_of, clusters
from policy_envoy.configuration.filters import Data, listener_filters, typed
from policy_envoy.configuration.upstreams import Upstream, upstreams
from policy_envoy.names import CHAIN_NAMESPACE, RETRY_HEADER, ROUTE_HEADER
from policy_service.domain.catalogue import Catalogue, Route

_MAX_RETRIES = 16


def bootstrap(catalogue: Catalogue, choices: Choices) -> Data:
    """The bootstrap as plain data, for YAML or JSON.

    Raises:
        UpstreamError: the catalogue does not say where its connections are, or the layout cannot hold them.
    """
    found = upstreams(catalogue)
    admin = {"admin": {"address": address_of(choices.admin)}} if choices.admin else {}
    listener = _listener(choices, _virtual_host(catalogue, choices, found), found)
    return {
        "node": {"id": "policy-gateway", "cluster": "policy-gateway"},
        **admin,
        "layered_runtime": {"layers": [{"name": "policy", "static_layer": _RUNTIME}]},
        "static_resources": {"listeners": [listener], "clusters": clusters(choices, found)},
    }


_RUNTIME = {"envoy.reloadable_features.grpc_side_stream_flow_control": False}
"""Back pressure of a slow door crashes Envoy 1.40 where the stage is an upstream filter (docs/adr/0019)."""
_ANSWER_BUFFER = 4
"""So does that of a client that reads slowly: answers wait in a buffer of so many times the largest body instead."""


# HTTP/1.0 is what proxies in front may speak unasked (nginx).
def _listener(choices: Choices, virtual_host: Data, connections: Iterable[str]) -> Data:
    buffer_bytes = min(_ANSWER_BUFFER * choices.body_limit_bytes, 2**31 - 1)
    manager = typed(
        "envoy.filters.network.http_connection_manager",
        "filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="client",
        codec_type="AUTO",
        use_remote_address=True,
        http_protocol_options={"accept_http_10": True, "default_host_for_http_10": "gateway"},
        http2_protocol_options={"initial_stream_window_size": buffer_bytes},
        stream_idle_timeout="600s",
        route_config={"name": "policy", "virtual_hosts": [virtual_host]},
        http_filters=listener_filters(choices, connections),
    )
    return {
        "name": "clients",
        "address": address_of(choices.listen),
        "per_connection_buffer_limit_bytes": buffer_bytes,
        "filter_chains": [{"filters": [manager]}],
    }


def _virtual_host(catalogue: Catalogue, choices: Choices, found: Mapping[str, Upstream]) -> Data:
    named = [route for each in catalogue.routes.values() for route in _routes_of(each, choices, found)]
    rest = _route(choices, {"prefix": "/"}, list(found), found)
    return {
        "name": "all",
        "domains": ["*"],
        "include_request_attempt_count": True,
        "include_attempt_count_in_response": True,
        "response_headers_to_remove": [RETRY_HEADER],
        "routes": [*named, rest],
    }


def _routes_of(route: Route, choices: Choices, found: Mapping[str, Upstream]) -> list[Data]:
    """A route of the catalogue, by path and by header. The order that it names serves while the door is away."""
    order = _connections(route, found)
    by_header = {"prefix": "/", "headers": [{"name": ROUTE_HEADER, "string_match": {"exact": route.name}}]}
    by_path = _route(choices, {"prefix": f"/routes/{route.name}/"}, order, found)
    by_path["route"]["prefix_rewrite"] = "/"
    return [by_path, _route(choices, by_header, order, found)]


def _connections(route: Route, found: Mapping[str, Upstream]) -> list[str]:
    """Connections of a route in order, each once; a target without one stands for all of its provider."""
    named = (
        [target.connection] if target.connection else [n for n, up in found.items() if up.provider == target.provider]
        for target in route.targets
    )
    return [name for name in dict.fromkeys(name for names in named for name in names) if name in found]


def _route(choices: Choices, match: Data, order: Iterable[str], found: Mapping[str, Upstream]) -> Data:
    names = list(order)
    action = {
        "timeout": "0s",
        "auto_host_rewrite": True,
        **_destination(choices, [name for name in names if not found[name].is_reserved]),
        "retry_policy": _retry_policy(len(names)),
    }
    return {"match": match, "request_body_buffer_limit": choices.body_limit_bytes, "route": action}


def _destination(choices: Choices, open_order: list[str]) -> Data:
    if choices.layout == Layout.SHARED:
        return {"cluster": SHARED_CLUSTER}
    groups = [{"name": name, "clusters": [{"cluster_name": name, "weight": 1}]} for name in open_order or [NO_CLUSTER]]
    specifier = {
        "@type": "type.googleapis.com/envoy.extensions.router.cluster_specifiers.priority_group.v3."
        "PriorityGroupClusterSpecifier",
        "priority_groups": groups,
        "override_metadata_namespace": CHAIN_NAMESPACE,
    }
    extension = {"name": "envoy.router.cluster_specifier_plugin.priority_group", "typed_config": specifier}
    return {"inline_cluster_specifier_plugin": {"extension": extension}}


def _retry_policy(targets: int) -> Data:
    """Go on where the verdict says so (its header), and where no answer came at all."""
    return {
        "retry_on": "retriable-headers,connect-failure,refused-stream,reset",
        "retriable_headers": [{"name": RETRY_HEADER, "present_match": True}],
        "num_retries": min(_MAX_RETRIES, max(2, targets + 1)),
        "refresh_cluster_on_retry": True,
        "retry_back_off": {"base_interval": "0.001s", "max_interval": "0.025s"},
    }
