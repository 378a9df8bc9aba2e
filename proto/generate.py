"""Writes the Python stubs of the service, its client and its Envoy door, or checks that they are up to date.

    python proto/generate.py            write
    python proto/generate.py --check    exit 1 and name the files that differ

Only policy/v1, policy/internal/v1 and the part of Envoy's API below adapters/envoy/proto are generated; google/rpc
comes from googleapis-common-protos. protoc writes imports that assume the first package to be top level; they are
rewritten to the package of each destination.
"""

from __future__ import annotations

import re
import sys
import tempfile
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from grpc_tools import protoc  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parent
SUFFIXES = {".py", ".pyi"}

_FROM = re.compile(r"^(\s*)from (policy|envoy)\.", re.MULTILINE)
_IMPORT = re.compile(r"^(\s*)import (policy|envoy)\.", re.MULTILINE)


class Destination(NamedTuple):
    """A package that carries stubs: its directory below the repository, its name, the files it is made of."""

    directory: str
    package: str
    files: str
    root: Path = ROOT
    """What the imports of those files are relative to."""

    @property
    def path(self) -> Path:
        return ROOT.parent / self.directory

    def sources(self) -> list[str]:
        """The files, relative to their root."""
        return sorted(str(path.relative_to(self.root)) for path in self.root.glob(self.files))


DESTINATIONS = (
    Destination("policy_service/generated", "policy_service.generated", "policy/**/*.proto"),
    Destination("adapters/python_client/policy_client/_generated", "policy_client._generated", "policy/v1/*.proto"),
    Destination(
        "adapters/envoy/policy_envoy/_generated",
        "policy_envoy._generated",
        "envoy/**/*.proto",
        ROOT.parent / "adapters" / "envoy" / "proto",
    ),
)


def generate(root: Path, sources: list[str], target: Path) -> None:
    """Run protoc with the Python, gRPC and stub plugins into `target`."""
    # The plugins of this very interpreter, not whatever PATH finds.
    scripts = Path(sys.executable).parent
    arguments = [
        "protoc",
        f"-I{root}",
        f"-I{resources.files('grpc_tools') / '_proto'}",
        f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}",
        f"--python_out={target}",
        f"--grpc_python_out={target}",
        f"--mypy_out=quiet:{target}",
        f"--mypy_grpc_out=quiet:{target}",
        *sources,
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")


def rewritten(text: str, package: str) -> str:
    """`from policy.v1 import x` becomes `from policy_service.generated.policy.v1 import x`."""
    return _IMPORT.sub(rf"\1import {package}.\2.", _FROM.sub(rf"\1from {package}.\2.", text))


def tree(destination: Destination) -> dict[str, str]:
    """Path below the destination -> text, packages' __init__ files included."""
    with tempfile.TemporaryDirectory() as name:
        generate(destination.root, destination.sources(), Path(name))
        written = [path for path in Path(name).rglob("*") if path.suffix in SUFFIXES and not _is_noise(path)]
        found = {str(path.relative_to(name)): rewritten(path.read_text(), destination.package) for path in written}
    return {**found, **dict.fromkeys(_package_files(found), "")}


def _is_noise(path: Path) -> bool:
    """A gRPC module of a file without a service."""
    return path.stem.endswith("_grpc") and "Servicer" not in path.with_suffix(".py").read_text()


def _package_files(found: dict[str, str]) -> set[str]:
    parents = {parent for path in found for parent in Path(path).parents}
    return {str(parent / "__init__.py") for parent in parents}


def drift(out: Path, expected: dict[str, str]) -> list[str]:
    """Files that are missing, differ, or are no longer generated."""
    present = {str(p.relative_to(out)): p.read_text() for p in out.rglob("*") if p.suffix in SUFFIXES}
    return sorted(path for path in expected.keys() | present.keys() if expected.get(path) != present.get(path))


def write(out: Path, expected: dict[str, str]) -> None:
    """Make the directory equal to `expected`."""
    for path in drift(out, expected):
        if path not in expected:
            (out / path).unlink()
            continue
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        (out / path).write_text(expected[path])


def main(arguments: list[str]) -> int:
    """Write, or with --check compare; 1 on drift."""
    stale = []
    for destination in DESTINATIONS:
        expected = tree(destination)
        if "--check" in arguments:
            stale += [f"{destination.directory}/{path}" for path in drift(destination.path, expected)]
        else:
            write(destination.path, expected)
    for path in stale:
        print(f"stale: {path}; run python proto/generate.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
