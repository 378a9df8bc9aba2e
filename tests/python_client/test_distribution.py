"""The client is a distribution of its own: it installs and works without the service and without SQLAlchemy."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from email.parser import Parser
from pathlib import Path

import pytest

from policy_client._carried import stream_events, watchdog
from tests.docs_pages import ROOT

CLIENT = ROOT / "adapters" / "python_client"
PROGRAM = """
import sys

BLOCKED = {"policy_service", "sqlalchemy", "asyncpg", "alembic", "pydantic", "yaml", "httpx"}

class Blocks:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(f"{name} is not to be imported")

sys.meta_path.insert(0, Blocks())
import policy_client
from policy_client.testing import ScriptedPolicy

policy = ScriptedPolicy()
with policy.client() as client:
    result = client.run(policy_client.pool("p/a/m"), lambda attempt: policy_client.answered("served", 200))
print(policy_client.__file__, result.value, len(policy.reports))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the built distribution alone."""
    place = tmp_path_factory.mktemp("installed")
    source = place / "source"
    subprocess.run(["cp", "-r", str(CLIENT), str(source)], check=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(place / "site"), str(source)], check=True, timeout=100)
    return place / "site"


@pytest.mark.timeout(120)
def test_it_works_where_nothing_of_the_service_can_be_imported(installed: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env={"PYTHONPATH": str(installed), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    path, value, reports = done.stdout.split()
    assert Path(path).is_relative_to(installed)
    assert (value, reports) == ("served", "1")


@pytest.mark.timeout(120)
def test_it_requires_grpc_and_protobuf_only(installed: Path) -> None:
    (metadata,) = installed.glob("policy_service_client-*.dist-info/METADATA")
    required = Parser().parsestr(metadata.read_text()).get_all("Requires-Dist") or []
    plain = sorted(re.split("[<>=]", each)[0] for each in required if "extra ==" not in each)
    assert plain == ["googleapis-common-protos", "grpcio", "protobuf"]
    assert (installed / "policy_client" / "py.typed").exists()
    assert list(installed.glob("policy_client/_generated/policy/v1/*.pyi"))


# --- what the client carries -------------------------------------------------------------------------------------
def test_the_copies_are_current_and_drift_is_seen(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("carry", CLIENT / "carry.py")
    assert spec is not None
    assert spec.loader is not None
    carry = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(carry)
    expected = carry.copies()
    assert carry.drift(expected) == []
    carry.write(expected, tmp_path)
    assert carry.drift(expected, tmp_path) == []
    (tmp_path / "httpx2.py").write_text("changed")
    (tmp_path / "_carried" / "watchdog.py").unlink()
    assert carry.drift(expected, tmp_path) == ["_carried/watchdog.py", "httpx2.py"]


@pytest.mark.parametrize("module", [stream_events, watchdog])
def test_the_copies_import_the_standard_library_only(module: object) -> None:
    names = {getattr(each, "__module__", "") or "" for each in vars(module).values()}
    roots = {name.partition(".")[0] for name in names} - {"policy_client", ""}
    assert roots <= set(sys.stdlib_module_names)
