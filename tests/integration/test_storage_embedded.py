"""The embedded server: shared by processes, stopped with the last of them, clear about what it cannot use."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from policy_service.storage.postgres import embedded, embedded_watch, schema
from policy_service.storage.postgres.embedded import EmbeddedServer
from policy_service.storage.postgres.embedded_host import Account, EmbeddedServerError, server_account
from policy_service.storage.postgres.store import PostgresStore
from tests.contract.beside import place_for_clusters
from tests.contract.units import TIMEOUT_MS

USER = """
import sys
from policy_service.storage.postgres.embedded import EmbeddedServer
server = EmbeddedServer.open(sys.argv[1])
print(server.pid, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def bare_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="policy-pg-", dir=place_for_clusters()) as name:
        yield Path(name)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Path]:
    """A stopped cluster to copy."""
    with tempfile.TemporaryDirectory(prefix="policy-pg-", dir=place_for_clusters()) as name:
        EmbeddedServer.open(name).close()
        yield Path(name) / "postgres"


@pytest.fixture
def directory(bare_directory: Path, cluster: Path) -> Path:
    """A data directory whose server has run before."""
    subprocess.run(["cp", "-a", str(cluster), str(bare_directory)], check=True)
    return bare_directory


class User:
    """Another process that uses the server of a directory."""

    def __init__(self, directory: Path) -> None:
        command = [sys.executable, "-c", USER, str(directory)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout
        self.server_pid = int(self.process.stdout.readline())

    def leave(self) -> None:
        """End as an ordinary process does."""
        self.process.communicate("\n", timeout=20)

    def kill(self) -> None:
        """End without a chance to clean up."""
        self.process.kill()
        self.process.communicate(timeout=20)


@pytest.fixture
def user(directory: Path) -> Iterator[Callable[[], User]]:
    users: list[User] = []

    def start() -> User:
        users.append(User(directory))
        return users[-1]

    yield start
    for each in users:
        each.process.kill()
        each.process.communicate()


def eventually(condition: Callable[[], bool], patience_s: float = 20) -> bool:
    ends_at = time.monotonic() + patience_s
    while not condition() and time.monotonic() < ends_at:
        time.sleep(0.01)
    return condition()


def is_gone(pid: int) -> bool:
    return not embedded_watch.is_postgres(pid)


async def test_a_first_start_answers_queries_and_a_restart_keeps_the_data(bare_directory: Path) -> None:
    for _ in range(2):
        server = await EmbeddedServer.start(bare_directory)
        await schema.upgrade(server.url)
        store = await PostgresStore.connect(server.url)
        secrets = await store.secrets()
        await store.close()
        server.close()
    again = EmbeddedServer.open(bare_directory)
    store = await PostgresStore.connect(again.url)
    assert await store.secrets() == secrets
    assert (await store.read_clock(timeout_ms=TIMEOUT_MS)).database_ms > 0
    await store.close()
    again.close()
    assert again.pid is None


def test_processes_share_one_server_and_the_last_one_stops_it(directory: Path, user: Callable[[], User]) -> None:
    first, second = user(), user()
    mine = EmbeddedServer.open(directory)
    assert first.server_pid == second.server_pid == mine.pid
    first.leave()
    mine.close()
    assert not is_gone(second.server_pid)
    second.leave()
    assert is_gone(second.server_pid)


def test_processes_that_start_at_once_start_one_server(bare_directory: Path) -> None:
    command = [sys.executable, "-c", USER, str(bare_directory)]
    many = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    pids = {int(each.stdout.readline()) for each in many if each.stdout}
    for each in many:
        each.communicate("\n")
    assert len(pids) == 1
    assert is_gone(pids.pop())


def test_the_server_stops_after_its_last_user_was_killed(directory: Path, user: Callable[[], User]) -> None:
    only = user()
    only.kill()
    assert eventually(lambda: is_gone(only.server_pid))
    assert EmbeddedServer.open(directory).pid != only.server_pid


def test_a_killed_user_does_not_stop_the_server_of_the_others(directory: Path, user: Callable[[], User]) -> None:
    killed, other = user(), user()
    killed.kill()
    time.sleep(0.2)
    assert not is_gone(other.server_pid)
    other.leave()
    assert is_gone(other.server_pid)


def test_a_killed_server_is_started_again_by_the_next_user(directory: Path) -> None:
    first = EmbeddedServer.open(directory)
    assert first.pid
    os.kill(first.pid, signal.SIGKILL)
    killed = first.pid
    assert eventually(lambda: is_gone(killed))
    second = EmbeddedServer.open(directory)
    assert second.pid not in (None, killed)
    second.close()
    first.close()


def test_a_stale_pid_file_that_names_a_living_stranger_is_no_server(directory: Path) -> None:
    stranger = subprocess.Popen(["sleep", "60"], **server_account().run_as())
    stale = f"{stranger.pid}\n{directory / 'postgres'}\n1\n5432\n{directory / 'postgres'}\n\n1 1\nready\n"
    (directory / "postgres" / "postmaster.pid").write_text(stale)
    (directory / "postgres" / f"{embedded.SOCKET_NAME}.lock").write_text(stale)
    server = EmbeddedServer.open(directory)
    assert server.pid not in (None, stranger.pid)
    server.close()
    stranger.kill()
    stranger.wait()


def test_a_long_data_directory_gets_a_short_socket(bare_directory: Path) -> None:
    deep = bare_directory / ("d" * 60) / ("e" * 60)
    server = EmbeddedServer.open(deep)
    assert len(os.fsencode(server.socket_directory / embedded.SOCKET_NAME)) <= embedded.SOCKET_PATH_LIMIT
    assert not str(server.socket_directory).startswith(str(deep))
    server.close()
    shutil.rmtree(server.socket_directory)


def test_the_server_listens_on_no_port(directory: Path) -> None:
    server = EmbeddedServer.open(directory)
    lines = (server.data / "postmaster.pid").read_text().splitlines()
    assert lines[5].strip() == ""
    server.close()


def refusal(directory: Path) -> str:
    with pytest.raises(EmbeddedServerError) as caught:
        EmbeddedServer.open(directory)
    return str(caught.value)


def test_a_damaged_cluster_is_refused(directory: Path) -> None:
    (directory / "postgres" / "global" / "pg_control").write_bytes(b"\0" * 8192)
    assert "did not start" in refusal(directory)
    (directory / "postgres" / "PG_VERSION").unlink()
    assert "damaged" in refusal(directory)


def test_a_cluster_of_another_version_is_refused(directory: Path) -> None:
    (directory / "postgres" / "PG_VERSION").write_text("12\n")
    assert "Postgres 12" in refusal(directory)


def test_a_cluster_of_another_owner_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = server_account()
    other = Account(mine.uid + 1, mine.gid, "somebody", is_other=mine.is_other)
    monkeypatch.setattr(embedded, "server_account", lambda: other)
    assert "is owned by" in refusal(directory)


def test_a_cluster_served_by_a_foreign_postmaster_is_refused(directory: Path) -> None:
    first = EmbeddedServer.open(directory)
    options = first.data / "postmaster.opts"
    ours = options.read_text()
    options.write_text('postgres "-D" "elsewhere"\n')
    assert "another postmaster" in refusal(directory)
    options.write_text(ours)
    first.close()
    assert first.pid is None


def test_an_interrupted_first_start_leaves_no_half_cluster(bare_directory: Path) -> None:
    (bare_directory / "postgres.unfinished").mkdir()
    (bare_directory / "postgres.unfinished" / "PG_VERSION").write_text("18")
    server = EmbeddedServer.open(bare_directory)
    assert server.pid
    server.close()


def test_a_directory_that_cannot_be_made_is_refused(bare_directory: Path) -> None:
    (bare_directory / "file").write_text("")
    assert "cannot create" in refusal(bare_directory / "file" / "data")


def test_closing_twice_is_harmless(directory: Path) -> None:
    server = EmbeddedServer.open(directory)
    server.close()
    server.close()


def test_a_directory_below_a_closed_one_serves_root_as_well(bare_directory: Path) -> None:
    """Root's server runs under another account, which must be able to pass, not to list, what lies above."""
    closed = bare_directory / "closed"
    closed.mkdir(mode=0o700)
    server = EmbeddedServer.open(closed / "data")
    assert server.pid
    assert not closed.stat().st_mode & 0o066
    server.close()
