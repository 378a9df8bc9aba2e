"""Wordings about an account, its credential, its wallet or where it calls from (spec/terminal_states.md section 3)."""

from __future__ import annotations

import re

from policy_service.domain.signals.family import Family, one_of

# --- accounts: bans, empty wallets, credentials
BAN = one_of(
    "account_deactivated",
    "account has been deactivated",
    "account has been disabled",
    "your account has been suspended",
    "this account is deactivated",
    "this service has been disabled in this account for violation",
    "this service has been disabled in this account",
)
BAN_EXTENDED = Family(
    phrases=(
        "organization has been restricted",
        "organization_restricted",
        "project has been denied access",
        "deactivated_workspace",
        "consumer_suspended",
        "organization has been disabled",
        "organisation has been disabled",
        "account has been banned",
        "account is banned",
        "account has been blocked",
        "account has been terminated",
        "account_banned",
        "account_suspended",
        "user_banned",
        "user has been banned",
        "user account has been suspended",
        "associated with a deactivated account",
        "账号已被封",
        "账户已被封",
        "账号被封禁",
        "用户已被封禁",
    ),
    near=(("consumer '", "has been suspended", 120), ("access was terminated", "violation", 120)),
)
CREDITS = one_of(
    "insufficient_quota",
    "billing_hard_limit_reached",
    "exceeded your current quota",
    "exceeded your current usage quota",
    "credit_balance_too_low",
    "your credit balance is too low",
    "credits exhausted",
    "out of credits",
    "payment required",
    "free tier of the model has been exhausted",
    "tier has been exhausted",
    "insufficient balance",
    "insufficient_balance",
    "insufficient account balance",
    "insufficient credit balance",
    "insufficient credits",
    "insufficient credit",
    "exhausted all your credits",
    "usage balance exhausted",
)
CREDITS_EXTENDED = Family(
    phrases=(
        "credit limit exceeded",
        "insufficient funds",
        "insufficient_funds",
        "not_enough_balance",
        "令牌额度已用尽",
        "no_payment_method",
        "negative balance",
        "balance is negative",
        "top up your account",
        "recharge your account",
        "please recharge",
        "creditserror",
        "credit_balance_exhausted",
        "credit balance is exhausted",
        "used all available credits",
        "have any credits",
        "no credits left",
        "no remaining credits",
        "no credits remaining",
        "not enough credits",
        "billing_not_active",
        "billing_disabled",
        "requires billing to be enabled",
        "check your billing details on our website",
        "insufficient_user_quota",
        "user quota is not enough",
        "token quota is not enough",
        "pre_consume_token_quota_failed",
        "exceeded_current_quota_error",
        "account balance is insufficient",
        "account balance is not enough",
        "balance is not enough",
        "not enough balance",
        "balance not enough",
        "account_overdue",
        "accountoverdue",
        "overdue balance",
        "overdue payment",
        "arrearage",
        "account is in arrears",
        "account in arrears",
        "账户已欠费",
        "账号已欠费",
        "已欠费",
        "余额不足",
        "余额已用尽",
        "add or update your payment method",
        "set up billing",
        "add a payment method",
        "no payment method",
        "payment_required",
        "недостаточно средств",
        "недостатньо коштів",
        "saldo insuficiente",
        "solde insuffisant",
        "guthaben aufgebraucht",
        "guthaben reicht nicht",
        "saldo insufficiente",
        "niewystarczające środki",
        "残高が不足",
        "残高不足",
        "잔액이 부족",
    ),
    near=(("run out of", "credits", 12), ("ran out of", "credits", 12), ("credits", "depleted", 12)),
)
BILLING_SUSPENSION = Family(
    near=tuple(("suspended", b, 120) for b in ("spending limit", "billing", "invoice", "payment"))
)
OAUTH_INVALID = one_of(
    "invalid authentication credentials",
    "oauth 2",
    "login cookie",
    "valid authentication credential",
    "invalid credentials",
    "re-authenticate your cline account",
)
CREDENTIAL_CODES = Family(
    phrases=(
        "invalidsignatureexception",
        "expiredtokenexception",
        "token_revoked",
        "token_expired",
        "api_key_revoked",
        "incorrect api key provided",
        "api key not valid",
        "api key expired",
        "api key was reported as leaked",
        "security token included in the request is",
        "token has been revoked",
        "oauth token revoked",
        "expired or revoked",
        "api key has been disabled",
        "api key is disabled",
        "api key has been revoked",
        "无效的令牌",
        "令牌已过期",
        "令牌状态不可用",
        "api_key_invalid",
        "api_key_expired",
        "api_key_disabled",
        "invalid_api_key",
        "token_invalidated",
        "invalid_grant",
        "access_token_expired",
        "unrecognizedclientexception",
        "invalidapikey",
        "bearer token included in the request is",
        "bearer token has expired",
        "unregistered callers",
        "invalid refresh token",
        "refresh_token_expired",
        "refresh_token_invalid",
        "refresh token is invalid",
        "refresh token is expired",
        "refresh token has expired",
        "refresh token expired",
        "refresh token was revoked",
        "api token has expired",
    ),
    near=(("api key", "blocked", 16),),
)
"""Names and unmistakable sentences about a dead credential; believed under 400 and 403 too."""
AMBIGUOUS_401_EXCLUDED = one_of("invalid api key", "token invalid", "revoked", "access denied")
CREDENTIAL_FAILURE = Family(
    near=tuple(
        (word, noun, 3)
        for word in ("invalid", "incorrect", "expired", "missing", "revoked")
        for noun in ("api key", "api-key", "api_key", "apikey")
    )
    + tuple(
        (word, noun, 3)
        for word in ("invalid", "expired", "missing", "revoked")
        for noun in ("token", "credential", "bearer")
    ),
    phrases=(
        "authentication failed",
        "authentication error",
        "authentication_error",
        "authentication required",
        "unauthorized",
        "not authenticated",
    ),
)

# --- places and clients
GEO = one_of(
    "user location is not supported",
    "location is not supported",
    "not supported for the api use",
    "region is not supported",
    "unsupported location",
    "not available in your location",
    "not available in your region",
)
GEO_EXTENDED = one_of(
    "country_not_supported",
    "unsupported country",
    "unsupported region",
    "territory is not supported",
    "region_not_supported",
    "is not available in your region",
    "is not supported in your region",
    "unsupported_country_region_territory",
    "country, region, or territory not supported",
    "not available in your country",
    "block access from your country",
    "not currently available in your location",
    "not currently available in your region",
    "not currently available in your country",
    "is not supported in your country",
    "not supported in your region",
    "access to anthropic models is not allowed from unsupported",
)
"""Believed for every provider, not only for Google surfaces."""
FINGERPRINT = Family(
    phrases=(
        "browser_signature_banned",
        "fingerprint_rejection",
        "_cf_chl_opt",
        "cdn-cgi/challenge-platform",
        'id="challenge-error-text"',
    ),
    patterns=(re.compile(r"error[_ -]?code\\?\"?'?\s{0,3}[:=]?\s{0,3}\\?\"?'?1010\b"),),
)
BLOCK_PAGE = one_of(
    "error code: 1020",
    "error code: 1006",
    "error code: 1007",
    "error code: 1008",
    "error code: 1012",
    "attention required! | cloudflare",
    "sorry, you have been blocked",
    "<title>just a moment...</title>",
)
"""Pages of a web application firewall in front of the provider: about the caller's network, never about an account."""
CLIENT_UNWELCOME = one_of(
    "unauthorized client detected",
    "only authorized for use with claude code",
    "only available for coding agents",
    "client is not allowed",
    "unsupported client",
    "please update your client",
    "upgrade your client",
    "ip_not_authorized",
    "ip address that is not authorized",
    "ip address is not allowed",
    "ip address is not in the allowlist",
    "virtual network/firewall rules",
    "check your network settings",
)
"""The provider serves this account, but not this kind of client or not from where it calls."""
PROJECT_PROBLEM = one_of(
    "has not been used in project", "service_disabled", "accessnotconfigured", "permission_denied", "it is disabled"
)
PROJECT_SETUP = one_of("has not been used in project", "service_disabled", "accessnotconfigured", "it is disabled")
"""The part of the project problems that an owner mends by switching an interface on."""
BROWSER_BLOCK = Family(phrases=("sentinel_blocked", "turnstile required"), near=(("sentinel", "blocked", 80),))
CLOUDFLARE_NO_RETRY = Family(
    phrases=("browser_signature_banned",), patterns=(re.compile(r"error_code\\?\"?\s{0,3}[:=]?\s{0,3}\\?\"?1010\b"),)
)
NOT_RETRYABLE = Family(patterns=(re.compile(r"retryable\\?\"?\s{0,3}:\s{0,3}false"),))
CLOUDFLARE_OWNER = one_of("cloudflare_error", "owner_action_required")
