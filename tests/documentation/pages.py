"""The pages of the documentation, taken apart: code blocks, links, headings, words in code."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# How blocks of a language are proved. Those of any other need a reason why they are not.
RUN = ("python", "bash")
PARSED = ("json", "yaml", "toml")
SHOWN = ("", "text")
_FENCE = re.compile(r"^(\s*)(`{3,}|~{3,})\s*([\w+-]*)\s*$")
_REASON = re.compile(r"^\s*<!--\s*not run:\s*(.*?)\s*-->\s*$")
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_TAG_LINK = re.compile(r"<(?:img|a|source)\b[^>]*?\b(?:src|href|srcset)=\"([^\"]+)\"")
_INLINE_CODE = re.compile(r"(?<!`)(`+)(?!`)((?:(?!\n\s*\n).)+?)(?<!`)\1(?!`)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced code block.

    Args:
        page (`Path`):
            Where it stands.
        line (`int`):
            The number of its first line, that after the fence.
        language (`str`):
            What the fence says.
        text (`str`):
            What is in it.
        reason (`str`, *optional*):
            What a comment `<!-- not run: reason -->` on the line before the fence says.
    """

    page: Path
    line: int
    language: str
    text: str
    reason: str | None

    @property
    def place(self) -> str:
        """File and line, as editors understand it."""
        return f"{_name(self.page)}:{self.line}"

    @property
    def treatment(self) -> str:
        """What is done with it: `run`, `parsed`, `shown`, `not run`, or `unknown`."""
        if self.reason is not None:
            return "not run"
        kinds = {"run": RUN, "parsed": PARSED, "shown": SHOWN}
        return next((kind for kind, languages in kinds.items() if self.language in languages), "unknown")


@dataclasses.dataclass(frozen=True)
class Page:
    """A page of Markdown.

    Args:
        path (`Path`):
            The file.
        blocks (`tuple[Block, ...]`):
            Its code blocks, in order.
        prose (`str`):
            All else; lines of code blocks are empty, so that line numbers stay.
        stray_reasons (`tuple[int, ...]`):
            Lines of `not run` comments that are not followed by a fence.
    """

    path: Path
    blocks: tuple[Block, ...]
    prose: str
    stray_reasons: tuple[int, ...]

    @property
    def name(self) -> str:
        """Its path in the repository."""
        return _name(self.path)

    @property
    def links(self) -> list[str]:
        """Targets of links and pictures."""
        prose = _INLINE_CODE.sub(lambda found: " " * len(found[0]), self.prose)
        return [*_LINK.findall(prose), *_TAG_LINK.findall(prose)]

    @property
    def inline_code(self) -> list[str]:
        """Words that stand as code in the prose."""
        return [" ".join(code.split()) for _, code in _INLINE_CODE.findall(self.prose)]

    @property
    def anchors(self) -> set[str]:
        """The names under which GitHub knows its headings."""
        found: dict[str, int] = {}
        names = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", self.prose))
        for heading in re.findall(r"^#{1,6}\s+(.*?)\s*#*\s*$", self.prose, re.MULTILINE):
            slug = slug_of(heading)
            names.add(f"{slug}-{found[slug]}" if slug in found else slug)
            found[slug] = found.get(slug, 0) + 1
        return names


def slug_of(heading: str) -> str:
    """Returns the anchor that GitHub makes of a heading."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


@functools.cache
def read_page(path: Path) -> Page:
    """Reads a page."""
    lines = path.read_text(encoding="utf-8").splitlines()
    blocks, prose, stray = [], [], []
    reason: tuple[int, str] | None = None
    number = 0
    while number < len(lines):
        line = lines[number]
        fence = _FENCE.match(line)
        if fence is None:
            if reason is not None:
                stray.append(reason[0])
            found = _REASON.match(line)
            reason = (number + 1, found[1]) if found else None
            prose.append(line)
            number += 1
            continue
        end = _end_of_block(lines, number, fence[2])
        content = [text.removeprefix(fence[1]) for text in lines[number + 1 : end]]
        why = reason[1] if reason is not None else None
        blocks.append(Block(path, number + 2, fence[3], "\n".join(content) + "\n", why))
        prose += [""] * (end + 1 - number)
        number, reason = end + 1, None
    if reason is not None:
        stray.append(reason[0])
    return Page(path, tuple(blocks), "\n".join(prose) + "\n", tuple(stray))


def _end_of_block(lines: list[str], start: int, fence: str) -> int:
    for number in range(start + 1, len(lines)):
        if re.fullmatch(rf"\s*{re.escape(fence[0])}{{{len(fence)},}}\s*", lines[number]):
            return number
    raise AssertionError(f"line {start + 1}: a code block that begins here has no end")


def documentation() -> list[Page]:
    """Returns the README and all pages of `docs`, whose blocks are run."""
    return [read_page(path) for path in (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))]


def other_pages() -> list[Page]:
    """Returns the pages for those who work on the project, and those beside what they describe."""
    folders = (ROOT, ROOT / "benchmarks", ROOT / "examples")
    found = {path for folder in folders for path in (folder.glob if folder == ROOT else folder.rglob)("*.md")}
    return [read_page(path) for path in sorted(found - {ROOT / "README.md"})]


def shell_lines(text: str) -> list[str]:
    """Returns the commands of a bash block: continued lines joined, comments and empty lines left out."""
    joined = re.sub(r"\\\n\s*", " ", text)
    return [line for line in joined.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
