"""Importing one changed module anew: who depends on it, and how all of these are forgotten.

What does not depend on the change stays imported: most of the time of an import anew would go there.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping, Set
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

Imports = Mapping[str, set[str]]
"""File -> dotted names that it imports from."""


class ChangedModule(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports one module from a changed text."""

    def __init__(self, name: str, path: Path, text: str) -> None:
        self.name, self.path, self.text = name, path, text

    def find_spec(self, fullname: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Only the changed module; packages keep their folder."""
        if fullname != self.name:
            return None
        folders = [str(self.path.parent)] if self.path.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(
            fullname, self.path, loader=self, submodule_search_locations=folders
        )

    def get_source(self, fullname: str) -> str:
        """The changed text."""
        return self.text


def module_name(path: str) -> str:
    """Dotted name of a file below the root."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported_names(root: Path) -> dict[str, set[str]]:
    """Dotted names that each file of the service and of the tests imports from, modules of a package included."""
    folders = ("policy_service", "tests")
    files = (path for folder in folders for path in (root / folder).rglob("*.py") if "generated" not in path.parts)
    return {str(path.relative_to(root)): set(_names(path)) for path in files}


def _names(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def importers(module: str, imports: Imports, *, through: str = "") -> set[str]:
    """Files that import a file, directly or through files whose path begins with `through`."""
    found: set[str] = set()
    waiting = [module_name(module)]
    while waiting:
        name = waiting.pop()
        new = {file for file, names in imports.items() if name in names} - found
        found |= new
        waiting += [module_name(file) for file in new if file.startswith(through)]
    return found


def acting(root: Path, files: Iterable[str]) -> set[str]:
    """Files that call something while they are imported, as a table that registers itself elsewhere does."""
    return {file for file in files if any(map(_acts, ast.parse((root / file).read_text(encoding="utf-8")).body))}


def _acts(node: ast.stmt) -> bool:
    called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    stored = isinstance(node, ast.Assign) and any(isinstance(each, ast.Subscript) for each in node.targets)
    return called or stored


def stale_after(module: str, imports: Imports, acting_files: Set[str]) -> set[str]:
    """Files to import anew: whoever depends on the module, and what is filled by those that act on import."""
    files = {module_name(file): file for file in imports}
    stale, waiting = set[str](), {module}
    while waiting:
        stale |= waiting
        behind = {file for each in waiting for file in importers(each, imports)}
        filled = {files[name] for each in waiting & acting_files for name in imports[each] if name in files}
        waiting = (behind | filled) - stale
    return stale


def forget(stale: Iterable[str]) -> None:
    """Take files and every test out of this process, as if never imported."""
    names = {module_name(file) for file in stale}
    for name in [*sys.modules]:
        is_test = name.startswith("tests.") and not name.startswith("tests.mutation")
        if is_test or name in names:
            del sys.modules[name]
            package, _, leaf = name.rpartition(".")
            if hasattr(sys.modules.get(package), leaf):
                delattr(sys.modules[package], leaf)
