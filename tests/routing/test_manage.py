"""Sources, endpoints and routes as they are changed, in a real database."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
import trustme
from psycopg.rows import dict_row

from madeira import sealing
from madeira.egress import Egress
from madeira.errors import AlreadyThere, ConfigurationInvalid, InUse, NotThere, SettingsError, Stale
from madeira.routing import secrets
from madeira.routing.config import parse_toml
from madeira.routing.fields import Kind
from madeira.routing.manage import Configurator
from madeira.sealing import Sealer
from madeira.store.database import Database
from tests.store import making
from tests.system.harness import KEY, wait_until

WHOLE = """
[[source]]
name = "billing"
secrets = ["env:BILLING_SECRET", "old-secret-of-billing"]
rate = 100
burst = 20

[[endpoint]]
name = "ledger"
url = "https://partner.example/api/{event_type}"
method = "PUT"
body = '''

{"id": {{ event_id | tojson }},
 "why": "a \\"quoted\\" word"}'''
success = 'status == 200 && body.code == 0'
rate = 30
timeout = 2.5
secrets = ["whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3", "env:LEDGER_SECRET"]
[endpoint.headers]
Authorization = "Bearer the-token-of-ledger"
"X-Plain" = "env:LEDGER_HEADER"
[endpoint.retry]
initial = 1
max = 8

[[endpoint]]
name = "audit"
url = "http://audit.example/"

[[route]]
name = "z-first"
source = "billing"
event_type = "payment.*"
filter = "payload.amount > 100"
endpoint = "ledger"

[[route]]
name = "a-second"
endpoint = "callback"
"""

SECRETS = ("old-secret-of-billing", "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3", "the-token-of-ledger")

ENVIRON = {"BILLING_SECRET": "b", "LEDGER_SECRET": "l", "LEDGER_HEADER": "h"}


def rows(url: str, statement: str) -> list[dict[str, Any]]:
    with psycopg.connect(url, row_factory=dict_row) as conn:
        return conn.execute(statement.encode()).fetchall()


def everything(url: str) -> str:
    """Every row of the tables that a change touches, as text."""
    return "\n".join(
        str(rows(url, f"SELECT * FROM {t} ORDER BY 1")) for t in ("source", "endpoint", "route", "configuration", "audit")
    )


def version(url: str) -> int:
    return int(rows(url, "SELECT version FROM configuration")[0]["version"])


def fields_of(problem: pytest.ExceptionInfo[ConfigurationInvalid]) -> list[str]:
    return [p.field for p in problem.value.problems]


# -- the file and back ----------------------------------------------------------------------------------------------


def test_what_is_exported_can_be_applied_and_changes_nothing(configurator: Configurator, database_url: str) -> None:
    """Export and apply are inverse to each other: over the same configuration, and from an empty one."""
    configurator.apply(WHOLE, who="t")
    exported = configurator.export()
    before = everything(database_url)
    difference = configurator.apply(exported, prune=True, who="t")
    assert difference.is_empty
    assert len(difference.unchanged) == 5
    assert everything(database_url) == before

    configurator.apply("", prune=True, who="t")
    assert configurator.list("endpoint") == []
    configurator.apply(exported, who="t")
    assert configurator.export() == exported
    sealer = Sealer((KEY,))
    there = parse_toml(exported, where="export", environ=ENVIRON, sealer=sealer)
    written = parse_toml(WHOLE, where="file", environ=ENVIRON)
    assert (there.sources, there.endpoints, there.routes) == (written.sources, written.endpoints, written.routes)


def test_a_file_written_by_hand_is_the_same_the_second_time(configurator: Configurator, database_url: str) -> None:
    """Sealing gives another text each time, and still nothing is written that did not change."""
    configurator.apply(WHOLE, who="t")
    before = everything(database_url)
    difference = configurator.apply(WHOLE, who="t")
    assert (difference.added, difference.changed, difference.is_empty) == ([], [], True)
    assert everything(database_url) == before


def test_no_secret_gets_into_the_database_or_an_export(configurator: Configurator, database_url: str) -> None:
    """What a file holds in clear is sealed before it is kept, also in the audit."""
    configurator.apply(WHOLE, who="t")
    configurator.update("source", "billing", {"secrets": ["hidden:2", "a-new-one"]}, expected=None, who="t")
    shown = everything(database_url) + configurator.export() + str(configurator.list("source") + configurator.list("endpoint"))
    assert not [secret for secret in (*SECRETS, "a-new-one") if secret in shown]
    assert "env:BILLING_SECRET" in shown


def test_a_dry_run_changes_nothing_and_tells_the_difference(configurator: Configurator, database_url: str) -> None:
    """What would be added, changed, removed and kept is told as it will be."""
    configurator.apply(WHOLE, who="t")
    before = everything(database_url)
    changed = WHOLE.replace("rate = 30", "rate = 31").replace("old-secret-of-billing", "new-secret").replace('"audit"', '"other"')
    dry = configurator.apply(changed, dry_run=True, prune=True, who="t")
    assert everything(database_url) == before
    assert dry.added == ["endpoint other"]
    assert dry.removed == ["endpoint audit"]
    assert dry.fields == {"source billing": ["secrets"], "endpoint ledger": ["rate"]}
    assert dry == configurator.apply(changed, prune=True, who="t")


def test_without_pruning_nothing_is_removed(configurator: Configurator) -> None:
    """A file may name a part of what is there; the rest is told as kept."""
    configurator.apply(WHOLE, who="t")
    difference = configurator.apply('[[source]]\nname = "new"\nsecrets = ["a-secret"]\n', who="t")
    assert difference.removed == []
    assert "endpoint ledger" in difference.kept
    assert {s.name for s in configurator.list("source")} == {"billing", "new"}


def test_a_file_is_applied_as_a_whole_or_not_at_all(configurator: Configurator, database_url: str) -> None:
    """One mistake in one object, and nothing of the file counts; all mistakes are told."""
    before = everything(database_url)
    text = WHOLE + "[[endpoint]]\nname = 'bad'\nurl = 'ftp://h'\nrate = -1\n[[route]]\nname = 'lost'\nendpoint = 'nowhere'\n"
    with pytest.raises(ConfigurationInvalid) as e:
        configurator.apply(text, who="t")
    assert fields_of(e) == ["endpoint[bad].url", "endpoint[bad].rate", "route[lost].endpoint"]
    assert everything(database_url) == before


def test_nothing_that_is_wrong_hides_anything_else(configurator: Configurator, database: Database) -> None:
    """Not a secret that no key opens, not a name, not a name that stands there twice, not a literal without a key."""
    first = "[[endpoint]]\nname = 'e'\nurl = 'ftp://h'\nsecrets = ['sealed:nonsense']\n"
    second = "[[endpoint]]\nname = 'e'\nurl = 'http://h'\nsecrets = ['a-literal']\nrate = -1\n"
    third = "[[route]]\nname = 'a b'\nendpoint = 'nobody'\nevent_type = 5\n"
    told = ["endpoint[e].name", "endpoint[e].secrets[0]", "endpoint[e].url", "endpoint number 2.rate"]
    told += ["route number 1.name", "route number 1.endpoint", "route number 1.event_type"]
    with pytest.raises(ConfigurationInvalid) as e:
        configurator.apply(first + second + third, who="t")
    assert sorted(fields_of(e)) == sorted(told)
    keyless = Configurator(database=database, sealer=Sealer(()), egress=Egress(allow=(), deny=()))
    with pytest.raises(ConfigurationInvalid) as e:
        keyless.apply(first + second + third, who="t")
    assert sorted(fields_of(e)) == sorted([*told, "endpoint number 2.secrets[0]"])
    with pytest.raises(ConfigurationInvalid) as e:
        keyless.create("route", "r", {"endpoint": "nobody", "filter": "1 +"}, who="t")
    assert sorted(fields_of(e)) == ["endpoint", "filter"]


def test_the_order_of_the_routes_is_that_of_the_file(configurator: Configurator) -> None:
    """A file with another order is a change; a new route comes where the file has it."""
    route = '[[route]]\nname = "{}"\nendpoint = "callback"\n'
    configurator.apply("".join(map(route.format, "abc")), who="t")
    difference = configurator.apply("".join(map(route.format, "cxab")), who="t")
    assert difference.reordered
    assert [r.name for r in configurator.list("route")] == ["c", "x", "a", "b"]
    assert not configurator.apply("".join(map(route.format, "cxab")), who="t").reordered


def test_a_host_that_may_not_be_called_is_refused_when_it_is_saved(database: Database) -> None:
    """A mistake in an address is told when it is made, and not at night."""
    strict = Configurator(database=database, sealer=Sealer((KEY,)), egress=Egress(allow=(), deny=("*.forbidden.example",)))
    for host in ("127.0.0.1", "localhost", "169.254.169.254", "a.forbidden.example"):
        for path in ("/x", "/{event_id}", "{?source}"):
            with pytest.raises(ConfigurationInvalid) as e:
                strict.create("endpoint", "e", {"url": f"http://{host}{path}"}, who="t")
            assert fields_of(e) == ["url"]


@pytest.mark.alone
def test_five_hundred_endpoints_and_a_thousand_routes_are_applied_in_three_seconds(configurator: Configurator) -> None:
    """The first time, into an empty database; a second time, when one of them changed; and a third, when none did."""
    text = '[[source]]\nname = "s"\nsecrets = ["secret-of-s"]\n'
    for n in range(500):
        text += f'[[endpoint]]\nname = "e{n}"\nurl = "http://e{n}.example/{{event_type}}"\nrate = 10\nsecrets = ["secret-{n}"]\n'
        text += f'body = \'{{"n": {n}, "id": {{{{ event_id | tojson }}}}}}\'\n[endpoint.headers]\nAuthorization = "Bearer {n}"\n'
    for n in range(1000):
        text += f'[[route]]\nname = "r{n}"\nsource = "s"\nevent_type = "t{n}.*"\n'
        text += f'filter = "payload.n == {n}"\nendpoint = "e{n % 500}"\n'
    took = []
    for one in (text, text.replace("rate = 10", "rate = 11", 1), text.replace("rate = 10", "rate = 11", 1)):
        begun = time.perf_counter()
        difference = configurator.apply(one, who="t")
        took.append(time.perf_counter() - begun)
        print(len(difference.added), len(difference.changed), len(difference.unchanged), f"{took[-1]:.2f} s")
    assert max(took) < 3.0, took


# -- one object -----------------------------------------------------------------------------------------------------


def test_an_object_is_made_changed_and_removed(configurator: Configurator, database_url: str) -> None:
    """Each change counts once, raises both versions, and leaves one row in the audit."""
    made = configurator.create("endpoint", "e", {"url": "http://h.example/", "retry": {"max": 900}}, who="ann", why="new")
    assert (made.version, made.document) == (1, {"url": "http://h.example/", "retry": {"max": 900.0}})
    changed = configurator.update("endpoint", "e", {"retry": {"max": None, "jitter": 0}, "rate": 5}, expected=1, who="bob")
    assert (changed.version, changed.document["retry"], changed.document["rate"]) == (2, {"jitter": 0.0}, 5.0)
    configurator.delete("endpoint", "e", expected=2, who="cid", why="gone")
    with pytest.raises(NotThere, match="no endpoint 'e'"):
        configurator.get("endpoint", "e")
    audit = rows(database_url, "SELECT who, action, what, why, detail FROM audit ORDER BY id")
    assert [(a["who"], a["action"], a["what"], a["why"]) for a in audit] == [
        ("ann", "create", "endpoint e", "new"),
        ("bob", "update", "endpoint e", None),
        ("cid", "delete", "endpoint e", "gone"),
    ]
    assert audit[1]["detail"]["changed"] == ["rate", "retry.jitter", "retry.max"]
    assert audit[1]["detail"]["before"]["retry"] == {"max": 900.0}
    assert version(database_url) == 4


def test_a_change_that_changes_nothing_leaves_no_trace(configurator: Configurator, database_url: str) -> None:
    """Not in the audit, not in the versions."""
    configurator.create("source", "s", {"secrets": ["a-secret"], "rate": 5}, who="t")
    before = everything(database_url)
    same = configurator.update("source", "s", {"rate": 5, "secrets": ["a-secret"]}, expected=None, who="t")
    assert same.version == 1
    assert everything(database_url) == before


def test_a_change_to_an_old_version_is_refused(configurator: Configurator) -> None:
    """Of two people who read the same version the second one must look again."""
    configurator.create("source", "s", {"secrets": ["a-secret"]}, who="t")
    configurator.update("source", "s", {"rate": 1}, expected=1, who="t")
    with pytest.raises(Stale, match="version 2 by now, not 1"):
        configurator.update("source", "s", {"rate": 2}, expected=1, who="t")
    with pytest.raises(Stale):
        configurator.delete("source", "s", expected=1, who="t")
    assert configurator.get("source", "s").document["rate"] == 1.0


def test_of_changes_at_the_same_moment_one_wins(configurator: Configurator, database_url: str) -> None:
    """Four people change the same version at once: one change counts, three are refused, nothing is mixed."""
    configurator.create("source", "s", {"secrets": ["a-secret"]}, who="t")

    def change(n: int) -> bool:
        try:
            configurator.update("source", "s", {"rate": n + 1, "burst": n + 1}, expected=1, who=f"t{n}")
        except Stale:
            return False
        return True

    with psycopg.connect(database_url) as holder, ThreadPoolExecutor(4) as pool:
        holder.execute("SELECT 1 FROM configuration FOR UPDATE")
        changes = [pool.submit(change, n) for n in range(4)]
        until_waiting(database_url, 4)
        holder.rollback()
        assert sorted(done.result() for done in changes) == [False, False, False, True]
    found = configurator.get("source", "s")
    assert found.version == 2
    assert found.document["rate"] == found.document["burst"]
    assert len(rows(database_url, "SELECT 1 FROM audit")) == 2


def until_waiting(database_url: str, count: int) -> None:
    """Wait until so many sessions of this database wait for a lock."""
    statement = """
        SELECT count(*) AS n FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'
    """
    wait_until(lambda: rows(database_url, statement)[0]["n"] == count, what="the waiting for the lock")


def test_two_files_at_the_same_moment_are_applied_one_after_the_other(configurator: Configurator, database_url: str) -> None:
    """Whichever comes last, the whole is that of one file: no route of one leads to an endpoint of the other."""
    text = '[[endpoint]]\nname = "{0}"\nurl = "http://{0}.example/"\n[[route]]\nname = "r"\nendpoint = "{0}"\n'
    with psycopg.connect(database_url) as holder, ThreadPoolExecutor(2) as pool:
        holder.execute("SELECT 1 FROM configuration FOR UPDATE")
        applied = [pool.submit(configurator.apply, text.format(name), prune=True, who="t") for name in "ab"]
        until_waiting(database_url, 2)
        holder.rollback()
        differences = [done.result() for done in applied]
    (endpoint,), (route,) = configurator.list("endpoint"), configurator.list("route")
    assert route.document["endpoint"] == endpoint.name
    assert sorted(len(difference.removed) for difference in differences) == [0, 1], "the second one saw the first one's"


def test_a_name_is_given_once(configurator: Configurator) -> None:
    """A second object of a name is refused, and so is one that could not be named."""
    configurator.create("source", "s", {"secrets": ["a-secret"]}, who="t")
    with pytest.raises(AlreadyThere):
        configurator.create("source", "s", {"secrets": ["a-secret-too"]}, who="t")
    with pytest.raises(ConfigurationInvalid) as e:
        configurator.create("source", "a b", {"secrets": ["a-secret-too"]}, who="t")
    assert fields_of(e) == ["name"]
    with pytest.raises(ConfigurationInvalid) as e:
        configurator.update("source", "s", {"name": "t"}, expected=None, who="t")
    assert fields_of(e) == ["name"]


def test_the_built_in_endpoint_stays_as_it_is(configurator: Configurator) -> None:
    """It can neither be made again, nor changed, nor removed; routes may lead to it."""
    with pytest.raises(ConfigurationInvalid, match="built in"):
        configurator.create("endpoint", "callback", {"url": "{+target_uri}"}, who="t")
    with pytest.raises(ConfigurationInvalid, match="built in"):
        configurator.update("endpoint", "callback", {"rate": 1}, expected=None, who="t")
    with pytest.raises(ConfigurationInvalid, match="built in"):
        configurator.delete("endpoint", "callback", expected=None, who="t")
    configurator.create("route", "r", {"endpoint": "callback"}, who="t")


@pytest.mark.parametrize("value", ["a\0b", "a\ud800b"])
def test_a_text_that_cannot_be_kept_is_refused(configurator: Configurator, value: str) -> None:
    """What JSON can say and Postgres cannot keep is an error of the document, not of the store."""
    with pytest.raises(ConfigurationInvalid) as e:
        configurator.create("route", "r", {"endpoint": "callback", "routing_key": value}, who="t")
    assert fields_of(e) == ["routing_key"]
    for field, document in (
        ("secrets[0]", {"secrets": ["long-enough" + value]}),
        ("headers.A", {"headers": {"A": value}}),
        ("client_certificate.key", {"client_certificate": {"chain": "env:CHAIN", "key": value}}),
    ):
        with pytest.raises(ConfigurationInvalid) as e:
            configurator.create("endpoint", "e", {"url": "http://h.example/"} | document, who="t")
        assert fields_of(e) == [field]


# -- secrets --------------------------------------------------------------------------------------------------------


def test_secrets_are_hidden_and_can_be_kept(configurator: Configurator, database: Database) -> None:
    """What is shown can be sent back: each hidden secret stays what it was, also in another place."""
    document = {
        "url": "http://h.example/",
        "secrets": ["secret-one", "env:TWO", "secret-three"],
        "headers": {"A": "value-a", "B": "env:B"},
    }
    shown = configurator.create("endpoint", "e", document, who="t").document
    assert shown["secrets"] == ["hidden:1", "env:TWO", "hidden:3"]
    assert shown["headers"] == {"A": "hidden", "B": "env:B"}
    sent = {"secrets": ["hidden:3", "secret-four", "hidden:1"], "headers": {"A": "hidden", "B": None, "C": "value-c"}}
    changed = configurator.update("endpoint", "e", sent, expected=1, who="t")
    assert changed.document["secrets"] == ["hidden:1", "hidden:2", "hidden:3"]
    endpoint = parse_toml(configurator.export(), where="export", environ={}, sealer=Sealer((KEY,))).endpoints["e"]
    assert endpoint.secrets == ("secret-three", "secret-four", "secret-one")
    assert endpoint.headers == {"A": "value-a", "C": "value-c"}


def test_a_secret_that_is_found_out_by_trying_is_refused_and_one_that_was_kept_goes_on(configurator: Configurator) -> None:
    """Eight characters at least of what is new; the same file again, an export and a reference are taken as they were."""
    short = '[[source]]\nname = "s"\nsecrets = ["short", "env:S"]\n'
    with pytest.raises(ConfigurationInvalid) as e:
        configurator.apply(short, who="t")
    assert [(p.field, "8 characters" in p.detail, "short" in p.detail.split()) for p in e.value.problems] == [
        ("source[s].secrets[0]", True, False)
    ]
    with pytest.MonkeyPatch.context() as before:
        before.setattr(secrets, "SHORTEST", 1)
        configurator.apply(short, who="t")
    assert configurator.apply(short, who="t").unchanged == ["source s"]
    assert configurator.apply(configurator.export(), who="t").unchanged == ["source s"]
    document = configurator.update("source", "s", {"rate": 5, "secrets": ["hidden:1", "longer-than-it"]}, expected=None, who="t")
    assert document.document["secrets"] == ["hidden:1", "hidden:2"]
    configurator.create("endpoint", "e", {"url": "http://h.example/", "headers": {"A": "any"}}, who="t")


@pytest.mark.parametrize(
    ("patch", "field"),
    [
        ({"secrets": ["hidden:2"]}, "secrets[0]"),
        ({"secrets": ["a-secret", "hidden"]}, "secrets[1]"),
        ({"secrets": ["hidden:0"]}, "secrets[0]"),
        ({"secrets": ["hidden:x"]}, "secrets[0]"),
        ({"headers": {"B": "hidden"}}, "headers.B"),
        ({"headers": {"A": "hidden:1"}}, "headers.A"),
        ({"client_certificate": {"chain": "hidden", "key": "hidden"}}, "client_certificate.chain"),
    ],
)
def test_hidden_without_a_secret_is_refused(configurator: Configurator, patch: dict[str, Any], field: str) -> None:
    """The word that stands for a secret never becomes one."""
    configurator.create("endpoint", "e", {"url": "http://h.example/", "secrets": ["a-secret"], "headers": {"A": "a"}}, who="t")
    with pytest.raises(ConfigurationInvalid) as e:
        configurator.update("endpoint", "e", patch, expected=None, who="t")
    assert fields_of(e)[0] == field
    with pytest.raises(ConfigurationInvalid):
        configurator.create("endpoint", "f", {"url": "http://h.example/"} | patch, who="t")


def test_without_a_key_only_references_are_taken(database: Database) -> None:
    """A literal that could not be sealed is refused with both remedies, and is not repeated."""
    keyless = Configurator(database=database, sealer=Sealer(()), egress=Egress(allow=(), deny=()))
    keyless.create("source", "s", {"secrets": ["env:S"]}, who="t")
    with pytest.raises(ConfigurationInvalid, match=r"secrets\[0\].*madeira keygen.*env:NAME") as e:
        keyless.create("source", "t", {"secrets": ["my-secret"]}, who="t")
    assert "my-secret" not in str(e.value)


@pytest.mark.parametrize(
    ("kind", "document", "field"),
    [
        ("source", {"secrets": ["a-secret", "env:MADEIRA_SECRET_KEY"]}, "secrets[1]"),
        ("endpoint", {"secrets": ["env:PGPASSWORD"]}, "secrets[0]"),
        ("endpoint", {"headers": {"A": "env:madeira_admin_token"}}, "headers.A"),
        ("endpoint", {"client_certificate": {"chain": "env:CHAIN", "key": "env:PgKey"}}, "client_certificate.key"),
    ],
)
def test_a_reference_to_what_is_ours_or_the_database_s_is_refused(
    configurator: Configurator, kind: Kind, document: dict[str, Any], field: str
) -> None:
    """In every place where a reference may stand, made or changed or applied: with the field and the remedy."""
    base = {"url": "http://h.example/"} if kind == "endpoint" else {"secrets": ["a-secret"]}
    with pytest.raises(ConfigurationInvalid, match="put the secret into a variable of another name") as e:
        configurator.create(kind, "o", base | document, who="t")
    assert fields_of(e) == [field]
    configurator.create(kind, "o", base, who="t")
    with pytest.raises(ConfigurationInvalid) as e:
        configurator.update(kind, "o", document, expected=None, who="t")
    assert fields_of(e) == [field]


def test_keys_are_changed_without_a_gap(configurator: Configurator, database: Database, database_url: str) -> None:
    """New key in front, everything sealed anew, old key away: the secrets are the same, and each object is in the audit."""
    configurator.apply(WHOLE, who="t")
    new = sealing.generate()
    both = Configurator(database=database, sealer=Sealer((new, KEY)), egress=Egress(allow=(), deny=()))
    done, problems = both.reencrypt(who="ann", why="rotation")
    assert (set(done), list(problems)) == ({"source billing", "endpoint ledger"}, [])
    assert both.reencrypt(who="ann") == ([], [])
    one = parse_toml(both.export(), where="export", environ=ENVIRON, sealer=Sealer((new,)))
    assert one.endpoints["ledger"].headers["Authorization"] == "Bearer the-token-of-ledger"
    audit = rows(database_url, "SELECT what FROM audit WHERE action = 'reencrypt' AND who = 'ann' ORDER BY id")
    assert [a["what"] for a in audit] == done


def test_what_no_key_opens_is_named_and_can_be_set_anew(configurator: Configurator, database: Database) -> None:
    """A lost key loses its secrets and nothing else: the file with the secrets in clear mends it."""
    configurator.apply(WHOLE, who="t")
    other = Configurator(database=database, sealer=Sealer((sealing.generate(),)), egress=Egress(allow=(), deny=()))
    done, problems = other.reencrypt(who="t")
    assert done == []
    assert {p.field for p in problems} == {
        "source[billing].secrets[1]",
        "endpoint[ledger].secrets[0]",
        "endpoint[ledger].headers.Authorization",
    }
    with pytest.raises(ConfigurationInvalid, match="no key in MADEIRA_SECRET_KEY opens it"):
        other.apply(configurator.export(), who="t")
    mended = other.apply(WHOLE, replace_secrets=True, who="t")
    assert mended.changed == ["source billing", "endpoint ledger"]
    assert other.apply(WHOLE, who="t").is_empty


def test_a_client_certificate_is_kept_like_a_secret(configurator: Configurator, database_url: str) -> None:
    """Sealed, hidden, kept when it is sent back; a key of another certificate is refused."""
    authority = trustme.CA()
    certificate, other = authority.issue_cert("client.example"), authority.issue_cert("other.example")
    chain = b"".join(blob.bytes() for blob in certificate.cert_chain_pems).decode()
    key, wrong = (c.private_key_pem.bytes().decode() for c in (certificate, other))
    document = {"url": "https://h.example/", "client_certificate": {"chain": chain, "key": key}}
    made = configurator.create("endpoint", "e", document, who="t")
    assert made.document["client_certificate"] == {"chain": "hidden", "key": "hidden"}
    assert "PRIVATE KEY" not in everything(database_url) + configurator.export()
    with pytest.raises(ConfigurationInvalid, match="does not belong") as e:
        configurator.update("endpoint", "e", {"client_certificate": {"key": wrong}}, expected=None, who="t")
    assert wrong[40:80] not in str(e.value)
    configurator.update("endpoint", "e", {"rate": 1, "client_certificate": {"key": "hidden"}}, expected=None, who="t")
    kept = parse_toml(configurator.export(), where="export", sealer=Sealer((KEY,))).endpoints["e"].client_certificate
    assert kept is not None
    assert (kept.chain, kept.key) == (chain, key)


# -- what is in use -------------------------------------------------------------------------------------------------


def test_what_a_route_names_cannot_be_removed(configurator: Configurator) -> None:
    """Neither an endpoint nor a source leaves a route without it behind."""
    configurator.apply(WHOLE, who="t")
    for kind, name in (("endpoint", "ledger"), ("source", "billing")):
        with pytest.raises(InUse, match="z-first"):
            configurator.delete(kind, name, expected=None, who="t", unfinished="cancel")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationInvalid) as e:
        configurator.apply('[[route]]\nname = "z-first"\nendpoint = "ledger"\n', prune=True, who="t")
    assert fields_of(e) == ["route[z-first].endpoint"]


def test_an_endpoint_with_unfinished_deliveries_stays_unless_they_are_cancelled(
    configurator: Configurator, database_url: str
) -> None:
    """Refused with their number; together with the decision they end, their events are counted, and the audit says how many."""
    for name in ("a", "b"):
        configurator.create("endpoint", name, {"url": "http://h.example/"}, who="t")
    with psycopg.connect(database_url, autocommit=True) as conn:
        refs = [making.routed(conn, ("a", "b"))[0] for _ in range(30)]
        called = making.routed(conn, ("a",))[0]
        making.claimed(conn, called)
        with pytest.raises(InUse, match=r"a \(31\)"):
            configurator.delete("endpoint", "a", expected=1, who="t")
        with pytest.raises(InUse, match=r"a \(31\)"):
            configurator.apply("", prune=True, who="t")
        removed = configurator.delete("endpoint", "a", expected=1, who="ann", why="closed", unfinished="cancel")
        assert {ref.delivery_id for ref in removed.cancelled} == {ref.delivery_id for ref in refs}
        assert removed.requested == 1
        for ref in refs:
            assert making.delivery(conn, ref.delivery_id)["status"] == "cancelled"
            event = making.event(conn, ref.seq)
            assert (event["status"], event["unfinished"], event["cancelled"]) == ("delivering", 1, 1)
        assert making.delivery(conn, called.delivery_id)["cancel_requested_at"] is not None
    with pytest.raises(NotThere):
        configurator.get("endpoint", "a")
    (audit,) = rows(database_url, "SELECT who, why, detail FROM audit WHERE action = 'delete'")
    assert (audit["who"], audit["why"], audit["detail"]["cancelled"], audit["detail"]["requested"]) == ("ann", "closed", 30, 1)


def test_nothing_is_cancelled_for_an_endpoint_that_stays(configurator: Configurator, database_url: str) -> None:
    """Whether it can be removed is seen before the first delivery is touched."""
    configurator.create("endpoint", "a", {"url": "http://h.example/"}, who="t")
    configurator.create("route", "r", {"endpoint": "a"}, who="t")
    with psycopg.connect(database_url, autocommit=True) as conn:
        (ref,) = making.routed(conn, ("a",))
        for error, expected in ((InUse, None), (Stale, 7)):
            with pytest.raises(error):
                configurator.delete("endpoint", "a", expected=expected, who="t", unfinished="cancel")
        assert making.delivery(conn, ref.delivery_id)["status"] == "pending"


def test_a_file_that_is_no_toml_is_told_in_one_line(configurator: Configurator) -> None:
    """The parser's own words, and no traceback."""
    with pytest.raises(ConfigurationInvalid, match="not valid TOML"):
        configurator.apply("[[source]\n", who="t")
    with pytest.raises(SettingsError, match="not valid TOML"):
        parse_toml("[[source]\n", where="f")
