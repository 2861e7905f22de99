"""Compiles grammars, in a process of its own that may crash, hang or run out of memory. Imports nothing of hf_paged.

A grammar that compiles here, within a small stack, compiles in the engine's process too; one that ends this process
(chains of thousands of rules overflow the stack of any compiler that is written recursively) ends nothing else.

Messages are JSON, one a line, on standard input and output:

    {"tokenizer": id, "definition": {"json": ..., "vocab_size": ..., "eos_token_ids": [...]}}    -> {"ready": true}
    {"tokenizer": id, "kind": "json", "text": ..., "options": {...}}    -> {"grammar": ..., "num_bytes": ...}

The answer to what is wrong is {"error": ...}.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

STACK_BYTES = 2 * 2**20  # the engine's process has more
MAX_MASK_SECONDS = 0.1  # a grammar whose first mask takes longer would hold up whole batches
MAX_TOKENIZERS = 4
_LIMITS = {"max_lexer_states": 50_000, "verbose_errors": False}
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_SOURCE_LINES = re.compile(r"\n +\d+ \| .*", re.DOTALL)  # how the library shows where something is wrong
_META = re.compile(r"[\\.+*?()|\[\]{}^$]")  # nothing else may be escaped: `\<` is the beginning of a word


def limits() -> Any:
    """Returns what bounds the work of a grammar: when it is compiled, and in each mask."""
    from llguidance import LLParserLimits

    return LLParserLimits(**_LIMITS)  # type: ignore[arg-type]


def make_tokenizer(definition: dict[str, Any]) -> Any:
    """Returns a tokenizer as the grammar library has it.

    Args:
        definition (`dict[str, Any]`):
            `json` (of the tokenizers library), `vocab_size` and `eos_token_ids`.
    """
    from llguidance import LLTokenizer

    eos = definition["eos_token_ids"] or None  # without one the library guesses, and nobody uses it
    return LLTokenizer(definition["json"], n_vocab=definition["vocab_size"], eos_token=eos)


def to_grammar(tokenizer: Any, kind: str, text: str, options: dict[str, Any]) -> str:
    """Returns what the grammar library compiles.

    Args:
        tokenizer (`LLTokenizer`):
            Knows which triggers are tokens.
        kind (`str`):
            What the text is.
        text (`str`):
            A schema, an expression, a grammar, or the JSON of choices or tags.
        options (`dict[str, Any]`):
            How JSON is written.

    Raises:
        ValueError: If it is malformed.
    """
    from llguidance import LLMatcher, regex_to_lark

    if kind == "json":
        return LLMatcher.grammar_from_json_schema(text, overrides=options)  # type: ignore[arg-type]
    if kind == "regex":  # \d and \w are ASCII, as in the patterns of JSON schemas
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(text, 'dw')}/")
    if kind == "choice":
        return LLMatcher.grammar_from_regex("|".join(_META.sub(r"\\\g<0>", choice) for choice in json.loads(text)))
    if kind == "structural_tag":
        return LLMatcher.grammar_from_lark(_tags_to_lark(tokenizer, json.loads(text)["tags"], options))
    if _GBNF_RULE.search(text):
        from llguidance.gbnf_to_lark import gbnf_to_lark

        text = gbnf_to_lark(text)
    return LLMatcher.grammar_from_lark(text)


def _tags_to_lark(tokenizer: Any, tags: list[dict[str, Any]], options: dict[str, Any]) -> str:
    lines = [
        "%llguidance {}",
        f"start: ({' | '.join(f'tag_{i}' for i in range(len(tags)))})* TEXT",
        r"TEXT: /(.|\n)*/",
    ]
    for i, tag in enumerate(tags):
        trigger, rest = tag["trigger"], tag["begin"][len(tag["trigger"]) :]
        token_ids = tokenizer.tokenize_str(trigger, parse_special=True)
        if len(token_ids) == 1 and tokenizer.is_special_token(token_ids[0]):
            head = f"TEXT <[{token_ids[0]}]>"
        else:
            lines.append(f"head_{i}[lazy]: TEXT {json.dumps(trigger)}")
            head = f"head_{i}"
        body = json.dumps({**tag["schema"], "x-guidance": options})
        parts = [head, json.dumps(rest) if rest else "", f"%json {body}", json.dumps(tag["end"]) if tag["end"] else ""]
        lines.append(f"tag_{i}: {' '.join(part for part in parts if part)}")
    return "\n".join(lines)


def compile_grammar(tokenizer: Any, grammar: str) -> Any:
    """Returns a matcher at the start of a grammar, which has computed its first mask.

    Args:
        tokenizer (`LLTokenizer`):
            The tokenizer.
        grammar (`str`):
            What `to_grammar` returned.

    Raises:
        ValueError: If it does not compile, or allows nothing.
    """
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(shorten(matcher.get_error()))
    return matcher


def shorten(message: str) -> str:
    """Returns the part of a library's message that tells a user something.

    Args:
        message (`str`):
            Perhaps many lines, with the state of a parser in them.
    """
    for mark in ("<state>", "<backtrace>", "<non-verbose/>"):
        message = message.split(mark)[0].strip()
    message = _SOURCE_LINES.sub("", _of_expression(message))
    if "NoExtension" in message:
        message = "no answer can follow it"
    elif message.startswith("panic: assertion failed: grammar.symbols"):
        message = "it has too many symbols"
    message = " ".join(message.split())
    return message if len(message) <= 300 else message[:300] + "..."


def _of_expression(message: str) -> str:
    """What is wrong with a regular expression, and where, without the library's drawing of it."""
    before, found, drawing = message.partition("regex parse error:\n    ")
    expression, _, rest = drawing.partition("\n    ")
    arrow, _, problem = rest.partition("\nerror: ")
    if found and problem:
        place = expression[len(arrow) - len(arrow.lstrip()) :]
        return before.partition("invalid regex ")[0] + f"{problem.splitlines()[0]}, at {place[:40]!r}"
    before, found, _ = message.partition(" (in regex): lookarounds not supported yet")
    if found:
        return before.partition("invalid regex ")[0] + r"`\b`, and `^` and `$` within an expression, are not supported"
    return message


class _Mallinfo(ctypes.Structure):
    _names = "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


def _allocated_bytes() -> Callable[[], int]:
    """Returns what counts the bytes in use; the caller sees to it that malloc has one arena."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):  # only glibc has it
        return lambda: 0
    mallinfo.restype = _Mallinfo

    def count() -> int:
        info = mallinfo()
        return info.uordblks + info.hblkhd

    return count


class _Server:
    """Answers messages, one after the other."""

    def __init__(self) -> None:
        self._tokenizers: dict[str, Any] = {}
        self._allocated = _allocated_bytes()

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            if "definition" in message:
                return self._define(message["tokenizer"], message["definition"])
            return self._compile(message)
        except (ValueError, RecursionError) as error:
            return {"error": "it is nested too deeply" if isinstance(error, RecursionError) else shorten(str(error))}
        except MemoryError:
            return {"error": "it needs too much memory"}
        except Exception as error:
            return {"error": shorten(f"{type(error).__name__}: {error}")}

    def _define(self, name: str, definition: dict[str, Any]) -> dict[str, Any]:
        while len(self._tokenizers) >= MAX_TOKENIZERS:
            del self._tokenizers[next(iter(self._tokenizers))]
        self._tokenizers[name] = make_tokenizer(definition)
        return {"ready": True}

    def _compile(self, message: dict[str, Any]) -> dict[str, Any]:
        tokenizer = self._tokenizers[message["tokenizer"]]
        grammar = to_grammar(tokenizer, message["kind"], message["text"], message["options"])
        before = self._allocated()
        matcher = compile_grammar(tokenizer, grammar)
        num_bytes = max(self._allocated() - before, 0)
        copy = matcher.deep_copy()
        started = time.perf_counter()
        copy.compute_bitmask()
        seconds = time.perf_counter() - started
        if seconds > MAX_MASK_SECONDS:
            raise ValueError(f"finding the tokens that it allows takes {seconds:.1f} s, which is too long")
        return {"grammar": grammar, "num_bytes": num_bytes}


def main() -> None:
    """Answers messages until there are no more."""
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # whatever a library prints is no answer
    server = _Server()

    def serve() -> None:
        for line in sys.stdin.buffer:
            print(json.dumps(server.answer(json.loads(line))), file=answers, flush=True)

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
