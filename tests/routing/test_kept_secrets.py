"""Secrets of the configuration: sealed or named, hidden when shown, kept when changed, brought under another key."""

from typing import Any

import pytest
import trustme

from madeira import sealing
from madeira.egress import Egress
from madeira.errors import ConfigurationInvalid
from madeira.routing import secrets
from madeira.routing.config import parse_toml
from madeira.routing.fields import Kind
from madeira.routing.manage import Configurator
from madeira.sealing import Sealer
from madeira.store.database import Database
from tests.routing.whole import ENVIRON, WHOLE, everything, fields_of, rows
from tests.system.harness import KEY


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
