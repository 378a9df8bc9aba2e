"""Two services with one name on one data directory: both run, and the second says what is wrong and what to do."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.integration.serving import config, serving


async def test_a_second_service_of_one_name_on_one_data_directory_warns_with_a_remedy(
    tmp_path: Path, embedded_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="policy_service")
    settings = config(tmp_path, embedded_url, replica="same")
    async with serving(settings) as (first, _):
        assert not told(caplog)
        async with serving(settings) as (second, _):
            (text,) = told(caplog)
            assert "'same'" in text
            assert "--data-dir" in text
            assert first._spool.directory != second._spool.directory


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "is called" in record.getMessage()]
