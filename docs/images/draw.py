"""Draws the pictures of the documentation: `python docs/images/draw.py` writes them anew, beside itself.

They are plain SVG with text as text, on a white card, so that they can be read on light and dark pages.
"""

from __future__ import annotations

import dataclasses
from html import escape
from pathlib import Path

INK, PALE, LINE, EMPTY, CARD = "#1f2328", "#57606a", "#8c959f", "#f6f8fa", "#ffffff"
# Colours that people who see fewer colours can tell apart (Okabe and Ito), and darker ones for text on white.
COLOURS = {"A": "#0072b2", "B": "#e69f00", "C": "#009e73", "D": "#cc79a7", "E": "#56b4e9", "F": "#d55e00"}
SANS = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
ON_DARK = {"A", "C", "F"}


class Drawing:
    """An SVG picture on a white card.

    Args:
        width (`int`):
            In pixels.
        height (`int`):
            In pixels.
        title (`str`):
            What the picture shows, for those who cannot see it.
    """

    def __init__(self, width: int, height: int, title: str):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" font-family="{SANS}" font-size="14" fill="{INK}">',
            f"<title>{escape(title)}</title>",
            '<defs><pattern id="unused" width="7" height="7" patternUnits="userSpaceOnUse" '
            f'patternTransform="rotate(45)"><rect width="7" height="7" fill="{EMPTY}"/>'
            '<line x1="0" y1="0" x2="0" y2="7" stroke="#c4cbd3" stroke-width="2.4"/></pattern>'
            '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5.5" markerHeight="5.5" '
            f'orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 z" fill="{PALE}"/></marker></defs>',
            f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="10" fill="{CARD}" stroke="#d0d7de"/>',
        ]

    def box(self, x: float, y: float, w: float, h: float, fill: str = EMPTY, **how: object) -> None:
        """A rectangle."""
        line, round_, width = how.get("line", LINE), how.get("rx", 3), how.get("width", 1)
        dash = f' stroke-dasharray="{how["dash"]}"' if "dash" in how else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{round_}" fill="{fill}" stroke="{line}" '
            f'stroke-width="{width}"{dash}/>'
        )

    def text(self, x: float, y: float, words: str, **how: object) -> None:
        """A line of text; `y` is its base line."""
        styles = {
            "font-size": how.get("size"),
            "font-weight": "600" if how.get("bold") else None,
            "fill": how.get("fill"),
            "text-anchor": how.get("anchor"),
            "font-family": MONO if how.get("mono") else None,
        }
        style = "".join(f' {name}="{value}"' for name, value in styles.items() if value is not None)
        self.parts.append(f'<text x="{x:g}" y="{y:g}"{style}>{escape(words)}</text>')

    def arrow(self, *points: tuple[float, float], dash: str | None = None) -> None:
        """A line through some points, with a tip at its end."""
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<path d="M{path}" fill="none" stroke="{PALE}" stroke-width="1.6" marker-end="url(#tip)"{dashes}/>'
        )

    def cell(self, x: float, y: float, w: float, h: float, owner: str, words: str = "") -> None:
        """A filled cell of a request, with a word in it."""
        self.box(x, y, w, h, COLOURS[owner], line=CARD, rx=2)
        if words:
            fill = "#ffffff" if owner in ON_DARK else INK
            self.text(x + w / 2, y + h / 2 + 4.5, words, anchor="middle", size=12.5, fill=fill)

    def save(self, name: str) -> None:
        """Writes the file."""
        path = Path(__file__).with_name(name)
        path.write_text("\n".join([*self.parts, "</svg>"]) + "\n", encoding="utf-8")


# ---------------------------------------------------------------- memory


@dataclasses.dataclass(frozen=True)
class Held:
    """A request and the tokens that it has stored."""

    name: str
    prompt: int
    answer: int


REQUESTS = (Held("A", 9, 14), Held("B", 5, 4), Held("C", 12, 5), Held("D", 3, 7))
ROOM = 28  # slots that a row is given where it has to be one piece
BLOCK = 4


def memory(drawing: Drawing, x: float, y: float) -> None:
    """The same four requests in one piece each, and in blocks."""
    slot, height, gap = 13, 24, 8
    used = sum(request.prompt + request.answer for request in REQUESTS)
    drawing.text(x, y, "One piece for each request", bold=True, size=15)
    drawing.text(x, y + 20, "as long as its answer might become", fill=PALE)
    for number, request in enumerate(REQUESTS):
        top = y + 36 + number * (height + gap)
        drawing.box(x, top, ROOM * slot, height, "url(#unused)")
        stored = request.prompt + request.answer
        drawing.cell(x, top, stored * slot, height, request.name, request.name)
    below = y + 36 + len(REQUESTS) * (height + gap)
    waste = 1 - used / (ROOM * len(REQUESTS))
    drawing.text(x, below + 18, f"{ROOM * len(REQUESTS)} slots reserved, {used} used: {waste:.0%} wasted (hatched)")

    left, columns = x + ROOM * slot + 64, 7
    blocks = [
        (request.name, min(BLOCK, request.prompt + request.answer - start))
        for request in REQUESTS
        for start in range(0, request.prompt + request.answer, BLOCK)
    ]
    # As they come to be handed out: a request's blocks lie anywhere.
    order = [0, 6, 9, 14, 1, 7, 10, 15, 2, 8, 11, 16, 3, 12, 4, 13, 5]
    order = [number for number in order if number < len(blocks)]
    drawing.text(left, y, "Blocks, handed out as tokens need them", bold=True, size=15)
    drawing.text(left, y + 20, f"hf_paged; drawn with {BLOCK} tokens a block, in fact 16", fill=PALE)
    width = BLOCK * slot
    for place in range(columns * 4):
        px = left + place % columns * (width + 7)
        top = y + 36 + place // columns * (height + gap)
        if place >= len(order):
            drawing.box(px, top, width, height, CARD, dash="3 3", line="#afb8c1")
            continue
        name, stored = blocks[order[place]]
        drawing.box(px, top, width, height, "url(#unused)")
        drawing.cell(px, top, stored * slot, height, name, name)
    waste = 1 - used / (len(blocks) * BLOCK)
    free = columns * 4 - len(blocks)
    drawing.text(
        left, below + 18, f"{len(blocks) * BLOCK} slots held, {used} used: {waste:.0%} wasted, {free} blocks free"
    )


# ---------------------------------------------------------------- time


ANSWERS = {"A": 9, "B": 3, "C": 5, "D": 2, "E": 6, "F": 4}
SEATS = 3


def static_batches() -> list[list[tuple[int, int, str]]]:
    """Returns, for each seat, who sits there from which step to which; a batch ends with its longest answer."""
    seats: list[list[tuple[int, int, str]]] = [[] for _ in range(SEATS)]
    names, start = list(ANSWERS), 0
    while names:
        batch, names = names[:SEATS], names[SEATS:]
        for seat, name in enumerate(batch):
            seats[seat].append((start, start + ANSWERS[name], name))
        start += max(ANSWERS[name] for name in batch)
    return seats


def continuous_batches() -> list[list[tuple[int, int, str]]]:
    """Returns the same where a seat that is free is taken at once."""
    seats: list[list[tuple[int, int, str]]] = [[] for _ in range(SEATS)]
    ends = [0] * SEATS
    for name, length in ANSWERS.items():
        seat = ends.index(min(ends))
        seats[seat].append((ends[seat], ends[seat] + length, name))
        ends[seat] += length
    return seats


def timeline(
    drawing: Drawing, x: float, y: float, title: str, words: str, seats: list[list[tuple[int, int, str]]]
) -> None:
    """One row for each seat, one column for each step."""
    step, height, gap = 25, 24, 8
    last = max(end for seat in seats for _, end, _ in seat)
    drawing.text(x, y, title, bold=True, size=15)
    drawing.text(x, y + 20, words, fill=PALE)
    for number, seat in enumerate(seats):
        top = y + 36 + number * (height + gap)
        drawing.box(x, top, last * step, height, "url(#unused)")
        for start, end, name in seat:
            drawing.cell(x + start * step, top, (end - start) * step, height, name, name)
    below = y + 36 + len(seats) * (height + gap) + 14
    busy = sum(end - start for seat in seats for start, end, _ in seat) / (last * len(seats))
    drawing.text(x, below + 4, f"{last} steps, {1 - busy:.0%} of the seats idle")


def batching(drawing: Drawing, x: float, y: float) -> None:
    """Six answers of different lengths in three seats, twice."""
    timeline(
        drawing,
        x,
        y,
        "Static batches wait for the longest",
        "a row is a seat; time goes to the right",
        static_batches(),
    )
    timeline(
        drawing, x + 428, y, "A free seat is taken at once", "hf_paged; the same six answers", continuous_batches()
    )


def draw_overview() -> None:
    """The README's picture."""
    drawing = Drawing(900, 460, "The same memory in pieces and in blocks; the same answers in batches and continuously")
    memory(drawing, 28, 40)
    drawing.parts.append('<line x1="28" y1="252" x2="872" y2="252" stroke="#d0d7de"/>')
    batching(drawing, 28, 284)
    drawing.save("overview.svg")


def draw_memory() -> None:
    """Waste in pieces and in blocks."""
    drawing = Drawing(900, 244, "Four requests in one piece each, and in blocks")
    memory(drawing, 28, 40)
    drawing.save("memory.svg")


def draw_batching() -> None:
    """Static and continuous batches."""
    drawing = Drawing(900, 216, "Six answers in three seats, in static batches and continuously")
    batching(drawing, 28, 40)
    drawing.save("batching.svg")


# ---------------------------------------------------------------- blocks and tables


def block(drawing: Drawing, x: float, y: float, owner: str, words: str, number: int | str = "") -> None:
    """A block of four slots with the words in them."""
    tokens = words.split()
    for slot in range(BLOCK):
        if slot < len(tokens):
            drawing.cell(x + slot * 40, y, 40, 28, owner, tokens[slot])
        else:
            drawing.box(x + slot * 40, y, 40, 28, "url(#unused)", line=CARD)
    drawing.box(x, y, BLOCK * 40, 28, "none", line=INK, width=1.2)
    if number != "":
        drawing.text(x + BLOCK * 20, y + 46, f"block {number}", anchor="middle", size=12.5, fill=PALE)


def table(drawing: Drawing, x: float, y: float, who: str, entries: list[int]) -> None:
    """A request's block table, one line for each block."""
    drawing.text(x + 60, y - 10, who, anchor="middle", bold=True)
    for number, entry in enumerate(entries):
        top = y + number * 62
        drawing.box(x, top, 84, 28, EMPTY, line=LINE, rx=0)
        drawing.text(x + 42, top + 19, f"{number * BLOCK} to {number * BLOCK + BLOCK - 1}", anchor="middle", size=12.5)
        drawing.box(x + 84, top, 36, 28, CARD, line=INK, rx=0)
        drawing.text(x + 102, top + 19, str(entry), anchor="middle", mono=True)


def draw_blocks() -> None:
    """Two requests that begin alike; then two answers to one prompt."""
    drawing = Drawing(900, 428, "Block tables of requests that share blocks, and a copy on write")
    drawing.text(28, 36, "Two requests that begin alike share full blocks", bold=True, size=15)
    table(drawing, 28, 80, "request A", [7, 2])
    table(drawing, 752, 80, "request B", [7, 5])
    block(drawing, 370, 80, "C", "the cat sat on", 7)
    block(drawing, 236, 142, "A", "the mat and", 2)
    block(drawing, 504, 142, "B", "the rug", 5)
    drawing.arrow((148, 94), (366, 94))
    drawing.arrow((148, 156), (232, 156))
    drawing.arrow((752, 94), (534, 94))
    drawing.arrow((752, 156), (668, 156))
    drawing.text(450, 66, "computed once, read by both, never written again", anchor="middle", size=12.5, fill=PALE)
    drawing.parts.append('<line x1="28" y1="216" x2="872" y2="216" stroke="#d0d7de"/>')

    drawing.text(28, 248, "Two answers to one prompt: copy on write", bold=True, size=15)
    drawing.text(28, 280, "before", fill=PALE)
    block(drawing, 28, 292, "A", "Once upon", 4)
    drawing.text(28, 368, "both answers hold block 4,", size=13)
    drawing.text(28, 388, "which has two slots left", size=13)
    drawing.arrow((212, 306), (296, 306))
    drawing.text(254, 296, "write", anchor="middle", size=12.5, fill=PALE)
    drawing.text(320, 280, "after the next token", fill=PALE)
    block(drawing, 320, 292, "A", "Once upon a", 4)
    drawing.text(320, 368, "the first to write gets a copy,", size=13)
    drawing.text(320, 388, "so each goes on alone", size=13)
    block(drawing, 520, 292, "A", "Once upon", 9)
    drawing.cell(520 + 80, 292, 40, 28, "B", "one")
    drawing.box(520, 292, 160, 28, "none", line=INK, width=1.2)
    drawing.text(716, 296, "Only the last, partial", size=13, fill=PALE)
    drawing.text(716, 314, "block is copied; all", size=13, fill=PALE)
    drawing.text(716, 332, "full ones stay shared.", size=13, fill=PALE)
    drawing.save("blocks.svg")


# ---------------------------------------------------------------- a step


def labelled(drawing: Drawing, x: float, y: float, w: float, h: float, title: str, *lines: str) -> None:
    """A box with a heading and some lines."""
    drawing.box(x, y, w, h, EMPTY, line=LINE, rx=6)
    drawing.text(x + 14, y + 24, title, bold=True)
    for number, line in enumerate(lines):
        drawing.text(x + 14, y + 46 + number * 19, line, size=12.5, fill=PALE)


def draw_step() -> None:
    """One step: schedule, launch, collect."""
    drawing = Drawing(900, 330, "One step: the scheduler fills a row of tokens, the model computes it, answers grow")
    parts = {
        "1  schedule": (
            "running requests first: 1 token each,",
            "then waiting ones, in chunks,",
            "until the token budget is spent",
            "(max_num_batched_tokens)",
        ),
        "2  launch": (
            "your Transformers model, called",
            "once on one row of tokens;",
            "attention reads and writes K/V",
            "through the block tables",
        ),
        "3  collect": (
            "tokens are chosen and sent;",
            "who is done gives its blocks back",
            "(they stay findable as cached",
            "beginnings until needed)",
        ),
    }
    for number, (title, lines) in enumerate(parts.items()):
        labelled(drawing, 28 + number * 297, 28, 250, 128, title, *lines)
    drawing.arrow((278, 92), (321, 92))
    drawing.arrow((575, 92), (618, 92))
    drawing.arrow((747, 156), (747, 182), (153, 182), (153, 160))
    drawing.text(450, 176, "next step", anchor="middle", size=12.5, fill=PALE)

    drawing.text(28, 222, "The row of one step", bold=True, size=15)
    x, width = 28, 21
    row = [("A", 1), ("B", 1), ("D", 1), ("C", 9), ("E", 18)]
    for owner, count in row:
        for _ in range(count):
            drawing.cell(x, 234, width, 28, owner)
            x += width
    drawing.box(28, 234, 30 * width, 28, "none", line=INK, width=1.2)
    drawing.text(28, 284, "A B D decode:", size=12.5)
    drawing.text(28, 301, "one token each", size=12.5, fill=PALE)
    drawing.text(142, 284, "C: the rest of its prompt", size=12.5)
    drawing.text(142, 301, "its first chunk came before", size=12.5, fill=PALE)
    drawing.text(328, 284, "E: a chunk of a long prompt", size=12.5)
    drawing.text(328, 301, "the rest in the next steps", size=12.5, fill=PALE)
    drawing.text(28 + 30 * width, 284, "budget spent", size=12.5, anchor="end")
    drawing.text(690, 244, "Prompts and answers are", size=13, fill=PALE)
    drawing.text(690, 262, "one loop: every request", size=13, fill=PALE)
    drawing.text(690, 280, "catches up with its tokens.", size=13, fill=PALE)
    drawing.save("step.svg")


# ---------------------------------------------------------------- where calls go


def draw_routes() -> None:
    """Which calls the engine runs, and which Transformers' own loop."""
    drawing = Drawing(900, 372, "Which calls run on the engine and which in Transformers' own loop")
    calls = (
        ("plain greedy search and sampling,", "with Transformers' processors"),
        ("beams, custom processors, scores,", "attentions, stop strings, ..."),
        ("assisted decoding, your own cache,", "holes in the mask, a model that", "the engine cannot run"),
    )
    ways = (
        ("requests", "the engine's sampler", "chooses the tokens"),
        ("a session", "Transformers' code chooses,", "the engine computes"),
        ("Transformers' loop", "slower, and right;", "the log says so"),
    )
    for number, (call, way) in enumerate(zip(calls, ways, strict=True)):
        y, height = 28 + number * 108, 92 + 8 * (number == 2)
        labelled(drawing, 28, y, 262, height, "model.generate" + ", pipeline" * (number == 0), *call)
        labelled(drawing, 336, y, 220, height, *way)
    drawing.box(602, 28, 270, 200, "#ddf4ff", line=COLOURS["A"], rx=6)
    drawing.text(737, 58, "the engine", anchor="middle", bold=True, size=15)
    for number, line in enumerate(("one pool of blocks, one loop of steps", "shared by all calls and threads")):
        drawing.text(737, 82 + number * 19, line, anchor="middle", size=12.5, fill=PALE)
    drawing.text(737, 150, "always here:", anchor="middle", size=12.5, fill=PALE)
    for number, line in enumerate(("generate_batch, the manager,", "LLM, AsyncEngine, hf-paged serve")):
        drawing.text(737, 172 + number * 20, line, anchor="middle", size=13)
    labelled(
        drawing, 602, 244, 270, 100, "model(...), training", "a plain forward of your model;", "the engine is never met"
    )
    for y in (74, 182, 294):
        drawing.arrow((290, y), (332, y))
    for y in (74, 182):
        drawing.arrow((556, y), (598, y))
    drawing.save("routes.svg")


if __name__ == "__main__":
    for draw in (draw_overview, draw_memory, draw_batching, draw_blocks, draw_step, draw_routes):
        draw()
