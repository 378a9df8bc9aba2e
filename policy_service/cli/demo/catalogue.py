"""The catalogue of the demo: the example catalogue, at free ports, with times that fit in a minute."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from policy_service.cli.demo.script import Pace

EXAMPLE: Final = Path(__file__).with_name("catalogue.yaml")
"""Link to docs/examples/catalogue.yaml."""

_RESELLER: Final = {"id": "reseller", "provider": "agentrouter", "auth_class": "api_key"}
_RESALE: Final = {
    "name": "resale",
    "strategy": "priority",
    "targets": [
        {"connection": "reseller", "model": "gpt-4o-mini"},
        {"connection": "openai-main", "model": "gpt-4o-mini"},
        {"connection": "anthropic-batch", "model": "claude-haiku-4"},
    ],
}
_LADDER_MS: Final = {"api_key": 3_000, "local": 5_000}
"""First step of the connection ladder by class: the defaults, which the pace shortens."""
_RESET_MS: Final = {"anthropic": 20_000, "house-llm": 5_000}
"""OPEN time of breakers at normal pace; short for our own machines, so that probes are seen at work."""
_LEAST_RESET_MS: Final = 1_000


def derive(ports: Mapping[str, int], pace: Pace) -> dict[str, Any]:
    """The example with one more provider, the addresses of the upstreams, and waiting times scaled to the pace."""
    document: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    document["connections"].append(dict(_RESELLER))
    document["routes"].append(dict(_RESALE))
    for connection in document["connections"]:
        connection["address"] = f"127.0.0.1:{ports[connection['id']]}"
    # No lease here: the account that the agent may lease would be hidden from the gateway.
    document["callers"] = [caller for caller in document["callers"] if not caller.get("scopes")]
    document["settings"] |= _short_times(pace)
    document["providers"] = [_short_breaker(entry, pace) for entry in document["providers"]]
    return document


def _short_times(pace: Pace) -> dict[str, Any]:
    """The ladder, scaled. Pool locks are off: even the shortest that can be set outlasts most of the trouble."""
    ladders = {name: {"base_cooldown_ms": round(base * pace.scale)} for name, base in _LADDER_MS.items()}
    return {"model_lockout": {"enabled": False}, "connection": ladders}


def _short_breaker(entry: Mapping[str, Any], pace: Pace) -> dict[str, Any]:
    reset = max(_LEAST_RESET_MS, round(_RESET_MS[entry["id"]] * pace.scale))
    return {**entry, "profile": {"breaker": {"reset_timeout_ms": reset}}}


def routes(document: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Connections of each route, in order."""
    return {route["name"]: tuple(target["connection"] for target in route["targets"]) for route in document["routes"]}
