"""Makes the files of the client that are copies, or checks them.

    python adapters/python_client/carry.py            write
    python adapters/python_client/carry.py --check    exit 1 and name the files that differ

The readers of streams come from the service, without which the client installs; they import nothing but the standard
library. The transport of httpx2 is that of httpx under the other name: both libraries have the same classes.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
DOMAIN = HERE.parents[1] / "policy_service" / "domain"
CLIENT = HERE / "policy_client"
READERS = ("stream_events.py", "watchdog.py")
NOTE = "# Made by carry.py from {}. Change the original.\n"


def copies(domain: Path = DOMAIN, client: Path = CLIENT) -> dict[str, str]:
    """Text of every copy by its path below the package."""
    readers = {
        f"_carried/{name}": NOTE.format(f"policy_service/domain/{name}") + _read(domain, name) for name in READERS
    }
    twin = re.sub(r"\bhttpx\b", "httpx2", _read(client, "httpx.py"))
    return {**readers, "_carried/__init__.py": "", "httpx2.py": NOTE.format("httpx.py") + twin}


def _read(directory: Path, name: str) -> str:
    return (directory / name).read_text(encoding="utf-8")


def drift(expected: dict[str, str], target: Path = CLIENT) -> list[str]:
    """Copies that are missing or differ from their originals."""
    return [path for path, text in expected.items() if not _is_there(target / path, text)]


def _is_there(file: Path, text: str) -> bool:
    return file.exists() and file.read_text(encoding="utf-8") == text


def write(expected: dict[str, str], target: Path = CLIENT) -> None:
    """Make every copy equal to its original."""
    for path, text in expected.items():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_text(text, encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Write, or with --check compare; 1 on drift."""
    expected = copies()
    if "--check" not in arguments:
        write(expected)
        return 0
    stale = drift(expected)
    for path in stale:
        print(f"stale: policy_client/{path}; run python adapters/python_client/carry.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
