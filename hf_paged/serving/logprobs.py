"""Log-probabilities in OpenAI's forms, with the exact bytes of each token."""

from __future__ import annotations

import codecs
import re
import weakref
from collections.abc import Sequence
from typing import Any

from ..generation.detokenizer import byte_table
from ..generation.outputs import Logprob

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """What single tokens stand for. A token may be part of a character: then its text is U+FFFD, its bytes are exact.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            The tokenizer; referred to weakly, as this is kept with it.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = weakref.ref(tokenizer)
        self._bytes: dict[int, bytes] = byte_table(tokenizer, skip_special_tokens=False) or _PieceBytes(tokenizer)
        self._special = frozenset(tokenizer.all_special_ids)
        self._texts: dict[int, str] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """Returns a token's bytes; none for an id that is no token.

        Args:
            token_id (`int`):
                The token.
        """
        return self._bytes[token_id]

    def text_of(self, token_id: int) -> str:
        """Returns a token's text.

        Args:
            token_id (`int`):
                The token.
        """
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._bytes[token_id].decode("utf-8", "replace")
        return text

    def shown_bytes(self, token_id: int, skip_special_tokens: bool) -> bytes:
        """Returns what a token adds to a text.

        Args:
            token_id (`int`):
                The token.
            skip_special_tokens (`bool`):
                Whether special tokens are left out of the text.
        """
        return b"" if skip_special_tokens and token_id in self._special else self._bytes[token_id]


class _PieceBytes(dict[int, bytes]):
    """Tokens of tokenizers whose texts are not bytes: SentencePiece's marks of spaces and bytes are undone."""

    def __init__(self, tokenizer: Any):
        super().__init__()
        self._tokenizer = weakref.ref(tokenizer)

    def __missing__(self, token_id: int) -> bytes:
        tokenizer = self._tokenizer()
        assert tokenizer is not None, "texts of tokens were asked for after their tokenizer was gone"
        piece = tokenizer.convert_ids_to_tokens(token_id) if token_id < len(tokenizer) else None
        if piece is None:
            data = b""
        elif byte := _BYTE_TOKEN.fullmatch(piece):
            data = bytes([int(byte[1], 16)])
        else:
            data = piece.replace("\u2581", " ").encode()
        self[token_id] = data
        return data


_TEXTS: weakref.WeakKeyDictionary[Any, tuple[int, TokenTexts]] = weakref.WeakKeyDictionary()


def token_texts(tokenizer: Any) -> TokenTexts:
    """Returns the texts of a tokenizer's tokens, made once per tokenizer.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            The tokenizer.
    """
    found = _TEXTS.get(tokenizer)
    if found is None or found[0] != len(tokenizer):  # added tokens change it
        found = _TEXTS[tokenizer] = len(tokenizer), TokenTexts(tokenizer)
    return found[1]


def _best(entry: dict[int, Logprob], count: int) -> list[tuple[int, Logprob]]:
    return sorted(entry.items(), key=lambda item: item[1].rank)[:count]


def _name(texts: TokenTexts, token_id: int, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else texts.text_of(token_id)


def chat_logprobs(
    texts: TokenTexts, token_ids: Sequence[int], entries: Sequence[dict[int, Logprob]], num_top: int, as_ids: bool
) -> dict[str, Any]:
    """Returns `logprobs` of a chat's choice.

    Args:
        texts (`TokenTexts`):
            Of the tokenizer.
        token_ids (`Sequence[int]`):
            The answer's tokens.
        entries (`Sequence[dict[int, Logprob]]`):
            For each of them, token id -> log-probability.
        num_top (`int`):
            How many of the best tokens to list.
        as_ids (`bool`):
            Name tokens `token_id:N`.
    """

    def shown(token_id: int, logprob: Logprob) -> dict[str, Any]:
        token = _name(texts, token_id, as_ids)
        return {"token": token, "logprob": logprob.logprob, "bytes": list(texts.bytes_of(token_id))}

    content = [
        {**shown(token_id, entry[token_id]), "top_logprobs": [shown(*item) for item in _best(entry, num_top)]}
        for token_id, entry in zip(token_ids, entries, strict=True)
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Writes `logprobs` of a completion's choice, all at once or piece by piece.

    Args:
        texts (`TokenTexts`):
            Of the tokenizer.
        num_top (`int`):
            How many of the best tokens to list; the token itself is always among them.
        as_ids (`bool`):
            Name tokens `token_id:N`.
        skip_special_tokens (`bool`):
            Whether special tokens are left out of the text that the offsets are about.
    """

    def __init__(self, texts: TokenTexts, num_top: int, as_ids: bool, skip_special_tokens: bool):
        self._texts = texts
        self._num_top = num_top
        self._as_ids = as_ids
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def of(
        self, token_ids: Sequence[int], entries: Sequence[dict[int, Logprob] | None], echoed: str = ""
    ) -> dict[str, Any]:
        """Returns `logprobs` of the next tokens.

        Args:
            token_ids (`Sequence[int]`):
                The tokens.
            entries (`Sequence[dict[int, Logprob] | None]`):
                For each of them, token id -> log-probability; `None` for a prompt's first token.
            echoed (`str`, *optional*, defaults to `""`):
                The prompt's text, if the answer begins with it: special tokens that stand in it are not left out.
        """
        offsets = []
        for token_id in token_ids:
            offsets.append(self._num_chars)
            stands_there = echoed.startswith(self._texts.text_of(token_id), self._num_chars)
            shown = self._texts.shown_bytes(token_id, self._skip_special_tokens and not stands_there)
            self._num_chars += len(self._utf8.decode(shown))
        return {
            "tokens": [_name(self._texts, token_id, self._as_ids) for token_id in token_ids],
            "token_logprobs": [
                None if entry is None else entry[token_id].logprob
                for token_id, entry in zip(token_ids, entries, strict=True)
            ],
            "top_logprobs": [
                None if entry is None else self._top(token_id, entry)
                for token_id, entry in zip(token_ids, entries, strict=True)
            ],
            "text_offset": offsets,
        }

    def _top(self, token_id: int, entry: dict[int, Logprob]) -> dict[str, float]:
        top: dict[str, float] = {}
        for other, logprob in [*_best(entry, self._num_top), (token_id, entry[token_id])]:
            # Different tokens may have one text (parts of characters): the most probable one is listed.
            top.setdefault(_name(self._texts, other, self._as_ids), logprob.logprob)
        return top


def prompt_logprobs(texts: TokenTexts, entries: Sequence[dict[int, Logprob] | None]) -> list[Any]:
    """Returns `prompt_logprobs` in vLLM's form.

    Args:
        texts (`TokenTexts`):
            Of the tokenizer.
        entries (`Sequence[dict[int, Logprob] | None]`):
            For each token of the prompt, token id -> log-probability.
    """
    return [
        None
        if entry is None
        else {
            str(token_id): {"logprob": item.logprob, "rank": item.rank, "decoded_token": texts.text_of(token_id)}
            for token_id, item in entry.items()
        }
        for entry in entries
    ]
