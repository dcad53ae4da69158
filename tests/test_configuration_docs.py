"""The settings in docs/configuration.md are made from the settings themselves."""

from dataclasses import fields
from pathlib import Path
from typing import Final

from madeira.routing import config
from madeira.settings import Settings, environment_name

PAGE: Final = Path(__file__).parents[1] / "docs" / "configuration.md"
BEGIN: Final = "<!-- settings: made from madeira/settings.py by `python -m tests.test_configuration_docs` -->\n"
END: Final = "<!-- end of settings -->\n"


def table() -> str:
    """The table of all settings."""
    lines = ["", "| name | what it does | default |", "|---|---|---|"]
    for f in fields(Settings):
        unit = f" ({f.metadata['unit']})" if f.metadata["unit"] else ""
        lines.append(f"| `{environment_name(f)}` | {f.metadata['doc']}{unit} | {_default(f.default)} |")
    return "\n".join(lines) + "\n\n"


def _default(value: object) -> str:
    if value in ("", (), None):
        return ""
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def page() -> str:
    """The page with its table made anew."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


def test_the_page_has_the_settings_as_they_are() -> None:
    """The reference cannot lag behind: `python -m tests.test_configuration_docs` makes it anew."""
    assert PAGE.read_text() == page()


def test_the_page_names_every_field_of_the_file() -> None:
    """Whatever the configuration file may hold is explained."""
    text = PAGE.read_text()
    known = {*config._ENDPOINT, *config._RETRY, *config._ROUTE} - {"ordering", "breaker", "retry"}
    assert not [name for name in known if f"`{name}`" not in text]


if __name__ == "__main__":
    PAGE.write_text(page())
