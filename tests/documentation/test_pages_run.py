"""The blocks of every page do what they say, with the packaged real model under the hub's name."""

from __future__ import annotations

import pytest

from tests.documentation.pages import documentation, read_page
from tests.documentation.runner import BlockFailedError, Machine, _starts_server

# The README last: it goes on with the server of the pages before it.
RUNNABLE = [page for page in documentation() if any(block.treatment == "run" for block in page.blocks)]
RUNNABLE.sort(key=lambda page: page.name == "README.md")


@pytest.fixture(scope="module")
def machine(hub_environment):
    """One for all pages."""
    with Machine(hub_environment) as machine:
        yield machine


@pytest.mark.slow
@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.name)
def test_the_blocks_of_a_page_run(page, tmp_path, machine):
    assert machine.run_page(page, tmp_path) > 0


def run_text(tmp_path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with Machine({}) as machine:
        machine.run_page(read_page(page), tmp_path)


def test_blocks_share_a_namespace_and_a_folder(tmp_path):
    run_text(
        tmp_path,
        "```python\nname = 'x.txt'\n```\n```bash\necho hello > x.txt\n```\n"
        "```python\nassert open(name).read() == 'hello\\n'\n```\n",
    )


def test_a_python_block_that_raises_fails_with_its_line(tmp_path):
    with pytest.raises(BlockFailedError, match=r"page.md:5: the block raised(.|\n)*line 6(.|\n)*NameError"):
        run_text(tmp_path, "```python\nx = 1\n```\n```python\nx\nmissing\n```\n")


def test_a_bash_block_that_fails_says_what_it_wrote(tmp_path):
    with pytest.raises(BlockFailedError, match=r"page.md:2: exit code 3\nsorry"):
        run_text(tmp_path, "```bash\necho sorry\n(exit 3)\necho never\n```\n")


def test_a_server_that_does_not_start_fails_its_block(tmp_path):
    with pytest.raises(BlockFailedError, match=r"page.md:2: the server does not start:(.|\n)*--no-such-flag"):
        run_text(tmp_path, "```bash\nhf-paged serve MODEL --no-such-flag  # a comment\n```\n")


@pytest.mark.parametrize(
    ("line", "starts"),
    [
        ("hf-paged serve MODEL --port 8000", True),
        ("HF_PAGED_API_KEY=secret hf-paged serve MODEL &  # a comment", True),
        ("python -m hf_paged.serving.api_server --model MODEL", True),
        ("hf-paged transformers-serve MODEL", True),
        ("hf-paged serve --help", False),
        ("hf-paged bench serve --base-url URL", False),
    ],
)
def test_lines_that_start_a_server_are_known(line, starts):
    assert _starts_server(line) is starts


def test_a_block_with_a_reason_is_not_run(tmp_path):
    run_text(tmp_path, "<!-- not run: it would fail -->\n```python\nmissing\n```\n")
