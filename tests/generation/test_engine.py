"""The engine: what is shared between requests never shows in their answers, and no failure outlives its request."""

from __future__ import annotations

import threading

import pytest
import torch

from hf_paged import (
    EngineClosedError,
    EngineError,
    InvalidRequestError,
    NonFiniteLogitsError,
    PromptTooLongError,
    QueueFullError,
    SamplingParams,
    StepFailedError,
)
from tests.conftest import random_prompts
from tests.families import greedy, tiny_model
from tests.paged_models import assert_idle, broken_forward, paged, paged_engine

VOCAB = 199
PROMPTS = random_prompts(10, VOCAB, seed=1)
LONG = random_prompts(1, VOCAB, seed=3, longest=60)[0] * 4


def params(max_tokens: int = 8, **kwargs) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, **kwargs})


def tokens(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def stock():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def expected(stock):
    return greedy(stock, PROMPTS, 8)


@pytest.fixture(scope="module")
def shared():
    return paged(block_size=8, num_blocks=100, max_num_seqs=8, max_num_batched_tokens=40)


@pytest.fixture
def model(shared, expected):
    shared.engine.weights_changed()  # each test starts with a cold prefix cache
    yield shared
    assert_idle(shared.engine)
    assert tokens(shared.engine.generate(PROMPTS[:2], params())) == expected[:2], "the engine is not usable any more"


@pytest.fixture
def engine(model):
    return model.engine


# --------------------------------------------------------------------------------------- failing


def unused_token(expected) -> int:
    """A token that no prompt and no answer has."""
    return min(set(range(1, 199)).difference(*PROMPTS, *expected))


def poison(token: int):
    """What a forward does that raises whenever this token is among its inputs."""

    def poisoned(forward, kwargs):
        if (kwargs["input_ids"] == token).any():
            raise RuntimeError("a device fell off")
        return forward()

    return poisoned


@pytest.mark.parametrize("at", [1, 2, 5])
def test_exception_that_does_not_come_again_fails_nobody(model, engine, expected, at, caplog):
    with broken_forward(model, RuntimeError("a device fell off"), at), engine.requests() as states:
        states += [engine.add_request(prompt, params()) for prompt in PROMPTS[:3]]
        list(engine.as_settled(states))
    assert tokens([state.output() for state in states]) == expected[:3]
    (record,) = [record for record in caplog.records if "are run again apart" in record.getMessage()]
    assert record.levelname == "WARNING" and "RuntimeError: a device fell off" in record.getMessage()
    assert_idle(engine)


@pytest.mark.parametrize("guilty", [{0}, {3}, {5}, {1, 4}, {0, 1, 2, 3, 4, 5}])
@pytest.mark.parametrize("at", ["prompt", "answer"])
def test_exception_fails_the_requests_at_fault_alone_with_the_cause(model, engine, expected, guilty, at):
    """The token is in their prompts, or they choose it in the middle of their answers."""
    token = unused_token(expected)
    wanted = [params(logit_bias={token: 100}) if at == "answer" and i in guilty else params() for i in range(6)]
    prompts = [[*PROMPTS[i], token] if at == "prompt" and i in guilty else PROMPTS[i] for i in range(6)]
    with broken_forward(model, poison(token), times=10**6), engine.requests() as states:
        states += [engine.add_request(prompt, param) for prompt, param in zip(prompts, wanted, strict=True)]
        list(engine.as_settled(states))
    for i, state in enumerate(states):
        if i not in guilty:
            assert tokens([state.output()]) == [expected[i]]
            continue
        assert isinstance(state.error, StepFailedError) and str(state.error.__cause__) == "a device fell off"
        assert "A step with 1 requests" in str(state.error) and "RuntimeError: a device fell off" in str(state.error)
        assert state.output().outputs[0].finish_reason == "error"
    assert_idle(engine)


def test_branches_of_one_prompt_fail_alone(model, engine, expected):
    token = unused_token(expected)
    wanted = params(12, n=4, temperature=1.5, seed=1, logit_bias={token: 3.0}, ignore_eos=True)
    with broken_forward(model, poison(token), times=10**6), engine.requests() as states:
        states.append(engine.add_request(PROMPTS[0], wanted))
        list(engine.as_settled(states))
    answers = states[0].output().outputs
    for answer in answers:  # the last token is never computed
        assert (answer.finish_reason == "error") == (token in answer.token_ids and len(answer.token_ids) < 12)
    assert {answer.finish_reason for answer in answers} == {"error", "length"}
    assert_idle(engine)


def test_requests_outside_of_the_step_that_failed_go_on(expected):
    """Of one prompt computed in chunks and one that waits, the second is not in the first's step."""
    model = paged(block_size=8, num_blocks=100, max_num_seqs=1)
    engine = model.engine
    with broken_forward(model, RuntimeError("once"), at=2), engine.requests() as states:
        states += [engine.add_request(prompt, params()) for prompt in PROMPTS[:3]]
        list(engine.as_settled(states))
    assert [state.error is None for state in states] == [False, True, True]
    assert tokens([state.output() for state in states[1:]]) == expected[1:3]
    assert_idle(engine)


def test_blocks_of_a_failed_step_are_not_found_by_later_prompts(model, engine, stock):
    """Blocks are registered before the step that fills them: a step that fails must take that back."""
    prompt = LONG[:35]

    def half(forward, kwargs):
        forward()
        raise RuntimeError("after the last layer")

    with broken_forward(model, half), pytest.raises(StepFailedError):
        engine.generate([prompt], params())
    (output,) = engine.generate([prompt], params())
    assert output.num_cached_tokens == 0 and tokens([output]) == greedy(stock, [prompt], 8)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_fail_their_request_alone(model, engine, expected, value):
    def spoil(forward, kwargs):
        output = forward()
        output.logits[0, 1] = value
        return output

    with broken_forward(model, spoil, at=2), engine.requests() as states:
        states += [engine.add_request(prompt, params()) for prompt in ([3], [4], [5])]
        list(engine.as_settled(states))
    assert [type(state.error) for state in states] == [type(None), NonFiniteLogitsError, type(None)]
    assert states[1].request_id in str(states[1].error)
    assert len(states[1].output().outputs[0].token_ids) == 1
    assert tokens([states[0].output(), states[2].output()]) == greedy(tiny_model("llama"), [[3], [5]], 8)


def test_prompt_logits_that_are_no_numbers_fail_their_request_alone(model, engine, expected):
    def spoil(forward, kwargs):
        output = forward()
        output.logits[0, 2] = torch.nan  # the first prompt position; what is sampled from is fine
        return output

    with broken_forward(model, spoil), engine.requests() as states:
        states.append(engine.add_request([3, 4, 5], params(logprobs=1, prompt_logprobs=1)))
        states.append(engine.add_request(PROMPTS[1][:5], params(3)))
        list(engine.as_settled(states))
    assert isinstance(states[0].error, NonFiniteLogitsError) and states[0].output().outputs[0].token_ids == []
    assert states[1].error is None


@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.parametrize("how", ["generate", "engine", "batch", "stream"])
def test_keyboard_interrupt_leaves_nothing_behind(model, engine, at, how):
    calls = {
        "generate": lambda: model.generate(torch.tensor([PROMPTS[0]] * 3), max_new_tokens=8),
        "engine": lambda: engine.generate(PROMPTS, params(n=2)),
        "batch": lambda: model.generate_batch(PROMPTS, max_new_tokens=8, progress_bar=False),
        "stream": lambda: model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=8, streamer=Quiet()),
    }
    threads = threading.active_count()
    with broken_forward(model, KeyboardInterrupt(), at), pytest.raises(KeyboardInterrupt):
        calls[how]()
    assert_idle(engine)
    assert threading.active_count() == threads


class Quiet:
    def put(self, value):
        pass

    def end(self):
        pass


def test_keyboard_interrupt_of_one_call_does_not_touch_another(model, engine, expected):
    with engine.requests() as others:
        others += [engine.add_request(prompt, params()) for prompt in PROMPTS[:3]]
        with broken_forward(model, KeyboardInterrupt(), at=3), pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS[3:], params())
        assert [state.finished for state in others].count(False) > 0
        list(engine.as_finished(others))
    assert tokens([state.output() for state in others]) == expected[:3]


def test_interrupt_between_two_steps_fails_what_is_running_and_starts_over(model, engine, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with engine.requests() as states:
        states += [engine.add_request(prompt, params()) for prompt in PROMPTS[:2]]
        engine.step()
        monkeypatch.setattr(engine.live.scheduler, "update_from_output", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(engine.as_finished(states))
    assert all(isinstance(state.error, EngineError) and state.finished for state in states)


def test_callback_that_raises_fails_its_request_alone(engine, expected):
    def careless(state):
        raise ZeroDivisionError("in the callback")

    with engine.requests() as states:
        states.append(engine.add_request(PROMPTS[0], params(), on_update=careless))
        states.append(engine.add_request(PROMPTS[1], params()))
        list(engine.as_settled(states))
    assert isinstance(states[0].error.__cause__, ZeroDivisionError)
    assert states[1].error is None and tokens([states[1].output()]) == expected[1:2]


# --------------------------------------------------------------------------------------- aborting


@pytest.mark.parametrize("num_steps", range(5))
@pytest.mark.parametrize("n", [1, 3])
def test_abort_at_any_time(engine, expected, num_steps, n):
    """tenstorrent/vllm#145: an abort of a request that the backend no longer knew crashed it."""
    with engine.requests() as states:
        states.append(engine.add_request(LONG, params(n=n), request_id="gone"))
        states.append(engine.add_request(PROMPTS[1], params(), request_id="stays"))
        for _ in range(num_steps):
            engine.step()
        for request_id in ("gone", "gone", "never was"):
            engine.abort(request_id)
        list(engine.as_settled(states))
        for request_id in ("gone", "stays"):
            engine.abort(request_id)
    assert {answer.finish_reason for answer in states[0].output().outputs} == {"abort"}
    assert states[0].error is None and states[0].output().finished
    assert tokens([states[1].output()]) == expected[1:2]


def test_abort_of_one_branch_that_has_ended(engine):
    state = engine.add_request([5], params(n=2))
    engine.wait(state)
    engine.abort(state.request_id)
    engine.abort(state.group.requests[0].request_id)
    assert {answer.finish_reason for answer in state.output().outputs} == {"length"}


def test_leaving_a_call_early_ends_its_requests(engine):
    with pytest.raises(LookupError), engine.requests() as states:
        states += [engine.add_request(prompt, params()) for prompt in PROMPTS]
        engine.step()
        raise LookupError
    assert all(state.finished for state in states)
    assert {answer.finish_reason for state in states for answer in state.output().outputs} <= {"abort", "length"}


# --------------------------------------------------------------------------------------- life


def test_sleep_release_and_close():
    model = paged(num_blocks=50)
    engine, prompt = model.engine, [3, 4, 5]
    answer = greedy(tiny_model("llama"), [prompt], 8)
    state = engine.add_request(prompt, params())
    for call in (engine.release, engine.sleep):
        with pytest.raises(EngineError, match="1 requests are still running"):
            call()
    engine.wait(state)
    engine.release()
    assert engine._loop.runner is None and engine.stats().num_prompt_tokens >= 0
    assert tokens(engine.generate([prompt], params())) == answer
    engine.sleep()
    engine.sleep()
    for call in (lambda: engine.add_request(prompt), lambda: model.generate(torch.tensor([prompt]))):
        with pytest.raises(EngineClosedError, match="wake_up"):
            call()
    engine.wake_up()
    assert tokens(engine.generate([prompt], params())) == answer
    state = engine.add_request(prompt, params())
    engine.step()
    engine.close()
    engine.close()
    assert isinstance(state.error, EngineClosedError) and state.finished
    with pytest.raises(EngineClosedError, match="closed"):
        engine.add_request(prompt)
    assert_idle(engine)


def test_counters_survive_a_release():
    engine = paged_engine(block_size=4, num_blocks=50)
    engine.generate([[3, 4, 5, 6, 7, 8]] * 2, params())
    before = engine.stats()
    counts = (before.num_prompt_tokens, before.num_cached_tokens, before.num_preemptions)
    engine.release()
    after = engine.stats()
    assert (after.num_prompt_tokens, after.num_cached_tokens, after.num_preemptions) == counts
    engine.generate([[3, 4, 5, 6, 7, 8]], params())
    assert engine.stats().num_prompt_tokens == counts[0] + 6


def test_full_queue_refuses_and_takes_again(expected):
    engine = paged_engine(block_size=8, num_blocks=100, max_num_seqs=1, max_queue_size=2)
    with engine.requests() as states:
        states += [engine.add_request(prompt, params()) for prompt in PROMPTS[:2]]
        with pytest.raises(QueueFullError, match="`max_queue_size` is 2"):
            engine.add_request(PROMPTS[2], params())
        engine.step()
        states.append(engine.add_request(PROMPTS[2], params()))
        list(engine.as_finished(states))
    assert tokens([state.output() for state in states]) == expected[:3]
    assert_idle(engine)


def test_request_ids_are_unique_among_live_requests(engine, expected):
    with engine.requests() as states:
        states.append(engine.add_request(PROMPTS[0], params(), request_id="mine"))
        with pytest.raises(InvalidRequestError, match="`request_id` 'mine'"):
            engine.add_request(PROMPTS[1], params(), request_id="mine")
        list(engine.as_finished(states))
    assert states[0].output().request_id == "mine"
    again = engine.add_request(PROMPTS[0], params(), request_id="mine")
    engine.wait(again)
    assert tokens([again.output()]) == expected[:1]


def test_request_id_that_looks_like_a_branch_touches_nobody(engine, expected):
    with engine.requests() as states:
        states.append(engine.add_request(PROMPTS[0], params(n=2), request_id="x"))
        engine.step()
        with pytest.raises(InvalidRequestError, match="0_x"):
            engine.add_request(PROMPTS[1], params(), request_id="0_x")
        states.append(engine.add_request(PROMPTS[1], params(), request_id="1_y"))
        with pytest.raises(InvalidRequestError, match="1_y"):
            engine.add_request(PROMPTS[1], params(n=2), request_id="y")
        list(engine.as_settled(states))
    assert [answer.token_ids for answer in states[0].output().outputs] == [expected[0]] * 2
    assert tokens([states[1].output()]) == expected[1:2]


# --------------------------------------------------------------------------------------- what never fits


def test_prompt_that_can_never_fit_is_refused_at_once_with_the_numbers():
    """vllm-project/vllm#35541: a prompt larger than the pool hung without a message."""
    engine = paged_engine(num_blocks=10, block_size=16)
    with pytest.raises(PromptTooLongError) as caught:
        engine.generate([[5] * 300], params())
    message = str(caught.value)
    assert all(number in message for number in ("300 tokens", "160", "10 blocks of 16", "19 blocks"))
    assert tokens(engine.generate([[5, 6]], params())) == greedy(tiny_model("llama"), [[5, 6]], 8)


@pytest.mark.parametrize("length", [78, 79, 80, 81, 96])
def test_prompts_around_the_pools_size_never_stall(length):
    """RBLN-SW/vllm-rbln#957: prompts between the usable and the nominal size waited for ever, and all behind them."""
    engine = paged_engine(num_blocks=10, block_size=8)
    prompt = [1 + i % 190 for i in range(length)]
    with engine.requests() as states:
        if length < 80:
            states.append(engine.add_request(prompt, params(4)))
        else:
            with pytest.raises(PromptTooLongError, match=rf"{length} tokens"):
                engine.add_request(prompt, params(4))
        states.append(engine.add_request([5, 6], params()))
        list(engine.as_finished(states))
    if length < 80:
        answer = greedy(tiny_model("llama"), [prompt], 4)[0][: 80 - length]
        assert tokens([states[0].output()]) == [answer]
    assert_idle(engine)


@pytest.mark.parametrize("chunked", [True, False])
def test_prompt_beyond_the_token_budget_is_chunked_or_refused(chunked, stock):
    """vllm-project/vllm#765: the server stopped answering after a warning."""
    engine = paged_engine(enable_chunked_prefill=chunked, max_num_batched_tokens=32, block_size=8)
    if chunked:
        assert tokens(engine.generate([LONG[:150]], params())) == greedy(stock, [LONG[:150]], 8)
    else:
        with pytest.raises(PromptTooLongError, match=r"150 tokens.*`max_num_batched_tokens` = 32"):
            engine.generate([LONG[:150]], params())
    assert tokens(engine.generate([[3, 4]], params())) == greedy(stock, [[3, 4]], 8)


@pytest.mark.parametrize(("length", "fits"), [(62, True), (63, True), (64, False), (65, False)])
def test_prompts_around_the_models_limit(length, fits):
    """vllm-project/vllm#16445: say the limit exactly."""
    engine = paged_engine(max_model_len=64)
    prompt = [1 + i % 190 for i in range(length)]
    call = params(1, prompt_logprobs=1)
    if fits:
        (output,) = engine.generate([prompt], call)
        assert len(output.prompt_logprobs) == length and len(output.outputs[0].token_ids) == 1
    else:
        with pytest.raises(PromptTooLongError, match=rf"{length} tokens.*`max_model_len` is 64"):
            engine.generate([prompt], call)


def test_answer_ends_where_the_model_ends():
    engine = paged_engine(max_model_len=20)
    (output,) = engine.generate([[5] * 15], params(100))
    assert len(output.outputs[0].token_ids) == 5 and output.outputs[0].finish_reason == "length"
    (output,) = engine.generate([[5] * 15], params(None))
    assert len(output.outputs[0].token_ids) == 5


# --------------------------------------------------------------------------------------- prefix cache


def test_warm_prefix_gives_the_cold_answer(stock):
    """tenstorrent/vllm#415: an answer was right on a miss and degenerate on a hit."""
    prompts = [LONG[:70] + [1 + i, 2 + i] for i in range(3)] + [LONG[:64], LONG[:48]]
    answers = greedy(stock, prompts, 8)
    for block_size in (4, 8, 32):
        engine = paged_engine(block_size=block_size, num_blocks=128)
        cold = engine.generate(prompts[:1], params(logprobs=3))
        warm = engine.generate(prompts, params(logprobs=3))
        assert tokens(cold) == answers[:1] and tokens(warm) == answers
        assert cold[0].num_cached_tokens == 0
        for output, prompt in zip(warm, prompts, strict=True):
            shared = len(prompt) if prompt == prompts[0] else min(len(prompt), 70)
            assert output.num_cached_tokens == min(shared // block_size, (len(prompt) - 1) // block_size) * block_size
        for first, second in zip(cold[0].outputs[0].logprobs, warm[0].outputs[0].logprobs, strict=True):
            assert first.keys() == second.keys()
            for token in first:
                assert first[token].logprob == pytest.approx(second[token].logprob, abs=1e-4)


def test_prefixes_off():
    engine = paged_engine(block_size=4, enable_prefix_caching=False)
    outputs = [engine.generate([LONG[:30]], params())[0] for _ in range(2)]
    assert [output.num_cached_tokens for output in outputs] == [0, 0]
    assert tokens(outputs[:1]) == tokens(outputs[1:])


def test_reused_block_is_not_found_under_its_old_prefix(stock):
    """GeeeekExplorer/nano-vllm#163: a freed block was reused but its old hash still pointed to it."""
    engine = paged_engine(num_blocks=6, block_size=8)
    first, second = LONG[:30], [1 + i % 150 for i in range(40)]
    answers = [greedy(stock, [prompt], 6)[0] for prompt in (first, second, first)]
    for prompt, answer in zip((first, second, first), answers, strict=True):
        assert tokens(engine.generate([prompt], params(6))) == [answer]
        index = engine.live.block_manager.indexes[0]
        assert all(index.block_id(block_hash.digest) == block_id for block_id, block_hash in index.items())


def test_half_full_block_is_found_by_its_full_content_only(stock):
    """vllm-project/vllm#49125: the hash of a partly filled block came back to life when it was full."""
    engine = paged_engine(num_blocks=40, block_size=8)
    prompt = LONG[:13]
    (output,) = engine.generate([prompt], params(12))
    whole = prompt + output.outputs[0].token_ids
    for length, cached in ((13, 8), (16, 8), (17, 16), (25, 24)):
        (again,) = engine.generate([whole[:length]], params(3))
        assert again.num_cached_tokens == cached
        assert tokens([again]) == greedy(stock, [whole[:length]], 3)
    (other,) = engine.generate([[*whole[:14], 3, 3, 3, 3]], params(3))
    assert other.num_cached_tokens == 8


def test_prompts_that_a_weak_hash_would_confuse(stock):
    """NVIDIA/Megatron-LM PR#4158: with a polynomial hash, adding 31 to a token and taking 1 off the next collides."""
    engine = paged_engine(block_size=4, num_blocks=60)
    prompt = [40 + i for i in range(12)]
    engine.generate([prompt], params(2))
    for i in range(3):
        forged = list(prompt)
        forged[i], forged[i + 1] = forged[i] + 31, forged[i + 1] - 1
        (output,) = engine.generate([forged], params(4))
        assert output.num_cached_tokens == 0 and tokens([output]) == greedy(stock, [forged], 4)


def test_extra_keys_keep_requests_apart(engine):
    """LMCache/LMCache#2878: a salt was honoured by one tier of the cache and not by the other."""
    prompt, cached = LONG[:33], []
    for keys in (("a",), ("b",), ("a",), (), (("a", 1),), (("a", 2),), ("b",)):
        state = engine.add_request(prompt, params(2), extra_keys=keys)
        engine.wait(state)
        cached.append(state.output().num_cached_tokens)
    assert cached == [0, 0, 32, 0, 0, 0, 32]


# --------------------------------------------------------------------------------------- branches, preemption


def test_branches_share_the_prompt_and_copy_when_they_part(stock):
    engine = paged_engine(block_size=8, num_blocks=60, max_num_batched_tokens=100)
    prompt = LONG[:43]  # the last block is partly filled
    with engine.requests() as states:
        states.append(engine.add_request(prompt, params(6, temperature=1.5, seed=5, n=4)))
        engine.step()
        assert engine.live.block_manager.num_blocks_held == 6  # shared by all four
        engine.step()
        assert engine.live.block_manager.num_blocks_held == 5 + 4
        list(engine.as_finished(states))
    assert engine.stats().num_computed_tokens == 43 + 4 * 5
    answers = [answer.token_ids for answer in states[0].output().outputs]
    assert len({tuple(answer) for answer in answers}) == 4
    for branch, answer in enumerate(answers):  # each is a walk of its own through the stock model
        logits = stock(torch.tensor([prompt + answer])).logits[0, 42:48].log_softmax(-1)
        assert all(logits[i, token].isfinite() for i, token in enumerate(answer)), branch
    (single,) = engine.generate([prompt], params(6, temperature=1.5, seed=5))
    assert single.outputs[0].token_ids == answers[0]
    (same,) = engine.generate([prompt], params(6, n=4))
    assert [answer.token_ids for answer in same.outputs] == greedy(stock, [prompt], 6) * 4


def test_preemption_is_invisible():
    """vllm-project/vllm#16832: after a preemption the answer was incomplete."""
    prompts = random_prompts(8, VOCAB, seed=9, longest=30)
    calls = [
        params(24),
        params(24, temperature=1.0, seed=3),
        params(24, temperature=1.0, seed=4, repetition_penalty=1.4, presence_penalty=0.5),
        params(24, logprobs=2, prompt_logprobs=1),
    ] * 2
    roomy = paged_engine(block_size=4, num_blocks=400).generate(prompts, calls)
    engine = paged_engine(block_size=4, num_blocks=22)
    tight = engine.generate(prompts, calls)
    assert engine.stats().num_preemptions >= 5
    assert tokens(tight) == tokens(roomy)
    for left, right in zip(tight, roomy, strict=True):
        assert 0 <= left.num_cached_tokens < len(left.prompt_token_ids)
        assert (left.prompt_logprobs is None) == (right.prompt_logprobs is None)
        for entry, other in zip(
            (left.prompt_logprobs or []) + (left.outputs[0].logprobs or []),
            (right.prompt_logprobs or []) + (right.outputs[0].logprobs or []),
            strict=True,
        ):
            assert (entry or {}).keys() == (other or {}).keys()
    assert_idle(engine)


def test_many_samples_in_a_small_pool_all_complete():
    """huggingface/transformers PR#43150: a full cache raised an error instead of waiting."""
    prompts = random_prompts(20, VOCAB, seed=5, longest=20)
    engine = paged_engine(num_blocks=16, block_size=8)
    prompts = [prompt[:60] for prompt in prompts]
    assert tokens(engine.generate(prompts, params(10))) == greedy(tiny_model("llama"), prompts, 10)


def test_nothing_grows_with_the_number_of_requests():
    """huggingface/text-generation-inference#801: free memory fell for hours."""
    model = paged(num_blocks=30, block_size=8, max_num_seqs=4)
    engine = model.engine
    for seed in range(6):
        prompts = [prompt[:50] for prompt in random_prompts(10, VOCAB, seed=seed)]
        engine.generate(prompts, params(3, temperature=1.0, repetition_penalty=1.2, n=1 + seed % 2))
        assert_idle(engine)
        assert not engine.live.states and not engine._loop.inbox and not engine.sampler._memory
        assert len(engine._loop.runner.batch._rows) <= 4
        assert not engine.live.scheduler._groups and engine.live.scheduler.num_waiting == 0


def test_seeds_do_not_depend_on_batch_mates_or_order(engine):
    """vllm-project/vllm#51226: a request's seed alone fixes its answer."""
    mine = params(10, temperature=1.2, seed=11, top_p=0.9)
    alone = tokens(engine.generate([PROMPTS[0]], mine))[0]
    free = params(10, temperature=1.0)
    for mates in (1, 3, 7):
        outputs = engine.generate(PROMPTS[1 : mates + 1] + [PROMPTS[0]], [free] * mates + [mine])
        assert outputs[-1].outputs[0].token_ids == alone
    with engine.requests() as states:  # it arrives while others run
        states += [engine.add_request(prompt, free) for prompt in PROMPTS[1:4]]
        for _ in range(3):
            engine.step()
        states.append(engine.add_request(PROMPTS[0], mine))
        list(engine.as_finished(states))
    assert tokens([states[-1].output()]) == [alone]


# --------------------------------------------------------------------------------------- log-probabilities


def reference(stock, whole: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return stock(torch.tensor([whole])).logits[0].double().log_softmax(-1)


def check_entries(entries, whole: list[int], start: int, num_best: int, logprobs: torch.Tensor) -> None:
    """Each entry is about the token at `start`, `start + 1`, ...; ids, values and ranks are those of a full forward."""
    for position, entry in enumerate(entries, start=start):
        row, token = logprobs[position - 1], whole[position]
        best = row.topk(num_best).indices.tolist()
        assert set(entry) == {token, *best}
        for token_id, found in entry.items():
            assert found.logprob == pytest.approx(row[token_id].item(), abs=1e-4)
            assert found.rank == 1 + int((row > row[token_id] + 1e-6).sum())


@pytest.mark.parametrize("budget", [16, 512])
@pytest.mark.parametrize("num_best", [0, 1, 5])
def test_prompt_log_probabilities_equal_a_full_forward(stock, budget, num_best):
    """vllm-project/vllm#15420: prompt log-probabilities did not line up with Transformers."""
    engine = paged_engine(block_size=8, num_blocks=100, max_num_batched_tokens=budget)
    prompts = [LONG[:33], *PROMPTS[:4], [7]]
    for _ in range(2):  # vllm-project/vllm#8268: the second time, with a cached prefix, crashed the engine
        for output in engine.generate(prompts, params(3, prompt_logprobs=num_best)):
            prompt, entries = output.prompt_token_ids, output.prompt_logprobs
            assert len(entries) == len(prompt) and entries[0] is None
            assert all(entry is not None for entry in entries[1:])
            check_entries(entries[1:], prompt, 1, num_best, reference(stock, prompt))


def test_prompt_log_probabilities_do_not_depend_on_who_came_before(stock):
    """vllm-project/vllm PR#42245: cached positions held numbers of earlier requests."""
    first, second = LONG[:40] + [3, 4], LONG[:40] + [150, 60, 70]
    seen = {}
    for order in ((first, second), (second, first), (first, second, first)):
        engine = paged_engine(block_size=8, num_blocks=100)
        engine.generate([LONG[:40]], params(2))
        for prompt in order:
            (output,) = engine.generate([prompt], params(2, prompt_logprobs=2))
            values = [{t: round(e.logprob, 3) for t, e in entry.items()} for entry in output.prompt_logprobs[1:]]
            assert seen.setdefault(tuple(prompt), values) == values


@pytest.mark.parametrize("num_best", [0, 2])
def test_log_probabilities_of_the_answer(engine, stock, num_best):
    """vllm-project/vllm#3707: `logprobs=0` returned nothing instead of the sampled token's value."""
    calls = [params(6, logprobs=num_best, seed=i, temperature=1.3, repetition_penalty=1.5) for i in range(3)]
    for output in engine.generate(PROMPTS[:3], calls):
        answer = output.outputs[0]
        whole, start = output.prompt_token_ids + answer.token_ids, len(output.prompt_token_ids)
        assert len(answer.logprobs) == 6
        assert all(num_best <= len(entry) <= num_best + 1 or num_best == 0 for entry in answer.logprobs)
        check_entries(answer.logprobs, whole, start, num_best, reference(stock, whole))
        total = sum(entry[token].logprob for entry, token in zip(answer.logprobs, answer.token_ids, strict=True))
        assert answer.cumulative_logprob == pytest.approx(total)


def test_no_log_probabilities_unless_wanted(engine):
    (output,) = engine.generate(PROMPTS[:1], params(2))
    assert output.prompt_logprobs is None and output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None


def test_statistics_add_up(engine):
    engine.reset_stats()
    outputs = engine.generate(PROMPTS[:4], params(5))
    stats = engine.stats()
    assert stats.num_generated_tokens == 20 and stats.num_finished == 4 and stats.num_failed_steps == 0
    assert stats.num_prompt_tokens == sum(map(len, PROMPTS[:4]))
    assert stats.num_computed_tokens == stats.num_prompt_tokens - stats.num_cached_tokens + 4 * 4
    assert stats.num_cached_tokens == sum(output.num_cached_tokens for output in outputs)
    assert 0 <= stats.kv_waste < 1 and stats.peak_running == 4
    assert stats.peak_kv_bytes_held == stats.peak_blocks_held * engine.plan.bytes_per_block > 0
