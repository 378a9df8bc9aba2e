"""The Envoy door: an ext_proc service that lets Envoy route, retry and report by the policy service.

Speaks the messages of `policy.v1` through `PolicyCalls` and knows nothing of how they are answered. Who starts it:
`policy_service.bootstrap` (same process and port) or `policy-service envoy` (a process of its own).
"""
