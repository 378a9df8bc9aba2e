"""Wordings about quotas and the configured texts (spec/classification.md sections 3 and 4.1)."""

from __future__ import annotations

import re

from policy_service.domain.signals.family import Family, one_of

# --- quota
LONG_PERIOD = Family(
    phrases=(
        "hard limit",
        "out of credits",
        "individual quota reached",
        "enable overages",
        "insufficient_g1_credits_balance",
        "daily free allocation",
        "have exhausted their quota",
        "organization tpd rate limit",
        "tpd rate limit",
        "insufficient balance",
        "使用上限",
        "调用上限",
        "额度已用尽",
        "额度已用完",
    ),
    lines=(
        ("daily", "limit"),
        ("daily", "quota"),
        ("per day", "limit"),
        ("monthly", "limit"),
        ("monthly", "quota"),
        ("per month", "limit"),
        ("quota", "exceed"),
        ("exceed", "quota"),
        ("insufficient", "quota"),
        ("billing", "cap"),
        ("credit", "exhaust"),
        ("plan", "limit"),
        ("resource has been exhausted", "reset after"),
        ("限额将在", "重置"),
    ),
    patterns=(re.compile(r"\"error\"\s{0,8}:\s{0,8}\"usage limit reached\.?\s{0,8}\""),),
)
TERMINAL_QUOTA = Family(
    phrases=(
        "insufficient_g1_credits_balance",
        "out of credits",
        "insufficient_quota",
        "individual quota reached",
        "enable overages",
        "daily free allocation",
        "tpd rate limit",
        "insufficient balance",
    ),
    lines=(("credit", "exhaust"), ("billing", "cap"), ("insufficient", "quota")),
)
DAILY = one_of("today's quota", "daily quota", "try again tomorrow", "tpd rate limit")
TOKENS_PER_DAY = one_of("tpd rate limit")
SUBSCRIPTION = one_of(
    "usage limit reached",
    "usage limit has been",
    "claude pro usage limit",
    "you've reached your usage limit",
    "you have reached your usage limit",
)
WEEKLY = one_of(
    "weekly usage limit",
    "weekly limit reached",
    "reached your weekly",
    "1-week quota",
    "week quota",
    "weekly/monthly limit",
)
SESSION = Family(phrases=("session usage limit", "session limit reached"))
PERIOD_QUOTA_EXTENDED = Family(
    phrases=(
        "out of call volume quota",
        "quota will be replenished",
        "hour limit reached",
        "hit your weekly limit",
        "hit your monthly limit",
        "budget has been exceeded",
        "budget_exceeded",
        "free usage limit",
        "monthly quota",
        "usage cap",
        "monthly usage limit",
        "reached your monthly",
        "reached your daily",
        "specified api usage limits",
        "you will regain access on",
        "usage_limit_reached",
        "usage limit exceeded",
        "freeusagelimiterror",
        "you've hit your usage limit",
        "you've hit your limit",
        "you've hit your session limit",
        "spend limit reached",
        "enforced_spend_limit_reached",
        "free allocated quota exceeded",
        "reached for this month",
        "reached the set inference limit",
        "key limit exceeded",
        "hit its monthly limit",
        "hit its weekly limit",
        "hit its daily limit",
        "monthly request limit",
        "monthly_request_count",
        "monthly spend limit",
        "free_quota_exceeded",
        "premium request allowance",
        "limits will reset at",
        "limit will reset at",
        "individual_quota",
        "individual quota reached",
        "quota_exhausted",
        "free trial quota",
        "out of extra usage",
        "draw from your extra usage",
        "monthly included credits",
        "spending cap",
        "monthly spending limit",
        "reached its spending limit",
        "reached its spend limit",
        "reached your spend limit",
        "reached your spending limit",
        "使用额度已用完",
        "使用额度已用尽",
        "今日额度已用",
        "本月额度已用",
        "free-usage-exhausted",
        "all the included free usage",
    ),
    near=(("exceeded", "usage quota", 24),),
)
"""A share of use that comes back by itself: hours to months, never a dead account."""
PERIOD_ALLOWANCE = PERIOD_QUOTA_EXTENDED | SUBSCRIPTION
ACCOUNT_ALLOWANCE = SUBSCRIPTION | one_of(
    "usage limit",
    "usage_limit",
    "usage quota",
    "call volume quota",
    "weekly",
    "session limit",
    "your account",
    "spending cap",
    "spend limit",
    "spending limit",
    "you have no quota",
)
"""A spent allowance that the whole account has, whatever model it was asked for."""
PER_DAY_METRIC = one_of("per_day", "perday", "per day")
DAY_WINDOW = Family(
    phrases=(
        "per day",
        "per_day",
        "perday",
        "per-day",
        "(rpd)",
        "(tpd)",
        "limit_rpd",
        "daily",
        "per 86400s",
        "per 24 h",
        "bymodelbyday",
        "tpd rate limit",
        "per month",
        "/ month",
        "/ day",
        "monthly",
        "per week",
        "weekly",
        "per 24 hours",
        "每日",
        "每天",
    )
)
"""Words that name a window of a day or longer."""
MINUTE_WINDOW = one_of("per minute", "per-minute", "limit_rpm", "(rpm)", "(tpm)", "per second")

# --- configured texts (section 3)
RATE_TEXT = one_of("rate limit", "too many requests")
QUOTA_TEXT = one_of(
    "hour quota",
    "quota has been exceeded",
    "quota exceeded",
    "quota will reset",
    "exhausted your capacity",
    "quota exhausted",
    "free tier of the model has been exhausted",
)
QUOTA_TEXT_EXTENDED = one_of(
    "have exhausted their quota", "exhausted your quota", "usage limit reached", "usage limit exceeded"
)
"""Read as quota only together with a stated reset: also what another gateway says of its own accounts."""
CAPACITY_TEXT = one_of("capacity", "overloaded", "high demand")
FORBIDDEN_QUOTA_EXCEPTIONS = one_of("has not been used in project", "hour quota", "quota has been exceeded")


def is_weekly(text: str) -> bool:
    """Weekly quota wording; "weekly" with "quota" and "exhaust" must stand on one line."""
    if WEEKLY.found_in(text):
        return True
    return (
        "weekly" in text
        and "exhaust" in text
        and any("weekly" in line and "quota" in line and "exhaust" in line for line in text.splitlines())
    )


def is_session_limit(text: str) -> bool:
    """Session quota wording; an expired session is none."""
    return SESSION.found_in(text) or ("reached your session" in text and "usage limit" in text)
