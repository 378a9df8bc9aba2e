"""`python -m policy_service`: the command line."""

from __future__ import annotations

import sys

from policy_service.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
