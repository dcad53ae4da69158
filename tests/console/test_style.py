"""The style can be read: every text against what it stands on, in light and in dark, by WCAG AA."""

import re
from pathlib import Path

import pytest

from madeira.console import app

CSS = (Path(app.__file__).parent / "static" / "console.css").read_text()

#: Text and what it stands on.
PAIRS = (
    [(text, ground) for text in ("text", "quiet", "accent", "bad") for ground in ("page", "card")]
    + [(tone, f"{tone}-bg") for tone in ("good", "busy", "wait", "bad", "off")]
    + [("text", f"{tone}-bg") for tone in ("busy", "wait", "bad", "off")]
    + [("accent", "busy-bg"), ("accent", "bad-bg"), ("on-accent", "accent"), ("quiet", "busy-bg"), ("quiet", "wait-bg")]
)


def colours(scheme: str) -> dict[str, str]:
    """The colours of a scheme."""
    blocks = re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)
    assert len(blocks) == 2
    return dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{3,6})", blocks[0] if scheme == "light" else blocks[1]))


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(digit * 2 for digit in colour[1:])
    channels = [int(digits[n : n + 2], 16) / 255 for n in (0, 2, 4)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out_enough_from_its_ground(scheme: str) -> None:
    found = colours(scheme)
    assert {
        pair: round(contrast(found[pair[0]], found[pair[1]]), 2) for pair in PAIRS if contrast(*map(found.get, pair)) < 4.5
    } == {}  # type: ignore[arg-type]


def test_both_schemes_have_the_same_colours() -> None:
    assert set(colours("light")) == set(colours("dark"))


def test_the_focus_can_be_seen() -> None:
    for scheme in ("light", "dark"):
        found = colours(scheme)
        assert min(contrast(found["focus"], found[ground]) for ground in ("page", "card", "busy-bg")) >= 3
