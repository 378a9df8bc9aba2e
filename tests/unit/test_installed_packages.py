"""What is installed for the service and its tests goes together."""

from __future__ import annotations

from collections import defaultdict
from importlib.metadata import distributions


def test_no_two_packages_install_the_same_module() -> None:
    """Which of them wins depends on the order of installation: with the loser the service may not even import."""
    owners: defaultdict[str, set[str]] = defaultdict(set)
    for package in distributions():
        for file in package.files or ():
            if file.suffix == ".py" and not file.parts[0].startswith(".."):
                owners[str(file)].add(package.metadata["Name"])
    assert {file: names for file, names in owners.items() if len(names) > 1} == {}
