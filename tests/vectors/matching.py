"""Comparing what a vector expects with what a world answered: every expected field, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def assert_expected(expected: Mapping[str, Any], actual: Mapping[str, Any], where: str) -> None:
    """Every expected field is there with its value; mappings are compared field by field, lists in order."""
    for name, value in expected.items():
        if name not in actual:
            raise AssertionError(f"{where}: {name} missing, have {dict(actual)}")
        _assert_equal(value, actual[name], f"{where}.{name}")


def _assert_equal(expected: Any, actual: Any, where: str) -> None:
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        assert_expected(expected, actual, where)
    elif isinstance(expected, list) and isinstance(actual, list):
        if len(expected) != len(actual):
            raise AssertionError(f"{where}: expected {expected}, got {actual}")
        for index, (one, other) in enumerate(zip(expected, actual, strict=True)):
            _assert_equal(one, other, f"{where}[{index}]")
    elif expected != actual:
        raise AssertionError(f"{where}: expected {expected!r}, got {actual!r}")


def matches(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> bool:
    """True if `actual` has every expected field."""
    return all(name in actual and actual[name] == value for name, value in expected.items())
