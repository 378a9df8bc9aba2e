"""Process configuration: precedence, unknown names, all problems at once, hidden secrets."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from policy_service.domain.settings import REGISTRY
from policy_service.settings.fields import hidden_url, server_fields, shown_value
from policy_service.settings.flags import FLAGS
from policy_service.settings.load import SERVICE_LINK, file_problems, known_variables, load
from policy_service.settings.problems import ConfigError
from policy_service.settings.server import ServerConfig, split_address


def problems_of(**given: object) -> dict[str, str]:
    """Text of each problem by path."""
    with pytest.raises(ConfigError) as caught:
        load(**given)  # type: ignore[arg-type]
    return {problem.path: problem.text() for problem in caught.value.problems}


def written(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_without_anything_the_defaults_apply() -> None:
    config = load().config

    assert config.listen.tcp == ("127.0.0.1:50051",)
    assert (config.store.select_ms, config.store.report_ms, config.token_max_age_s) == (20, 200, 86_400)
    assert config.database_text is None


def test_a_flag_beats_the_environment_which_beats_the_file_which_beats_the_default(tmp_path: Path) -> None:
    file = written(tmp_path, "workers: 2\ndrain_ms: 2\nstore: {select_ms: 2, report_ms: 2}\n")
    environment = {"POLICY_WORKERS": "3", "POLICY_STORE_SELECT_MS": "3"}

    loaded = load(file=file, environment=environment, flags={"workers": "4", "replica": None})

    config = loaded.config
    assert (config.workers, config.store.select_ms, config.store.report_ms, config.drain_ms) == (4, 3, 2, 2)
    assert config.store.poll_ms == ServerConfig().store.poll_ms
    assert loaded.sources["workers"] == "flag --workers"
    assert loaded.sources["store.select_ms"] == "environment POLICY_STORE_SELECT_MS"
    assert loaded.sources["store.report_ms"] == f"file {file}:3"


@pytest.mark.parametrize("name", [".", "..", "nul\0", "two\nlines", "\x1b[31m"])
def test_a_replica_name_that_is_no_row_no_line_and_no_directory_is_refused(name: str) -> None:
    assert "not a name" in problems_of(environment={"POLICY_REPLICA": name})["replica"]


@pytest.mark.parametrize("name", ["", "a b", "é😀", "pod/1", "%s{}"])
def test_a_replica_may_have_any_printable_name(name: str) -> None:
    assert load(environment={"POLICY_REPLICA": name}).config.replica == name


def test_the_environment_can_name_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, "workers: 2\n")

    assert load(environment={"POLICY_CONFIG": str(file)}).config.workers == 2


def test_every_problem_is_listed_at_once_with_its_place_and_remedy(tmp_path: Path) -> None:
    file = written(tmp_path, "workers: 0\nstore:\n  selct_ms: 5\n  report_ms: abc\nlisten: {tcp: [nowhere]}\n")

    found = problems_of(
        file=file,
        environment={"POLICY_WRKERS": "2", "POLICY_STORE_POLL_MS": "x"},
        flags={"log.level": "loud", "wokers": "1"},
    )

    assert set(found) == {
        "workers",
        "store.selct_ms",
        "store.report_ms",
        "store.poll_ms",
        "listen.tcp[0]",
        "POLICY_WRKERS",
        "log.level",
        "wokers",
    }
    assert found["workers"] == f"{file}:1: workers: out of range; given: 0; allowed: 1 .. 64; correct the value"
    assert "did you mean select_ms?" in found["store.selct_ms"]
    assert "did you mean POLICY_WORKERS?" in found["POLICY_WRKERS"]
    assert "did you mean workers?" in found["wokers"]
    assert found["store.poll_ms"].startswith("environment POLICY_STORE_POLL_MS: ")
    assert found["log.level"].startswith("flag --log-level: ")


def test_a_policy_setting_in_the_file_is_sent_to_the_catalogue(tmp_path: Path) -> None:
    found = problems_of(file=written(tmp_path, "breaker: {oauth: {failure_threshold: 3}}\n"))

    assert "below settings: of the catalogue" in found["breaker"]


def test_a_policy_setting_as_a_flag_is_sent_to_the_catalogue_and_its_variable() -> None:
    name = "connection.api_key.base_cooldown_ms"
    told = problems_of(flags={name: "1"})[name]
    assert "below settings: of the catalogue" in told
    assert "POLICY_CONNECTION_API_KEY_BASE_COOLDOWN_MS" in told
    assert "POLICY_CONNECTION_API_KEY_BASE_COOLDOWN_MS" in {row.environment for row in REGISTRY.values()}


def test_variables_of_policy_settings_are_handed_on_and_unusable_ones_draw_a_warning() -> None:
    environment = {"POLICY_COOLDOWN_WAIT_ENABLED": "maybe", "RATE_LIMIT_MAX_WAIT_MS": "9", "HOME": "/x"}

    loaded = load(environment=environment)

    assert loaded.environment == {"POLICY_COOLDOWN_WAIT_ENABLED": "maybe", "RATE_LIMIT_MAX_WAIT_MS": "9"}
    assert [text.split(":")[0] for text in loaded.warnings] == ["POLICY_COOLDOWN_WAIT_ENABLED"]


def test_a_variable_without_the_prefix_is_nobodys_business() -> None:
    assert load(environment={"RATE_LIMIT_AUTO_ENABLE": "true", "PATH": ""}).environment == {}


@pytest.mark.parametrize(
    "name",
    [
        "POLICY_SERVICE_SERVICE_HOST",
        "POLICY_SERVICE_PORT",
        "POLICY_SERVICE_SERVICE_PORT_GRPC",
        "POLICY_PORT_1_TCP_ADDR",
    ],
)
def test_variables_that_an_orchestrator_sets_for_a_service_of_this_name_are_left_alone(name: str) -> None:
    assert load(environment={name: "tcp://10.0.0.1:50051"}).warnings == ()


def test_no_variable_of_ours_looks_like_one_of_an_orchestrator() -> None:
    assert [name for name in known_variables() if SERVICE_LINK.fullmatch(name)] == []


def test_process_and_policy_settings_never_share_a_variable() -> None:
    process = {row.environment for row in server_fields().values()}

    assert process & {spec.environment for spec in REGISTRY.values()} == set()
    assert process <= set(known_variables())


def test_every_flag_belongs_to_a_field() -> None:
    assert set(FLAGS) <= set(server_fields())


def test_every_field_says_what_it_means() -> None:
    assert [row.name for row in server_fields().values() if not row.doc] == []


@pytest.mark.parametrize("key", ["plain-key-of-24-symbols!", "sha256:" + hashlib.sha256(b"k").hexdigest()])
def test_keys_are_compared_by_hash_and_never_shown(key: str) -> None:
    config = load(environment={"POLICY_AUTH_KEYS": key}).config

    expected = key.removeprefix("sha256:") if key.startswith("sha256:") else hashlib.sha256(key.encode()).hexdigest()
    assert config.auth.key_hashes == {expected}
    assert shown_value(config, server_fields()["auth.keys"]) == ["********"]
    assert key not in repr(config)


def test_a_refused_secret_is_not_repeated() -> None:
    found = problems_of(
        environment={"POLICY_AUTH_KEYS": "sh0rt", "POLICY_DATABASE_URL": "mysql://u:hunter2@h/d"},
    )

    assert set(found) == {"auth.keys[0]", "database_url"}
    assert "sh0rt" not in found["auth.keys[0]"]
    assert "hunter2" not in found["database_url"]


def test_a_database_address_is_shown_without_its_password() -> None:
    url = "postgresql://u:hunter2@h:5432/d?sslmode=require&password=hunter3"

    assert hidden_url(url) == "postgresql://u:********@h:5432/d?sslmode=require&password=********"
    assert "hunter" not in repr(load(environment={"POLICY_DATABASE_URL": url}).config)


@pytest.mark.parametrize(
    ("flags", "path"),
    [
        ({"tls.cert_file": "a"}, "tls"),
        ({"tls.client_ca_file": "a"}, "tls"),
        ({"listen.tcp": []}, "listen"),
        ({"store.failover": "maybe"}, "store.failover"),
        ({"store.commit_interval_ms": "19"}, "store.commit_interval_ms"),
    ],
)
def test_combinations_that_cannot_work_are_refused(flags: dict[str, object], path: str) -> None:
    assert path in problems_of(flags=flags)


def test_an_open_address_without_key_or_tls_draws_warnings() -> None:
    warnings = load(flags={"listen.tcp": "0.0.0.0:50051"}).warnings

    assert [text.split(";")[-1].strip() for text in warnings] == [
        "set auth.keys",
        "set tls.cert_file and tls.key_file",
    ]


def test_notifications_are_off_behind_a_transaction_pool() -> None:
    assert load(flags={"store.pgbouncer": "true"}).config.store.listens is False


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    config = load(flags={"tls.cert_file": str(tmp_path / "no.pem"), "tls.key_file": str(tmp_path)}).config

    assert [problem.path for problem in file_problems(config)] == ["tls.cert_file", "tls.key_file"]


@pytest.mark.parametrize("text", ["localhost:1", "[::1]:0", "10.0.0.1:65535", "host.example:80"])
def test_addresses_are_host_and_port(text: str) -> None:
    host, port = split_address(text)

    assert text.endswith(f":{port}")
    assert host in text


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:65536", "::1:5", "a b:1", "http://h:1"])
def test_other_texts_are_no_addresses(text: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        split_address(text)


@pytest.mark.parametrize("text", ["- a\n", "just text\n", "a: [\n", "a: 1\na: 2\n"])
def test_a_file_that_is_no_mapping_of_single_keys_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        load(file=written(tmp_path, text))


def test_a_missing_file_is_a_problem_with_its_path(tmp_path: Path) -> None:
    found = problems_of(file=tmp_path / "none.yaml")

    assert str(tmp_path / "none.yaml") in found["config"]
