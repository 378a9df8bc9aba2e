"""`classify`: JSON lines of upstream errors in, verdicts out."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path
from typing import TextIO

from policy_service.application.classify import classify_lines, compare_lines
from policy_service.cli import exit_codes
from policy_service.cli.output import note, problems
from policy_service.domain.policy import Policy
from policy_service.settings.catalogue_file import builtin_catalogue, load_catalogue_file
from policy_service.settings.load import policy_environment

_UNUSABLE = '"error": {"field": '


def run(catalogue: Path | None, lines: TextIO, out: TextIO) -> int:
    """Classify every line; 1 where a line could not be used (its answer says why).

    Raises:
        ConfigError: the catalogue cannot be used.
    """
    _tolerate(lines, "replace")
    _tolerate(out, "backslashreplace")
    unusable = 0
    for answer in classify_lines(lines, load_policy(catalogue)):
        unusable += _UNUSABLE in answer and '"rule": ' not in answer
        out.write(answer + "\n")
    if unusable:
        note(f"{unusable} line(s) could not be used; their answers name the field and what to do")
    return exit_codes.FAILED if unusable else exit_codes.OK


def dry_run(before: Path, after: Path | None, lines: TextIO, out: TextIO) -> int:
    """Show the lines whose verdict another catalogue would change, and how many of how many they are.

    Args:
        before: catalogue in force.
        after: catalogue to try; None: the built-in providers alone.

    Raises:
        ConfigError: one of the catalogues cannot be used.
    """
    old, new = load_policy(before), load_policy(after)
    _tolerate(lines, "replace")
    _tolerate(out, "backslashreplace")
    changed = total = 0
    for difference in compare_lines(lines, old, new, time.time_ns() // 1_000_000):
        total += 1
        if difference is not None:
            changed += 1
            out.write(difference + "\n")
    note(f"would have changed {changed} of {total}")
    return exit_codes.OK


def load_policy(catalogue: Path | None) -> Policy:
    """The policy of a catalogue file, or of the built-in providers; the environment's settings apply."""
    environment = policy_environment(os.environ)
    if catalogue is None:
        return Policy(builtin_catalogue(), environment)
    loaded = load_catalogue_file(catalogue, environment=environment)
    problems(loaded.warnings, level="warning")
    return Policy(loaded.catalogue, environment)


def _tolerate(stream: TextIO, errors: str) -> None:
    """Bytes that are no UTF-8, and lone surrogates, must not end a long run."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(encoding="utf-8", errors=errors)
