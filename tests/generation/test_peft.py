"""PEFT on a paged model: the answers are Transformers', and no adapter ever meets another one's K/V."""

from __future__ import annotations

import contextlib
import copy
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers.integrations.peft import MIN_PEFT_VERSION, check_peft_version

from hf_paged import AutoPagedModelForCausalLM, PagedGenerationMixin, SamplingParams
from tests.families import tiny_model
from tests.paged_models import assert_idle, paged

PROMPT = torch.tensor([[5, 17, 33, 8, 61, 90, 4, 12, 13]])
NEW = 8
CACHED = 8  # of the prompt's 9 tokens, in blocks of 4
TARGETS = ["q_proj", "v_proj"]

pytestmark = pytest.mark.filterwarnings("ignore:.*adapter.*:UserWarning", "ignore::FutureWarning")


def answer(model, **kwargs) -> list[int]:
    return model.generate(input_ids=PROMPT, max_new_tokens=NEW, do_sample=False, **kwargs)[
        0, PROMPT.shape[1] :
    ].tolist()


def ask(model) -> tuple[list[int], int]:
    """An answer, and how many tokens of the prompt were cached."""
    engine = (model.get_base_model() if isinstance(model, PeftModel) else model).engine
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    (output,) = engine.generate([PROMPT[0].tolist()], params)
    return output.outputs[0].token_ids, output.num_cached_tokens


def lora_config(**kwargs) -> LoraConfig:
    return LoraConfig(r=4, init_lora_weights=False, **{"target_modules": TARGETS, **kwargs})


def lora(model, seed: int = 0, **kwargs):
    torch.manual_seed(seed)
    return get_peft_model(model, lora_config(**kwargs))


def both(paged_first: bool = True, names: tuple[str, ...] = ("other",)):
    """Stock and paged, with the same adapters: `default` and some more."""
    models = []
    for model in (tiny_model("llama"), paged(block_size=4)):
        model = lora(model)
        for seed, name in enumerate(names):
            torch.manual_seed(9 + seed)
            model.add_adapter(name, lora_config())
        models.append(model)
    return models


# --------------------------------------------------------------------------------------- every kind of adapter


KINDS = {
    "lora": lambda: lora_config(),
    "dora": lambda: lora_config(use_dora=True),
    "rslora_with_bias": lambda: lora_config(use_rslora=True, lora_bias=True),
    "olora": lambda: LoraConfig(r=4, init_lora_weights="olora", target_modules=TARGETS),
    "lora_with_saved_module": lambda: lora_config(modules_to_save=["lm_head"]),
    "lora_on_embeddings": lambda: lora_config(target_modules=["embed_tokens", "gate_proj", "o_proj"]),
    "lora_with_tokens": lambda: lora_config(trainable_token_indices=[5, 17, 33]),
    "lora_on_parameters": lambda: lora_config(target_modules=[], target_parameters=["q_proj.weight"]),
    "ia3": lambda: peft.IA3Config(
        init_ia3_weights=False, target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "loha": lambda: peft.LoHaConfig(r=4, init_weights=False, target_modules=TARGETS),
    "vera": lambda: peft.VeraConfig(r=4, init_weights=False, target_modules=TARGETS),
    "oft": lambda: peft.OFTConfig(r=4, oft_block_size=0, init_weights=False, target_modules=TARGETS),
    "layer_norm": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "adaption_prompt": lambda: peft.AdaptionPromptConfig(adapter_len=3, adapter_layers=2),
    "soft_prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3),
    "p_tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=16),
    "prefix_tuning": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3),
}
THROUGH_THE_LOOP = {"soft_prompt", "p_tuning", "prefix_tuning"}


def adapted(model, kind: str):
    config = KINDS[kind]()
    config.task_type = "CAUSAL_LM"
    torch.manual_seed(0)
    model = get_peft_model(model, config)
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "adaption_gate" in name:
                parameter.fill_(1.0)
            elif parameter.requires_grad:
                scale = 6.0 if "prompt_encoder" in name else 1.0 if parameter.ndim < 2 or "hada" in name else 0.05
                parameter.add_(torch.randn(parameter.shape, generator=source) * scale)
    return model.eval()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_adapters_of_every_kind_equal_stock_before_and_after_paging(kind):
    expected = answer(adapted(tiny_model("llama"), kind))
    # PEFT 0.21 hands prefixes to Transformers 5.24 under an argument's old name, which leaves them out.
    assert kind == "prefix_tuning" or expected != answer(tiny_model("llama"))
    used = paged(block_size=4)
    answer(used)
    for model in (adapted(used, kind), AutoPagedModelForCausalLM.from_model(adapted(tiny_model("llama"), kind))):
        assert isinstance(model, PeftModel)
        stats = model.get_base_model().engine.stats()
        before = stats.num_generated_tokens
        assert answer(model) == expected and answer(model) == expected
        assert kind in THROUGH_THE_LOOP or stats.num_generated_tokens == before + 2 * NEW
        if kind not in THROUGH_THE_LOOP:
            (result,) = model.generate_batch([PROMPT[0].tolist()], max_new_tokens=NEW, progress_bar=False).values()
            assert result.generated_tokens == expected


def test_adapters_per_row_go_through_transformers_loop():
    prompts, answers = PROMPT.repeat(3, 1), []
    for model in both():
        names = ["default", "__base__", "other"]
        answers.append(model.eval().generate(input_ids=prompts, max_new_tokens=NEW, adapter_names=names))
    assert torch.equal(answers[0], answers[1])


# --------------------------------------------------------------------------------------- whose K/V


def test_an_adapter_finds_its_own_blocks_again_and_nobody_elses():
    """vllm-project/vllm#30931: K/V computed under one adapter must not be found under another."""
    stock, model = both()
    expected = {name: answer(stock) for name in ("default", "other") if stock.set_adapter(name) is None}
    with stock.disable_adapter():
        expected["none"] = answer(stock)
    assert len({tuple(tokens) for tokens in expected.values()}) == 3
    seen = set()
    for name in ("default", "other", "default", "none", "other", "none", "default"):
        if name == "none":
            with model.disable_adapter():
                assert ask(model) == (expected[name], CACHED if name in seen else 0)
        else:
            model.set_adapter(name)
            assert ask(model) == (expected[name], CACHED if name in seen else 0)
        seen.add(name)


def test_blocks_from_before_the_first_adapter_are_found_without_it():
    model = paged(block_size=4)
    plain = ask(model)[0]
    model = lora(model)
    assert ask(model)[1] == 0
    with model.disable_adapter():
        assert ask(model) == (plain, CACHED)


def test_adapters_of_one_name_after_another_share_nothing(tmp_path):
    for seed in (1, 2):
        lora(tiny_model("llama"), seed).save_pretrained(tmp_path / str(seed))
    stock, model = both()
    for seed in (1, 2, 1):
        for each in (stock, model):
            each.load_adapter(str(tmp_path / str(seed)), adapter_name="same")
            each.set_adapter("same")
        got = ask(model)
        assert got == (answer(stock), 0)
        assert ask(model) == (got[0], CACHED)
        for each in (stock, model):
            each.delete_adapter("same")


def test_adapters_that_do_not_take_part_may_come_go_and_change():
    _, model = both()
    first = ask(model)[0]
    model.add_adapter("third", lora_config())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".other." in name:
                parameter.mul_(2)
    assert ask(model) == (first, CACHED)
    model.delete_adapter("other")
    assert ask(model) == (first, CACHED)


def test_merging_unmerging_and_scaling():
    stock, model = both()

    def scale(each, by):
        for module in each.modules():
            if hasattr(module, "set_scale"):
                module.set_scale("default", by)

    before = ask(model)[0]
    for change, cached in (
        (lambda each: each.merge_adapter(), 0),
        (lambda each: each.unmerge_adapter(), 0),
        (lambda each: scale(each, 3.0), 0),
        (lambda each: scale(each, 1.0), CACHED),
        (lambda each: (each.merge_adapter(), each.unmerge_adapter()), 0),  # rounding: the weights are others now
        (lambda each: each.merge_adapter(["other"]), 0),
    ):
        for each in (stock, model):
            change(each)
        assert ask(model) == (answer(stock), cached)
    assert answer(stock) != before


def test_adapters_in_sum():
    stock, model = both()
    texts = []
    for names in (["default"], ["default", "other"], ["other"]):
        for each in (stock, model):
            each.base_model.set_adapter(names)
        texts.append(ask(model))
        assert texts[-1] == (answer(stock), 0)
    assert len({tuple(text) for text, _ in texts}) == 3


def test_merge_and_unload_gives_the_paged_model_back():
    for unload in ("merge_and_unload", "unload"):
        stock, model = both()
        ask(model)
        stock, model = getattr(stock, unload)(), getattr(model, unload)()
        assert isinstance(model, PagedGenerationMixin) and not isinstance(model, PeftModel)
        assert ask(model)[0] == answer(stock) == answer(model)
        assert (answer(stock) == answer(tiny_model("llama"))) is (unload == "unload")


def test_merging_without_a_request_in_between_is_noticed():
    stock, model = tiny_model("llama"), paged(block_size=4)
    before = ask(model)[0]
    for each in (stock, model):
        lora(each).merge_and_unload()
    after = ask(model)
    assert after == (answer(stock), 0) and after[0] != before


def test_peft_that_is_imported_late_is_noticed():
    code = """
import sys, torch
from tests.families import tiny_model
from tests.paged_models import paged
prompt, stock, model = torch.tensor([[5, 17, 33, 8, 61, 90, 4]]), tiny_model("llama"), paged(block_size=2)
before = model.generate(prompt, max_new_tokens=8)
assert "peft.tuners" not in sys.modules
from peft import LoraConfig, get_peft_model
for each in (stock, model):
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(each, config).merge_and_unload()
after = model.generate(prompt, max_new_tokens=8)
assert torch.equal(after, stock.generate(prompt, max_new_tokens=8)) and not torch.equal(after, before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr


def test_hot_swapped_weights_are_others(tmp_path):
    from peft.utils.hotswap import hotswap_adapter

    lora(tiny_model("llama"), 5).save_pretrained(tmp_path)
    stock, model = both(names=())
    before = ask(model)[0]
    for each in (stock, model):
        hotswap_adapter(each, str(tmp_path), adapter_name="default")
    after = ask(model)
    assert after == (answer(stock), 0) and after[0] != before


# --------------------------------------------------------------------------------------- while requests run


@contextlib.contextmanager
def switched(model):
    model.set_adapter("other")
    yield


@contextlib.contextmanager
def away_and_back(model):
    model.set_adapter("other")
    yield
    model.set_adapter("default")


@contextlib.contextmanager
def disabled_and_enabled(model):
    with model.disable_adapter():
        yield


@contextlib.contextmanager
def merged_and_unmerged(model):
    model.merge_adapter(["other"])
    yield
    model.unmerge_adapter()


@contextlib.contextmanager
def trained(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A.default" in name:
                parameter.mul_(-1)
    yield


CHANGES = {
    change.__name__: change for change in (switched, away_and_back, disabled_and_enabled, merged_and_unmerged, trained)
}


@pytest.mark.parametrize("how", sorted(CHANGES))
@pytest.mark.parametrize("when", ["between steps", "in a step"])
def test_adapters_switched_while_a_request_runs_poison_nothing(how, when):
    stock, model = both()
    base, change = model.get_base_model(), CHANGES[how](model)
    engine = base.engine

    def between_the_layers(module, arguments):  # the first has run already, the second not yet
        handles[0].remove()
        change.__enter__()

    def before_the_head(module, arguments):
        handles[1].remove()
        change.__exit__(None, None, None)

    with CHANGES[how](stock):
        pass
    with engine.requests() as states:
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        states.append(engine.add_request(PROMPT[0].tolist(), params))
        for _ in range(2):
            engine.step()
        if when == "in a step":  # one that fills a block
            handles = [
                base.model.layers[0].mlp.register_forward_pre_hook(between_the_layers),
                base.lm_head.register_forward_pre_hook(before_the_head),
            ]
            engine.step()
        else:
            with change:
                for _ in range(6):
                    engine.step()
        for _ in engine.as_finished(states):
            pass
    whole = states[0].group.requests[0].token_ids
    for name in ("other", "default", "other", "default"):
        for each in (stock, model):
            each.set_adapter(name)
        for prompt in (whole, PROMPT[0].tolist()):
            ids = torch.tensor([prompt])
            expected = stock.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False
            )
            (output,) = engine.generate([prompt], params.replace(max_tokens=NEW))
            assert output.outputs[0].token_ids == expected[0, len(prompt) :].tolist()
    assert_idle(engine)


def test_adapters_switched_under_load_by_another_thread():
    """Requests go on with the weights of the moment; nothing of that is found later."""
    stock, model = both()
    engine = model.get_base_model().engine
    stop, errors = threading.Event(), []

    def load():
        seed = 0
        while not stop.is_set():
            seed += 1
            prompts = [PROMPT[0].tolist(), PROMPT[0].tolist() * 2, [1 + seed % 190] * 7]
            try:
                engine.generate(prompts, SamplingParams(temperature=0, max_tokens=4 + seed % 9, ignore_eos=True))
            except Exception as error:  # handed to the test
                errors.append(error)
                return

    thread = threading.Thread(target=load)
    thread.start()
    expected = {}
    for name in ("default", "other"):
        stock.set_adapter(name)
        expected[name] = answer(stock)
    with stock.disable_adapter():
        expected[None] = answer(stock)
    for round_ in range(12):
        name = ("default", "other", None)[round_ % 3]
        if name is None:
            with model.disable_adapter():
                assert answer(model) == expected[name]
        else:
            model.set_adapter(name)
            assert answer(model) == expected[name]
    stop.set()
    thread.join(60)
    assert not errors and not thread.is_alive()
    assert_idle(engine)


# --------------------------------------------------------------------------------------- Transformers' own methods


def test_adapters_by_transformers_own_methods(tmp_path):
    try:
        check_peft_version(MIN_PEFT_VERSION)
    except ValueError as error:
        pytest.skip(f"Transformers refuses this version of PEFT: {error}")
    for seed in (1, 2):
        lora(tiny_model("llama"), seed).save_pretrained(tmp_path / str(seed))
    stock, model, texts = tiny_model("llama"), paged(block_size=4), []
    for change in (
        lambda each: None,
        lambda each: each.load_adapter(str(tmp_path / "1"), adapter_name="one"),
        lambda each: each.load_adapter(str(tmp_path / "2"), adapter_name="two"),
        lambda each: each.set_adapter("two"),
        lambda each: each.set_adapter("one"),
        lambda each: each.disable_adapters(),
        lambda each: each.enable_adapters(),
        lambda each: each.set_adapter("two"),
        lambda each: each.delete_adapter("two"),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for each in (stock, model):
                change(each)
        texts.append(ask(model)[0])
        assert texts[-1] == answer(stock)
    assert texts[4] == texts[1] != texts[3] and texts[5] == texts[0]


def test_adapter_loaded_by_transformers(tmp_path):
    lora(tiny_model("llama"), 1).save_pretrained(tmp_path)
    stock, model = tiny_model("llama"), paged(block_size=4)
    before = ask(model)[0]
    for each in (stock, model):
        each.load_adapter(str(tmp_path))
    after = ask(model)
    assert after == (answer(stock), 0) and after[0] != before


def test_saved_adapters_are_loaded_with_their_model(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "base")
    model = AutoPagedModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    model = lora(model)
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    expected = ask(model)[0]
    model.save_pretrained(tmp_path / "adapter")
    files = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert "adapter_model.safetensors" in files and "model.safetensors" not in files
    again = PeftModel.from_pretrained(paged(), str(tmp_path / "adapter"))
    whole = AutoPagedModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.float32)
    assert ask(again)[0] == ask(whole)[0] == expected != answer(tiny_model("llama"))
    twin = copy.deepcopy(again)
    twin.set_adapter("default")
    assert ask(twin)[0] == expected


def test_adapter_is_trained_and_the_engine_follows():
    stock, model = both(names=())
    before = answer(model)
    for each in (stock, model):
        optimizer = torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=0.1, fused=True)
        for _ in range(2):
            each(input_ids=PROMPT, labels=PROMPT).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if each is stock:
            expected = answer(stock)
    assert ask(model) == (expected, 0) and expected != before
