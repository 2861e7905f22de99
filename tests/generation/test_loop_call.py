"""Every argument with which Transformers' own loop runs over rows in the engine: results equal stock."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest
import torch
import transformers
from transformers import GenerationConfig

from hf_paged import AutoPagedModelForCausalLM, PagedCache, PagedConfig
from hf_paged.compat import cache_argument, output_cache
from hf_paged.errors import NotSupportedError
from tests.families import tiny_model
from tests.generation.loop_outputs import PROMPT, ROWS, TWO, assert_same, both, check_same, in_the_loop, padded
from tests.paged_models import assert_idle, paged
from tests.tokenizers_for_tests import VOCAB_SIZE, tiny_tokenizer

RECORD = {"return_dict_in_generate": True}
BATCHES = {"one": {"inputs": PROMPT}, "two": {"inputs": TWO}, "padded": padded()}


@pytest.fixture(scope="module")
def stock():
    return tiny_model("llama", vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def shared():
    return paged(overrides={"vocab_size": VOCAB_SIZE}, max_num_seqs=12, num_blocks=200, block_size=8)


@pytest.fixture
def model(shared):
    yield shared
    assert_idle(shared.engine)


# --------------------------------------------------------------------------------------- settings

CALLS = {
    "nothing": {},
    "sampling": {"do_sample": True, "temperature": 1.3, "top_p": 0.95, "num_return_sequences": 3},
    "several ends": {"eos_token_id": list(range(20, 60)), "pad_token_id": 42},
    "min lengths": {"eos_token_id": list(range(2, 260)), "min_new_tokens": 5},
    "no repeated words": {"no_repeat_ngram_size": 1, "encoder_repetition_penalty": 2.0},
    "typical": {"do_sample": True, "typical_p": 0.7, "renormalize_logits": True},
    "epsilon": {"do_sample": True, "epsilon_cutoff": 0.01, "eta_cutoff": 0.01},
    "suppressed": {"suppress_tokens": list(range(0, 200, 2)), "begin_suppress_tokens": list(range(100))},
    "forced": {"forced_bos_token_id": 7, "forced_eos_token_id": 11},
    "bias": {"sequence_bias": [[[7, 8], 30.0], [[7], 10.0]]},
    "decay": {"exponential_decay_length_penalty": (2, 5.0), "eos_token_id": 11},
    "invalid values": {"remove_invalid_values": True},
    "watermark": {"watermarking_config": transformers.WatermarkingConfig(bias=3.0)},
    "scores": {"output_scores": True, "output_logits": True, **RECORD},
    "sampled scores": {"output_scores": True, "do_sample": True, "top_k": 30, "num_return_sequences": 2, **RECORD},
    "time": {"max_time": 1000.0},
    "no time": {"max_time": 0.0},
    "chunks": {"prefill_chunk_size": 4},
    "chunks of one": {"prefill_chunk_size": 1, "num_beams": 2},
    "chunks larger than the prompt": {"prefill_chunk_size": 100},
    "configuration": {"generation_config": GenerationConfig(max_new_tokens=5, no_repeat_ngram_size=2)},
    "stop strings": {"stop_strings": ["a", "e", "zz"], "tokenizer": tiny_tokenizer()},
    "stop strings, beams": {"stop_strings": ["a", "e"], "tokenizer": tiny_tokenizer(), "num_beams": 2},
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", CALLS)
def test_settings_equal_stock(model, stock, name, batch):
    call = {**in_the_loop(), **BATCHES[batch], **CALLS[name]}
    if "generation_config" in call:
        call["max_new_tokens"] = None
    check_same(stock, model, **call)


def test_the_same_seed_gives_the_same_text_as_stock(model, stock):
    """Where Transformers' own loop samples, it draws the numbers that it always draws."""
    call = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 20, **padded(), **in_the_loop()}
    answers = [both(stock, model, seed=seed, **call) for seed in (0, 1)]
    for ours, theirs in answers:
        assert torch.equal(ours, theirs)
    assert not torch.equal(answers[0][0], answers[1][0])


@pytest.mark.parametrize("negative", [None, [[5, 6, 7]], [[0, 6, 7]]])
@pytest.mark.parametrize("num_beams", [1, 2])
def test_guidance_equals_stock(model, stock, negative, num_beams):
    call = {"guidance_scale": 2.0, "num_beams": num_beams}
    if negative is not None:
        negative = torch.tensor(negative).repeat(num_beams, 1)
        call |= {"negative_prompt_ids": negative, "negative_prompt_attention_mask": (negative != 0).long()}
    check_same(stock, model, inputs=PROMPT, **in_the_loop(), **call)


@pytest.mark.parametrize("batch", BATCHES)
def test_token_healing_equals_stock(model, stock, batch):
    """Transformers shortens the prompt and leaves the mask as it was."""
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = "<|user|>"
    try:
        call = {"token_healing": True, "tokenizer": tokenizer, **BATCHES[batch]}
        check_same(stock, model, **call)
        check_same(stock, model, num_beams=2, **call)
    finally:
        tokenizer.bos_token = None


def test_allowed_tokens_are_asked_for_each_row(model, stock):
    asked = []

    def allowed(batch: int, tokens: torch.Tensor) -> list[int]:
        asked.append((batch, tokens.tolist()))
        return [3 + batch, 9, len(tokens)]

    check_same(stock, model, inputs=TWO, num_beams=2, prefix_allowed_tokens_fn=allowed)
    half = len(asked) // 2
    assert asked[:half] == asked[half:] and {batch for batch, _ in asked} == {0, 1}


# --------------------------------------------------------------------------------------- processors and criteria


class Diary(transformers.LogitsProcessor):
    """Writes down what it is given, and forbids what it counts to."""

    def __init__(self):
        self.seen: list[tuple[list, tuple, torch.dtype]] = []

    def __call__(self, input_ids, scores):
        self.seen.append((input_ids.tolist(), tuple(scores.shape), scores.dtype))
        scores[:, len(self.seen) % 7 :: 7] = -float("inf")  # in place, as processors of others do
        return scores


class Stops(transformers.StoppingCriteria):
    """Ends rows whose last token is even, from the third call on."""

    def __init__(self):
        self.seen: list[tuple[list, int | None]] = []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append((input_ids.tolist(), len(scores) if scores else None))
        return (input_ids[:, -1] % 2 == 0) & (len(self.seen) > 2)


@pytest.mark.parametrize("call", [{}, {"do_sample": True, "num_return_sequences": 2}, {"num_beams": 2}], ids=str)
@pytest.mark.parametrize("outputs", [{}, {"output_scores": True, **RECORD}], ids=["", "scores"])
def test_custom_processors_and_criteria_see_the_whole_batch(model, stock, call, outputs):
    seen = []
    for each in (stock, model):
        diary, stops = Diary(), Stops()
        torch.manual_seed(0)
        result = each.generate(
            **padded(),
            **call,
            **outputs,
            max_new_tokens=9,
            logits_processor=transformers.LogitsProcessorList([diary]),
            stopping_criteria=transformers.StoppingCriteriaList([stops]),
        )
        seen.append((diary.seen, stops.seen, result))
    assert seen[0][:2] == seen[1][:2]
    assert_same(seen[1][2], seen[0][2])


class Fails:
    """Raises in a certain call; as a processor or as a streamer."""

    def __init__(self, error: BaseException, when: int = 3):
        self.error, self.calls, self.when = error, 0, when

    def __call__(self, input_ids, scores):
        self.tick()
        return scores

    def put(self, value):
        self.tick()

    def end(self):
        pass

    def tick(self):
        self.calls += 1
        if self.calls == self.when:
            raise self.error


class FailsToEnd(transformers.StoppingCriteria):
    """Raises in its third call."""

    def __init__(self, error: BaseException):
        self.fails = Fails(error)

    def __call__(self, input_ids, scores, **kwargs):
        self.fails.tick()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def failing_calls(error: BaseException) -> dict[str, dict]:
    return {
        "processor": {"logits_processor": [Fails(error)], "num_beams": 2},
        "criteria": {"stopping_criteria": [FailsToEnd(error)], "num_beams": 2},
        "streamer": {"streamer": Fails(error), **in_the_loop()},
        "allowed": {"prefix_allowed_tokens_fn": lambda batch, tokens: Fails(error, 1).tick(), "num_beams": 2},
    }


@pytest.mark.parametrize("kind", ["processor", "criteria", "streamer", "allowed"])
@pytest.mark.parametrize("error", [ZeroDivisionError("mine"), KeyboardInterrupt()], ids=repr)
def test_whatever_raises_ends_its_call_alone(model, stock, kind, error):
    """Other threads' calls go on, and nothing is left in the engine."""
    expected = stock.generate(PROMPT, num_beams=3, max_new_tokens=30)
    results: list = []
    thread = threading.Thread(target=lambda: results.append(model.generate(PROMPT, num_beams=3, max_new_tokens=30)))
    thread.start()
    with pytest.raises(type(error)) as caught:
        model.generate(PROMPT, max_new_tokens=8, **failing_calls(error)[kind])
    assert caught.value is error
    thread.join(60)
    assert not thread.is_alive() and torch.equal(results[0], expected)


@pytest.mark.parametrize(
    "call",
    [
        {"inputs": PROMPT, "num_beams": 0},
        {"inputs": PROMPT, "num_beams": 2, "num_return_sequences": 3},
        {"inputs": PROMPT, "num_beams": 2, "early_stopping": "sometimes"},
        {"inputs": PROMPT, "forced_eos_token_id": -1},
        {"inputs": PROMPT, "guidance_scale": "a lot"},
        {"inputs": PROMPT, "max_new_tokens": 0, "num_beams": 2},
        {"inputs": PROMPT, "stop_strings": "a"},
        {"inputs": PROMPT, "token_healing": True},
        {"inputs_embeds": torch.zeros(1, 3, 63), "num_beams": 2},
    ],
    ids=lambda call: ", ".join(f"{k}={v}" for k, v in call.items() if not isinstance(v, torch.Tensor)) or "embeds",
)
def test_wrong_calls_raise_what_transformers_raises(model, stock, call):
    errors = []
    for each in (stock, model):
        with pytest.raises(Exception) as caught:  # noqa: PT011, B017 - compared with the other's
            each.generate(**{"max_new_tokens": 4, **call})
        errors.append(caught.value)
    assert isinstance(errors[1], type(errors[0])), errors
    assert str(errors[1]) == str(errors[0]) or isinstance(errors[1], ValueError)


@pytest.mark.parametrize("pad", [None, -1, VOCAB_SIZE + 5])
def test_pad_tokens_of_any_kind(model, stock, pad):
    """One row never needs it; a second one that ends earlier does."""
    stock_config = stock.generation_config
    try:
        for each in (stock, model):
            each.generation_config = GenerationConfig(eos_token_id=list(range(20, 60)), pad_token_id=pad)
        check_same(stock, model, inputs=PROMPT, **in_the_loop())
        outcomes = []
        for each in (stock, model):
            try:
                outcomes.append(each.generate(TWO, max_new_tokens=12, **in_the_loop()))
            except (ValueError, IndexError) as error:
                outcomes.append(type(error))
        if isinstance(outcomes[0], torch.Tensor):
            assert_same(outcomes[1], outcomes[0])
        else:
            assert not isinstance(outcomes[1], torch.Tensor)
    finally:
        for each in (stock, model):
            each.generation_config = stock_config


# --------------------------------------------------------------------------------------- embeddings


@pytest.fixture(scope="module")
def embeds(stock):
    return stock.get_input_embeddings()(torch.tensor([list(range(3, 24))])).detach()


EMBED_CALLS = {
    "greedy": {},
    "in the loop": in_the_loop(),
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampling": {"do_sample": True, "num_return_sequences": 2, **in_the_loop()},
    "max_length": {"max_new_tokens": None, "max_length": 30},
    "min_length": {"eos_token_id": list(range(2, 260)), "min_length": 5},
    "outputs": {"output_scores": True, "output_hidden_states": True, **RECORD},
}


@pytest.mark.parametrize("name", EMBED_CALLS)
def test_embeddings_equal_stock(model, stock, embeds, name):
    call = EMBED_CALLS[name]
    two = torch.cat([embeds, embeds.flip(1)])
    mask = torch.ones(two.shape[:2], dtype=torch.long)
    mask[0, :6] = 0
    ids = torch.tensor([list(range(3, 24))])
    check_same(stock, model, inputs_embeds=embeds, **call)
    if "max_length" not in call:
        check_same(stock, model, inputs_embeds=embeds, input_ids=ids, **call)
    if "output_hidden_states" not in call:
        check_same(stock, model, inputs_embeds=two, attention_mask=mask, **call)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt2", "opt", "deepseek_v3"])
def test_embeddings_of_other_families_equal_stock(family):
    stock, model = tiny_model(family), paged(family)
    embeds = stock.get_input_embeddings()(torch.tensor([list(range(3, 24))])).detach() * 1.1
    check_same(stock, model, inputs_embeds=embeds, num_beams=2, attention_mask=torch.ones(1, 21, dtype=torch.long))


def test_equal_embeddings_share_blocks_and_others_never_do(stock, embeds):
    """Their tokens are all the same placeholder."""
    model = paged(overrides={"vocab_size": VOCAB_SIZE}, block_size=4)
    stats = model.engine.stats
    first = check_same(stock, model, inputs_embeds=embeds, **in_the_loop())
    assert stats().num_cached_tokens == 0
    assert torch.equal(check_same(stock, model, inputs_embeds=embeds.clone(), **in_the_loop()), first)
    assert stats().num_cached_tokens == 20
    other = embeds.clone()
    other[0, -1, 5] += 3.0
    check_same(stock, model, inputs_embeds=other, **in_the_loop())
    check_same(stock, model, inputs_embeds=embeds[:, :12], **in_the_loop())
    placeholder = torch.zeros(1, 21, dtype=torch.long)
    check_same(stock, model, inputs=placeholder, attention_mask=torch.ones_like(placeholder), **in_the_loop())
    assert stats().num_cached_tokens == 20


def test_embeddings_that_differ_below_float32_are_different():
    stock = tiny_model("llama", dtype=torch.float64)
    model = AutoPagedModelForCausalLM.from_model(
        tiny_model("llama", dtype=torch.float64), paged_config=PagedConfig(block_size=4)
    )
    embeds = stock.get_input_embeddings()(PROMPT).detach()
    for given in (embeds, embeds + 1e-12):
        check_same(stock, model, inputs_embeds=given, **in_the_loop())
    assert model.engine.stats().num_cached_tokens == 0


@pytest.mark.parametrize("ids", [None, torch.tensor([list(range(3, 24))])], ids=["alone", "with ids"])
def test_embeddings_in_chunks_equal_stock_or_raise_a_clear_error(model, stock, embeds, ids):
    """Where Transformers raises RuntimeError, about sizes of tensors, they are computed or refused."""
    call = {"inputs_embeds": embeds, "input_ids": ids, "num_beams": 2, "max_new_tokens": 4}
    expected = stock.generate(**call)
    try:
        assert torch.equal(stock.generate(**call, prefill_chunk_size=4), expected)
        may_raise: tuple = ()
    except RuntimeError:
        may_raise = (NotSupportedError,)
    try:
        answer = model.generate(**call, prefill_chunk_size=4)
    except may_raise as error:
        assert "`prefill_chunk_size`" in str(error)
    else:
        assert torch.equal(answer, expected)


# --------------------------------------------------------------------------------------- what is recorded


@pytest.mark.parametrize("call", [{}, {"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}], ids=str)
@pytest.mark.parametrize("chunk", [None, 4])
def test_hidden_states_equal_stock(model, stock, call, chunk):
    check_same(stock, model, inputs=TWO, output_hidden_states=True, prefill_chunk_size=chunk, **RECORD, **call)


def test_hidden_states_of_a_batch_invariant_engine(stock):
    model = paged(overrides={"vocab_size": VOCAB_SIZE}, batch_invariant=True)
    check_same(stock, model, inputs=TWO, output_hidden_states=True, num_beams=2, **RECORD)
    assert_idle(model.engine)


def test_hidden_states_in_a_pool_without_room_for_beams_that_share_nothing(stock):
    """Each row is computed by itself, so that each needs all of its blocks."""
    model = paged(overrides={"vocab_size": VOCAB_SIZE}, block_size=4, num_blocks=24)
    call = {"inputs": torch.arange(2, 42)[None], "num_beams": 2, "max_new_tokens": 4}
    check_same(stock, model, **call)
    ours, theirs = both(stock, model, output_hidden_states=True, **RECORD, **call)
    assert_same(ours, theirs)
    assert_idle(model.engine)


def eager_pair(family: str, **config):
    stock, model = tiny_model(family), tiny_model(family)
    for each in (stock, model):
        each.set_attn_implementation("eager")
    return stock, AutoPagedModelForCausalLM.from_model(model, paged_config=PagedConfig(**config))


@pytest.mark.parametrize("call", [{}, {"num_beams": 2}, {"output_hidden_states": True, "do_sample": True}], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2", "olmoe", "deepseek_v3"])
def test_attentions_of_an_eager_model_equal_stock(family, call):
    stock, model = eager_pair(family, block_size=4)
    check_same(stock, model, inputs=TWO, output_attentions=True, **RECORD, **call)
    assert_idle(model.engine)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3"])
@pytest.mark.parametrize("num_beams", [1, 2])
def test_attentions_of_sliding_windows_equal_stock(family, num_beams):
    """Transformers' cache forgets what has left the window, and its attention weights have no columns for it."""
    stock, model = eager_pair(family)
    ours, theirs = both(stock, model, inputs=TWO, num_beams=num_beams, output_attentions=True, **RECORD)
    assert_same(ours, theirs)
    assert_idle(model.engine)


@pytest.mark.parametrize(("family", "inputs"), [("gpt_oss", {"inputs": PROMPT}), ("mistral", padded())], ids=str)
def test_attentions_that_the_engine_does_not_compute_equal_stock(family, inputs):
    """Those beside learned sinks, and those of padding."""
    stock, model = eager_pair(family)
    ours, theirs = both(stock, model, output_attentions=True, **RECORD, **inputs)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert_same(ours.attentions, theirs.attentions)
    assert model.engine.stats().num_steps == 0


def test_attentions_of_an_sdpa_model_are_there(model, stock):
    """Transformers returns empty tuples for it, and warns."""
    eager = tiny_model("llama", vocab_size=VOCAB_SIZE)
    eager.set_attn_implementation("eager")
    call = {"output_attentions": True, **RECORD}
    ours, nothing = both(stock, model, inputs=TWO, **call)
    theirs, _ = both(stock, eager, inputs=TWO, **call)
    assert list(ours) == list(nothing) == list(theirs)
    assert [len(step) for step in nothing.attentions] == [0] * 8
    assert_same(ours.attentions, theirs.attentions)


def test_recording_in_chunks_and_after_lost_blocks(stock):
    """Prompts are computed in pieces, in a pool that only just holds them beside a rival."""
    model = paged(
        overrides={"vocab_size": VOCAB_SIZE}, block_size=4, num_blocks=20, max_num_batched_tokens=7, max_num_seqs=4
    )
    prompt, call = torch.arange(2, 23)[None], {"output_hidden_states": True, "max_new_tokens": 12, **RECORD}
    stop = threading.Event()

    def rival():
        while not stop.is_set():
            model.generate(torch.arange(5, 8)[None], max_new_tokens=70)

    thread = threading.Thread(target=rival, daemon=True)
    thread.start()
    try:
        for _ in range(10):
            check_same(stock, model, inputs=prompt, **call)
            if model.engine.stats().num_preemptions > 2:
                break
    finally:
        stop.set()
        thread.join(60)
    assert model.engine.stats().num_preemptions > 0
    assert_idle(model.engine)


# --------------------------------------------------------------------------------------- caches


@pytest.mark.parametrize("call", [{"num_beams": 3, "num_return_sequences": 3}, in_the_loop()], ids=["beams", "loop"])
def test_the_returned_cache_continues(model, stock, call):
    """One row of K/V for each beam; those of the answers continue as stock's do."""
    results = []
    for each in (stock, model):
        output = each.generate(PROMPT, max_new_tokens=6, **RECORD, **call)
        cache = output_cache(output)
        again = each.generate(output.sequences, max_new_tokens=5, **{cache_argument(each): cache})
        results.append((output.sequences, again))
    assert isinstance(cache, PagedCache)
    assert_same(results[1], results[0])


def test_the_returned_cache_holds_what_stocks_does(model, stock):
    for call in ({"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2, **in_the_loop()}):
        ours, theirs = both(stock, model, **padded(), **RECORD, **call)
        mask = torch.nn.functional.pad(padded()["attention_mask"], (0, 7), value=1)
        real = mask.repeat_interleave(len(output_cache(theirs).layers[0].keys) // 3, dim=0).bool()
        for mine, other in zip(output_cache(ours).layers, output_cache(theirs).layers, strict=True):
            for a, b in ((mine.keys, other.keys), (mine.values, other.values)):
                assert a.shape == b.shape
                torch.testing.assert_close(a.transpose(1, 2)[real], b.transpose(1, 2)[real], atol=1e-4, rtol=1e-4)


# --------------------------------------------------------------------------------------- streamers


def test_text_streamer(model, stock, capsys):
    texts = []
    for each in (stock, model):
        each.generate(PROMPT, max_new_tokens=9, streamer=transformers.TextStreamer(tiny_tokenizer()), **in_the_loop())
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""


def test_text_iterator_streamer_in_a_thread(model, stock):
    pieces = []
    for each in (stock, model):
        streamer = transformers.TextIteratorStreamer(tiny_tokenizer(), skip_prompt=True, timeout=30)
        call = {"inputs": PROMPT, "max_new_tokens": 9, "streamer": streamer, **in_the_loop()}
        thread = threading.Thread(target=each.generate, kwargs=call)
        thread.start()
        pieces.append(list(streamer))
        thread.join()
    assert pieces[0] == pieces[1] and len(pieces[0]) > 1


def test_async_text_iterator_streamer(model, stock):
    async def collect(each):
        streamer = transformers.AsyncTextIteratorStreamer(tiny_tokenizer(), skip_prompt=True, timeout=30)
        call = {"inputs": PROMPT, "max_new_tokens": 9, "streamer": streamer, **in_the_loop()}
        thread = threading.Thread(target=each.generate, kwargs=call)
        thread.start()
        pieces = [piece async for piece in streamer]
        thread.join()
        return pieces

    assert asyncio.run(collect(stock)) == asyncio.run(collect(model))


class Collector(transformers.generation.streamers.BaseStreamer):
    """Takes any number of rows."""

    def __init__(self):
        self.values: list = []

    def put(self, value):
        self.values.append(value.tolist())

    def end(self):
        self.values.append("end")


@pytest.mark.parametrize("batch", BATCHES)
def test_streamers_that_take_any_batch(model, stock, batch):
    collected = []
    for each in (stock, model):
        collected.append(Collector())
        each.generate(max_new_tokens=5, streamer=collected[-1], **BATCHES[batch])
    assert collected[0].values == collected[1].values


@pytest.mark.parametrize("call", [{"inputs": TWO}, {"inputs": PROMPT, "num_beams": 2}], ids=["batch", "beams"])
def test_streamers_that_do_not_fit_their_call(model, stock, call):
    errors = []
    for each in (stock, model):
        with pytest.raises(ValueError, match=r"batch size 1|beam search") as caught:
            each.generate(streamer=transformers.TextStreamer(tiny_tokenizer()), **call)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("seats", [1, 4])
def test_a_streamer_that_blocks_holds_up_nobody(stock, seats):
    """Not even where its row holds the only seat."""
    model = paged(overrides={"vocab_size": VOCAB_SIZE}, max_num_seqs=seats, num_blocks=40)
    entered, release = threading.Event(), threading.Event()

    class Blocks(Collector):
        def put(self, value):
            super().put(value)
            if len(self.values) == 4:
                entered.set()
                release.wait(60)

    streamer, results = Blocks(), []
    expected = stock.generate(PROMPT, max_new_tokens=9)
    thread = threading.Thread(
        target=lambda: results.append(model.generate(PROMPT, max_new_tokens=9, streamer=streamer, **in_the_loop())),
        daemon=True,
    )
    thread.start()
    assert entered.wait(30)
    for call in ({}, {"num_beams": 2} if seats > 1 else in_the_loop()):
        answers: list = []
        other = threading.Thread(
            target=lambda call=call, answers=answers: answers.append(model.generate(TWO[1:], max_new_tokens=7, **call)),
            daemon=True,
        )
        other.start()
        other.join(30)
        assert not other.is_alive(), "it waits for a streamer of somebody else"
        assert torch.equal(answers[0], stock.generate(TWO[1:], max_new_tokens=7, **call))
    release.set()
    thread.join(30)
    assert torch.equal(results[0], expected)
    assert_idle(model.engine)


# --------------------------------------------------------------------------------------- which cache


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"inputs": PROMPT, "num_beams": 2, "position_ids": torch.arange(10)[None] * 2}, "`position_ids` were given"),
        ({**padded(), "output_hidden_states": True, **RECORD}, "hidden states and attentions of padding are wanted"),
        ({"inputs": PROMPT, "prompt_lookup_num_tokens": 2}, "takes tokens back"),
    ],
    ids=["positions", "hidden states of padding", "prompt lookup"],
)
def test_calls_whose_rows_cannot_be_in_the_engine_say_why(model, stock, caplog, call, words):
    caplog.set_level(logging.INFO, logger="hf_paged")
    before = model.engine.stats().num_steps
    ours, theirs = both(stock, model, **call)
    assert_same(ours, theirs)
    assert model.engine.stats().num_steps == before
    assert any(words in record.getMessage() for record in caplog.records), caplog.text


def test_a_mask_with_holes_is_honoured(model, stock):
    mask = torch.ones_like(PROMPT)
    mask[0, 4] = 0
    ours, theirs = both(stock, model, inputs=PROMPT, attention_mask=mask, num_beams=2)
    assert torch.equal(ours, theirs)


def test_no_cache_at_all(model, stock):
    ours, theirs = both(stock, model, inputs=TWO, num_beams=2, use_cache=False)
    assert torch.equal(ours, theirs)
    assert ROWS[1] == TWO[0].tolist()
