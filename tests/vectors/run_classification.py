"""Runs the vectors of spec/classification.md; their schema is explained in the data file."""

from __future__ import annotations

from tests.vectors.classification_stage import run_failure

run = run_failure
