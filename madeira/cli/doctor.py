"""`madeira doctor`: checks everything that Madeira depends on and says what is wrong, and what to do about it."""

import ipaddress
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import click
import psycopg
import redis

from madeira import __version__, binding
from madeira.broker.connections import connect
from madeira.broker.queues import Queues
from madeira.cli import folders, running_system, stored
from madeira.cli.common import configure_log, database, json_option, load, print_json
from madeira.cli.findings import Finding, Level
from madeira.cli.running import DataFolder
from madeira.delivery.signing import standard_key
from madeira.egress import Egress
from madeira.errors import MadeiraError
from madeira.routing.config import Rules
from madeira.routing.fields import KINDS
from madeira.routing.follow import rules_of
from madeira.sealing import Sealer
from madeira.settings import Settings, is_set
from madeira.states import Role
from madeira.store import configuration, migrate, tokens
from madeira.store.configuration import Snapshot
from madeira.store.database import is_direct, session_settings

#: Oldest Postgres, as `server_version_num` says it.
_POSTGRES: Final = 140000

#: Bytes of the key of a secret, at least, as Standard Webhooks recommends.
_SECRET_BYTES: Final = 24

#: Oldest major versions of Redis and Valkey.
_REDIS: Final = 7
_VALKEY: Final = 8

#: Seconds that an answer of Redis may take.
_TIMEOUT_S: Final = 3.0

_PACKAGES: Final = ("dramatiq", "periodiq", "falcon", "gunicorn", "httpx", "psycopg", "redis", "prometheus-client")

_SIGNS: Final[dict[Level, tuple[str, str]]] = {
    "ok": ("ok     ", "green"),
    "warning": ("WARNING", "yellow"),
    "error": ("ERROR  ", "red"),
}


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Check every dependency and setting; the exit code is 1 when something is wrong."""
    findings = list(_examine())
    if as_json:
        print_json([asdict(f) for f in findings])
    else:
        for finding in findings:
            sign, color = _SIGNS[finding.level]
            click.echo(f"{click.style(sign, fg=color)} {finding.what}: {finding.text}")
    if any(f.level == "error" for f in findings):
        sys.exit(1)


def _examine() -> Iterator[Finding]:
    yield Finding("ok", "madeira", f"{__version__}, Python {sys.version.split()[0]}, {', '.join(_versions())}")
    try:
        values = load()
    except MadeiraError as e:
        yield Finding("error", "settings", str(e))
        return
    configure_log(values)
    yield from _settings(values)
    yield from _guarded("postgres", lambda: _postgres(values))
    yield from _guarded("redis", lambda: _redis(values))
    yield from running_system.collector(values)
    yield from _guarded("clocks", lambda: running_system.clocks(_clocks(values)))
    yield from _guarded("folders", lambda: folders.look(values, is_up=DataFolder(values.data_dir).running() is not None))


def _versions() -> Iterator[str]:
    for package in _PACKAGES:
        try:
            yield f"{package} {version(package)}"
        except PackageNotFoundError:
            yield f"{package} MISSING"


def _settings(values: Settings) -> Iterator[Finding]:
    if is_set("MADEIRA_CONFIG") and DataFolder(values.data_dir).running() is None:
        text = "MADEIRA_CONFIG is set, and only `madeira up` applies it; everywhere else `madeira apply FILE` does"
        yield Finding("warning", "configuration file", text)
    if not values.secret_key:
        text = "MADEIRA_SECRET_KEY is not set: secrets can only be given as env:NAME; `madeira keygen` makes a key"
        yield Finding("warning", "secret key", text)
    if why := binding.refusal_of_host(values.host):
        text = f"no API starts here: this machine cannot listen on {values.host} ({why}); set MADEIRA_HOST to an address of it"
        yield Finding("warning", "address", text)
    elif not _is_loopback(values.host):
        yield Finding("warning", "address", f"the API listens on {values.host}; put a proxy with TLS in front of it")
    if values.lease_margin_s < 10:
        yield Finding("warning", "leases", f"MADEIRA_LEASE_MARGIN_S={values.lease_margin_s:g} is for tests; in earnest it is 30")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


#: What to do when something cannot be examined at all.
_REMEDIES: Final = {
    "postgres": "see that the server runs and that MADEIRA_DATABASE_URL names it, with its user, password and database",
    "redis": "see that the server runs and that MADEIRA_REDIS_URL names it, with its password",
    "clocks": "mend what is told above first",
    "folders": "see that MADEIRA_DATA_DIR names a folder that can be written to",
}


def _guarded(what: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from look()
    except (psycopg.Error, redis.RedisError, MadeiraError, OSError) as e:
        yield Finding("error", what, f"cannot be examined: {' '.join(str(e).split())}; {_REMEDIES[what]}")


def _postgres(values: Settings) -> Iterator[Finding]:
    if not values.database_url:
        yield Finding("error", "postgres", "MADEIRA_DATABASE_URL is not set and no `madeira up` runs here: set it, or start one")
        return
    with psycopg.connect(values.database_url, connect_timeout=3, autocommit=True) as conn:
        number = conn.info.server_version
        level: Level = "ok" if number >= _POSTGRES else "error"
        yield Finding(level, "postgres", f"version {number // 10000}.{number % 10000}; 14 is the oldest that Madeira knows")
        yield from _postgres_settings(conn)
        rights = list(stored.rights(conn))
    if rights:
        # All else would only tell of what may not be seen.
        yield from rights
        return
    missing = migrate.pending(values.database_url)
    if missing:
        yield Finding("error", "migrations", f"{', '.join(missing)} not applied yet; run `madeira migrate`")
        return
    unfit = migrate.ahead(values.database_url)
    if unfit:
        yield Finding("error", "migrations", unfit)
        return
    yield Finding("ok", "migrations", "all were applied")
    with psycopg.connect(values.database_url, connect_timeout=3, autocommit=True) as conn:
        found = list(stored.tables(conn, is_ahead=migrate.is_ahead(conn)))
        yield from found
        if any(one.level == "error" for one in found):
            return
        yield from stored.log_parts(conn)
    yield from _held(values)


def _held(values: Settings) -> Iterator[Finding]:
    """What the tables hold."""
    with database(values) as db, db.connection() as pooled:
        yield from _pooling(pooled)
        snapshot = configuration.read(pooled)
        yield from _configuration(rules_of(snapshot, sealer=Sealer(values.secret_key)), snapshot)
        yield from _administrator(values, pooled)
        yield from running_system.held(pooled)
        yield from running_system.connections(pooled)
        yield from running_system.replica(values)
        yield from running_system.scheduler(pooled)
        egress = Egress(allow=values.egress_allow, deny=values.egress_deny)
        yield from running_system.addresses(snapshot, egress)


def _pooling(conn: psycopg.Connection[Any]) -> Iterator[Finding]:
    """Behind a pooler a session cannot be told anything at its start: its role must be."""
    if is_direct(conn):
        return
    missing = {name: value for name, value in session_settings(10.0).items() if _show(conn, name) in ("0", "on")}
    text = "a pooler stands between; prepared statements are not used"
    if not missing:
        yield Finding("ok", "pooler", f"{text}, and the role has the settings of a session")
        return
    role = conn.info.user
    remedy = "; ".join(f'ALTER ROLE "{role}" SET {name} = {value}' for name, value in missing.items())
    yield Finding(
        "warning",
        "pooler",
        f"{text}. It drops the settings of a session, so give them to the role: {remedy}; "
        "then have the pooler connect anew (of PgBouncer RECONNECT, or a restart)",
    )


def _configuration(rules: Rules, found: Snapshot) -> Iterator[Finding]:
    """What the processes would make of the configuration, with the environment and the keys of this one."""
    # Of what is stored, so that what cannot be used here counts too.
    text = f"version {rules.version}: {_counted(found)}"
    if not found.sources:
        yield Finding("warning", "configuration", f"{text}: nothing can be posted; make a source with `madeira apply` or the API")
    else:
        yield Finding("ok", "configuration", text)
    for what, reason in rules.unusable.items():
        if rules.is_partly_usable(what):
            yield Finding("warning", "configuration", f"a secret of {what} cannot be used: {reason}")
        else:
            yield Finding("error", "configuration", f"{what} cannot be used: {reason}")
    short = [f"source {one.name}" for one in rules.sources.values() if any(map(_is_short, one.secrets))]
    short += [f"endpoint {one.name}" for one in rules.endpoints.values() if any(map(_is_short, one.secrets))]
    if short:
        text = (
            f"a secret of {', '.join(short)} has less than {_SECRET_BYTES} bytes, which Standard Webhooks recommends: who has "
            "one signed message can try them out; put one of `openssl rand -base64 32` beside it, then take it away"
        )
        yield Finding("warning", "secrets", text)


def _is_short(secret: str) -> bool:
    return len(standard_key(secret)) < _SECRET_BYTES


def _counted(found: Snapshot) -> str:
    return ", ".join(f"{len(found.of(kind))} {kind}{'' if len(found.of(kind)) == 1 else 's'}" for kind in KINDS)


def _administrator(values: Settings, conn: psycopg.Connection[Any]) -> Iterator[Finding]:
    if not values.admin_token and not any(token.role is Role.ADMIN for token in tokens.live(conn).values()):
        text = "nobody administers by the API yet: `madeira token create NAME --role admin` makes a token for it"
        yield Finding("ok", "admin token", text)


def _postgres_settings(conn: psycopg.Connection[Any]) -> Iterator[Finding]:
    encoding = _show(conn, "server_encoding")
    yield Finding("ok" if encoding == "UTF8" else "error", "encoding", f"{encoding}; payloads are kept as text, which needs UTF8")
    if _show(conn, "fsync") != "on":
        yield Finding("error", "fsync", "fsync is off: a crash of the machine loses or damages what was accepted; switch it on")
    commit = _show(conn, "synchronous_commit")
    if commit == "off":
        yield Finding("error", "synchronous_commit", "off: a crash of Postgres loses accepted events; set it to on")
    if conn.execute("SELECT pg_is_in_recovery()").fetchone() == (True,):
        yield Finding("error", "primary", "this server is a standby and takes no writes; name the primary")
    elif _show(conn, "synchronous_standby_names"):
        yield Finding("ok", "standby", f"synchronous standby: {_show(conn, 'synchronous_standby_names')}")
    else:
        text = "no synchronous standby: if you fail over automatically, the last accepted events can be lost"
        yield Finding("warning", "standby", f"{text}; set synchronous_standby_names")


def _show(conn: psycopg.Connection[Any], name: str) -> str:
    row = conn.execute("SELECT current_setting(%s)", [name]).fetchone()
    return str(row[0]) if row else ""


def _redis(values: Settings) -> Iterator[Finding]:
    if not values.redis_url:
        yield Finding("error", "redis", "MADEIRA_REDIS_URL is not set and no `madeira up` runs here: set it, or start one")
        return
    client = connect(values.redis_url, timeout_s=_TIMEOUT_S, connections=1)
    try:
        info: dict[str, Any] = client.info()
        yield _redis_version(info)
        policy = info.get("maxmemory_policy") or _config(client, "maxmemory-policy")
        yield _redis_policy(str(policy))
        if not info.get("aof_enabled"):
            text = "appendonly is off: a restart of Redis loses the queues; they are rebuilt from Postgres, which takes time"
            yield Finding("warning", "redis persistence", text)
        if info.get("role") not in ("master", None):
            yield Finding("error", "redis role", f"this server is a {info.get('role')} and takes no writes; name the master")
        queues = Queues(redis_url=values.redis_url, namespace=values.namespace)
        try:
            yield from running_system.workers(queues)
        finally:
            queues.close()
    finally:
        client.close()


def _clocks(values: Settings) -> dict[str, float]:
    """By how many seconds the clocks of the servers that answer are ahead of ours."""
    ahead = {}
    if values.database_url:
        # That it cannot be reached is told already.
        with suppress(psycopg.Error), psycopg.connect(values.database_url, connect_timeout=3, autocommit=True) as conn:
            ahead["Postgres"] = running_system.clock_of_postgres(conn)
    if values.redis_url:
        with (
            suppress(redis.RedisError, OSError),
            closing(Queues(redis_url=values.redis_url, namespace=values.namespace)) as queues,
        ):
            ahead["Redis"] = running_system.clock_of_redis(queues)
    return ahead


def _redis_version(info: dict[str, Any]) -> Finding:
    valkey = info.get("valkey_version")
    name, text, oldest = ("Valkey", str(valkey), _VALKEY) if valkey else ("Redis", str(info.get("redis_version")), _REDIS)
    good = text.split(".")[0].isdigit() and int(text.split(".")[0]) >= oldest
    return Finding("ok" if good else "error", "redis", f"{name} {text}; {oldest} is the oldest that Madeira knows")


def _redis_policy(policy: str) -> Finding:
    if policy == "noeviction":
        return Finding("ok", "redis memory", "maxmemory-policy is noeviction")
    if policy in ("None", ""):
        return Finding("warning", "redis memory", "the server does not tell its maxmemory-policy; see that it is noeviction")
    text = f"maxmemory-policy is {policy}: under memory pressure Redis THROWS QUEUED WORK AWAY"
    return Finding("error", "redis memory", f"{text} (reconcile brings it back, late); set maxmemory-policy to noeviction")


def _config(client: "redis.Redis", name: str) -> str | None:
    try:
        found: Any = client.config_get(name)
    except redis.ResponseError:
        # Managed servers refuse CONFIG.
        return None
    return str(found.get(name))
