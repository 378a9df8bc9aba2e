"""Building the trace provider from the standard OTEL_* environment variables."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def wants_traces(environment: Mapping[str, str]) -> bool:
    """True where an OTLP endpoint is set and traces are not switched off."""
    disabled = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    none = environment.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none"
    return not disabled and not none and any(environment.get(name) for name in _ENDPOINTS)


def trace_provider(replica: str, version: str) -> TracerProvider:
    """Provider with the OTLP/gRPC exporter; endpoint, headers and sampling come from OTEL_* variables.

    Args:
        replica: name of this replica, the resource's service.instance.id.
        version: release of the service.
    """
    resource = Resource.create({SERVICE_NAME: "policy-service", SERVICE_VERSION: version, SERVICE_INSTANCE_ID: replica})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
