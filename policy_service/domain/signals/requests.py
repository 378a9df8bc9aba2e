"""Wordings about the request itself, and of outcomes that punish nobody (classification.md section 4.2, guards.md)."""

from __future__ import annotations

import re

from policy_service.domain.signals.family import Family, one_of

# --- 400 and 422 (section 4.2)
OVERFLOW = Family(
    phrases=(
        "input too long",
        "input is too long",
        "too many tokens",
        "prompt is too long",
        "context window",
        "maximum context",
        "token limit",
        "request too large",
        "tokens per minute",
        "tpm",
    ),
    lines=(
        ("context", "too long"),
        ("context", "exceeded"),
        ("context", "overflow"),
        ("context", "limit"),
        ("max", "token"),
    ),
)
OVERFLOW_CERTAIN = Family(
    phrases=(
        "context_length_exceeded",
        "context_window_exceeded",
        "exceed_context_size",
        "context_length_error",
        "prompt is too long",
        "input is too long",
        "input too long",
        "maximum context length",
        "maximum context window",
        "exceeds the available context size",
        "exceeds the context window",
        "exceeds the model's context",
        "exceed context limit",
        "exceeds the maximum number of tokens",
        "maximum prompt length",
        "reduce the length of the messages",
        "reduce the length of the prompt",
        "range of input length should be",
        "input length and `max_tokens` exceed",
        "prompt exceeds max length",
        "string_above_max_length",
        "too many total text bytes",
        "超出模型长度",
        "上下文长度超",
        "prompt 超长",
        "上下文过长",
        "greater than the context length",
        "maximum model length",
        "payload size exceeds",
        "prompt tokens too long",
        "max input characters",
        "model only supports up to",
        "max_seq_len",
        "输入长度超过",
        "超过了该模型的最大上下文",
        "超出最大上下文",
    ),
    near=(
        ("input", "is too large to process", 24),
        ("max_tokens", "must be at least 1, got -", 24),
        ("input length", "exceeds the maximum length", 24),
        ("input token count", "exceeds the maximum", 24),
        ("expected maxlength", "actual", 24),
        ("prompt token count", "exceeds the limit", 24),
        ("context window", "exceed", 24),
    ),
)
"""Wordings that name the length of this very request; believed under any status."""
OUTPUT_TOKENS = Family(
    phrases=("maximum tokens you requested", "max_tokens is too large", "max_tokens: ", "range of max_tokens"),
    near=(
        ("max_tokens", "must be less than", 24),
        ("max_tokens", "valid range", 24),
    ),
)
"""The answer that is asked for is longer than the model writes; another one may write that much."""
TOO_LARGE_FOR_LIMIT = Family(
    phrases=("the input or output tokens must be reduced", "request too large for "),
    patterns=(re.compile(r"used 0, requested"),),
)
"""A single request above a per-minute allowance: waiting never helps."""
MALFORMED = Family(
    phrases=(
        "improperly formed request",
        "messages must alternate",
        "empty message",
        "empty content",
        "message is empty",
        "content is empty",
        "messages is empty",
    ),
    chains=((("invalid", "message", "format"), 80),),
    patterns=(re.compile(r"(?:blank|empty|missing)[ a-z_.'\"]{0,20}(?:function|tool)[ _-]?(?:call)?[ _-]?name"),),
)
PARAMETER = Family(
    phrases=("parameter is illegal",),
    near=(("max_tokens", "illegal", 80), ("max_tokens", "must be", 80), ("max_tokens", "range", 80)),
    patterns=(
        re.compile(
            r"(?:extra|additional)[ _-](?:inputs?|propert(?:y|ies)|fields?)[^\n]{0,80}not[ _-](?:permitted|allowed)"
        ),
        re.compile(r"(?:unknown|unrecognized|unexpected|invalid)[ _-](?:fields?|parameters?|inputs?)\b"),
    ),
)
PARAMETER_EXTENDED = Family(
    phrases=(
        "unsupported parameter",
        "unsupported_parameter",
        "missing required parameter",
        "missing_required_parameter",
    ),
    chains=tuple(
        ((noun, said), 60)
        for noun in ("key", "field", "property")
        for said in ("not permitted", "not allowed", "not-permitted", "not_permitted")
    ),
)
MODEL_UNSERVED = Family(
    phrases=("invalid model", "select a different model"),
    lines=(
        ("model", "not available"),
        ("model", "not found"),
        ("model", "not supported"),
        ("model", "not accessible"),
        ("model", "does not exist"),
    ),
    near=(("unsupported", "model", 80),),
)
MODEL_UNSERVED_EXTENDED = one_of(
    "model not exist",
    "model identifier is invalid",
    "not a valid model",
    "on-demand throughput",
    "no endpoints found",
    "unable to access model",
    "does not work with the specified model",
    "requested entity was not found",
    "模型不存在",
    "no such model",
    "not supported model",
    "is not servable",
    "specified version does not exist",
    "no model named",
    "unknown model",
)
MODEL_PERMISSION = Family(near=(("access", "model", 60), ("permission", "model", 60)))
UNKNOWN_PROVIDER_FOR_MODEL = one_of("unknown provider for model")
NIM_DEGRADED = Family(near=(("function", "degraded", 80),))
RATE_WORDS_400 = one_of(
    "high frequency",
    "high-frequency",
    "non-compliant",
    "non compliant",
    "too many requests",
    "rate limit",
    "频繁",
    "频率",
)
THROTTLING_CODES = frozenset(
    {
        "throttlingexception",
        "throttling",
        "throttling.ratequota",
        "throttling.allocationquota",
        "toomanyrequestsexception",
        "rate_limit_exceeded",
        "rate_limit_error",
        "ratelimitexceeded",
        "ratelimitreached",
        "resource_exhausted",
        "requestlimitexceeded",
    }
)
MODEL_CODES = frozenset({"model_not_found", "deployment_not_found"})
MODEL_CODES_EXTENDED = frozenset(
    {
        "deploymentnotfound",
        "modelnotfound",
        "model_not_available",
        "model_not_supported",
        "invalid_model",
        "model_unavailable",
        "model_decommissioned",
        "invalidendpointormodel.notfound",
        "invalidendpoint.closedendpoint",
        "unsupported_model",
        "model_not_exist",
    }
)
VALIDATION_CODES = frozenset(
    {
        "unknown_parameter",
        "unsupported_parameter",
        "unsupported_value",
        "invalid_value",
        "invalid_type",
        "invalid_parameter",
        "missing_required_parameter",
        "integer_above_max_value",
        "integer_below_min_value",
        "array_above_max_length",
        "array_below_min_length",
        "string_above_max_length",
        "string_below_min_length",
        "invalid_json_schema",
        "invalid_request_body",
        "invalid_function_parameters",
        "invalid_function_arguments",
        "invalid_tool_call_arguments",
        "unknown_field",
        "missing_parameter",
        "invalidparameter",
        "validation_error",
    }
)
"""Codes of a request that did not pass the provider's checks. The message then quotes what the caller sent."""

# --- guards
ABORT = one_of(
    "request_signal_aborted",
    "request signal aborted",
    "client disconnected",
    "operation was aborted",
    "controller is already closed",
)
LOCAL_FAULT = Family(
    phrases=(
        "command not found",
        "is not recognized as an internal or external command",
        "child process exited with code",
        "local host execution error",
    ),
    lines=(("spawn", "enoent"), ("spawn", "eacces"), ("spawn", "epipe")),
)
REQUEST_RESOURCE = Family(
    phrases=("no such file object",),
    near=tuple(
        (noun, said, 160)
        for noun in ("file", "item", "response", "upload", "vector store", "vector_store")
        for said in ("not found", "does not exist")
    ),
    patterns=(re.compile(r"\bfile-[a-z0-9]{3,}"),),
)
FREE_TIER_ONLY = one_of("freetieronly", "free tier only")
