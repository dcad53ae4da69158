"""A process with another key than the running ones seals nothing behind their back."""

from typing import Any

import pytest

from madeira import sealing
from madeira.egress import Egress
from madeira.errors import ConfigurationInvalid
from madeira.routing.manage import Configurator
from madeira.sealing import Sealer
from madeira.store.database import Database
from tests.system.harness import KEY

FILE = """
[[source]]
name = "shop"
secrets = ["the-secret"]
rate = 10

[[endpoint]]
name = "sink"
url = "http://sink.example/"
secrets = ["env:SINK"]
[endpoint.headers]
Authorization = "Bearer x"
"""

NEW = '[[source]]\nname = "new"\nsecrets = ["another-secret"]\n'


def with_keys(database: Database, *keys: str) -> Configurator:
    return Configurator(database=database, sealer=Sealer(keys), egress=Egress(allow=(), deny=()))


@pytest.fixture
def stranger(configurator: Configurator, database: Database) -> Configurator:
    """What is stored was sealed with the key of the tests; this one has another."""
    configurator.apply(FILE, who="t")
    return with_keys(database, sealing.generate())


def refused(problems: ConfigurationInvalid) -> dict[str, str]:
    return {problem.field: problem.detail for problem in problems.problems}


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_file_is_refused_that_would_seal_anew_what_cannot_be_opened(
    configurator: Configurator, stranger: Configurator, dry_run: bool
) -> None:
    """Each place is named, with the remedy; the running processes go on with what they can open."""
    before = configurator.export()
    with pytest.raises(ConfigurationInvalid) as e:
        stranger.apply(FILE, dry_run=dry_run, who="t")
    told = refused(e.value)
    assert set(told) == {"source[shop].secrets[0]", "endpoint[sink].headers.Authorization"}
    for detail in told.values():
        assert "sealed with a key that is not here" in detail
        assert "MADEIRA_SECRET_KEY" in detail
        assert "--replace-secrets" in detail
    assert "the-secret" not in str(e.value)
    assert configurator.export() == before


def test_replacing_is_possible_when_it_is_asked_for(stranger: Configurator) -> None:
    """As after a lost key."""
    assert stranger.apply(FILE, replace_secrets=True, who="t").changed == ["source shop", "endpoint sink"]
    assert stranger.apply(FILE, who="t").is_empty


def test_keys_that_open_nothing_of_what_is_stored_seal_nothing_new(stranger: Configurator) -> None:
    """Neither by a file nor by the API: the running processes would not open it."""
    refusals: list[Any] = [
        lambda: stranger.apply(NEW, who="t"),
        lambda: stranger.create("source", "new", {"secrets": ["another-secret"]}, who="t"),
        lambda: stranger.update("source", "shop", {"secrets": ["another-secret"]}, expected=None, who="t"),
    ]
    for refusal in refusals:
        with pytest.raises(ConfigurationInvalid, match=r"secrets\[0\].*MADEIRA_SECRET_KEY"):
            refusal()


def test_what_needs_no_key_is_changed_with_any(stranger: Configurator) -> None:
    """References, and objects without secrets."""
    stranger.create("source", "new", {"secrets": ["env:NEW"]}, who="t")
    stranger.apply(FILE.replace('"the-secret"', '"env:SHOP"').split("[endpoint.headers]")[0], who="t")
    stranger.apply('[[endpoint]]\nname = "plain"\nurl = "http://h.example/"\n', who="t")


def test_a_key_that_opens_some_replaces_one_secret_by_the_api_and_none_by_a_file(
    configurator: Configurator, database: Database
) -> None:
    """Some of what is stored is of a lost key. A secret that is sent anew is a decision; a file that names it is none."""
    with_keys(database, sealing.generate()).create("source", "shop", {"secrets": ["of the lost key"]}, who="t")
    mixed = with_keys(database, sealing.generate(), KEY)
    mixed.apply(NEW, replace_secrets=True, who="t")
    with pytest.raises(ConfigurationInvalid, match=r"source\[shop\].secrets\[0\]"):
        mixed.apply(FILE, who="t")
    mixed.update("source", "shop", {"secrets": ["the-secret"]}, expected=None, who="t")
    assert mixed.apply(FILE, who="t").added == ["endpoint sink"]


def test_while_keys_are_changed_files_are_applied_as_ever(configurator: Configurator, database: Database) -> None:
    """The new key in front of the old one opens everything."""
    configurator.apply(FILE, who="t")
    both = with_keys(database, sealing.generate(), KEY)
    assert both.apply(FILE + NEW, who="t").added == ["source new"]
