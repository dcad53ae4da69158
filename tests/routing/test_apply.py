"""A whole configuration as a file: applied as a whole or not at all, exported, and the same when it is applied again."""

import time

import pytest

from madeira.egress import Egress
from madeira.errors import ConfigurationInvalid, SettingsError
from madeira.routing.config import parse_toml
from madeira.routing.manage import Configurator
from madeira.sealing import Sealer
from madeira.store.database import Database
from tests.routing.whole import ENVIRON, SECRETS, WHOLE, everything, fields_of
from tests.system.harness import KEY


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


def test_a_file_that_is_no_toml_is_told_in_one_line(configurator: Configurator) -> None:
    """The parser's own words, and no traceback."""
    with pytest.raises(ConfigurationInvalid, match="not valid TOML"):
        configurator.apply("[[source]\n", who="t")
    with pytest.raises(SettingsError, match="not valid TOML"):
        parse_toml("[[source]\n", where="f")
