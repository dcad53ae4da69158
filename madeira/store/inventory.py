"""What the migrations of this version make, and whether it is there: tables, columns, indexes, constraints, triggers, functions.

The record of what was applied does not know of a table that somebody dropped, of an index whose building was broken off, nor of
what a restore left out; and `madeira migrate`, which goes by that record, makes none of it again. What should be there stands in
``migrations/inventory.json``, one thing a line. Nobody writes that file: `make inventory` makes it from a database that was
migrated just now, by the same statement that looks at one in use, and a test holds it against such a database.

What is there and stands in no list is no matter of ours: a later version may have made it. What is there by its name may still
be another thing: a copy of a table has columns without NOT NULL, an index of that name need not be unique, nor be one of the same
columns and rows. So each thing is held against its traits and its definition too. Traits are attributes of the catalogue. The
definition is what Postgres writes: those versions that were tried write ours in the same words, and no other one is held to them.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import psycopg
from psycopg import sql

from madeira.errors import StoreError
from madeira.store import search_path
from madeira.store.schema import FOLDER

#: Where the list stands.
FILE: Final = FOLDER / "inventory.json"

Kind = Literal["table", "column", "part", "constraint", "index", "trigger", "function"]

#: What is there, as far as a name leads to it without its schema. Parts of the log by day come and go: `_PARTS` looks at those.
_FOUND: Final = r"""
    WITH ours AS (
        SELECT c.oid, c.relname, c.relispartition FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE c.relkind IN ('r', 'p') AND pg_table_is_visible(c.oid) AND n.nspname !~ '^(pg_|information_schema$)'
            AND c.relname !~ '^delivery_log_[0-9]{8}(_kept)?$')
    SELECT 'table', relname, relname, NULL, true, '{}'::text[] FROM ours
    UNION ALL
    -- A part has the identity of the whole since Postgres 17. Rows come by the whole, so it is of no account.
    SELECT 'column', o.relname || '.' || a.attname, o.relname,
        pg_get_expr(d.adbin, d.adrelid), true,
        array_remove(ARRAY['TYPE ' || format_type(a.atttypid, a.atttypmod)
                           || CASE WHEN a.attcollation <> y.typcollation THEN ' COLLATE ' || quote_ident(l.collname) ELSE '' END,
                           CASE WHEN a.attnotnull THEN 'NOT NULL' END,
                           CASE WHEN a.atthasdef AND a.attgenerated = '' THEN 'DEFAULT' END,
                           CASE WHEN a.attidentity <> '' AND NOT o.relispartition THEN 'IDENTITY' END,
                           CASE WHEN a.attgenerated <> '' THEN 'EXPRESSION' END], NULL)
    FROM ours o JOIN pg_attribute a ON a.attrelid = o.oid JOIN pg_type y ON y.oid = a.atttypid
        LEFT JOIN pg_collation l ON l.oid = a.attcollation
        LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
    WHERE a.attnum > 0 AND NOT a.attisdropped
    UNION ALL
    SELECT 'part', o.relname, p.relname, NULL, true, '{}'
    FROM ours o JOIN pg_inherits i ON i.inhrelid = o.oid JOIN ours p ON p.oid = i.inhparent
    UNION ALL
    -- Those that have an index are whole if that is. NOT NULL is one since Postgres 18, and no name of ours.
    SELECT 'constraint', c.conname, o.relname, pg_get_constraintdef(c.oid, true), coalesce(x.indisvalid, true),
        array_remove(ARRAY['KEYS ' || x.indnkeyatts], NULL)
    FROM ours o JOIN pg_constraint c ON c.conrelid = o.oid
        LEFT JOIN pg_index x ON x.indexrelid = c.conindid AND c.contype IN ('p', 'u', 'x')
    WHERE c.contype IN ('c', 'f', 'p', 'u', 'x')
    UNION ALL
    -- How it is stored is for whoever looks after the server to choose.
    SELECT 'index', i.relname, o.relname, regexp_replace(pg_get_indexdef(i.oid, 0, true), ' WITH \([^)]*\)', ''), x.indisvalid,
        array_remove(ARRAY[CASE WHEN x.indisunique THEN 'UNIQUE' END, 'KEYS ' || x.indnkeyatts], NULL)
    FROM ours o JOIN pg_index x ON x.indrelid = o.oid JOIN pg_class i ON i.oid = x.indexrelid
    WHERE NOT EXISTS (SELECT FROM pg_constraint c WHERE c.conindid = i.oid AND c.contype IN ('p', 'u', 'x'))
    UNION ALL
    SELECT 'trigger', t.tgname, o.relname, pg_get_triggerdef(t.oid, true), t.tgenabled IN ('O', 'A'), '{}'
    FROM ours o JOIN pg_trigger t ON t.tgrelid = o.oid WHERE NOT t.tgisinternal
    UNION ALL
    SELECT 'function', p.proname, '', NULL, true, '{}'
    FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
    WHERE pg_function_is_visible(p.oid) AND n.nspname !~ '^(pg_|information_schema$)'
"""

#: Parts of the log by day; whether the index of verdicts of each is there, whole and such a one, and its definition.
_PARTS: Final = r"""
    SELECT c.relname, (x.indisvalid AND x.indisunique AND x.indnkeyatts = 3) IS TRUE,
        regexp_replace(pg_get_indexdef(x.indexrelid, 0, true), ' WITH \([^)]*\)', '')
    FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
        LEFT JOIN pg_index x ON x.indrelid = c.oid AND x.indexrelid = to_regclass(c.relname || '_one_verdict')
    WHERE i.inhparent = to_regclass('delivery_log') AND c.relname ~ '^delivery_log_[0-9]'
    ORDER BY c.relname
"""

#: What the role of this connection may not do in each table where it may not do all. What was applied is for `migrate` to write.
_DENIED: Final = """
    SELECT found.relname, array_agg(found.privilege ORDER BY found.place)
    FROM (SELECT c.oid, c.relname, p.privilege, p.place
          FROM unnest(%s::text[]) AS t (name) JOIN pg_class c ON c.oid = to_regclass(t.name)
            CROSS JOIN unnest('{SELECT,INSERT,UPDATE,DELETE}'::text[]) WITH ORDINALITY AS p (privilege, place)
          WHERE c.relname <> 'schema_migration' OR p.privilege = 'SELECT') AS found
    WHERE NOT has_table_privilege(found.oid, found.privilege)
    GROUP BY found.relname ORDER BY found.relname
"""

#: Whether the role may make and drop parts of the log: who owns the table may, where it may make tables.
_MAKES_PARTS: Final = """
    SELECT pg_has_role(c.relowner, 'USAGE') AND has_schema_privilege(c.relnamespace, 'CREATE'), pg_get_userbyid(c.relowner)
    FROM pg_class c WHERE c.oid = to_regclass('delivery_log')
"""

_SCHEMA: Final = "SELECT current_schema()"

#: Where the session looks for tables, who said so, in which database, and whether that leads to any schema.
_PATH: Final = """
    SELECT setting, reset_val, source, current_database(), current_schema() IS NULL FROM pg_settings WHERE name = 'search_path'
"""

#: NULL where there is no such schema.
_MAY_USE_PUBLIC: Final = "SELECT has_schema_privilege(to_regnamespace('public'), 'USAGE')"

#: Where the record of what was applied is, if it is there and its plain name does not lead to it.
_ELSEWHERE: Final = """
    SELECT n.nspname, has_schema_privilege(n.oid, 'USAGE'),
        -- Where the other tables are, if that record has left them.
        (SELECT o.nspname FROM pg_class d JOIN pg_namespace o ON o.oid = d.relnamespace
         WHERE d.oid = to_regclass('delivery')
            AND NOT EXISTS (SELECT FROM pg_class e WHERE e.relname = 'delivery' AND e.relnamespace = n.oid))
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relname = 'schema_migration' AND c.relkind = 'r' AND to_regclass('schema_migration') IS NULL
    ORDER BY n.nspname LIMIT 1
"""

#: How a sequence is set above what stands in its column.
_SET_SEQUENCE: Final = (
    "SELECT setval(pg_get_serial_sequence('{table}', '{column}'), coalesce(max({column}), 0) + 1, false) FROM {table}"
)

#: Tables of ours, by their names, and parts of the log, to which their plain name does not lead: with their schema, their
#: columns, the schema where most of ours are, and the one of what the name leads to instead. What lies beside another record of
#: what was applied is of another Madeira.
_MISPLACED: Final = """
    WITH home AS (
        SELECT h.oid, h.nspname FROM pg_class c JOIN pg_namespace h ON h.oid = c.relnamespace
        WHERE c.relname = ANY (%(tables)s) AND c.relkind IN ('r', 'p') AND pg_table_is_visible(c.oid)
        GROUP BY h.oid, h.nspname ORDER BY count(*) DESC LIMIT 1)
    SELECT c.relname, n.nspname,
        ARRAY(SELECT a.attname::text FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped),
        home.nspname,
        (SELECT s.relnamespace::regnamespace::text FROM pg_class s WHERE s.oid = to_regclass(quote_ident(c.relname)))
    FROM home CROSS JOIN pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relkind IN ('r', 'p') AND n.nspname !~ '^(pg_|information_schema$)' AND NOT pg_table_is_visible(c.oid)
        AND (c.relname = ANY (%(tables)s)
            OR c.oid IN (SELECT i.inhrelid FROM pg_inherits i WHERE i.inhparent = to_regclass('delivery_log')))
        AND (n.oid = home.oid
            OR NOT EXISTS (SELECT FROM pg_class r WHERE r.relnamespace = n.oid AND r.relname = 'schema_migration'))
    ORDER BY c.relname, n.nspname
"""

#: Major versions of Postgres that were seen to write what the migrations make in the very words of the list.
_TRIED: Final = range(14, 19)

#: The part of the log that takes what no day takes; the others are made like it.
_REST: Final = "delivery_log_rest"

#: What an empty `search_path` looks like.
_EMPTY: Final = ("", '""')


@dataclass(frozen=True, slots=True)
class Thing:
    """What a migration makes."""

    kind: Kind
    name: str
    #: The table that it belongs to, or of which it is a part; empty when to none.
    table: str
    #: What makes it, as Postgres writes it; of a column, its default or expression. None where no statement can bring it back, or
    #: none that fits a line.
    made_by: str | None = None
    #: What is held against what is there, in the order in which a column can be given it.
    traits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that is not as it should be."""

    #: What, as a sentence begins with it.
    what: str
    remedy: str


def known() -> list[Thing]:
    """What this version's migrations make.

    Raises:
        StoreError: the list is not there.
    """
    try:
        lines = json.loads(FILE.read_text("utf-8"))
    except OSError:
        raise StoreError(f"there is no {FILE}: the package is not complete; install it again") from None
    return [Thing(kind, name, table, made_by, tuple(traits)) for kind, name, table, made_by, *traits in lines]


def text_of(conn: "psycopg.Connection[Any]") -> str:
    """The list, as `FILE` holds it, of a database that was migrated just now."""
    lines = [(thing.kind, thing.name, thing.table, thing.made_by, *thing.traits) for thing, _ in _found(conn)]
    return "[\n" + ",\n".join(json.dumps(line) for line in lines) + "\n]\n"


def faults(conn: "psycopg.Connection[Any]", *, is_ahead: bool = False) -> Iterator[Fault]:
    """What is missing, not usable or another thing of what this version's migrations make, each with what to do about it.

    What belongs to a table that is not there is not told one by one. `is_ahead`: migrations of a later version were applied,
    which may have replaced all but tables and columns.
    """
    found = {(thing.kind, thing.name, thing.table): (thing, is_whole) for thing, is_whole in _found(conn)}
    tables = {name for kind, name, _ in found if kind == "table"}
    is_tried = conn.info.server_version // 10000 in _TRIED
    for thing in known():
        if is_ahead and thing.kind not in ("table", "column"):
            continue
        if thing.table and thing.table not in tables and thing.kind != "table":
            continue
        there = found.pop((thing.kind, thing.name, thing.table), None)
        if there is None:
            yield Fault(f"the {thing.kind} {thing.name}{_of(thing)} is missing", _how_to_make(thing))
        elif not is_ahead and (there[0].traits != thing.traits or (is_tried and there[0].made_by != thing.made_by)):
            yield from _differences(thing, there[0])
        elif not there[1]:
            yield _unusable(thing)
    for thing, is_whole in found.values():
        if not is_whole and thing.kind == "index":
            name = _quoted(thing.name)
            yield Fault(f"the index {thing.name}{_of(thing)} is not usable, and none of ours", f"DROP INDEX CONCURRENTLY {name}")
    if not is_ahead:
        yield from _parts(conn, is_tried=is_tried)


def denied(conn: "psycopg.Connection[Any]") -> Iterator[Fault]:
    """What the role of `conn` may not do that the processes do, and what its administrator has to type."""
    role = _quoted(conn.info.user)
    tables = sorted(thing.name for thing in known() if thing.kind == "table")
    missing: Mapping[str, list[str]] = dict(conn.execute(_DENIED, (tables,)).fetchall())
    ((schema,),) = conn.execute(_SCHEMA)
    if missing:
        told = "; ".join(f"{', '.join(what)} in {table}" for table, what in list(missing.items())[:3])
        more = f"; and in {len(missing) - 3} more tables" if len(missing) > 3 else ""
        rights = "SELECT, INSERT, UPDATE, DELETE"
        yield Fault(
            f"the role {conn.info.user} may not {told}{more}",
            f"GRANT {rights} ON ALL TABLES IN SCHEMA {_quoted(schema)} TO {role}",
        )
    for may, owner in conn.execute(_MAKES_PARTS):
        if not may:
            yield Fault(
                f"the role {conn.info.user} may not make and drop the parts of delivery_log: old attempts stay for ever",
                f"GRANT {_quoted(owner)} TO {role}; GRANT CREATE ON SCHEMA {_quoted(schema)} TO {role}",
            )


def elsewhere(conn: "psycopg.Connection[Any]") -> Iterator[Fault]:
    """Why the session of `conn` does not see tables that are there, if that is so: they seem to be missing then."""
    ((path, began_with, _, _, is_nowhere),) = conn.execute(_PATH)
    shown = "empty" if path in _EMPTY else path
    for schema, may, home in conn.execute(_ELSEWHERE):
        role, quoted = _quoted(conn.info.user), _quoted(schema)
        if home:
            yield _moved("schema_migration", schema, home)
            return
        if not may:
            yield Fault(f"the role {conn.info.user} may not use the schema {schema}", f"GRANT USAGE ON SCHEMA {quoted} TO {role}")
            return
        if path in _EMPTY and began_with not in _EMPTY:
            yield Fault("this session finds no tables", search_path.SPOILT)
            return
        what = f"the tables are in the schema {schema}, where this session does not look (search_path: {shown})"
        yield Fault(what, _look_in(conn, schema))
        return
    if is_nowhere:
        what = f"the role {conn.info.user} finds and makes tables in no schema (search_path: {shown})"
        yield Fault(what, _how_to_have_a_schema(conn))
        return
    yield from _misplaced(conn)


def _misplaced(conn: "psycopg.Connection[Any]") -> Iterator[Fault]:
    """Tables of which one by one something else is seen, or nothing, although they are there."""
    things = known()
    columns: dict[str, set[str]] = {thing.name: set() for thing in things if thing.kind == "table"}
    for thing in things:
        if thing.kind == "column":
            columns[thing.table].add(thing.name.removeprefix(f"{thing.table}."))
    for table, schema, found, home, seen in conn.execute(_MISPLACED, {"tables": list(columns)}):
        if schema == home:
            what = f"the table {table} of the schema {home} is hidden by what has the same name in the schema {seen}"
            yield Fault(f"{what}, which comes earlier in the search_path", _look_in(conn, home))
        # Our names are common words: it may be a table of somebody else.
        elif seen is None and columns.get(table, set()) <= set(found):
            yield _moved(table, schema, home)


def _moved(table: str, schema: str, home: str) -> Fault:
    what = f"the table {table} is in the schema {schema}, where this session does not look, and the others are in {home}"
    return Fault(what, f"ALTER TABLE {_quoted(schema)}.{_quoted(table)} SET SCHEMA {_quoted(home)}")


def _how_to_have_a_schema(conn: "psycopg.Connection[Any]") -> str:
    role = _quoted(conn.info.user)
    ((may_use_public,),) = conn.execute(_MAY_USE_PUBLIC)
    if may_use_public is None:
        return f"CREATE SCHEMA {role} AUTHORIZATION {role}; {_look_in(conn, conn.info.user)}"
    grant = "" if may_use_public else f"GRANT USAGE, CREATE ON SCHEMA public TO {role}; "
    return grant + _look_in(conn, "public")


def _look_in(conn: "psycopg.Connection[Any]", schema: str) -> str:
    ((_, _, source, database, _),) = conn.execute(_PATH)
    role, quoted = _quoted(conn.info.user), _quoted(schema)
    if source == "client":
        # It wins over whatever stands in the server.
        return f"name {schema} in the search_path that MADEIRA_DATABASE_URL (options) or PGOPTIONS asks for, or ask for none"
    # Of all that the server keeps, what is said of a role in a database wins.
    set_path = f"ALTER ROLE {role} IN DATABASE {_quoted(database)} SET search_path = {quoted}"
    return f"{set_path}; a pooler has to connect anew then (docs/operations.md)"


def _found(conn: "psycopg.Connection[Any]") -> Iterator[tuple[Thing, bool]]:
    # Not by the database, whose collation may be any.
    for kind, name, table, made_by, is_whole, traits in sorted(conn.execute(_FOUND), key=lambda row: row[:3]):
        yield Thing(kind, name, table, made_by, tuple(traits)), is_whole


def _of(thing: Thing) -> str:
    return f" of {thing.table}" if thing.kind in ("part", "constraint", "index", "trigger") else ""


def _how_to_make(thing: Thing) -> str:
    name, table = _quoted(thing.name), _quoted(thing.table)
    match thing.kind:
        case "index":
            return str(thing.made_by).replace("INDEX", "INDEX CONCURRENTLY", 1)
        case "constraint":
            return f"ALTER TABLE {table} ADD CONSTRAINT {name} {thing.made_by}"
        case "trigger":
            return str(thing.made_by)
        case "part":
            return f"ALTER TABLE {table} ATTACH PARTITION {name} DEFAULT"
        case "function":
            return f"run its CREATE FUNCTION, which stands in {FOLDER}"
        case _:
            return (
                "what it held is gone: restore the database from a backup (docs/operations.md), `madeira migrate` makes none anew"
            )


def _differences(thing: Thing, there: Thing) -> Iterator[Fault]:
    """What tells `there` from `thing`; of a column in the order in which it can be mended."""
    if thing.kind != "column":
        what = f"the {thing.kind} {thing.name}{_of(thing)} is another one ({_shown(there)} instead of {_shown(thing)})"
        yield Fault(what, _how_to_replace(thing))
        return
    for trait in reversed(there.traits):
        if trait not in thing.traits and not trait.startswith("TYPE"):
            yield Fault(f"the column {thing.name} has {trait}, which is none of ours", f"{_alter(thing)} DROP {trait}")
    for trait in thing.traits:
        if trait.startswith("TYPE") and trait != there.traits[0]:
            got, wanted = there.traits[0].removeprefix("TYPE "), trait.removeprefix("TYPE ")
            yield Fault(f"the column {thing.name} is another one ({got} instead of {wanted})", _how_to_give(thing, trait))
        elif trait not in there.traits:
            yield Fault(f"the column {thing.name} is without its {trait}", _how_to_give(thing, trait))
        elif trait in ("DEFAULT", "EXPRESSION") and there.made_by != thing.made_by:
            what = f"the column {thing.name} has another {trait} ({_shown(there)} instead of {_shown(thing)})"
            yield Fault(what, _how_to_give(thing, trait))


def _shown(thing: Thing) -> str:
    """The definition of what has one, in a line and without its name."""
    text = " ".join(str(thing.made_by).split())
    if thing.kind == "index":
        return f"{'UNIQUE ' if 'UNIQUE' in thing.traits else ''}{text.partition(' USING ')[2]}"
    return text.removeprefix(f"CREATE TRIGGER {_quoted(thing.name)} ")


def _how_to_replace(thing: Thing) -> str:
    name = _quoted(thing.name)
    if thing.kind == "index":
        return f"DROP INDEX CONCURRENTLY {name}; {_how_to_make(thing)}"
    if thing.kind == "trigger":
        return _how_to_make(thing).replace("CREATE", "CREATE OR REPLACE", 1)
    return f"ALTER TABLE {_quoted(thing.table)} DROP CONSTRAINT {name}, ADD CONSTRAINT {name} {thing.made_by}"


def _how_to_give(column: Thing, trait: str) -> str:
    if trait == "NOT NULL":
        return f"{_alter(column)} SET NOT NULL"
    if trait == "DEFAULT":
        return f"{_alter(column)} SET DEFAULT {column.made_by}"
    if trait == "EXPRESSION":
        return f"it can be computed anew: drop it, and run its ADD COLUMN and what makes its indexes, which stand in {FOLDER}"
    if trait.startswith("TYPE"):
        # The table is locked while it is written anew.
        return f"while everything is stopped, {_alter(column)} {trait}"
    name, table = column.name.removeprefix(f"{column.table}."), _quoted(column.table)
    # One that begins at 1 would give numbers that are taken.
    return f"{_alter(column)} ADD GENERATED BY DEFAULT AS IDENTITY; {_SET_SEQUENCE.format(table=table, column=name)}"


def _alter(column: Thing) -> str:
    return f"ALTER TABLE {_quoted(column.table)} ALTER {_quoted(column.name.removeprefix(f'{column.table}.'))}"


def _unusable(thing: Thing) -> Fault:
    name, table = _quoted(thing.name), _quoted(thing.table)
    if thing.kind == "trigger":
        return Fault(f"the trigger {thing.name}{_of(thing)} is switched off", f"ALTER TABLE {table} ENABLE TRIGGER {name}")
    what = f"the index {thing.name}{_of(thing)} is not usable, since its building was broken off or goes on"
    return Fault(what, f"if nobody is building it, REINDEX INDEX CONCURRENTLY {name}")


def _parts(conn: "psycopg.Connection[Any]", *, is_tried: bool) -> Iterator[Fault]:
    (wanted,) = (thing.made_by for thing in known() if thing.name == f"{_REST}_one_verdict")
    for part, is_whole, definition in conn.execute(_PARTS).fetchall():
        if is_whole and (not is_tried or definition == str(wanted).replace(_REST, part)):
            continue
        index, on = _quoted(f"{part}_one_verdict"), _quoted(part)
        make = f"CREATE UNIQUE INDEX CONCURRENTLY {index} ON {on} (delivery_id, token, (outcome = 'late'))"
        what = f"the index {part}_one_verdict of the part {part} of delivery_log is missing, not usable or another one"
        yield Fault(what, f"DROP INDEX IF EXISTS {index}; {make}")


def _quoted(name: str) -> str:
    return name if name.isidentifier() and name.islower() else sql.Identifier(name).as_string(None)
