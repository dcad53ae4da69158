import os
from dataclasses import fields
from pathlib import Path

import pytest

from madeira import digits, settings
from madeira.errors import SettingsError
from madeira.settings import Settings, environment_name

KEY = "bWFkZWlyYS10ZXN0cy1zZWFsLXdpdGgtdGhpcy1rZXk="


def test_defaults_need_no_environment() -> None:
    """Without any variable the settings hold, and say that the servers are to be embedded."""
    values = settings.load({})
    assert (values.database_url, values.redis_url) == ("", "")
    assert (values.host, values.port, values.threads) == ("127.0.0.1", 8000, 48)


@pytest.mark.parametrize(
    ("environ", "parts"),
    [
        ({"MADEIRA_DATABSE_URL": "x"}, ["MADEIRA_DATABSE_URL", "did you mean MADEIRA_DATABASE_URL"]),
        ({"MADEIRA_PROT": "x"}, ["MADEIRA_PROT", "did you mean MADEIRA_PORT"]),
        ({"MADEIRA_NOSUCH": "x"}, ["MADEIRA_NOSUCH is not a setting", "known are MADEIRA_ADMIN_TOKEN, "]),
        ({"MADEIRA_X": "x"}, ["MADEIRA_X is not a setting", "known are MADEIRA_ADMIN_TOKEN, "]),
        ({"MADEIRA_ZZZZZZZZZZ": "x"}, ["MADEIRA_ZZZZZZZZZZ", "known are"]),
        ({"MADEIRA_PORT": "http"}, ["MADEIRA_PORT", "'http' is not a whole number"]),
        ({"MADEIRA_PORT": "70000"}, ["MADEIRA_PORT", "70000 is not between"]),
        ({"MADEIRA_BEAT_S": "soon"}, ["MADEIRA_BEAT_S", "'soon' is not a number", "such as 2.5"]),
        ({"MADEIRA_BEAT_S": "90"}, ["MADEIRA_BEAT_S", "90 is not between 0.05 and 60 seconds"]),
        ({"MADEIRA_LOG_FORMAT": "xml"}, ["MADEIRA_LOG_FORMAT", "json, text"]),
        ({"MADEIRA_DATABASE_URL": "mysql://h/d"}, ["MADEIRA_DATABASE_URL", "postgresql://"]),
        ({"MADEIRA_REDIS_URL": "http://h"}, ["MADEIRA_REDIS_URL", "redis://"]),
        ({"MADEIRA_PORT": "9191"}, ["MADEIRA_PORT", "MADEIRA_METRICS_PORT", "9191"]),
        ({"MADEIRA_NAMESPACE": "a b"}, ["MADEIRA_NAMESPACE", "'a b'"]),
        ({"MADEIRA_CONFIG": "/nowhere/rules.toml"}, ["MADEIRA_CONFIG", "no file /nowhere/rules.toml"]),
        ({"MADEIRA_SILENCE_S": "10", "MADEIRA_BEAT_S": "5"}, ["MADEIRA_SILENCE_S=10", "MADEIRA_BEAT_S=5"]),
    ],
)
def test_a_wrong_value_stops_the_start_with_one_line(environ: dict[str, str], parts: list[str]) -> None:
    """Unknown names, malformed values and contradictions are told with the name and the remedy, in one line."""
    with pytest.raises(SettingsError) as e:
        settings.load(environ)
    assert "\n" not in str(e.value)
    for part in parts:
        assert part in str(e.value)


@pytest.mark.parametrize("odd", ["1_0", " 10", "10 ", "10\n", "+10", "\uff11\uff10", "\u0661\u0660", "0x10", "-"])
def test_a_number_is_read_as_it_looks_or_not_at_all(odd: str) -> None:
    """Python itself would take most of these for ten; who wrote it may have meant another, or none."""
    for name in ("MADEIRA_PORT", "MADEIRA_THREADS", "MADEIRA_KEEP_IDS_DAYS", "MADEIRA_BEAT_S", "MADEIRA_RECONCILE_S"):
        with pytest.raises(SettingsError, match=rf"{name}: .*is not a.* number; write it in the digits 0 to 9"):
            settings.load({name: odd})
    with pytest.raises(ValueError, match="is not a whole number"):
        digits.whole(odd)
    with pytest.raises(ValueError, match="is not a number"):
        digits.number(odd)


def test_a_whole_number_beyond_all_bounds_is_called_too_large() -> None:
    """It is one: whoever looks for what is wrong with its digits finds nothing."""
    with pytest.raises(ValueError, match="is too large: a whole number has 18 digits at most"):
        digits.whole("-" + "1" * 19)
    with pytest.raises(ValueError, match="is not a number"):
        digits.number("1" * 31)


@pytest.mark.parametrize("odd", ["nan", "inf", "-inf", "1e", "1.2.3", "."])
def test_what_is_no_number_of_seconds_is_refused_as_such(odd: str) -> None:
    with pytest.raises(SettingsError, match=r"MADEIRA_BEAT_S: .*is not a number; write it in the digits 0 to 9"):
        settings.load({"MADEIRA_BEAT_S": odd})


def test_seconds_may_have_a_point_or_an_exponent() -> None:
    for text, seconds in (("2", 2.0), ("2.5", 2.5), ("2.", 2.0), (".5", 0.5), ("1e1", 10.0), ("25e-1", 2.5)):
        assert settings.load({"MADEIRA_BEAT_S": text}).beat_s == seconds


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MADEIRA_DATABASE_URL", "postgresql://u:hunter2%zz@h/d"),
        ("MADEIRA_DATABASE_URL", "postgresql://u:hunter2@h:hunter2/d"),
        ("MADEIRA_DATABASE_URL", "postgresql://u:hunter2@h:99999/d"),
        ("MADEIRA_DATABASE_URL", "postgresql://h/d?hunter2=1"),
        ("MADEIRA_DATABASE_URL", "postgresql://[::1/hunter2"),
        ("MADEIRA_DATABASE_URL", "hunter2://h/d"),
        ("MADEIRA_REDIS_URL", "redis://:hunter2%@h/0"),
        ("MADEIRA_REDIS_URL", "redis://:hunter2@h:hunter2/0"),
        ("MADEIRA_REDIS_URL", "redis://h:99999/hunter2"),
        ("MADEIRA_REDIS_URL", "redis://h/0?hunter2=1"),
        ("MADEIRA_REDIS_URL", "redis://[::1/hunter2"),
    ],
)
def test_a_url_that_cannot_be_read_is_told_by_its_name_only(name: str, value: str) -> None:
    """It stops the start and not the first connection, and no part of it, which may be a password, is repeated."""
    with pytest.raises(SettingsError, match=name) as e:
        settings.load({name: value})
    assert "hunter2" not in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MADEIRA_DATABASE_URL", "postgres://u:p%25@h1:5432,h2:5433/d?sslmode=require&target_session_attrs=any"),
        ("MADEIRA_DATABASE_URL", "postgresql:///d?host=/run/postgresql"),
        ("MADEIRA_REDIS_URL", "rediss://u:p%40@h:6380/1?ssl_cert_reqs=none"),
        ("MADEIRA_REDIS_URL", "unix:///run/redis.sock?db=2"),
    ],
)
def test_urls_of_every_kind_pass(name: str, value: str) -> None:
    """What the clients can read is not refused."""
    assert settings.load({name: value})


def test_an_empty_value_is_not_set() -> None:
    """A variable that is there and empty means the default."""
    assert settings.load({"MADEIRA_PORT": ""}).port == Settings().port


def test_names_of_others_are_no_concern() -> None:
    """Only names with the prefix are looked at."""
    assert settings.load({"MADEIRAS_PORT": "1", "PORT": "x"}) == Settings()


def test_settings_show_no_secret() -> None:
    """URLs with passwords, keys and tokens are not in the text of the settings."""
    values = settings.load(
        {
            "MADEIRA_DATABASE_URL": "postgresql://u:pass1@h/d",
            "MADEIRA_REDIS_URL": "redis://:pass2@h/0",
            "MADEIRA_ADMIN_TOKEN": "pass3",
            "MADEIRA_SECRET_KEY": KEY,
        }
    )
    assert "pass" not in repr(values)
    assert KEY not in repr(values)


def test_keys_are_checked_at_the_start_and_not_told() -> None:
    """One that is no key is told by its number: whatever it is, it may be meant to be secret."""
    assert settings.load({"MADEIRA_SECRET_KEY": f"{KEY}, {KEY}"}).secret_key == (KEY, KEY)
    with pytest.raises(SettingsError, match=r"MADEIRA_SECRET_KEY: key number 2 .*madeira keygen") as e:
        settings.load({"MADEIRA_SECRET_KEY": f"{KEY},hunter2"})
    assert "hunter2" not in str(e.value)


@pytest.mark.parametrize("name", ["MADEIRA_EGRESS_ALLOW", "MADEIRA_EGRESS_DENY"])
def test_what_may_be_called_is_checked_at_the_start(name: str) -> None:
    """An entry that is neither address nor network nor pattern stops the start."""
    with pytest.raises(SettingsError, match=f"{name}.*10.0.0.0/99"):
        settings.load({name: "10.1.0.0/16,10.0.0.0/99"})


def test_a_secret_may_be_in_a_file(tmp_path: Path) -> None:
    """The name with _FILE names it; space around it does not count, and its emptiness is no secret."""
    file = tmp_path / "url"
    file.write_text("redis://h/0\n")
    assert settings.load({"MADEIRA_REDIS_URL_FILE": str(file)}).redis_url == "redis://h/0"
    assert settings.load({"MADEIRA_REDIS_URL_FILE": str(file), "MADEIRA_REDIS_URL": ""}).redis_url == "redis://h/0"
    assert settings.load({"MADEIRA_REDIS_URL_FILE": "", "MADEIRA_REDIS_URL": "redis://i/0"}).redis_url == "redis://i/0"


@pytest.mark.parametrize(
    ("environ", "wrong"),
    [
        ({"MADEIRA_ADMIN_TOKEN_FILE": "{folder}/hunter2"}, "MADEIRA_ADMIN_TOKEN_FILE: .*No such file"),
        ({"MADEIRA_ADMIN_TOKEN_FILE": "{folder}"}, "MADEIRA_ADMIN_TOKEN_FILE: .*Is a directory"),
        ({"MADEIRA_ADMIN_TOKEN_FILE": "{folder}/empty"}, "MADEIRA_ADMIN_TOKEN_FILE: .*is empty"),
        ({"MADEIRA_ADMIN_TOKEN_FILE": "{folder}/bytes"}, "MADEIRA_ADMIN_TOKEN_FILE: .*holds no text"),
        ({"MADEIRA_REDIS_URL_FILE": "{folder}/bad"}, "MADEIRA_REDIS_URL: the URL must start with redis"),
        (
            {"MADEIRA_ADMIN_TOKEN_FILE": "{folder}/bad", "MADEIRA_ADMIN_TOKEN": "hunter2"},
            "MADEIRA_ADMIN_TOKEN and MADEIRA_ADMIN_TOKEN_FILE are both set",
        ),
        ({"MADEIRA_PORT_FILE": "{folder}/bad"}, "MADEIRA_PORT_FILE is not a setting"),
        ({"MADEIRA_ADMIN_TOKN_FILE": "{folder}/bad"}, "did you mean MADEIRA_ADMIN_TOKEN_FILE"),
    ],
)
def test_a_file_that_gives_no_secret_stops_the_start(environ: dict[str, str], wrong: str, tmp_path: Path) -> None:
    """It is told by the name of its variable; neither its content nor what stands in the variable is repeated."""
    for name, content in (("bad", b"hunter2"), ("empty", b" \n"), ("bytes", b"\xff\xfe")):
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SettingsError, match=wrong) as e:
        settings.load({name: value.format(folder=tmp_path) for name, value in environ.items()})
    assert "hunter2" not in str(e.value)
    assert "\n" not in str(e.value)


def test_what_is_said_to_a_child_process_takes_the_place_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the child would see both, and refuse to start."""
    monkeypatch.setenv("MADEIRA_REDIS_URL_FILE", "/run/secrets/redis_url")
    assert "MADEIRA_REDIS_URL_FILE" in settings.environment()
    assert "MADEIRA_REDIS_URL_FILE" not in settings.environment(MADEIRA_REDIS_URL="redis://h/0")


def test_every_setting_is_documented() -> None:
    """The object is the manual: each field says what it does."""
    assert not [environment_name(f) for f in fields(Settings) if not f.metadata["doc"].endswith(".")]


def test_a_missing_requirement_is_told_with_its_name() -> None:
    """A process that cannot do without a setting names it and the way around."""
    with pytest.raises(SettingsError, match=r"MADEIRA_DATABASE_URL is not set; .*madeira up"):
        settings.require(Settings(), "database_url")


@pytest.mark.parametrize(
    ("value", "secret"), [("plain", "plain"), ("env:THERE", "from-the-environment"), ("environment", "environment")]
)
def test_a_secret_is_literal_or_from_the_environment(value: str, secret: str) -> None:
    """`env:NAME` is looked up, everything else is the secret itself."""
    assert settings.secret_reference(value, "here", {"THERE": "from-the-environment"}) == secret


@pytest.mark.parametrize("value", ["env:NOT_THERE", "env:EMPTY", ""])
def test_an_absent_secret_is_an_error(value: str) -> None:
    """An empty secret would let everybody sign."""
    with pytest.raises(SettingsError, match="here"):
        settings.secret_reference(value, "here", {"EMPTY": ""})


@pytest.mark.parametrize(
    "name", ["MADEIRA_SECRET_KEY", "MADEIRA_ADMIN_TOKEN", "madeira_database_url", "PGPASSWORD", "Pgpassfile"]
)
def test_no_secret_is_read_from_what_is_ours_or_the_database_s(name: str) -> None:
    """Whoever writes a configuration must not get it sent to a receiver; the remedy is told, the value not."""
    with pytest.raises(SettingsError, match=f"here.*{name}.*another name") as e:
        settings.secret_reference(f"env:{name}", "here", {name: "guarded-value"})
    assert "guarded-value" not in str(e.value)


@pytest.mark.parametrize("name", ["MADEIRA_DATA_DIR", "PROMETHEUS_MULTIPROC_DIR"])
def test_a_folder_that_cannot_be_made_stops_the_start_with_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a root filesystem that cannot be written; the setting that names it is told."""
    (tmp_path / "file").touch()
    wrong = tmp_path / "file" / "below"
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    monkeypatch.setenv(name, str(wrong))
    with pytest.raises(SettingsError, match=rf"^{name}: .*{wrong}.*Not a directory$"):
        settings.multiproc_dir(Settings(data_dir=wrong), "worker")


@pytest.mark.parametrize("name", ["MADEIRA_DATA_DIR", "PROMETHEUS_MULTIPROC_DIR"])
def test_a_folder_that_cannot_be_written_stops_the_start_with_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that another user made; prometheus-client would raise at the first number."""
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(SettingsError, match=rf"^{name}: this user may not write into {tmp_path}"):
        settings.multiproc_dir(Settings(data_dir=tmp_path), "worker")


def test_a_child_gets_our_environment_with_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes win, None removes, the rest is passed on, and the code is found from any folder."""
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.setenv("GONE", "1")
    environ = settings.environment(GONE=None, NEW="2")
    assert environ["KEPT"] == "1"
    assert "GONE" not in environ
    assert environ["NEW"] == "2"
    assert str(Path(settings.__file__).parents[1]) in environ["PYTHONPATH"].split(":")
