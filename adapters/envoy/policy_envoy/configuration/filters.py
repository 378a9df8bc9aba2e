"""HTTP filters of the generated configuration: both stages, header hygiene, credentials, and the filters that end a
chain."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from policy_envoy.configuration.choices import Choices, CredentialSource, FailMode, Layout
from policy_envoy.configuration.upstreams import Upstream
from policy_envoy.names import (
    BASE_PATH,
    CHAIN_NAMESPACE,
    CONNECTION,
    CONNECTIONS,
    CONTROL_HEADERS,
    CONTROL_PREFIXES,
    DECISION_HEADER,
    DECISION_NAMESPACE,
    GATEWAY_HEADERS,
    LB_NAMESPACE,
    LISTENER_STAGE,
    REQUEST,
    RETRY_HEADER,
    STAGE,
    UPSTREAM_STAGE,
)

Data = dict[str, Any]
POLICY_CLUSTER = "policy_service"
_TYPE = "type.googleapis.com/envoy.extensions."
_ANSWER_MS = 2_000
"""Longest answer of the door to one message, waits and pauses apart; then the fail mode acts."""
_PAUSE_MS = 5_000
"""Longest pause between two attempts (judging.MAX_PAUSE_MS)."""
_ENVOY_WISHES = (
    "x-envoy-retry-on",
    "x-envoy-max-retries",
    "x-envoy-retriable-header-names",
    "x-envoy-retriable-status-codes",
    "x-envoy-upstream-rq-timeout-ms",
    "x-envoy-upstream-rq-per-try-timeout-ms",
    "x-envoy-hedge-on-per-try-timeout",
)
"""Request headers by which a client could change timeouts and retries."""


def typed(name: str, kind: str, **fields: Any) -> Data:
    """An extension: its name and its configuration."""
    return {"name": name, "typed_config": {"@type": _TYPE + kind, **fields}}


def listener_filters(choices: Choices, connections: Iterable[str]) -> list[Data]:
    """Filters of the client's side: hygiene, first stage, router.

    Args:
        connections: those that have an upstream here.
    """
    known = _listed(connections) if choices.layout is not Layout.SHARED else ""
    initial = {CONNECTIONS: known} if known else None
    return [
        _header_mutation(request=[{"remove": name} for name in (*_foreign(), *_ENVOY_WISHES)]),
        _ext_proc(choices, LISTENER_STAGE, choices.max_wait_ms + _ANSWER_MS, initial),
        typed("envoy.filters.http.router", "filters.http.router.v3.Router", suppress_envoy_headers=True),
    ]


def _listed(connections: Iterable[str]) -> str:
    """What the door is told of the clusters; empty where a metadata value cannot hold it."""
    text = " ".join(sorted(connections))
    return text.replace("%", "%%") if text.isascii() and len(text) <= _LIST_LIMIT else ""


_LIST_LIMIT = 4_096
"""gRPC refuses more than 8 KiB of metadata; beyond this the door takes every connection to have a cluster."""


def _foreign() -> tuple[str, ...]:
    """Names that only Envoy and the door may set."""
    return tuple(name for name in GATEWAY_HEADERS if not name.startswith("x-ai-eg-model"))


def upstream_filters(choices: Choices, upstream: Upstream | None) -> list[Data]:
    """Filters of an attempt: second stage, hygiene and credential, codec.

    Args:
        upstream: None: a cluster that several connections share.
    """
    initial = {CONNECTION: upstream.connection, BASE_PATH: upstream.base_path} if upstream else {}
    credential = _CREDENTIALS[choices.credentials](choices, upstream) if upstream else []
    return [
        _ext_proc(choices, UPSTREAM_STAGE, _ANSWER_MS + _PAUSE_MS, {k: v for k, v in initial.items() if v}),
        _header_mutation(
            request=[*map(_by_prefix, CONTROL_PREFIXES), *({"remove": name} for name in _NEVER_SENT), _PLAIN],
            response=[{"remove": name} for name in (RETRY_HEADER, DECISION_HEADER)],
        ),
        *credential,
        typed("envoy.filters.http.upstream_codec", "filters.http.upstream_codec.v3.UpstreamCodec"),
    ]


_NEVER_SENT = (*sorted(CONTROL_HEADERS), *GATEWAY_HEADERS)


_PLAIN: Data = {
    "append": {
        "header": {"key": "accept-encoding", "value": "identity"},
        "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
    }
}
"""The door reads error bodies and streams on their way, which compressed ones would not let it."""


def _by_prefix(prefix: str) -> Data:
    return {"remove_on_match": {"key_matcher": {"prefix": prefix}}}


def _ext_proc(choices: Choices, stage: str, timeout_ms: int, initial: Mapping[str, str] | None = None) -> Data:
    # Where the door has seen no request there is nothing to ask it: a 400 of Envoy's codec must not wait, since
    # Envoy closes the connection at once. The door itself asks for the answer's head of a request that it has routed.
    is_listener = stage == LISTENER_STAGE
    attributes = (
        {"response_attributes": ["response.code_details"]}
        if is_listener
        else {"request_attributes": ["xds.upstream_host_metadata"]}
        if not initial
        else {}
    )
    return typed(
        "envoy.filters.http.ext_proc",
        "filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service=_grpc_service(choices, {STAGE: stage, **(initial or {})}),
        failure_mode_allow=choices.fail_mode == FailMode.OPEN,
        processing_mode={"request_header_mode": "SEND", "response_header_mode": "SKIP" if is_listener else "SEND"},
        allow_mode_override=True,
        message_timeout=f"{timeout_ms / 1000}s",
        mutation_rules={"allow_all_routing": True, "allow_envoy": True},
        metadata_options={
            "forwarding_namespaces": {"untyped": [] if is_listener else [DECISION_NAMESPACE]},
            "receiving_namespaces": {"untyped": [DECISION_NAMESPACE, CHAIN_NAMESPACE, LB_NAMESPACE]},
        },
        status_on_error={"code": "ServiceUnavailable"},
        stat_prefix=stage,
        **attributes,
    )


def _grpc_service(choices: Choices, initial: Mapping[str, str]) -> Data:
    metadata = [{"key": name, "value": value} for name, value in initial.items()]
    if choices.policy_key:
        metadata.append({"key": "authorization", "value": f"Bearer %ENVIRONMENT({choices.policy_key})%"})
    if choices.may_have_several_doors:
        metadata.append({"key": REQUEST, "value": "%STREAM_ID%"})
    retries = {"retry_policy": _OTHER_DOOR} if choices.may_have_several_doors else {}
    return {"envoy_grpc": {"cluster_name": POLICY_CLUSTER}, "initial_metadata": metadata, "timeout": "0s", **retries}


_OTHER_DOOR: Data = {
    "retry_on": "connect-failure,refused-stream",
    "num_retries": 2,
    "retry_back_off": {"base_interval": "0.001s", "max_interval": "0.01s"},
    "retry_host_predicate": [
        {
            "name": "envoy.retry_host_predicates.previous_hosts",
            "typed_config": {"@type": _TYPE + "retry.host.previous_hosts.v3.PreviousHostsPredicate"},
        }
    ],
    "host_selection_retry_max_attempts": 8,
}
"""A door that is gone is passed over at once, before a health check has found it out."""


def _header_mutation(*, request: Sequence[Data] = (), response: Sequence[Data] = ()) -> Data:
    mutations = {"request_mutations": list(request), "response_mutations": list(response)}
    return typed(
        "envoy.filters.http.header_mutation",
        "filters.http.header_mutation.v3.HeaderMutation",
        mutations={name: listed for name, listed in mutations.items() if listed},
    )


# -- credentials -------------------------------------------------------------------------------------------
_HEADERS: Mapping[str, tuple[str, str]] = {
    "anthropic": ("x-api-key", ""),
    "gemini": ("x-goog-api-key", ""),
    "azure": ("api-key", ""),
    "azure-openai": ("api-key", ""),
}
"""Header and prefix of a provider's credential; any other takes `authorization: Bearer`."""


def _none(choices: Choices, upstream: Upstream) -> list[Data]:
    return []


def _from_environment(choices: Choices, upstream: Upstream) -> list[Data]:
    name, prefix = _HEADERS.get(upstream.provider, ("authorization", "Bearer "))
    header = {"key": name, "value": f"{prefix}%ENVIRONMENT({variable_of(upstream.connection)})%"}
    foreign = [{"remove": other} for other in _CLIENT_KEYS if other != name]
    own = {"append": {"header": header, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}}
    return [_header_mutation(request=[*foreign, own])]


def _from_file(choices: Choices, upstream: Upstream) -> list[Data]:
    name, prefix = _HEADERS.get(upstream.provider, ("authorization", "Bearer "))
    path = f"{choices.credential_directory.rstrip('/')}/{upstream.connection}.yaml"
    source = {"path_config_source": {"path": path}, "resource_api_version": "V3"}
    generic = typed(
        "envoy.http.injected_credentials.generic",
        "http.injected_credentials.generic.v3.Generic",
        credential={"name": upstream.connection, "sds_config": source},
        header=name,
        header_value_prefix=prefix,
    )
    injector = typed(
        "envoy.filters.http.credential_injector",
        "filters.http.credential_injector.v3.CredentialInjector",
        overwrite=True,
        credential=generic,
    )
    return [_header_mutation(request=[{"remove": other} for other in _CLIENT_KEYS if other != name]), injector]


_CLIENT_KEYS = ("authorization", "x-api-key", "api-key", "x-goog-api-key")
"""Where clients show their key for this gateway: never for an upstream that is given a credential of its own."""

_CREDENTIALS: Mapping[CredentialSource, Callable[[Choices, Upstream], list[Data]]] = {
    CredentialSource.NONE: _none,
    CredentialSource.ENVIRONMENT: _from_environment,
    CredentialSource.FILES: _from_file,
}


def variable_of(connection: str) -> str:
    """Environment variable with the credential of a connection."""
    return "CREDENTIAL_" + re.sub(r"[^A-Za-z0-9]", "_", connection).upper()
