"""What pages name exists: verbs, flags, metrics, variables, extras, links, anchors and pictures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.documentation import names
from tests.documentation.pages import ROOT, Page, documentation, other_pages, read_page, slug_of

PAGES = [*documentation(), *other_pages()]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
ALL_TEXT = {page.name: page.path.read_text(encoding="utf-8") for page in PAGES}


def broken_links(page: Page) -> list[str]:
    """Links of a page that lead nowhere in the repository."""
    wrong = []
    for link in page.links:
        if re.match(r"[a-z][a-z0-9+.-]*:", link) or link.startswith("//"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.path.parent / name).resolve() if name else page.path
        if not target.exists():
            wrong.append(f"{link}: there is no such file")
        elif not target.is_relative_to(ROOT) and page.path.is_relative_to(ROOT):
            wrong.append(f"{link}: it is outside of the repository")
        elif anchor and target.suffix == ".md" and anchor not in read_page(target).anchors:
            wrong.append(f"{link}: the page has no such heading; it has {sorted(read_page(target).anchors)}")
    return wrong


@every_page
def test_links_anchors_and_pictures_exist(page):
    assert not broken_links(page)


@every_page
def test_commands_have_verbs_and_flags_that_exist(page):
    wrong = [
        f"{place}: {mistake}"
        for command, place in names.commands_of(page)
        for mistake in names.mistakes_in_command(command)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", documentation(), ids=lambda page: page.name)
def test_flags_that_are_named_alone_exist(page):
    unknown = sorted(names.flags_named_alone(page) - names.known_flags())
    assert not unknown, f"no verb of hf-paged has {unknown} (those of other programs: names.OF_OTHERS)"


@every_page
def test_metrics_exist(page):
    named = set(re.findall(r"\b((?:hf_paged|vllm):[a-z]\w*)", ALL_TEXT[page.name]))
    unknown = sorted(named - names.metric_names()) if named else []
    assert not unknown, f"/metrics has no {unknown}"


@every_page
def test_variables_of_the_environment_exist(page):
    named = set(re.findall(r"\bHF_PAGED_[A-Z_]*[A-Z]\b", ALL_TEXT[page.name]))
    assert named <= names.variables(), f"nothing reads {sorted(named - names.variables())}"


@every_page
def test_extras_exist(page):
    listed = re.findall(r"pip install [^\n`]*?(?:hf-paged|\.)\[([\w,-]+)\]", ALL_TEXT[page.name])
    named = {extra for some in listed for extra in some.split(",")}
    assert named <= names.extras(), f"pyproject.toml has no extra {sorted(named - names.extras())}"


@every_page
def test_pictures_say_in_words_what_they_show(page):
    images = re.findall(r"!\[([^\]]*)\]\(", page.prose)
    images += re.findall(r"<img\b(?![^>]*\balt=\"[^\"]+\")[^>]*>", page.prose)
    assert all(text.strip() and not text.startswith("<img") for text in images), images


def test_every_page_is_listed_in_the_index():
    index = read_page(ROOT / "docs" / "README.md")
    listed = {(index.path.parent / link.partition("#")[0]).resolve() for link in index.links}
    missing = [page.name for page in documentation()[1:] if page.path not in {*listed, index.path}]
    assert not missing, f"docs/README.md should say who reads {missing}"


@pytest.mark.parametrize(
    ("command", "mistake"),
    [
        ("serve MODEL --max-num-seqs 8 --no-enable-prefix-caching", None),
        ("serve MODEL --max-sequences 8", "no flag `--max-sequences`"),
        ("serves MODEL", "no `hf-paged serves`"),
        ("bench throughput|prefix --json FILE", None),
        ("bench throughput|speed", "no `hf-paged bench speed`"),
        ("bench serve --base-url URL --goodput ttft:200", None),
        ("bench serve --rate 2", "no flag `--rate`"),
        ("transformers-serve MODEL --port 8000 --paged-config '{}'", None),
        ("run-batch -i in.jsonl -o out.jsonl MODEL --max-num-seqs 8", None),
        ("--version", None),
        ("--version --verbose", "no verb has `--verbose`"),
    ],
)
def test_mistakes_in_commands_are_found(command, mistake):
    found = "; ".join(names.mistakes_in_command(command))
    assert found == "" if mistake is None else mistake in found


@pytest.mark.parametrize(
    ("heading", "slug"),
    [
        ("How fast", "how-fast"),
        ("Many requests: `generate_batch`, the manager, `transformers serve`",
         "many-requests-generate_batch-the-manager-transformers-serve"),
        ("A [link](x.md) & more", "a-link--more"),
    ],
)  # fmt: skip
def test_anchors_are_those_of_github(heading, slug):
    assert slug_of(heading) == slug


def test_links_that_lead_nowhere_are_found(tmp_path: Path):
    (tmp_path / "other.md").write_text("# Here\n\ntext\n\n# Here\n")
    page = tmp_path / "page.md"
    page.write_text("[a](other.md#here) [b](other.md#here-1) ![c](no.svg) [`d`](other.md#there) `[e](no)`\n")
    assert [link.partition(":")[0] for link in broken_links(read_page(page))] == ["no.svg", "other.md#there"]


@pytest.mark.parametrize("name", ["hf_paged:num_requests_running", "vllm:time_to_first_token_seconds_bucket"])
def test_known_metrics_are_known(name):
    assert name in names.metric_names() and f"{name}s" not in names.metric_names()
