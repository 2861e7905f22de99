"""`LLM` and `SamplingParams`: what an article on offline inference with vLLM does, and what it should do."""

from __future__ import annotations

import inspect

import pytest
import torch

from hf_paged import (
    LLM,
    AutoPagedModelForCausalLM,
    ConfigurationError,
    EngineClosedError,
    HiddenStatesWanted,
    InvalidEmbedsError,
    InvalidRequestError,
    InvalidTokenError,
    NotSupportedError,
    PagedConfig,
    PromptTooLongError,
    SamplingParams,
)
from tests.families import greedy, tiny_model
from tests.paged_models import assert_idle
from tests.successor_model import ids, successor_model
from tests.tokenizers_for_tests import EOS, VOCAB_SIZE, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
PROMPTS = ["the hello", "and on", "in the other and the"]
TOKENS = [TOKENIZER(prompt)["input_ids"] for prompt in PROMPTS]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def model():
    return AutoPagedModelForCausalLM.from_model(
        tiny_model("llama", vocab_size=VOCAB_SIZE), paged_config=PagedConfig(max_num_seqs=8, num_blocks=200)
    )


@pytest.fixture
def llm(model):
    yield LLM(model, tokenizer=TOKENIZER)
    assert_idle(model.engine)


@pytest.fixture(scope="module")
def expected():
    return greedy(tiny_model("llama", vocab_size=VOCAB_SIZE), TOKENS, 8)


def run(llm: LLM, prompts, params=GREEDY, **kwargs):
    return llm.generate(prompts, params, use_tqdm=False, **kwargs)


def token_ids(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


# --------------------------------------------------------------------------------------- prompts


def test_texts_are_answered_in_order(llm, expected):
    outputs = run(llm, PROMPTS)
    assert token_ids(outputs) == expected
    for output, prompt, tokens, answer in zip(outputs, PROMPTS, TOKENS, expected, strict=True):
        assert output.prompt == prompt and output.prompt_token_ids == tokens and output.finished
        (completion,) = output.outputs
        assert completion.text == TOKENIZER.decode(answer, skip_special_tokens=True)
        assert completion.finish_reason == "length" and completion.stop_reason is None and completion.index == 0
        assert output.metrics.arrival_time <= output.metrics.first_token_time <= output.metrics.finished_time


@pytest.mark.parametrize(
    "prompts",
    [
        PROMPTS[0],
        [PROMPTS[0]],
        {"prompt": PROMPTS[0]},
        [{"prompt": PROMPTS[0]}],
        {"prompt_token_ids": TOKENS[0]},
        TOKENS[0],
        [TOKENS[0]],
        [torch.tensor(TOKENS[0])],
        tuple(TOKENS[0]),
    ],
    ids=["text", "texts", "dict", "dicts", "token dict", "tokens", "token lists", "tensors", "tuple"],
)
def test_every_form_of_prompt_gives_the_same_answer(llm, expected, prompts):
    assert token_ids(run(llm, prompts)) == expected[:1]


def test_forms_may_be_mixed_and_no_prompt_is_fine(llm, expected):
    assert token_ids(run(llm, [PROMPTS[0], {"prompt_token_ids": TOKENS[1]}, TOKENS[2]])) == expected
    assert run(llm, []) == []


def test_one_set_of_parameters_for_each_prompt(llm, expected):
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (2, 5, 8)]
    assert token_ids(run(llm, PROMPTS, params)) == [answer[:n] for answer, n in zip(expected, (2, 5, 8), strict=True)]
    with pytest.raises(InvalidRequestError, match="3 prompts were given 2 sampling parameters"):
        run(llm, PROMPTS, params[:2])


# --------------------------------------------------------------------------------------- chat


CHAT = [{"role": "system", "content": "on"}, {"role": "user", "content": "hello"}]
CHAT_TEXT = "<|system|>on<|end|><|user|>hello<|end|><|assistant|>"


def test_chat_applies_the_template(llm):
    for conversation in (CHAT, [CHAT], [[CHAT[0], {"role": "user", "content": [{"type": "text", "text": "hello"}]}]]):
        (output,) = llm.chat(conversation, GREEDY, use_tqdm=False)
        assert output.prompt == CHAT_TEXT
        assert output.prompt_token_ids == TOKENIZER(CHAT_TEXT, add_special_tokens=False)["input_ids"]
    (direct,) = run(llm, {"prompt_token_ids": output.prompt_token_ids})
    assert output.outputs[0].token_ids == direct.outputs[0].token_ids


def test_chat_passes_its_settings_to_the_template(llm):
    other = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "and the"}]
    outputs = llm.chat([CHAT, other], GREEDY, False, continue_final_message=True)
    assert outputs[1].prompt == "<|user|>a<|end|><|assistant|>and the"
    (output,) = llm.chat(CHAT, GREEDY, False, add_generation_prompt=False)
    assert output.prompt == CHAT_TEXT.removesuffix("<|assistant|>")
    template, tool = "{{ messages[0].content }}{{ tools[0].name }}{{ mood }}", {"name": "t"}
    (output,) = llm.chat(CHAT, GREEDY, False, chat_template=template, tools=[tool], chat_template_kwargs={"mood": "m"})
    assert output.prompt == "ontm"


@pytest.mark.parametrize(
    ("messages", "error", "match"),
    [
        ([], InvalidRequestError, "`messages`"),
        ([[]], InvalidRequestError, "A conversation"),
        ("hello", InvalidRequestError, "`messages`"),
        ([CHAT, "hello"], InvalidRequestError, "A conversation"),
        ([{"content": "no role"}], InvalidRequestError, "`role`"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], NotSupportedError, "image_url"),
    ],
)
def test_wrong_conversations_are_refused(llm, messages, error, match):
    with pytest.raises(error, match=match):
        llm.chat(messages, GREEDY, use_tqdm=False)


def test_template_that_refuses_or_is_missing(llm, model):
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        llm.chat(CHAT, GREEDY, False, chat_template="{{ raise_exception('roles must alternate') }}")
    bare = type(TOKENIZER)(tokenizer_object=TOKENIZER.backend_tokenizer)
    with pytest.raises(InvalidRequestError, match="no chat template"):
        LLM(model, tokenizer=bare).chat(CHAT)


# --------------------------------------------------------------------------------------- defaults and seeds


@pytest.fixture
def model_with_defaults():
    model = tiny_model("llama", vocab_size=VOCAB_SIZE)
    config = model.generation_config
    config.repetition_penalty, config.temperature, config.top_k, config.top_p = 3.0, 0.6, 11, 0.9
    config.max_new_tokens, config.do_sample = 9, True
    return model


def test_defaults_come_from_the_models_generation_config(model_with_defaults):
    """EleutherAI/lm-evaluation-harness#3154: the offline engine ignored the repetition penalty of the checkpoint."""
    stock = tiny_model("llama", vocab_size=VOCAB_SIZE)
    llm = LLM(model_with_defaults, tokenizer=TOKENIZER)
    defaults = llm.get_default_sampling_params()
    seen = (defaults.repetition_penalty, defaults.temperature, defaults.top_k, defaults.top_p, defaults.max_tokens)
    assert seen == (3.0, 0.6, 11, 0.9, 9)
    prompt = list(range(5, 230))  # so that most tokens are penalized
    (output,) = run(llm, prompt, SamplingParams(temperature=0))
    penalized = stock.generate(torch.tensor([prompt]), do_sample=False, repetition_penalty=3.0, max_new_tokens=9)
    assert prompt + output.outputs[0].token_ids == penalized[0].tolist()
    explicit = SamplingParams(temperature=0, repetition_penalty=1.0, max_tokens=12)
    assert token_ids(run(llm, prompt, explicit)) == greedy(stock, [prompt], 12)
    assert output.outputs[0].token_ids != greedy(stock, [prompt], 9)[0]


def test_defaults_that_nobody_sets_are_those_of_vllm(llm):
    defaults = llm.get_default_sampling_params()
    assert (defaults.temperature, defaults.top_p, defaults.top_k, defaults.max_tokens, defaults.n) == (1, 1, 0, 16, 1)


def test_seed_of_the_engine_repeats_a_whole_run(model):
    params = SamplingParams(temperature=1.0, max_tokens=8)
    runs = [token_ids(run(LLM(model, tokenizer=TOKENIZER, seed=seed), PROMPTS * 2, params)) for seed in (3, 3, 4)]
    assert runs[0] == runs[1] != runs[2]
    assert len({tuple(answer) for answer in runs[0]}) > 3  # equal prompts get different answers


def test_seed_of_a_request_fixes_its_answer_whoever_is_beside_it(llm):
    """vllm-project/vllm#51226: a seeded request changed from run to run when its batch mate had no seed."""
    seeded, free = SamplingParams(seed=42, max_tokens=8), SamplingParams(max_tokens=8)
    alone = token_ids(run(llm, PROMPTS[0], seeded))[0]
    for _ in range(3):
        assert token_ids(run(llm, PROMPTS[:2], [seeded, free]))[0] == alone
        assert token_ids(run(llm, [PROMPTS[1]] * 7 + [PROMPTS[0]], [free] * 7 + [seeded]))[-1] == alone


def test_branches_differ_and_can_be_repeated(llm):
    """vllm-project/vllm#10852: n samples came back identical."""
    params = SamplingParams(n=4, temperature=1.0, seed=7, max_tokens=8)
    first, second = (run(llm, PROMPTS[0], params)[0].outputs for _ in range(2))
    assert [answer.index for answer in first] == [0, 1, 2, 3]
    assert [answer.token_ids for answer in first] == [answer.token_ids for answer in second]
    assert len({tuple(answer.token_ids) for answer in first}) > 1


@pytest.mark.parametrize("top_k", [0, -1, None])
def test_every_spelling_of_no_top_k_means_the_same(llm, top_k):
    """vllm-project/vllm PR#17691: `top_k=0`, off in Transformers, was refused."""
    given = run(llm, PROMPTS[0], SamplingParams(top_k=top_k, seed=5, max_tokens=8))
    assert token_ids(given) == token_ids(run(llm, PROMPTS[0], SamplingParams(seed=5, max_tokens=8)))


def test_top_1_is_greedy_in_one_batch(llm, expected):
    """vllm-project/vllm#5404: top_k=1 and temperature=0 disagreed."""
    params = [SamplingParams(top_k=1, temperature=2.0, max_tokens=8)] * 3 + [GREEDY] * 3
    assert token_ids(run(llm, PROMPTS * 2, params)) == expected * 2


# --------------------------------------------------------------------------------------- endings


CHAIN = ids("the", " and", "hell", "o", "\n", "in")  # "the andhello\nin" over and over
CHAIN_TEXT = "the andhello\nin"


@pytest.fixture(scope="module")
def scripted():
    model = successor_model(CHAIN, [*ids("x", "y"), EOS, *ids("z")])
    return LLM(model, tokenizer=TOKENIZER, max_num_seqs=8, num_blocks=100)


def test_script_runs_as_written(scripted):
    (output,) = run(scripted, "in", SamplingParams(temperature=0, max_tokens=12))
    assert output.outputs[0].text == CHAIN_TEXT * 2


@pytest.mark.parametrize(
    ("stop", "text", "num_tokens"),
    [
        ("nd", "the a", 2),  # inside a token
        ("dhel", "the an", 3),  # across two
        (" andhello", "the", 4),  # across three
        ("the", "", 1),  # at the beginning
        ("\n", "the andhello", 5),
        (["zzz", "o\nin", "hello"], "the and", 4),  # the one that ends first
        ("inthe", "the andhello\n", 7),
        ("never", CHAIN_TEXT + CHAIN_TEXT, 12),
    ],
)
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_cut_exactly(scripted, stop, text, num_tokens, include):
    """vllm-project/vllm PR#3672: stop strings fired at token ends only and left remnants."""
    params = SamplingParams(temperature=0, max_tokens=12, stop=stop, include_stop_str_in_output=include)
    (output,) = run(scripted, "in", params)
    answer = output.outputs[0]
    if stop == "never":
        assert (answer.finish_reason, answer.stop_reason, answer.text) == ("length", None, text)
    else:
        hit = answer.stop_reason
        assert answer.finish_reason == "stop" and hit in ([stop] if isinstance(stop, str) else stop)
        assert answer.text == text + (hit if include else "")
    assert len(answer.token_ids) == num_tokens and answer.token_ids == (CHAIN * 2)[:num_tokens]


def test_text_held_back_for_a_stop_string_arrives_at_the_end(scripted):
    """ggml-org/llama.cpp PR#15007: what could have begun a stop string was never sent."""
    for tokens in range(1, 7):
        params = SamplingParams(temperature=0, max_tokens=tokens, stop=["the andhello\nXXX", "\ninXX"])
        (output,) = run(scripted, "in", params)
        assert output.outputs[0].text == TOKENIZER.decode(CHAIN[:tokens])


def test_no_stop_before_min_tokens(scripted):
    """vllm-project/vllm#21987: `min_tokens` was ignored when a stop string showed up early."""
    params = SamplingParams(temperature=0, max_tokens=20, min_tokens=8, stop="and")
    (output,) = run(scripted, "in", params)
    assert output.outputs[0].text == CHAIN_TEXT + "the " and len(output.outputs[0].token_ids) == 8
    params = SamplingParams(temperature=0, max_tokens=9, min_tokens=4, stop_token_ids=ids("hell"))
    (output,) = run(scripted, "in", params)
    assert ids("hell")[0] not in output.outputs[0].token_ids[:4]


def test_end_of_sequence_ends_unless_it_is_ignored():
    model = successor_model([*ids("x", "y"), EOS, *ids("z")])
    model.generation_config.eos_token_id = EOS
    llm = LLM(model, tokenizer=TOKENIZER, num_blocks=50)
    (answer,) = run(llm, "x", SamplingParams(temperature=0, max_tokens=6))[0].outputs
    assert (answer.text, answer.token_ids) == ("y", [*ids("y"), EOS])
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, skip_special_tokens=False)
    (answer,) = run(llm, "x", params)[0].outputs
    assert (answer.text, answer.finish_reason) == ("y<|end|>zxy<|end|>", "length")
    (answer,) = run(llm, "x", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))[0].outputs
    assert answer.text == "yzxy"
    (answer,) = run(llm, "x", SamplingParams(temperature=0, max_tokens=6, min_tokens=3))[0].outputs
    assert EOS not in answer.token_ids[:3] and len(answer.token_ids) >= 3


@pytest.mark.parametrize(
    ("name", "value"), [("enable_lora", True), ("speculative_config", {"num": 1}), ("pipeline_parallel_size", 2)]
)
def test_settings_of_vllm_that_are_not_built_are_refused_by_name(model, name, value):
    with pytest.raises(NotSupportedError, match=name):
        LLM(model, tokenizer=TOKENIZER, **{name: value})


def test_a_setting_of_vllm_that_is_called_otherwise_here_is_refused_with_its_name(model):
    with pytest.raises(ConfigurationError, match=r"`cudagraph_capture_sizes` of vLLM is `cuda_graph_sizes` here"):
        LLM(model, tokenizer=TOKENIZER, cudagraph_capture_sizes=[1, 8])


def test_settings_of_vllm_that_change_nothing_are_accepted(model):
    LLM(model, tokenizer=TOKENIZER, disable_log_stats=True, swap_space=4, tokenizer_mode="auto", enable_lora=False)


@pytest.mark.parametrize(
    ("device", "has_gpu", "device_map"),
    [
        ({}, False, None),
        ({}, True, "cuda"),
        ({"device": "auto"}, True, "cuda"),
        ({"device": "cpu"}, True, None),
        ({"device": "cuda:1"}, False, "cuda:1"),
        ({"device_map": "cpu"}, True, "cpu"),
    ],
)
def test_a_model_is_loaded_onto_the_device_that_vllm_would_take(device, has_gpu, device_map, monkeypatch):
    class Loaded(Exception):
        pass

    def load(*args, **kwargs):
        raise Loaded(kwargs.get("device_map"))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(AutoPagedModelForCausalLM, "from_pretrained", load)
    with pytest.raises(Loaded) as loaded:
        LLM("org/model", **device)
    assert loaded.value.args == (device_map,)


def test_a_model_that_is_there_stays_on_its_device(model):
    with pytest.raises(NotSupportedError, match="`device` 'cuda'.*to"):
        LLM(model, tokenizer=TOKENIZER, device="cuda")


def test_a_misspelled_setting_names_the_right_one(model):
    with pytest.raises(ConfigurationError, match="did you mean `gpu_memory_utilization`"):
        LLM(model, tokenizer=TOKENIZER, gpu_memory_utilisation=0.5)


def test_a_wrong_prompt_among_several_is_named(llm):
    with pytest.raises(InvalidRequestError, match="Prompt 1 of 3"):
        run(llm, ["the", [], "and"])
    for prompts in (None, 5, {"text": "a"}):
        with pytest.raises(InvalidRequestError, match="prompt"):
            run(llm, prompts)


def test_leaving_the_block_closes_it():
    with LLM(tiny_model("llama", vocab_size=VOCAB_SIZE), tokenizer=TOKENIZER, num_blocks=20) as llm:
        assert "LlamaForCausalLM" in repr(llm)
        run(llm, "the")
    with pytest.raises(EngineClosedError):
        run(llm, "the")


def test_the_tokenizers_own_end_token_ends_too():
    llm = LLM(successor_model([*ids("x", "y"), EOS, *ids("z")]), tokenizer=TOKENIZER, num_blocks=50)
    assert llm.model.generation_config.eos_token_id is None and TOKENIZER.eos_token_id == EOS
    (answer,) = run(llm, "x", SamplingParams(temperature=0, max_tokens=6))[0].outputs
    assert (answer.token_ids, answer.finish_reason, answer.stop_reason) == ([*ids("y"), EOS], "stop", None)
    generated = llm.model.generate(torch.tensor([ids("x")]), max_new_tokens=4, do_sample=False)
    assert generated[0].tolist() == [*ids("x", "y"), EOS, *ids("z", "x")]  # as in Transformers, which has no tokenizer


def test_any_of_several_end_tokens_ends():
    """huggingface/open-r1 PR#663: only one of several end-of-sequence ids was honoured."""
    llm = LLM(successor_model(CHAIN), tokenizer=TOKENIZER, num_blocks=50)
    llm.model.generation_config.eos_token_id = [EOS, *ids("o", "hell")]  # also set after loading
    (answer,) = run(llm, "in", SamplingParams(temperature=0, max_tokens=9))[0].outputs
    assert answer.token_ids == CHAIN[:3] and answer.finish_reason == "stop" and answer.text == "the and"


@pytest.mark.parametrize("include", [False, True])
def test_text_of_a_stop_token_follows_the_flag(scripted, include):
    """vllm-project/vllm#2538: the text of a stop token id stayed although it was not to be included."""
    params = SamplingParams(temperature=0, max_tokens=9, stop_token_ids=ids("hell"), include_stop_str_in_output=include)
    (answer,) = run(scripted, "in", params)[0].outputs
    assert answer.text == ("the andhell" if include else "the and")
    assert (answer.finish_reason, answer.stop_reason) == ("stop", ids("hell")[0])
    assert answer.token_ids == CHAIN[:3]


def test_no_text_without_detokenizing(scripted):
    (output,) = run(scripted, "in", SamplingParams(temperature=0, max_tokens=3, detokenize=False))
    assert output.outputs[0].text == "" and output.outputs[0].token_ids == CHAIN[:3]


def test_log_probabilities_carry_texts(scripted):
    (output,) = run(scripted, "in", SamplingParams(temperature=0, max_tokens=2, logprobs=1, prompt_logprobs=0))
    first = output.outputs[0].logprobs[0]
    assert list(first) == CHAIN[:1] and first[CHAIN[0]].decoded_token == "the" and first[CHAIN[0]].rank == 1
    assert output.prompt_logprobs == [None]
    assert output.outputs[0].cumulative_logprob == pytest.approx(0, abs=1e-3)


# --------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("bad", "error", "match"),
    [
        ("", InvalidRequestError, "prompt is empty"),
        ({"prompt": ""}, InvalidRequestError, "prompt is empty"),
        ({"prompt_token_ids": []}, InvalidRequestError, "prompt is empty"),
        ({}, InvalidRequestError, "dict with `prompt`"),
        ([1, VOCAB_SIZE], InvalidTokenError, rf"`prompt_token_ids\[1\]` is {VOCAB_SIZE}"),
        ([-1], InvalidTokenError, r"`prompt_token_ids\[0\]` is -1"),
        (["a", "b"], InvalidTokenError, "whole number, got 'a'"),
        ([1.5], InvalidTokenError, "whole number, got 1.5"),
        ([True], InvalidTokenError, "whole number, got True"),
        (None, InvalidRequestError, "got None"),
        (b"abc", InvalidRequestError, "bytes"),
        ([5] * 512, PromptTooLongError, "512 tokens.*`max_model_len` is 512"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, NotSupportedError, "multi_modal_data"),
        ({"prompt_embeds": torch.zeros(1)}, InvalidEmbedsError, "prompt_embeds"),
    ],
)
def test_wrong_prompts_are_refused_before_anything_starts(llm, expected, bad, error, match):
    """vllm-project/vllm#7283: one empty prompt took the engine down."""
    before = llm.engine.stats().num_steps
    with pytest.raises(error, match=match):
        run(llm, [PROMPTS[0], bad, PROMPTS[1]])
    assert llm.engine.stats().num_steps == before
    assert_idle(llm.engine)
    assert token_ids(run(llm, PROMPTS)) == expected


@pytest.mark.parametrize(
    ("params", "error", "match"),
    [
        ({"temperature": 1}, InvalidRequestError, "must be a SamplingParams or a list"),
        ("greedy", InvalidRequestError, "must be a SamplingParams or a list"),
        ([GREEDY, None, {"temperature": 1}], InvalidRequestError, "must be a SamplingParams"),
        (SamplingParams(stop_token_ids=[VOCAB_SIZE]), InvalidTokenError, "`stop_token_ids` names the token"),
        (SamplingParams(logit_bias={VOCAB_SIZE + 5: 1.0}), InvalidTokenError, "`logit_bias` names the token"),
        (SamplingParams(allowed_token_ids=[5, 9999]), InvalidTokenError, "`allowed_token_ids` names the token 9999"),
        (SamplingParams(n=9), InvalidRequestError, "`n` is 9"),
    ],
)
def test_wrong_parameters_are_refused_before_anything_starts(llm, params, error, match):
    """vllm-project/vllm PR#16529: a bias for an id beyond the vocabulary crashed the engine."""
    before = llm.engine.stats().num_steps
    with pytest.raises(error, match=match):
        run(llm, PROMPTS, params)
    assert llm.engine.stats().num_steps == before


def test_reserved_arguments_are_refused(llm, model):
    with pytest.raises(NotSupportedError, match="`lora_request`"):
        run(llm, PROMPTS, lora_request=object())
    with pytest.raises(NotSupportedError, match="`lora_request`"):
        llm.chat(CHAT, GREEDY, False, lora_request=object())
    with pytest.raises(ConfigurationError, match="`quantization` 'awq' is for models that are loaded by their names"):
        LLM(model, tokenizer=TOKENIZER, quantization="awq")
    with pytest.raises(NotSupportedError, match="`tensor_parallel_size` 2"):
        LLM(model, tokenizer=TOKENIZER, tensor_parallel_size=2)
    with pytest.raises(ConfigurationError, match="`kv_cache_dtype` must be one of auto, fp8,"):
        LLM(model, tokenizer=TOKENIZER, kv_cache_dtype="int4")


# --------------------------------------------------------------------------------------- making one


def test_from_a_folder_with_settings(tmp_path, expected, capsys):
    tiny_model("llama", vocab_size=VOCAB_SIZE).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    llm = LLM(
        model=tmp_path, dtype="float32", tensor_parallel_size=1, gpu_memory_utilization=0.5, max_model_len=100,
        max_num_seqs=2, max_num_batched_tokens=32, enable_prefix_caching=False, seed=0, trust_remote_code=False,
        block_size=8, enforce_eager=True,
    )  # fmt: skip
    plan = llm.engine.plan
    assert (plan.max_model_len, plan.max_num_seqs, plan.max_num_batched_tokens, plan.block_size) == (100, 2, 32, 8)
    assert not plan.enable_prefix_caching
    assert token_ids(run(llm, PROMPTS)) == expected
    assert llm.get_tokenizer().chat_template == TOKENIZER.chat_template


def test_unknown_and_contradictory_settings(tmp_path, model):
    with pytest.raises(ConfigurationError, match="`max_modle_len`; did you mean `max_model_len`"):
        LLM(model, tokenizer=TOKENIZER, max_modle_len=3)
    with pytest.raises(TypeError, match="something_else"):
        LLM(model, tokenizer=TOKENIZER, something_else=3)
    with pytest.raises(InvalidRequestError, match="either `paged_config` or the single settings"):
        LLM(model, tokenizer=TOKENIZER, paged_config=PagedConfig(), block_size=8)
    with pytest.raises(ConfigurationError, match="`max_num_seqs` must be a whole number"):
        LLM(model, tokenizer=TOKENIZER, max_num_seqs=0)
    with pytest.raises(InvalidRequestError, match="`dtype` bfloat16"):
        LLM(model, tokenizer=TOKENIZER, dtype="bfloat16")
    with pytest.raises(InvalidRequestError, match="`tokenizer` is needed"):
        LLM(model)


def test_model_in_memory_is_paged_with_the_given_settings(expected):
    model = tiny_model("llama", vocab_size=VOCAB_SIZE)
    llm = LLM(model, tokenizer=TOKENIZER, max_model_len=64, block_size=8)
    assert llm.model is model and llm.engine.plan.max_model_len == 64 and llm.engine.plan.block_size == 8
    assert token_ids(run(llm, PROMPTS)) == expected
    again = LLM(model, tokenizer=TOKENIZER)
    assert again.engine is llm.engine
    other = LLM(model, tokenizer=TOKENIZER, max_model_len=32)
    assert other.engine.plan.max_model_len == 32 and token_ids(run(other, PROMPTS)) == expected


def test_signatures_begin_as_in_vllm():
    assert list(inspect.signature(LLM.generate).parameters)[:4] == ["self", "prompts", "sampling_params", "use_tqdm"]
    assert list(inspect.signature(LLM.chat).parameters)[:4] == ["self", "messages", "sampling_params", "use_tqdm"]


# --------------------------------------------------------------------------------------- the rest


def test_progress_bar_only_when_wanted(llm, capsys):
    run(llm, PROMPTS)
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == ""
    llm.generate(PROMPTS, GREEDY)
    captured = capsys.readouterr()
    assert captured.out == "" and "Processed prompts" in captured.err and "3/3" in captured.err


def test_priority_decides_who_is_first():
    llm = LLM(
        tiny_model("llama", vocab_size=VOCAB_SIZE), tokenizer=TOKENIZER, max_num_seqs=1, scheduling_policy="priority"
    )
    outputs = run(llm, PROMPTS, priority=[2, 0, 1])
    order = sorted(range(3), key=lambda i: outputs[i].metrics.finished_time)
    assert order == [1, 2, 0]
    with pytest.raises(InvalidRequestError, match="3 prompts were given 2 priorities"):
        run(llm, PROMPTS, priority=[1, 2])
    with pytest.raises(InvalidRequestError, match="`priority` must be a whole number"):
        run(llm, PROMPTS, priority=[1, 2, 0.5])
    assert_idle(llm.engine)


def test_cached_prompts_are_reported_and_can_be_forgotten():
    llm = LLM(tiny_model("llama", vocab_size=VOCAB_SIZE), tokenizer=TOKENIZER, block_size=2)
    cached = [run(llm, PROMPTS[0])[0].num_cached_tokens for _ in range(2)]
    assert cached[0] == 0 < cached[1] < len(TOKENS[0])
    llm.reset_prefix_cache()
    assert run(llm, PROMPTS[0])[0].num_cached_tokens == 0


def test_sleep_wake_and_close(expected):
    llm = LLM(tiny_model("llama", vocab_size=VOCAB_SIZE), tokenizer=TOKENIZER)
    assert token_ids(run(llm, PROMPTS)) == expected
    llm.sleep()
    with pytest.raises(EngineClosedError, match="sleeps"):
        run(llm, PROMPTS)
    llm.wake_up()
    assert token_ids(run(llm, PROMPTS)) == expected
    llm.close()
    llm.close()
    with pytest.raises(EngineClosedError, match="closed"):
        run(llm, PROMPTS)


# --------------------------------------------------------------------------------------- hidden states, embeddings


def stock_hidden_states(tokens: list[int]) -> torch.Tensor:
    states = tiny_model("llama", vocab_size=VOCAB_SIZE)(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.stack(states)[:, 0]


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 4}, {"num_blocks": 4, "block_size": 4}, {"batch_invariant": True}],
    ids=["roomy", "chunked", "preempted", "batch invariant"],
)
def test_hidden_states_of_all_tokens_equal_a_plain_forward(settings):
    model = AutoPagedModelForCausalLM.from_model(
        tiny_model("llama", vocab_size=VOCAB_SIZE), paged_config=PagedConfig(**settings)
    )
    llm = LLM(model, tokenizer=TOKENIZER)
    outputs = run(llm, [*PROMPTS, PROMPTS[-1]], hidden_states=True)
    for output in outputs:
        tokens = output.prompt_token_ids + output.outputs[0].token_ids[:-1]
        torch.testing.assert_close(output.outputs[0].hidden_states, stock_hidden_states(tokens), atol=1e-4, rtol=0)
    if "num_blocks" in settings:
        assert llm.engine.stats().num_preemptions > 0
    assert_idle(llm.engine)


def test_chosen_layers_of_the_last_token_for_each_of_several_answers(llm):
    wanted = HiddenStatesWanted(layers=(-1, 0), all_tokens=False)
    params = SamplingParams(n=3, seed=3, temperature=1.0, max_tokens=5, ignore_eos=True)
    (output,) = run(llm, PROMPTS[1], params, hidden_states=wanted)
    for answer in output.outputs:
        expected = stock_hidden_states(output.prompt_token_ids + answer.token_ids[:-1])[[-1, 0], -1:]
        torch.testing.assert_close(answer.hidden_states, expected, atol=1e-4, rtol=0)


def test_hidden_states_are_ordinary_tensors_and_absent_unless_asked_for(llm):
    plain, asked = run(llm, PROMPTS[0])[0], run(llm, PROMPTS[0], hidden_states=True)[0]
    assert plain.outputs[0].hidden_states is None and plain.outputs[0].scores is None
    assert not asked.outputs[0].hidden_states.is_inference()


@pytest.mark.parametrize("layers", [(4,), (-4,), (True,), ("last",)])
def test_layers_that_do_not_exist_are_named(llm, layers):
    with pytest.raises(InvalidRequestError, match="`hidden_states.layers` must hold whole numbers from -3 to 2"):
        run(llm, PROMPTS[0], hidden_states=HiddenStatesWanted(layers=layers))


def test_no_layers_at_all_are_refused(llm):
    with pytest.raises(InvalidRequestError, match="`hidden_states.layers` is empty"):
        run(llm, PROMPTS[0], hidden_states=HiddenStatesWanted(layers=()))


def test_prompt_embeddings_answer_as_their_tokens_do_and_share_nothing_with_others(llm):
    embed = llm.model.get_input_embeddings()
    long = TOKENS[2] * 20
    given = [{"prompt_embeds": embed(torch.tensor(tokens))} for tokens in (long, long, [t + 1 for t in long])]
    by_embeds = [run(llm, prompt)[0] for prompt in given]
    by_tokens = [run(llm, {"prompt_token_ids": tokens})[0] for tokens in (long, long, [t + 1 for t in long])]
    assert token_ids(by_embeds) == token_ids(by_tokens)
    assert [output.num_cached_tokens > 0 for output in by_embeds] == [False, True, False]


def test_embeddings_of_a_wrong_width_are_refused(llm):
    with pytest.raises(InvalidEmbedsError, match=r"\[3, 64\].*got torch.float32 \[3, 31\]"):
        run(llm, {"prompt_embeds": torch.zeros(3, 31)})
