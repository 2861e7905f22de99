"""The pictures: drawn by the script beside them, legible on light and dark pages, small."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from tests.documentation.pages import DOCS

FOLDER = DOCS / "images"
PICTURES = sorted(FOLDER.glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"
MOST_BYTES = 20_000


def test_pictures_are_what_the_script_draws(tmp_path):
    script = tmp_path / "draw.py"
    script.write_bytes((FOLDER / "draw.py").read_bytes())
    subprocess.run([sys.executable, str(script)], check=True)
    drawn = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    assert drawn == {path.name: path.read_text() for path in PICTURES}, "run `python docs/images/draw.py`"


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_a_picture_has_text_a_title_and_a_card_of_its_own(path):
    root = ElementTree.parse(path).getroot()
    width, height = (float(number) for number in root.attrib["viewBox"].split()[2:])
    card = root.find(f"{SVG}rect")
    assert root.findtext(f"{SVG}title") and root.findall(f"{SVG}text")
    assert card is not None and card.attrib["fill"] == "#ffffff"
    assert (float(card.attrib["width"]), float(card.attrib["height"])) == (width - 1, height - 1)
    assert path.stat().st_size < MOST_BYTES


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_text_lies_on_the_card(path):
    """A letter of a wide typeface takes 0.55 of its size, on average; browsers' own are narrower."""
    root = ElementTree.parse(path).getroot()
    width, height = (float(number) for number in root.attrib["viewBox"].split()[2:])
    for text in root.findall(f"{SVG}text"):
        size = float(text.attrib.get("font-size", root.attrib["font-size"]))
        length = 0.55 * size * len(text.text or "") * (1.08 if "font-weight" in text.attrib else 1)
        x = float(text.attrib["x"])
        anchor = text.attrib.get("text-anchor", "start")
        left = x - length / 2 if anchor == "middle" else x
        assert left >= 8 and left + length <= width - 8, f"{text.text!r} ends at {left + length:.0f} of {width:.0f}"
        assert 10 <= float(text.attrib["y"]) <= height - 6, text.text


def test_pictures_name_no_file_elsewhere():
    for path in PICTURES:
        assert not re.search(r"href=|url\((?!#)|<image|<script", path.read_text()), path.name
