"""One mutant against the tests that run it.

The change of a function is put into the running process (its code object is exchanged in a forked child). What runs
while modules are imported - constants, defaults, tables, functions called for them - needs a fresh import of the
changed file.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from types import CodeType, FunctionType

import pytest

from tests.mutation.mutants import Mutant, difference, mutated
from tests.mutation.reimport import ChangedModule, acting, forget, imported_names, importers, module_name, stale_after
from tests.mutation.suite import OPTIONS, Baseline, Function, Outcomes, forget_cached, function_of, in_child, run_items

KILLED, SURVIVED, TIMED_OUT, NO_CODE, UNCOVERED = "killed", "survived", "timed out", "no code", "uncovered"
FRESH_IMPORT_S = 25.0
AFFORDABLE_S = 15.0
"""CPU time of tests spent on one mutant; what only the dear ones would notice counts as a survivor."""
NEAR_FILES = (1, 3, 36)
"""Test files imported anew for a changed constant, in steps: importing takes longer than running, and the nearest
notice most changes."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What became of a mutant: `by` is the test that noticed."""

    module: str
    mutant: Mutant
    change: str
    verdict: str
    by: str = ""


def code_tree(code: CodeType) -> Iterator[CodeType]:
    """A code object and all those it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from code_tree(constant)


def changed_functions(before: CodeType, after: CodeType) -> list[tuple[CodeType, CodeType]]:
    """Pairs that differ by themselves or in what they define; a module's or class's own body among them."""
    pairs = zip(code_tree(before), code_tree(after), strict=False)
    return [(old, new) for old, new in pairs if old != new]


def _own_body(code: CodeType) -> tuple[object, ...]:
    constants = tuple(each for each in code.co_consts if not isinstance(each, CodeType))
    return code.co_code, constants, code.co_names


def innermost(pairs: Sequence[tuple[CodeType, CodeType]]) -> CodeType | None:
    """The function whose own body changed; None when a module's or class's body did (it runs on import)."""
    own = [old for old, new in pairs if _own_body(old) != _own_body(new)]
    if not own or any(not code.co_flags & 0x2 for code in own):  # CO_NEWLOCALS: functions have it, bodies do not
        return None
    return own[-1]


def living_functions() -> list[FunctionType]:
    """Every function of the domain in this process, those inside classes, caches and tables included."""
    return [each for each in gc.get_objects() if isinstance(each, FunctionType) and function_of(each.__code__)[0]]


def exchange(functions: Sequence[FunctionType], pairs: Sequence[tuple[CodeType, CodeType]]) -> int:
    """Give every living function of these its new code; how many were found."""
    new_code = dict(pairs)
    found = [each for each in functions if each.__code__ in new_code]
    for function in found:
        function.__code__ = new_code[function.__code__]
    return len(found)


class Chosen(Outcomes):
    """A nested run of chosen tests in a chosen order, which remembers the first failure."""

    def __init__(self, nodeids: Sequence[str]) -> None:
        super().__init__()
        self.order = {nodeid: at for at, nodeid in enumerate(nodeids)}
        self.first = ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the chosen, cheapest first."""
        items[:] = sorted((each for each in items if each.nodeid in self.order), key=lambda i: self.order[i.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The first failure names the test."""
        self.first = self.first or (report.nodeid if report.failed else "")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A module that cannot be imported any more is noticed by every test of it."""
        self.first = self.first or (f"import of {report.nodeid}" if report.failed else "")


@dataclass(slots=True)
class Bench:
    """Everything a trial needs: the copy of the tree, the collected session and the baseline."""

    root: Path
    session: pytest.Session
    outcomes: Outcomes
    baseline: Baseline
    functions: list[FunctionType] = field(default_factory=living_functions)
    imports: dict[str, set[str]] = field(init=False)
    acting: set[str] = field(init=False)
    nearest: dict[str, list[list[str]]] = field(default_factory=dict)
    stale: dict[str, set[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.imports = imported_names(self.root)
        self.acting = acting(self.root, [file for file in self.imports if file.startswith("policy_service/")])

    def covering(self, function: Function) -> list[str]:
        """Tests that enter the function, as many as are affordable."""
        return self._affordable(function[0], (n for n, seen in self.baseline.functions.items() if function in seen))

    def near(self, module: str) -> list[list[str]]:
        """Tests of the files that import the module or enter most of it and of those that import it, nearest first."""
        if module not in self.nearest:
            self.nearest[module] = self._near(module)
        return self.nearest[module]

    def _near(self, module: str) -> list[list[str]]:
        files = {module, *importers(module, self.imports, through="policy_service/domain/")}
        weight: Counter[str] = Counter()
        for nodeid, seen in self.baseline.functions.items():
            weight[_file(nodeid)] += sum(file in files for file, _, _ in seen) + 1_000 * self._names(nodeid, module)
        best = [file for file, count in weight.most_common(sum(NEAR_FILES)) if count]
        chosen = self._affordable(module, (n for n in self.baseline.functions if _file(n) in best))
        steps = [set(best[end - size : end]) for size, end in zip(NEAR_FILES, accumulate(NEAR_FILES), strict=True)]
        return [step for files in steps if (step := [n for n in chosen if _file(n) in files])]

    def _names(self, nodeid: str, module: str) -> bool:
        return module_name(module) in self.imports.get(_file(nodeid), ())

    def try_out(self, module: str, mutant: Mutant) -> Trial:
        """The verdict on one mutant."""
        source = (self.root / module).read_text(encoding="utf-8")
        after = mutated(source, mutant)
        change = difference(source, after)
        try:
            filename = str(self.root / module)
            pairs = changed_functions(compile(source, filename, "exec"), compile(after, filename, "exec"))
        except (SyntaxError, ValueError):
            return Trial(module, mutant, change, NO_CODE)
        function = innermost(pairs)
        if function is None or function_of(function) in self.baseline.imported:
            return self._imported_anew(module, mutant, after, change)
        return self._exchanged(module, mutant, pairs, function, change)

    def _exchanged(
        self, module: str, mutant: Mutant, pairs: list[tuple[CodeType, CodeType]], function: CodeType, change: str
    ) -> Trial:
        chosen = self.covering(function_of(function))
        if not chosen:
            return Trial(module, mutant, change, UNCOVERED)
        by_id = {item.nodeid: item for item in self.session.items}

        def work() -> tuple[str]:
            forget_cached()
            if not exchange(self.functions, pairs):
                return ("no function found",)
            return (run_items([by_id[nodeid] for nodeid in chosen], self.outcomes) or "",)

        return self._judged(module, mutant, change, in_child(work, *self._budget(chosen)))

    def _imported_anew(self, module: str, mutant: Mutant, after: str, change: str) -> Trial:
        trial = Trial(module, mutant, change, UNCOVERED)
        for chosen in self.near(module):
            trial = self._judged(module, mutant, change, self._run_anew(module, after, chosen))
            if trial.verdict != SURVIVED:
                break
        return trial

    def _run_anew(self, module: str, after: str, chosen: list[str]) -> tuple[str] | None:
        files = sorted({_file(nodeid) for nodeid in chosen})
        listener = Chosen(chosen)
        if module not in self.stale:
            self.stale[module] = stale_after(module, self.imports, self.acting)

        def work() -> tuple[str]:
            forget(self.stale[module])
            sys.meta_path.insert(0, ChangedModule(module_name(module), self.root / module, after))
            code = pytest.main(["-x", *OPTIONS, *(str(self.root / file) for file in files)], plugins=[listener])
            return (listener.first or ("" if code == 0 else f"exit {code}"),)

        cpu, wall = self._budget(chosen)
        answer: tuple[str] | None = in_child(work, cpu + FRESH_IMPORT_S, wall + 4 * FRESH_IMPORT_S)
        return answer

    def _judged(self, module: str, mutant: Mutant, change: str, answer: tuple[str] | None) -> Trial:
        if answer is None:
            return Trial(module, mutant, change, TIMED_OUT)
        return Trial(module, mutant, change, KILLED if answer[0] else SURVIVED, answer[0])

    def _budget(self, nodeids: Sequence[str]) -> tuple[float, float]:
        """CPU and wall seconds: traced cost of the tests is already more than their plain cost."""
        cost = 4 + 3 * sum(self.baseline.seconds[nodeid] for nodeid in nodeids)
        return cost, 30 + 8 * cost

    def _cheapest(self, nodeids: Iterator[str]) -> list[str]:
        left_out = {*self.baseline.broken, *self.baseline.dear}
        return sorted((n for n in nodeids if n not in left_out), key=self.baseline.seconds.__getitem__)

    def _affordable(self, module: str, nodeids: Iterator[str]) -> list[str]:
        """Tests of files that import the module first, then the cheapest."""
        found = sorted(self._cheapest(nodeids), key=lambda nodeid: not self._names(nodeid, module))
        spent = accumulate(self.baseline.seconds[nodeid] for nodeid in found)
        return [nodeid for nodeid, cost in zip(found, spent, strict=True) if cost <= AFFORDABLE_S]


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]
