"""Every code block is run, parsed or shown, or says why it is not; those that are run are at least well formed."""

from __future__ import annotations

import ast
import json
import subprocess
import tomllib

import pytest
import yaml

from tests.documentation.pages import PARSED, RUN, SHOWN, Block, documentation, read_page

PAGES = documentation()
BLOCKS = [block for page in PAGES for block in page.blocks]
PARSERS = {
    "python": ast.parse,
    "json": json.loads,
    "toml": tomllib.loads,
    "yaml": lambda text: list(yaml.safe_load_all(text)),
}
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def of(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


@every_page
def test_every_block_has_a_runner_or_a_reason(page):
    unknown = [f"{block.place} ({block.language})" for block in page.blocks if block.treatment == "unknown"]
    assert not unknown, (
        f"{unknown}: blocks of {RUN} are run, of {PARSED} parsed, of {SHOWN} shown; others need "
        "`<!-- not run: reason -->` on the line before the fence"
    )


@every_page
def test_a_reason_stands_before_a_block_and_says_something(page):
    assert not page.stray_reasons, f"no block begins after the `not run` comments in lines {page.stray_reasons}"
    empty = [block.place for block in page.blocks if block.reason is not None and len(block.reason.split()) < 2]
    assert not empty, f"{empty}: say in a few words why the block is not run"


def test_most_blocks_are_run():
    """Reasons are for what needs another machine or another program, not for what is inconvenient."""
    reasons = {block.place: block.reason for block in BLOCKS if block.reason is not None}
    print("not run:", *(f"{place}: {reason}" for place, reason in reasons.items()), sep="\n  ")
    assert len([block for block in of("python") if block.reason is None]) > 2 * len(
        [block for block in of("python") if block.reason is not None]
    ), reasons


@every_page
def test_blocks_are_well_formed(page):
    wrong = {block.place: _mistake_in(block) for block in page.blocks}
    assert not any(wrong.values()), {place: mistake for place, mistake in wrong.items() if mistake}


def _mistake_in(block: Block) -> str | None:
    try:
        if block.language == "bash":
            done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
            return done.stderr or None
        PARSERS.get(block.language, str)(block.text)
    except ValueError as error:  # also what TOML and JSON raise
        return str(error)
    except (SyntaxError, yaml.YAMLError) as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("language", "text"),
    [("python", "def f("), ("bash", "if true"), ("json", "{"), ("yaml", "a: [1"), ("toml", "a = ")],
)
def test_blocks_that_are_not_well_formed_are_found(tmp_path, language, text):
    assert _mistake_in(Block(tmp_path / "page.md", 1, language, text, None))
    assert _mistake_in(Block(tmp_path / "page.md", 1, "text", text, None)) is None


def test_blocks_are_found_as_they_stand(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "text\n<!-- not run: needs a GPU -->\n```python\na\n```\n- item\n\n  ````bash\n  b\n  ```\n  ````\n"
        "<!-- not run: astray -->\n\n```\nc\n```\n"
    )
    read = read_page(page)
    assert [(block.line, block.language, block.text, block.treatment) for block in read.blocks] == [
        (4, "python", "a\n", "not run"),
        (9, "bash", "b\n```\n", "run"),
        (15, "", "c\n", "shown"),
    ]
    assert read.stray_reasons == (12,)
