"""Route strategies, one file each: pure orderings over eligible targets (spec/strategies.md section 4).

A strategy sees only targets that may run. It gets the configured positions of the eligible targets and returns
them in order of preference; rotation state is a value that the caller keeps per replica.
"""

ROUTE_STRATEGIES = (
    "priority",
    "weighted",
    "round-robin",
    "context-relay",
    "fill-first",
    "p2c",
    "random",
    "least-used",
    "cost-optimized",
    "reset-aware",
    "reset-window",
    "headroom",
    "strict-random",
    "auto",
    "lkgp",
    "context-optimized",
    "cache-optimized",
    "fusion",
    "pipeline",
)
"""Valid names in the order in which an error lists them (spec/strategies.md section 1)."""

IMPLEMENTED_STRATEGIES = ("priority", "weighted", "round-robin", "fill-first")
"""Those that this release orders by; a selection with any other is refused."""

DEFAULT_STRATEGY = "priority"
