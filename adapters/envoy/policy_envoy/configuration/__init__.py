"""The generated Envoy configuration: one whole bootstrap from a catalogue. Pure: values in, plain data out."""

from policy_envoy.configuration.bootstrap import bootstrap
from policy_envoy.configuration.choices import Choices, CredentialSource, FailMode, Layout
from policy_envoy.configuration.upstreams import UpstreamError

__all__ = ["Choices", "CredentialSource", "FailMode", "Layout", "UpstreamError", "bootstrap"]
