"""Names that travel between client, Envoy and door: headers, metadata namespaces, gRPC initial metadata.

One place for all of them, since the generated Envoy configuration and the stages have to agree.
"""

from __future__ import annotations

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"

# gRPC initial metadata of a stream: which filter asks, and for an attempt which connection its cluster belongs to.
STAGE = "x-policy-stage"
LISTENER_STAGE = "listener"
UPSTREAM_STAGE = "upstream"
CONNECTION = "x-policy-connection"
BASE_PATH = "x-policy-base-path"
CONNECTIONS = "x-policy-connections"
"""Connections that this Envoy has clusters of, blanks between them. Absent: unknown, or all share one cluster."""
REQUEST = "x-policy-request"
"""Id of the client request, the same in both stages: by it Envoy chooses among several processes of the door."""

# Request headers of the client.
ROUTE_HEADER = "x-policy-route"
MODEL_HEADER = "x-ai-eg-model"
"""Model header of Envoy AI Gateway."""
EXPLAIN_HEADER = "x-policy-explain"
"""Any value but `0` and `false`: the answer carries `x-policy-decision`."""
OWNER_HEADERS = ("x-policy-lease-owner", "x-omniroute-lease-owner")
GENERATION_HEADERS = ("x-policy-lease-generation", "x-omniroute-lease-generation")
SESSION_HEADERS = ("x-codex-session-id", "x-session-id", "x-omniroute-session")
MODE_HEADERS = ("x-policy-mode", "x-omniroute-mode")
BUDGET_HEADERS = ("x-policy-budget", "x-omniroute-budget")
BUDGET_FALLBACK_HEADERS = ("x-policy-budget-fallback", "x-omniroute-budget-fallback")

# Where the order of the upstreams goes.
ENDPOINT_HEADER = "x-gateway-destination-endpoint"
"""Header, and key below `envoy.lb`, of the endpoint picker protocol (Gateway API inference extension, proposal 004)."""
LB_NAMESPACE = "envoy.lb"
FALLBACK_CHAIN_HEADER = "x-ai-eg-fallback-chain"
"""Backend names in order, of Envoy AI Gateway."""
CHAIN_NAMESPACE = "policy.chain"
"""`override_metadata_namespace` of the priority group cluster specifier (Envoy 1.40)."""
DECISION_NAMESPACE = "policy.decision"
"""What the stages of one request hand on to each other; metadata never leaves Envoy."""

# Response headers.
DECISION_HEADER = "x-policy-decision"
RETRY_HEADER = "x-policy-retry"
"""`retriable_headers` of the retry policy: the verdict says go on. Removed by Envoy before the client."""
DROP_REASON_HEADER = "x-policy-drop-reason"
TERMINAL_REASON_HEADER = "x-policy-terminal-reason"
RECOVERY_HEADER = "x-policy-recovery-action"
RETRY_AFTER_SECONDS_HEADER = "x-policy-retry-after-seconds"

ATTEMPT_COUNT_HEADER = "x-envoy-attempt-count"

ANSWERED = "via_upstream"
"""Envoy's response code details of an upstream's own answer. An attempt that had one and that a process of the door has
not seen was seen by another process."""

TOO_LARGE = "request_payload_too_large"
"""Envoy's response code details of its 413 to a body beyond its buffer."""

CONTROL_PREFIXES = ("x-policy-", "x-omniroute-")
"""Headers of the client for the service only: they reach no upstream, known or not."""
CONTROL_HEADERS = frozenset(SESSION_HEADERS)
"""Those of them without such a prefix."""

GATEWAY_HEADERS = (ENDPOINT_HEADER, FALLBACK_CHAIN_HEADER, MODEL_HEADER, ATTEMPT_COUNT_HEADER)
"""For Envoy only: stripped on the way to the upstream, by Envoy itself, so that they go also while the door is away."""
