"""Wordings about one model, and the finer meanings of the public verdict."""

from __future__ import annotations

import re

from policy_service.domain.signals.family import Family, one_of

# --- the model or its route
RETIRED_MARKS = (
    "no longer available",
    "no longer supported",
    "has been retired",
    "has been deprecated",
    "has been discontinued",
    "has been removed",
    "has been sunset",
    "reached end of life",
)
MOVED = one_of("endpoint has moved", "endpoint has been moved", "update your base_url", "update your base url")
ROUTE_NOT_AUTHORIZED = one_of("not authorized for this route")

# --- meanings that only the public verdict tells apart
OVERLOAD = one_of(
    "over capacity",
    "server busy",
    "high traffic",
    "no instances available",
    "no available channel",
    "insufficient_model_capacity",
    "nocapacity",
    "modelnotready",
    "model is not ready",
    "tier capacity exceeded",
    "capacity temporarily exceeded",
    "loading model",
    "capacity_exceeded",
    "maximum pending requests",
    "queue_exceeded",
    "too busy",
    "服务器繁忙",
    "无可用渠道",
    "请求过载",
    "is saturated",
    "overload",
    "overloaded",
    "no available accounts",
    "no auth available",
    "no available model provider",
    "no capacity",
    "at capacity",
    "maximum capacity",
    "capacity exhausted",
    "capacity_exhausted",
    "high demand",
    "server is busy",
    "servers are busy",
    "service is too busy",
    "engine_overloaded",
    "server_overloaded",
    "currently loading",
    "model_loading",
    "not enough capacity",
    "insufficient capacity",
    "upstream_provider_shared_pool",
    "resource exhausted. please try again later",
    "负载已饱和",
    "负载过高",
    "系统繁忙",
    "访问量过大",
    "服务繁忙",
    "system capacity",
    "scaled to zero",
    "scaling_up",
    "is scaling up",
    "überlastet",
    "sobrecargad",
    "surchargé",
    "перегружен",
    "перевантажен",
    "混み合って",
    "과부하",
)
SLOW_DOWN = one_of("slow down", "slow_down", "too many connections", "service is busy", "currently busy")
"""Load where the service itself fails; beside a 429 only what one caller is told."""
CONTENT_POLICY = one_of(
    "censorship_blocked",
    "sensitive words",
    "sensitive_words",
    "outputted is blocked",
    "policy_violation",
    "request has been flagged",
    "content moderation",
    "content_moderation",
    "was flagged for",
    "flagged as potentially",
    "violates usage guidelines",
    "usage guidelines",
    "considered high risk",
    "requires moderation",
    "potentially violating",
    "new_sensitive",
    "input_sensitive",
    "output_sensitive",
    "harmful content",
    "invalid_prompt",
    "content_filter",
    "content filter",
    "content_policy",
    "content policy",
    "content management policy",
    "content filtering policy",
    "responsibleaipolicyviolation",
    "content exists risk",
    "risk detection",
    "riskdetection",
    "sensitive information",
    "sensitivecontentdetected",
    "data_inspection_failed",
    "datainspectionfailed",
    "inappropriate content",
    "safety system",
    "moderation_blocked",
    "flagged by our moderation",
    "prohibited_content",
    "violates our usage policies",
    "usage policy violation",
    "contains prohibited",
    "content-blocked",
    "content_blocked",
    "不安全或敏感内容",
    "敏感内容",
    "违规内容",
)
MODEL_NAMED = Family(
    phrases=(
        "the model is",
        "for this model",
        "该模型",
        "no available channel for model",
        "model is not ready",
        "insufficient_model_capacity",
        "此模型",
        "that model is",
        "this model is",
        "selected model",
        "loading model",
        "model service",
        "for model",
        "engine is currently overloaded",
        "engine_overloaded",
        "model is currently loading",
        "model_capacity_exhausted",
        "capacity on this model",
        "当前分组上游负载",
        "load of the current group",
        "accounts supporting model",
    ),
    patterns=(
        re.compile(r"\bmodel=[\w./:-]{2,80}"),
        re.compile(r"\bmodel [`'\"]?[\w./:-]+[`'\"]? (?:is|has)\b"),
        re.compile(r"/[\w.:-]{2,80} is (?:currently |temporarily )?(?:over|at|out of) capacity"),
    ),
)
"""The text blames one model, not the whole provider."""
_NO_MODEL = r"(?!user|your|this|key|token|request|[rt]p[md]\b)"
RATE_OF_MODEL = Family(
    patterns=(
        re.compile(r"rate limit for this model"),
        re.compile(rf"(?:rate limit (?:reached|exceeded)|limited) for {_NO_MODEL}[`'\"]?[\w./:-]{{2,}}"),
    )
)
"""A rate limit that is stated for one model."""
MODEL_ENTITLEMENT = Family(
    phrases=(
        "not allowed to sample from this model",
        "bedrock:invokemodel",
        "access to model denied",
        "access to the requested model",
        "model access denied",
        "model_permission_blocked",
        "model_terms_required",
        "requires terms acceptance",
        "accessdenied.unpurchased",
        "not authorized to access this model",
        "not authorized to use this model",
        "not enabled for this model",
        "subscription does not include",
        "does not include access to",
        "模型未开通",
        "无权限访问模型",
        "模型无权限",
        "have access to the model",
        "have access to model",
        "access to this model",
        "model access is denied",
        "model requires a subscription",
        "not supported when using codex with",
        "must be verified to",
        "extra usage is required for",
        "not yet available for this subscription",
        "no permission to access this model",
        "not available on your plan",
        "not available in your plan",
        "requires a paid plan",
        "upgrade for access",
        "无权访问",
        "no access to model",
        "non-serverless model",
        "not allowed to access model",
        "not allowed to use publisher model",
        "not available on your current plan",
        "not support model",
    )
)
"""The model or feature exists, this account may not use it."""
MODEL_SETUP = one_of("matching your data policy", "use case details have not been submitted")
"""The owner has to allow the model in the settings of the account first."""
PLAN_WITHOUT_ACCESS = one_of("usage_not_included")
"""The plan of the account does not include this way of use at all."""
FEATURE_ENTITLEMENT = one_of(
    "long context beta", "extra usage is required for", "not yet available for this subscription"
)
NEVER_OFFERED = Family(patterns=(re.compile(r"\blimit: 0\b(?![.\d])"),))
"""An allowance of zero: the model is not part of this tier."""
MODEL_LOAD_FAILED = one_of(
    "failed to load model",
    "requires more system memory",
    "out of memory",
    "model failed to load",
    "model has crashed",
    "model has unloaded or crashed",
    "waiting for llama runner",
    "runner process has terminated",
)
TOOL_USE_FAILED = one_of("tool_use_failed", "failed to call a function")


_SENTENCE_ENDS = (". ", "! ", "? ", "\n", "。")
_SENTENCE_REACH = 400


def is_retired(text: str) -> bool:
    """A model that is gone for good: "model" and the statement in one sentence."""
    return "model" in text and any(mark in text and _says_of_a_model(text, mark) for mark in RETIRED_MARKS)


def _says_of_a_model(text: str, mark: str) -> bool:
    position = text.find(mark)
    while position >= 0:
        if "model" in _sentence(text, position):
            return True
        position = text.find(mark, position + len(mark))
    return False


def _sentence(text: str, position: int) -> str:
    """The sentence around `position`; a dot inside a name such as `gpt-3.5` ends none."""
    start = max(0, position - _SENTENCE_REACH)
    start = max(start, *(text.rfind(end, start, position) for end in _SENTENCE_ENDS))
    stop = min(len(text), position + _SENTENCE_REACH)
    ends = (text.find(end, position, stop) for end in _SENTENCE_ENDS)
    return text[start : min((end for end in ends if end >= 0), default=stop)]
