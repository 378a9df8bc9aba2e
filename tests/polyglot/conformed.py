"""Starts an example gateway for `policy-service conformance`, in place of this process.

    policy-service conformance --command "python -m tests.polyglot.conformed CONFIG COMMAND..."

CONFIG is where the configuration is written that says what the kit's variables say.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def configuration() -> dict[str, object]:
    """The gateway's configuration for the stage of the kit."""
    given = json.loads(Path(os.environ["UPSTREAMS_FILE"]).read_text())["upstreams"]
    upstreams = {name: {part: value for part, value in each.items() if part != "key"} for name, each in given.items()}
    return {
        "listen": os.environ["GATEWAY_LISTEN"],
        "policy": {"address": os.environ["POLICY_TARGET"], "select_timeout_ms": 2_000, "report_timeout_ms": 5_000},
        "fail_mode": "closed",
        "request_timeout_ms": 30_000,
        "upstreams": upstreams,
    }


if __name__ == "__main__":
    file, *command = sys.argv[1:]
    Path(file).write_text(json.dumps(configuration()))
    os.execvp(command[0], [*command, file])
