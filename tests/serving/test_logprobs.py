"""Bytes and texts of single tokens, and the forms of log-probabilities, for tokenizers of both kinds."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from hf_paged.generation.outputs import Logprob
from hf_paged.serving.answer_parser import ParsedReasoning, ParsedText
from hf_paged.serving.chat_answer import ReasoningCounter
from hf_paged.serving.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs, token_texts
from tests.tokenizers_for_tests import EOS, tiny_tokenizer


@pytest.fixture(scope="module")
def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Words are marked by a leading mark, and characters that are no token fall apart into byte tokens."""
    tokens = ["<unk>", "</s>", "\u2581a", "b", "\u2581", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True, unk_token="<unk>")
    )
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


def test_pieces_are_written_as_they_stand_in_texts(sentencepiece_like):
    texts = token_texts(sentencepiece_like)
    assert [texts.text_of(token) for token in (2, 3, 4, 1)] == [" a", "b", " ", "</s>"]
    euro = [5 + byte for byte in "\u20ac".encode()]
    assert b"".join(map(texts.bytes_of, euro)) == "\u20ac".encode()
    assert texts.text_of(euro[0]) == "\ufffd"
    assert texts.bytes_of(10_000) == b"" and texts.text_of(10_000) == ""
    assert token_texts(sentencepiece_like) is texts, "made once"


def test_byte_level_tokens_have_their_bytes():
    tokenizer = tiny_tokenizer()
    texts = token_texts(tokenizer)
    for text in ("the hello", "\u6f22\u5b57", "\U0001f44d\n"):
        tokens = tokenizer(text)["input_ids"]
        assert b"".join(map(texts.bytes_of, tokens)) == text.encode()
    assert texts.text_of(EOS) == "<|end|>"
    assert texts.shown_bytes(EOS, True) == b"" and texts.shown_bytes(EOS, False) == b"<|end|>"


def test_offsets_go_on_from_piece_to_piece(sentencepiece_like):
    euro = [5 + byte for byte in "\u20ac".encode()]
    tokens = [2, *euro, 3, 1, 3]
    entries = [{token: Logprob(-1.0, 1)} for token in tokens]
    whole = CompletionLogprobs(token_texts(sentencepiece_like), 0, False, True).of(tokens, entries)
    assert whole["text_offset"] == [0, 2, 2, 2, 3, 4, 4]  # " a", a character of three tokens, "b", nothing, "b"
    parts = CompletionLogprobs(token_texts(sentencepiece_like), 0, False, True)
    first, second = parts.of(tokens[:2], entries[:2]), parts.of(tokens[2:], entries[2:])
    assert {name: first[name] + second[name] for name in first} == whole


def test_the_best_tokens_come_first_and_the_token_itself_is_always_there():
    texts = token_texts(tiny_tokenizer())
    entry = {70: Logprob(-5.0, 9), 71: Logprob(-0.5, 1), 72: Logprob(-1.5, 2)}
    [shown] = chat_logprobs(texts, [70], [entry], 2, False)["content"]
    assert [best["token"] for best in shown["top_logprobs"]] == [texts.text_of(71), texts.text_of(72)]
    assert shown["logprob"] == -5.0
    [named] = chat_logprobs(texts, [70], [entry], 1, True)["content"]
    assert named["token"] == "token_id:70" and named["top_logprobs"][0]["token"] == "token_id:71"
    form = CompletionLogprobs(texts, 2, False, True).of([70], [entry])
    assert list(form["top_logprobs"][0].values()) == [-0.5, -1.5, -5.0]
    assert prompt_logprobs(texts, [None, entry])[1]["71"]["rank"] == 1


def test_of_tokens_with_one_text_the_most_probable_is_listed():
    tokenizer = tiny_tokenizer()
    first, second = tokenizer("\u6f22")["input_ids"][:2]
    entry = {second: Logprob(-3.0, 2), first: Logprob(-1.0, 1)}
    form = CompletionLogprobs(token_texts(tokenizer), 2, False, True).of([second], [entry])
    assert form["top_logprobs"] == [{"\ufffd": -1.0}] and form["token_logprobs"] == [-3.0]


@pytest.mark.parametrize("close", ["<|user|>", "</think>"])
def test_tokens_of_reasoning_end_with_its_tag(close):
    tokenizer = tiny_tokenizer()
    reasoning, rest = tokenizer("hello the")["input_ids"], tokenizer("and on")["input_ids"]
    counter = ReasoningCounter(tokenizer, close)
    assert counter.num_tokens == 0
    tag = tokenizer(close)["input_ids"]
    counter.add([*reasoning[:3]], [ParsedReasoning("hel")])
    counter.add([*reasoning[3:], *tag, *rest], [ParsedReasoning("lo the"), ParsedText("and on")])
    counter.add(rest, [ParsedText("and on")])
    assert counter.num_tokens == len(reasoning) + len(tag)
    nothing = ReasoningCounter(tokenizer, close)
    nothing.add(rest, [ParsedText("and on")])
    assert nothing.num_tokens == 0
