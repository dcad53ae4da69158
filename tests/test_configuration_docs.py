"""The tables in docs/configuration.md are made from the settings and from the table of fields."""

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Final

from madeira.routing.fields import FIELDS, KINDS, Field
from madeira.settings import Settings, environment_name

PAGE: Final = Path(__file__).parents[1] / "docs" / "configuration.md"
MADE: Final = "made by `python -m tests.test_configuration_docs`"


def settings_table() -> str:
    """The table of all settings."""
    lines = ["", "| name | what it does | default |", "|---|---|---|"]
    for f in fields(Settings):
        unit = f" ({f.metadata['unit']})" if f.metadata["unit"] else ""
        lines.append(f"| `{environment_name(f)}` | {f.metadata['doc']}{unit} | {_setting(f.default)} |")
    return "\n".join(lines) + "\n\n"


def _setting(value: object) -> str:
    return "" if value in ("", (), None) else _shown(value)


def fields_table() -> str:
    """The table of all fields of sources, endpoints and routes."""
    lines = ["", "| table | field | what it is | default |", "|---|---|---|---|"]
    for kind in KINDS:
        lines += _rows(f"[[{kind}]]", kind, FIELDS[kind])
    return "\n".join(lines) + "\n\n"


def _rows(table: str, path: str, found: tuple[Field, ...]) -> Iterator[str]:
    label = f"`{table}`"
    for field in found:
        unit = f" ({field.unit})" if field.unit else ""
        default = "required" if field.required else field.absent or _shown(field.default)
        yield f"| {label} | `{field.name}` | {field.doc.replace('|', '&#124;')}{unit} | {default} |"
        label = ""
    for field in found:
        if field.fields:
            yield from _rows(f"[{path}.{field.name}]", f"{path}.{field.name}", field.fields)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def page() -> str:
    """The page with its tables made anew."""
    text = PAGE.read_text()
    for name, made in (("settings", settings_table()), ("fields", fields_table())):
        begin, end = f"<!-- {name}: {MADE} -->\n", f"<!-- end of {name} -->\n"
        before, found, rest = text.partition(begin)
        assert found, f"the page has no mark for {name}"
        _, found, after = rest.partition(end)
        assert found, f"the page has no end of {name}"
        text = before + begin + made + end + after
    return text


def test_the_page_has_settings_and_fields_as_they_are() -> None:
    """The reference cannot lag behind: `python -m tests.test_configuration_docs` makes it anew."""
    assert PAGE.read_text() == page()


def test_every_field_says_what_it_does_and_what_holds_without_it() -> None:
    """A person who reads the table need not read the code."""

    def bare(found: tuple[Field, ...]) -> list[str]:
        silent = [f.name for f in found if not f.doc or not (f.required or f.absent or f.default is not None)]
        return silent + [name for f in found for name in bare(f.fields)]

    assert not [name for kind in KINDS for name in bare(FIELDS[kind])]


def test_it_names_every_setting_that_may_stand_in_a_file() -> None:
    """All that are secret, and no other."""
    (listed,) = re.findall(r"that are secret \(([^)]*)\) may stand in a file", PAGE.read_text())
    assert set(re.findall(r"`(\w+)`", listed)) == {environment_name(f) for f in fields(Settings) if f.metadata["secret"]}


def test_a_worker_has_as_many_processes_and_threads_wherever_one_is_started() -> None:
    """In what is read and in what is deployed: those of the settings; one that is for some queues may have others."""
    root = PAGE.parents[1]
    named = [
        "README.md",
        "docs/deployment.md",
        "docker-compose.yml",
        "deploy/kubernetes/worker.yaml",
        "deploy/systemd/madeira-worker@.service",
    ]
    asked = re.compile(r'-p[ ,"]+([0-9]+)[ ,"]+-t[ ,"]+([0-9]+)(?!.*-Q)')
    defaults = {f.name: str(f.default) for f in fields(Settings)}
    for name in named:
        found = asked.findall((root / name).read_text())
        assert set(found) - {("1", "8")} == {(defaults["processes"], defaults["threads"])}, name


if __name__ == "__main__":
    PAGE.write_text(page())
