"""Text from tokens, a few at a time: what has been sent is never taken back, and nothing is sent that may change."""

from __future__ import annotations

import codecs
import re
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\ufffd"
_WINDOW = 8  # tokens of context that are decoded again, so that spaces between tokens come out right
# What `PreTrainedTokenizerBase.clean_up_tokenization` replaces, in its order.
_CLEAN_UPS = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


class IncrementalDetokenizer:
    """Decodes an answer as its tokens arrive.

    The pieces joined are `tokenizer.decode(output_ids, skip_special_tokens=...)`: the answer decoded by itself, as
    Transformers users do. Tokenizers that mark words by a leading space (SentencePiece) then write none at the
    answer's beginning. With `after_prompt`, the text is what the answer adds to the decoded prompt, so that the two
    can be joined (vLLM's rule); for byte-level tokenizers both are the same.

    Byte-level tokenizers (GPT-2, Llama 3, Qwen, SmolLM2, ...) take a table of each token's bytes, after a proof on
    sample tokens that this gives what `decode` gives; all others decode a short window of tokens twice per token.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            A Transformers tokenizer, fast or slow.
        prompt_token_ids (`Sequence[int]`):
            The prompt.
        skip_special_tokens (`bool`, defaults to `True`):
            Leave special tokens out of the text.
        after_prompt (`bool`, defaults to `False`):
            Decode the answer as the prompt's continuation rather than by itself.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool = True,
        after_prompt: bool = False,
    ):
        table = byte_table(tokenizer, skip_special_tokens)
        self._decoder: _Decoder
        if table is not None:
            self._decoder = _ByteLevelDecoder(table)
        else:
            context = prompt_token_ids if after_prompt else ()
            self._decoder = _WindowDecoder(tokenizer, context, skip_special_tokens)
        self._clean_ups = [_Replacement(*pair) for pair in _CLEAN_UPS] if _cleans_up(tokenizer) else []
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """Returns all text that was given out so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def append(self, token_ids: Sequence[int]) -> str:
        """Takes new tokens and returns the new text that is certain, perhaps none.

        Args:
            token_ids (`Sequence[int]`):
                The answer's next tokens.

        Returns:
            `str`: Text to append. Characters of which bytes are missing are held back.
        """
        return self._give(self._decoder.append(token_ids), last=False)

    def finish(self) -> str:
        """Returns the rest of the text, once no more tokens will come; incomplete characters become U+FFFD."""
        return self._give(self._decoder.finish(), last=True)

    def _give(self, text: str, last: bool) -> str:
        for clean_up in self._clean_ups:
            text = clean_up.append(text) + (clean_up.finish() if last else "")
        if text:
            self._pieces.append(text)
        return text


class _Decoder(Protocol):
    """Tokens in, certain text out."""

    def append(self, token_ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class _ByteLevelDecoder:
    """Tokens are bytes; the text is their UTF-8."""

    def __init__(self, table: ByteTable):
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def append(self, token_ids: Sequence[int]) -> str:
        table = self._table
        return self._utf8.decode(b"".join([table[token_id] for token_id in token_ids]))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """Works with any tokenizer: decodes the last few tokens with and without the new ones.

        tokens   | ........ | context (text given out) | new |
                            ^ start                    ^ end

    Text is held back while it ends in U+FFFD, and while the last token is a byte token (`<0x..>`): those are decoded
    run by run, and one wrong byte spoils the whole run.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int], skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._skipped = frozenset(tokenizer.all_special_ids) if skip_special_tokens else frozenset()
        self._token_ids = self._context(prompt_token_ids)
        self._num_context = len(self._token_ids)
        self._start = 0
        self._end = len(self._token_ids)
        self._length = 0  # characters given out

    def append(self, token_ids: Sequence[int]) -> str:
        return "".join([self._append_one(token_id) for token_id in token_ids])

    def finish(self) -> str:
        if self._end == len(self._token_ids):
            return ""
        # The whole is decoded once more: the window may have held back more than it had to.
        before = self._decode(self._token_ids[: self._num_context])
        text = self._decode(self._token_ids)[len(before) + self._length :]
        self._end = len(self._token_ids)
        return text

    def _append_one(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        if token_id in self._skipped:
            return ""
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if isinstance(token, str) and _BYTE_TOKEN.fullmatch(token):
            return ""
        known = self._decode(self._token_ids[self._start : self._end])
        text = self._decode(self._token_ids[self._start :])
        if len(text) <= len(known) or text.endswith(_REPLACEMENT) or not text.startswith(known):
            return ""
        self._end = len(self._token_ids)
        self._length += len(text) - len(known)
        self._move_window()
        return text[len(known) :]

    def _move_window(self) -> None:
        start = self._end - _WINDOW
        # The context must hold text of its own, or the next word would lose its space as if it were the first.
        if start - self._start >= _WINDOW and self._decode(self._token_ids[start : self._end]).strip():
            self._start = start

    def _context(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """Returns the end of the prompt that holds text, or all of it."""
        size = _WINDOW
        while size < len(prompt_token_ids) and not self._decode(list(prompt_token_ids[-size:])).strip():
            size *= 2
        return list(prompt_token_ids[-size:])

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
        )


class _Replacement:
    """`str.replace` over a text that arrives in pieces."""

    def __init__(self, old: str, new: str):
        self._old = old
        self._new = new
        self._held = ""

    def append(self, text: str) -> str:
        if not text:
            return ""
        *parts, rest = (self._held + text).split(self._old)
        held = next(n for n in range(len(self._old) - 1, -1, -1) if rest.endswith(self._old[:n]))
        self._held = rest[len(rest) - held :]
        return self._new.join([*parts, rest[: len(rest) - held]])

    def finish(self) -> str:
        text, self._held = self._held, ""
        return text


def _cleans_up(tokenizer: Any) -> bool:
    """Returns whether `decode` cleans up spaces by default; Transformers does not for BPE unless it is forced."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    backend = getattr(tokenizer, "backend_tokenizer", None)
    forced = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    return backend is None or type(backend.model).__name__ != "BPE" or bool(forced)


def _byte_alphabet() -> dict[str, int]:
    """Returns the bytes that the 256 characters of byte-level tokens stand for (Radford et al. 2019, GPT-2).

    Printable characters stand for their own code; the others, in order, are the characters from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


class ByteTable(dict[int, bytes]):
    """Token id -> its bytes, filled as tokens are met.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            The tokenizer; referred to weakly, as the table is kept with it.
        skipped (`frozenset[int]`):
            Tokens that leave no text.
    """

    def __init__(self, tokenizer: Any, skipped: frozenset[int]):
        super().__init__()
        self._tokenizer = weakref.ref(tokenizer)
        self._skipped = skipped

    def __missing__(self, token_id: int) -> bytes:
        tokenizer = self._tokenizer()
        assert tokenizer is not None, "a byte table was used after its tokenizer was gone"
        token = None if token_id in self._skipped else tokenizer.convert_ids_to_tokens(token_id)
        if token is None:  # special, or no such token: `decode` leaves it out
            data = b""
        elif all(char in _ALPHABET for char in token):
            data = bytes([_ALPHABET[char] for char in token])
        else:
            data = token.encode()  # an added token's plain text
        self[token_id] = data
        return data


# Per tokenizer: its size when the table was made (added tokens change it), and the table or None, by whether special
# tokens are skipped.
_TABLES: weakref.WeakKeyDictionary[Any, dict[tuple[int, bool], ByteTable | None]] = weakref.WeakKeyDictionary()


def byte_table(tokenizer: Any, skip_special_tokens: bool) -> ByteTable | None:
    """Returns the bytes of each token of a byte-level tokenizer, made once per tokenizer.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            A Transformers tokenizer.
        skip_special_tokens (`bool`):
            Whether special tokens leave no text.

    Returns:
        `ByteTable` or `None`: None if the tokens' bytes, joined, are not what the tokenizer decodes.
    """
    tables = _TABLES.setdefault(tokenizer, {})
    key = (len(tokenizer), skip_special_tokens)
    if key not in tables:
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = frozenset(token_id for token_id, token in added.items() if token.special)
        table = ByteTable(tokenizer, special if skip_special_tokens else frozenset())
        tables[key] = table if _agrees(table, tokenizer, skip_special_tokens, list(added)) else None
    return tables[key]


def _agrees(table: ByteTable, tokenizer: Any, skip_special_tokens: bool, added: list[int]) -> bool:
    """Returns whether a table decodes as the tokenizer does: single tokens, and many in disorder (invalid UTF-8)."""
    size = len(tokenizer)
    sample = [(i * 7919 + 13) % size for i in range(min(size, 500))]
    mixed = [token_id for i, token_id in enumerate(sample) for token_id in (*added[i : i + 1], token_id)]
    for token_ids in ([], *([token_id] for token_id in (*sample[:100], *added[:100])), mixed, mixed[::-1]):
        expected = tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        if b"".join([table[token_id] for token_id in token_ids]).decode("utf-8", "replace") != expected:
            return False
    return True
