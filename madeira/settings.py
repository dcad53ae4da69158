"""Process settings: one frozen object, parsed once from the environment and checked as a whole.

This is the only module that reads ``os.environ``. Each field carries its own documentation in its metadata; the
reference in ``docs/configuration.md`` is made from it.
"""

import difflib
import errno
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from madeira import egress
from madeira import setting_values as parse
from madeira.errors import SettingsError

#: Every name that Madeira reads starts with this; any other name with it stops the start.
PREFIX: Final = "MADEIRA_"

#: A secret may come from a file: its name with this at the end names the file, as container engines hand out secrets.
FILE: Final = "_FILE"

#: Names with the prefix that tests and tools may set without their being settings.
_IGNORED: Final = frozenset({"MADEIRA_TEST_REPORT"})

#: Levels of the log, from the lowest on.
LOG_LEVELS: Final = ("debug", "info", "warning", "error")

#: How much a name must be like one that is known, from 0 to 1, to be told as meant; the prefix, which all have, aside.
_NEAR: Final = 0.7

#: Variables that a secret of a configuration may not be read from: Madeira's own, and those of Postgres' clients: else who
#: may write a configuration would have them sent to a receiver of his choice.
_GUARDED: Final = (PREFIX, "PG")

#: What a disk may come to between two starts without anybody having changed a setting.
_DISK: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)

#: Where prometheus-client looks for its folder.
_MULTIPROC: Final = "PROMETHEUS_MULTIPROC_DIR"


def _setting(default: Any, value: Callable[[str], Any], doc: str, *, secret: bool = False, unit: str = "") -> Any:
    return field(default=default, repr=not secret, metadata={"value": value, "doc": doc, "unit": unit, "secret": secret})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of one process.

    The environment name of a field is ``MADEIRA_`` and its name in capitals: `database_url` is
    ``MADEIRA_DATABASE_URL``.
    """

    database_url: str = _setting(
        "",
        parse.url("postgresql", "postgres"),
        "Postgres (14 or later), as a libpq URL. Empty: `madeira up` starts an embedded one.",
        secret=True,
    )
    replica_url: str = _setting(
        "",
        parse.url("postgresql", "postgres"),
        "A streaming replica of Postgres, as a libpq URL: API and console read their lists there while it is at most five "
        "seconds behind. Empty: everything is read from `MADEIRA_DATABASE_URL`.",
        secret=True,
    )
    redis_url: str = _setting(
        "",
        parse.url("redis", "rediss", "unix"),
        "Redis (7 or later) or Valkey (8 or later). Empty: `madeira up` starts an embedded one.",
        secret=True,
    )
    namespace: str = _setting(
        "madeira", parse.namespace, "Prefix of every Redis key, so that several Madeiras can share one Redis."
    )
    data_dir: Path = _setting(Path(".madeira"), parse.path, "Folder of the embedded servers' data and of the metrics files.")
    host: str = _setting("127.0.0.1", parse.text, "Address that the API listens on.")
    port: int = _setting(8000, parse.whole(1, 65535), "Port that the API listens on.")
    processes: int = _setting(2, parse.whole(1, 256), "Processes of the API and of the workers that `madeira up` starts, each.")
    threads: int = _setting(48, parse.whole(1, 512), "Threads of each such process.")
    config: Path | None = _setting(
        None, parse.path, "TOML file with sources, endpoints and routes that `madeira up` applies when it starts."
    )
    secret_key: tuple[str, ...] = _setting(
        (),
        parse.keys,
        "Keys that seal secrets in the database, comma separated: the first one seals, all of them open. `madeira keygen` makes "
        "one. The same in every process.",
        secret=True,
    )
    admin_token: str = _setting("", parse.text, "Bearer token of the administrator. Empty: no administrator access.", secret=True)
    egress_allow: tuple[str, ...] = _setting(
        (),
        parse.listed,
        "Addresses, networks (CIDR) and host patterns that may be called although they are denied by themselves (this machine, "
        "link-local, cloud metadata, reserved ranges) or by `MADEIRA_EGRESS_DENY`; comma separated. The more specific one wins.",
    )
    egress_deny: tuple[str, ...] = _setting(
        (),
        parse.listed,
        "Addresses, networks (CIDR) and host patterns that may not be called; `*` is every address. Comma separated.",
    )
    max_body: int = _setting(1_048_576, parse.whole(1024, 104_857_600), "Largest request body that intake accepts.", unit="bytes")
    log_level: str = _setting("info", parse.choice(*LOG_LEVELS), "Lowest level that is logged.")
    log_format: str = _setting("json", parse.choice("json", "text"), "`json`: one object a line; `text`: for a terminal.")
    log_burst: int = _setting(
        100,
        parse.whole(0, 1_000_000),
        "Lines of one kind (event key, level, and the endpoint, source or queue that they name) that a process writes in ten "
        "seconds; beyond, it says how many were left out. 0: all.",
        unit="lines",
    )
    metrics_port: int = _setting(9191, parse.whole(0, 65535), "Port of the workers' /metrics page. 0: none.")
    scheduler_metrics_port: int = _setting(9192, parse.whole(0, 65535), "Port of the scheduler's /metrics page. 0: none.")
    metrics_token: str = _setting(
        "",
        parse.text,
        "Bearer token that every /metrics page wants to see, the API's too. Empty: whoever reaches the port may read them.",
        secret=True,
    )
    traces: str = _setting(
        "off",
        parse.choice("off", "otlp"),
        "`otlp`: spans go to a collector of OpenTelemetry, as its own variables say, such as `OTEL_EXPORTER_OTLP_ENDPOINT` "
        "(docs/tracing.md); needs `pip install '.[otel]'`. `off`: none, and nothing of it is loaded.",
    )
    beat_s: float = _setting(5.0, parse.seconds(0.05, 60), "Time between two heartbeats of a process.", unit="seconds")
    silence_s: float = _setting(
        60.0, parse.seconds(0.2, 3600), "Silence after which a process counts as gone and its work is taken over.", unit="seconds"
    )
    lease_margin_s: float = _setting(
        30.0, parse.seconds(0.5, 3600), "Time that a lease outlives the timeout of its call.", unit="seconds"
    )
    reconcile_s: float = _setting(
        60.0, parse.seconds(0.2, 3600), "Time between two comparisons of Postgres with the broker.", unit="seconds"
    )
    keep_payload_days: int = _setting(
        30,
        parse.days,
        "After how many days payloads go of events that succeeded or were cancelled. Dead letters keep theirs, for a replay. "
        "0: never before their events.",
        unit="days",
    )
    keep_succeeded_days: int = _setting(90, parse.days, "After how many days events go that succeeded. 0: never.", unit="days")
    keep_cancelled_days: int = _setting(
        90, parse.days, "After how many days events go that were cancelled. 0: never.", unit="days"
    )
    keep_dead_days: int = _setting(
        365, parse.days, "After how many days dead events go that nobody has replayed or cancelled. 0: never.", unit="days"
    )
    keep_attempts_days: int = _setting(
        30,
        parse.days,
        "After how many days the attempts go of deliveries that have ended; those of dead letters go with them. 0: never.",
        unit="days",
    )
    keep_ids_days: int = _setting(
        90,
        parse.days,
        "For how many days the id of an event that is gone is still a duplicate. 0: for ever.",
        unit="days",
    )
    keep_audit_days: int = _setting(1095, parse.days, "After how many days entries of the audit go. 0: never.", unit="days")

    def __post_init__(self) -> None:
        if self.silence_s < 3 * self.beat_s:
            raise SettingsError(
                f"MADEIRA_SILENCE_S={self.silence_s:g} must be at least three times MADEIRA_BEAT_S={self.beat_s:g}: "
                "a process that misses one heartbeat is not gone"
            )
        self._check_ports()
        self._check_ages()
        # Raises for an entry that is none.
        egress.Egress(allow=self.egress_allow, deny=self.egress_deny)

    def _check_ports(self) -> None:
        taken: dict[int, str] = {}
        for name in ("port", "metrics_port", "scheduler_metrics_port"):
            port = getattr(self, name)
            if port and port in taken:
                raise SettingsError(
                    f"{PREFIX}{taken[port].upper()} and {PREFIX}{name.upper()} are both {port}: the API, the workers' "
                    "numbers and the scheduler's need a port each"
                )
            taken[port] = name

    def _check_ages(self) -> None:
        """The audit says why something ended, and is kept longer than what it is about."""
        ever = math.inf
        kept = {name: getattr(self, name) or ever for name in ("keep_succeeded_days", "keep_cancelled_days", "keep_dead_days")}
        longest = max(kept, key=lambda name: kept[name])
        if (self.keep_audit_days or ever) < kept[longest]:
            raise SettingsError(
                f"MADEIRA_KEEP_AUDIT_DAYS={self.keep_audit_days} must be at least MADEIRA_{longest.upper()}="
                f"{getattr(self, longest)}: the audit outlives what it is about (0 keeps for ever)"
            )


def environment_name(f: "Field[Any]") -> str:
    """The environment name of a field of `Settings`."""
    return PREFIX + f.name.upper()


def load(environ: Mapping[str, str] | None = None) -> Settings:
    """Parse and check the settings.

    `environ` maps names to values; the process's environment when absent. An empty value means "not set". A secret may be in
    a file instead, which the name with ``_FILE`` at its end names.

    Raises:
        SettingsError: a value is malformed, two contradict each other, a file cannot be read, or a ``MADEIRA_`` name is
            unknown.
    """
    environ = os.environ if environ is None else environ
    by_name = {environment_name(f): f for f in fields(Settings)}
    values: dict[str, Any] = {}
    for name, raw in _with_files(environ, by_name).items():
        if not name.startswith(PREFIX) or name in _IGNORED:
            continue
        if name not in by_name:
            raise SettingsError(f"{name} is not a setting of Madeira{_hint(name, by_name)}")
        if raw == "":
            continue
        f = by_name[name]
        try:
            values[f.name] = f.metadata["value"](raw)
        except ValueError as e:
            raise SettingsError(f"{name}: {e}") from None
    settings = Settings(**values)
    if settings.config and settings.config.is_dir():
        raise SettingsError(f"MADEIRA_CONFIG: {settings.config} is a folder; name a file in it")
    if settings.config and not settings.config.is_file():
        raise SettingsError(f"MADEIRA_CONFIG: there is no file {settings.config}")
    return settings


def _with_files(environ: Mapping[str, str], by_name: Mapping[str, "Field[Any]"]) -> dict[str, str]:
    """`environ` with the contents of the files that hold secrets under the names of these."""
    found = dict(environ)
    for name in (name for name, f in by_name.items() if f.metadata["secret"]):
        file = found.pop(name + FILE, "")
        if not file:
            continue
        if found.get(name):
            raise SettingsError(f"{name} and {name}{FILE} are both set; leave one of them out")
        try:
            found[name] = Path(file).read_text("utf-8").strip()
        except (OSError, ValueError) as e:
            reason = getattr(e, "strerror", None) or "it holds no text"
            # Its name is not repeated: it may be the secret itself, put into the wrong variable.
            raise SettingsError(f"{name}{FILE}: the file that it names cannot be read: {reason}") from None
        if not found[name]:
            raise SettingsError(f"{name}{FILE}: the file that it names is empty")
    return found


def _hint(name: str, by_name: Mapping[str, "Field[Any]"]) -> str:
    known = [*by_name, *(known + FILE for known, f in by_name.items() if f.metadata["secret"])]
    near = difflib.get_close_matches(name.removeprefix(PREFIX), [n.removeprefix(PREFIX) for n in known], n=1, cutoff=_NEAR)
    return f"; did you mean {PREFIX}{near[0]}?" if near else f"; known are {', '.join(sorted(by_name))}"


def environment(**changes: str | None) -> dict[str, str]:
    """The environment for a child process: this process's own, with `changes` by their full names (None removes one).

    With the folder of this very code first in its search path, where it is not an installed package.
    """
    environ = {**os.environ, **{k: v for k, v in changes.items() if v is not None}}
    for name, value in changes.items():
        if value is None:
            environ.pop(name, None)
        # The file would contradict what is said here.
        environ.pop(name + FILE, None)
    code = Path(__file__).resolve().parent.parent
    if code.name not in ("site-packages", "dist-packages"):
        environ["PYTHONPATH"] = os.pathsep.join([str(code), *filter(None, [environ.get("PYTHONPATH")])])
    return environ


def is_set(name: str) -> bool:
    """Whether the environment names `name` (in full) with a value."""
    return bool(os.environ.get(name))


def of_opentelemetry(name: str, default: int) -> int:
    """A whole number among the variables of OpenTelemetry, whose `name` is given in full; `default` where it is not set.

    Raises:
        SettingsError: it is none, or below 1.
    """
    try:
        return parse.whole(1, 10_000_000)(os.environ.get(name) or str(default))
    except ValueError as e:
        raise SettingsError(f"{name}: {e}") from None


def require(settings: Settings, *names: str) -> None:
    """Stop with one clear line when a setting that this process cannot do without is missing.

    Raises:
        SettingsError: one of `names` (field names) is empty.
    """
    for name in names:
        if not getattr(settings, name):
            raise SettingsError(f"{PREFIX}{name.upper()} is not set; set it, or start everything with `madeira up`")


def refusal_of_reference(name: str) -> str | None:
    """Why ``env:name`` may not be used, with the remedy; None when it may. The case of the name does not matter."""
    if not name.upper().startswith(_GUARDED):
        return None
    return (
        f"the environment variable {name} may not be read: those that begin with MADEIRA_ or PG are Madeira's own and the "
        "database's; put the secret into a variable of another name"
    )


def secret_reference(value: str, where: str, environ: Mapping[str, str] | None = None) -> str:
    """Resolve a secret of a configuration file: ``env:NAME`` is read from the environment, all else is literal.

    Raises:
        SettingsError: the named variable may not be read or is not set, or the secret is empty; the value itself is never
            told.
    """
    environ = os.environ if environ is None else environ
    if value.startswith("env:"):
        name = value[4:]
        refusal = refusal_of_reference(name)
        if refusal:
            raise SettingsError(f"{where}: {refusal}")
        if not environ.get(name):
            raise SettingsError(f"{where}: the environment variable {name} is not set")
        return environ[name]
    if not value:
        raise SettingsError(f"{where}: a secret must not be empty")
    return value


def metrics_root(settings: Settings) -> tuple[Path, str]:
    """The folder that holds those of all families, or that of the only one, and the name of the variable that says so."""
    given = os.environ.get(_MULTIPROC)
    return (Path(given), _MULTIPROC) if given else (settings.data_dir / "metrics", "MADEIRA_DATA_DIR")


def multiproc_dir(settings: Settings, family: str) -> Path:
    """The folder of the metrics files of one family of processes (``api``, ``worker``, ``scheduler``).

    Puts it into the environment too, since prometheus-client looks there when it is first imported. Raises SettingsError when
    another folder must be named, or this one given to this user. A disk that is full or can only be read is none of that: it may
    have become so since the last start, and numbers are kept in memory then (`madeira.metrics_blocks`).
    """
    root, name = metrics_root(settings)
    folder = root if name == _MULTIPROC else root / family
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        if e.errno not in _DISK:
            raise SettingsError(f"{name}: the folder {folder} of the metrics files cannot be made: {e.strerror}") from None
    # A broken disk says no even to whether the folder is there, which `exists` would raise.
    if os.path.lexists(folder) and not os.access(folder, os.W_OK | os.X_OK) and not os.statvfs(folder).f_flag & os.ST_RDONLY:
        raise SettingsError(f"{name}: this user may not write into {folder}, the folder of the metrics files")
    os.environ[_MULTIPROC] = str(folder)
    return folder


def metrics_folder() -> Path | None:
    """Where prometheus-client keeps this process's numbers; None when they are kept in memory."""
    folder = os.environ.get(_MULTIPROC)
    return Path(folder) if folder else None
