"""A paged model is still the Transformers model that it was: loading, saving, copying, training, adapters, the end."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

import hf_paged
from hf_paged import (
    LLM,
    AutoPagedModelForCausalLM,
    ConfigurationError,
    EngineClosedError,
    NotSupportedError,
    PagedConfig,
    PagedGenerationMixin,
    SamplingParams,
    UnsupportedModelError,
)
from tests.families import OTHER_FAMILIES, greedy, tiny_model
from tests.paged_models import paged

PROMPT = torch.tensor([[5, 17, 33, 8, 61, 90, 4]])
MANY = [[7 * i % 190 + 1 for i in range(n)] for n in (3, 20, 33, 50)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A checkpoint of the tiny llama."""
    path = tmp_path_factory.mktemp("llama")
    tiny_model("llama").save_pretrained(path)
    return str(path)


def answer(model, **kwargs) -> list[int]:
    return model.generate(PROMPT, max_new_tokens=8, **kwargs)[0, PROMPT.shape[1] :].tolist()


# --------------------------------------------------------------------------------------- what it is


def test_from_pretrained_gives_an_instance_of_the_own_class(folder):
    model = AutoPagedModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(model, LlamaForCausalLM) and isinstance(model, PagedGenerationMixin)
    assert type(model).__name__ == "LlamaForCausalLM" and type(model).__module__ == LlamaForCausalLM.__module__
    assert not model.training and model.dtype == torch.float32
    assert answer(model) == answer(tiny_model("llama"))


def test_from_pretrained_takes_what_transformers_takes(folder):
    config = transformers.AutoConfig.from_pretrained(folder, max_position_embeddings=64)
    model = AutoPagedModelForCausalLM.from_pretrained(
        folder, config=config, dtype="bfloat16", attn_implementation="eager", device_map="cpu", low_cpu_mem_usage=True
    )
    assert model.dtype == torch.bfloat16 and model.engine.plan.max_model_len == 64
    assert model.config._attn_implementation == "hf_paged_eager"
    assert len(answer(model)) == 8


def test_loading_info_comes_beside_the_model(folder):
    model, info = AutoPagedModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert isinstance(model, PagedGenerationMixin) and not info["missing_keys"]


def test_saved_checkpoint_is_an_ordinary_one(folder, tmp_path):
    model = AutoPagedModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.max_new_tokens = 3
    model.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    assert json.loads(text)["architectures"] == ["LlamaForCausalLM"]
    for file in tmp_path.iterdir():
        if file.suffix == ".json":
            assert "paged" not in file.read_text().lower()
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(stock) is LlamaForCausalLM and stock.config._attn_implementation == "sdpa"
    assert stock.generate(PROMPT).shape[1] == PROMPT.shape[1] + 3
    for name, tensor in tiny_model("llama").state_dict().items():
        assert torch.equal(stock.state_dict()[name], tensor)


@pytest.mark.parametrize(("stored", "tied"), [(True, True), (False, True), (True, False)])
def test_head_stored_or_not_tied_or_not(tmp_path, stored, tied):
    """sgl-project/sglang#2935: checkpoints with tied embeddings may hold the head's weight or leave it out."""
    from safetensors.torch import load_file, save_file

    tiny_model("llama", tie_word_embeddings=tied).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("lm_head.weight", None)
    if stored:
        source = weights["model.embed_tokens.weight"]
        weights["lm_head.weight"] = source.clone() if tied else source.flip(0).contiguous()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model = AutoPagedModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(model(PROMPT).logits, stock(PROMPT).logits)
    assert answer(model) == answer(stock)


# --------------------------------------------------------------------------------------- plain forward, training


def loss_and_gradients(model, **kwargs):
    model.zero_grad()
    output = model(input_ids=PROMPT, labels=PROMPT, **kwargs)
    output.loss.backward()
    return output.loss, output.logits, {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same(left, right) -> None:
    assert torch.equal(left[0], right[0]) and torch.equal(left[1], right[1])
    assert left[2].keys() == right[2].keys()
    for name, gradient in left[2].items():
        assert torch.equal(gradient, right[2][name]), name


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss", "gpt2", "deepseek_v3"])
def test_plain_forward_and_backward_are_bitwise_stock(family):
    stock, model = tiny_model(family), paged(family)
    model.generate(PROMPT, max_new_tokens=2)
    for mask in (None, torch.tensor([[0, 0, 1, 1, 1, 1, 1]])):
        assert_same(loss_and_gradients(model, attention_mask=mask), loss_and_gradients(stock, attention_mask=mask))


def test_plain_forward_is_stock_while_the_engine_runs_in_another_thread():
    """huggingface/transformers PR#36737: a paged call must not switch attention for everybody else."""
    stock, model = tiny_model("llama"), paged()
    expected, forwards = loss_and_gradients(stock), 0
    outputs: list = []
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    thread = threading.Thread(target=lambda: outputs.extend(model.engine.generate(MANY, params)))
    thread.start()
    while thread.is_alive():
        assert_same(loss_and_gradients(model), expected)
        forwards += 1
    thread.join()
    assert forwards > 1
    assert [output.outputs[0].token_ids for output in outputs] == greedy(stock, MANY, 40)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_steps_between_generations(checkpointing):
    """huggingface/trl PR#5765: generation beside training, on the weights of the moment."""
    stock, model = tiny_model("llama"), paged()
    for each in (stock, model):
        each.train()
        if checkpointing:
            each.gradient_checkpointing_enable()
    for _ in range(2):
        texts = []
        for each in (stock, model):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
            each(input_ids=PROMPT, labels=PROMPT, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            texts.append(answer(each, do_sample=False))
        assert texts[1] == texts[0]
    for left, right in zip(stock.parameters(), model.parameters(), strict=True):
        assert torch.equal(left, right)


def test_dropout_of_a_model_in_training_mode_is_not_dropped_silently():
    """Transformers' `generate` of a model in training mode applies its dropout."""
    stock, model = (tiny_model("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5).train() for _ in range(2))
    model = AutoPagedModelForCausalLM.from_model(model)
    assert model.training and model._paged_refusal is None
    texts = []
    for each in (stock, model):
        torch.manual_seed(0)
        texts.append(answer(each))
    assert texts[0] == texts[1]
    assert answer(model.eval()) == answer(stock.eval()) != texts[0]


# --------------------------------------------------------------------------------------- other attention, and back


def test_attention_implementation_set_away_and_back():
    model = paged()
    expected = answer(model)
    steps = model.engine.stats().num_steps
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager" and answer(model) == expected
    assert model.engine.stats().num_steps == steps  # Transformers' own loop
    model.set_attn_implementation("hf_paged")
    assert answer(model) == expected and model.engine.stats().num_steps > steps


@pytest.mark.parametrize("stock", ["sdpa", "eager"])
@pytest.mark.filterwarnings("ignore:The `paged:FutureWarning")
def test_model_loaded_for_transformers_own_continuous_batching_is_paged(stock):
    model = tiny_model("llama")
    model.set_attn_implementation(f"paged|{stock}")
    before = model.config._attn_implementation  # newer versions leave out the prefix
    model = AutoPagedModelForCausalLM.from_model(model)
    prompt = [5, 6, 7, 8]
    assert (
        model.generate(torch.tensor([prompt]), max_new_tokens=5)[0, 4:].tolist()
        == greedy(tiny_model("llama"), [prompt], 5)[0]
    )
    assert model.engine.stats().num_steps > 0
    assert model.unpaged().config._attn_implementation == before


def test_unpaged_gives_the_model_back():
    model = paged()
    engine = model.engine
    expected = answer(model)
    assert model.unpaged() is model
    assert type(model) is LlamaForCausalLM and model.config._attn_implementation == "sdpa"
    assert not [name for name in vars(model) if "paged" in name]
    assert answer(model) == expected
    with pytest.raises(EngineClosedError):
        engine.generate(MANY)
    again = AutoPagedModelForCausalLM.from_model(model)
    assert again is model and answer(model) == expected


def test_paging_again_with_the_same_settings_changes_nothing():
    model = paged(block_size=8)
    engine = model.engine
    request = engine.add_request([5, 6, 7])
    assert AutoPagedModelForCausalLM.from_model(model, paged_config=PagedConfig(block_size=8)) is model
    assert model.engine is engine and not request.finished
    engine.abort_all()


def test_a_wrong_backend_is_one_error_and_no_noise():
    code = (
        "from hf_paged import AutoPagedModelForCausalLM as A, PagedConfig\n"
        "from tests.families import tiny_model\n"
        "A.from_model(tiny_model('llama'), paged_config=PagedConfig(attn_backend='flash'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "flash" in done.stderr.splitlines()[-1]
    assert "Exception ignored" not in done.stderr


def test_paging_again_changes_the_settings():
    model = paged(block_size=8)
    first = model.engine
    AutoPagedModelForCausalLM.from_model(model, paged_config=PagedConfig(block_size=32))
    assert model.engine.plan.block_size == 32 and type(model).__mro__.count(PagedGenerationMixin) == 1
    with pytest.raises(EngineClosedError):
        first.generate(MANY)
    assert answer(model) == answer(tiny_model("llama"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_model_of_another_dtype_gets_another_engine(dtype):
    model, stock = paged(), tiny_model("llama")
    first = model.engine
    answer(model)
    for each in (model, stock):
        assert each.to(dtype) is each
    assert answer(model)[:3] == answer(stock)[:3]
    assert model.engine is not first and model.engine.plan.dtype == str(dtype).removeprefix("torch.")
    with pytest.raises(EngineClosedError):
        first.generate(MANY)
    again = model.engine
    assert model.to(dtype).to("cpu").engine is again


def test_vocabulary_that_grows_is_noticed():
    model, stock = paged(), tiny_model("llama")
    for each in (model, stock):
        torch.manual_seed(0)
        each.resize_token_embeddings(210)
    prompt = torch.tensor([[5, 17, 205]])
    assert torch.equal(model.generate(prompt, max_new_tokens=6), stock.generate(prompt, max_new_tokens=6))
    with pytest.raises(hf_paged.InvalidTokenError, match="vocabulary of 210"):
        model.generate(prompt + 5, max_new_tokens=6)


# --------------------------------------------------------------------------------------- what it does not run


@pytest.mark.parametrize("family", sorted(OTHER_FAMILIES))
def test_families_that_take_the_other_way_warn_once_and_answer_as_ever(family, caplog):
    stock, model = tiny_model(family), tiny_model(family)
    before = model.config._attn_implementation
    with caplog.at_level(logging.WARNING, logger="hf_paged"):
        model = AutoPagedModelForCausalLM.from_model(model)
        assert answer(model) == answer(stock)
        assert torch.equal(model(PROMPT).logits, stock(PROMPT).logits)
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("hf_paged")]
    assert len(messages) == 1
    assert type(stock).__name__ in messages[0] and "layer" in messages[0].lower() or "state" in messages[0]
    assert "Transformers' own loop" in messages[0]
    assert model.config._attn_implementation == before
    with pytest.raises(UnsupportedModelError, match=type(stock).__name__):
        model.engine  # noqa: B018 - the property raises
    with pytest.raises(UnsupportedModelError, match=type(stock).__name__):
        model.generate_batch([[1, 2]])
    with pytest.raises(UnsupportedModelError, match=type(stock).__name__):
        LLM(model, tokenizer=object())


def test_linear_attention_layer_is_named(caplog):
    config = transformers.Qwen3NextConfig(
        vocab_size=99, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, layer_types=["linear_attention", "full_attention"], num_experts=2,
        num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    )  # fmt: skip
    AutoPagedModelForCausalLM.from_model(AutoModelForCausalLM.from_config(config))
    (message,) = [record.getMessage() for record in caplog.records if record.name.startswith("hf_paged")]
    assert "state" in message or "Layer 0" in message


@pytest.fixture(scope="module")
def t5():
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )


def test_encoder_decoder_models_are_refused(t5, tmp_path):
    with pytest.raises(UnsupportedModelError, match="T5ForConditionalGeneration"):
        AutoPagedModelForCausalLM.from_model(t5)
    t5.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="decoder-only"):
        AutoPagedModelForCausalLM.from_pretrained(str(tmp_path))
    assert type(t5) is transformers.T5ForConditionalGeneration


@pytest.mark.parametrize("thing", ["gpt2", None, torch.nn.Linear(2, 2), object(), {"model": 1}])
def test_things_that_are_no_model_are_refused(thing):
    with pytest.raises(UnsupportedModelError, match="`model` must be a PreTrainedModel"):
        AutoPagedModelForCausalLM.from_model(thing)


def test_models_that_generate_nothing_are_refused():
    config = tiny_model("llama").config
    bert = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    for model in (
        transformers.LlamaModel(config),
        transformers.LlamaForSequenceClassification(config),
        transformers.BertForMaskedLM(bert),
    ):
        before = type(model)
        with pytest.raises(UnsupportedModelError, match=before.__name__):
            AutoPagedModelForCausalLM.from_model(model)
        assert type(model) is before


@pytest.mark.parametrize("config", [{"block_size": 16}, "fast", 3, PagedConfig])
def test_settings_must_be_a_paged_config(config, folder):
    for call in (
        lambda: AutoPagedModelForCausalLM.from_model(tiny_model("llama"), paged_config=config),
        lambda: AutoPagedModelForCausalLM.from_pretrained(folder, paged_config=config),
    ):
        with pytest.raises(ConfigurationError, match="`paged_config` must be a PagedConfig"):
            call()


@pytest.mark.parametrize(
    ("argument", "error", "match"),
    [
        ({"tensor_parallel_size": 2}, NotSupportedError, "`tensor_parallel_size` 2"),
        ({"tensor_parallel_size": 0}, ConfigurationError, "whole number from 1, got 0"),
        ({"tensor_parallel_size": True}, ConfigurationError, "got True"),
        ({"quantize": "int3"}, ConfigurationError, "`quantize` must be one of 'int8'"),
    ],
)
def test_reserved_arguments_are_refused_before_anything_is_read(argument, error, match):
    with pytest.raises(error, match=match):
        AutoPagedModelForCausalLM.from_pretrained("/does/not/exist", **argument)


def test_unknown_backend_or_policy_leaves_the_model_alone():
    for config in (PagedConfig(attn_backend="fastest"), PagedConfig(scheduling_policy="lifo")):
        model = tiny_model("llama")
        with pytest.raises(hf_paged.UnknownNameError, match="available"):
            AutoPagedModelForCausalLM.from_model(model, paged_config=config)
        assert type(model) is LlamaForCausalLM and model.config._attn_implementation == "sdpa"


def test_a_backend_that_was_asked_for_by_name_and_cannot_run_is_an_error():
    model = tiny_model("llama")
    errors = hf_paged.UnsupportedAttentionError, hf_paged.UnknownNameError  # the latter where it is not installed
    with pytest.raises(errors, match="'triton' cannot serve this model|triton package is not installed"):
        AutoPagedModelForCausalLM.from_model(model, paged_config=PagedConfig(attn_backend="triton"))
    assert type(model) is LlamaForCausalLM and model.config._attn_implementation == "sdpa"


def test_class_is_not_to_be_made_by_hand():
    with pytest.raises(OSError, match="from_pretrained"):
        AutoPagedModelForCausalLM()


def test_layers_offloaded_to_disk_are_run_right_or_refused(folder, tmp_path, caplog):
    """huggingface/accelerate#2520: with `device_map` the cache of a layer must be where the layer runs."""
    devices = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    devices.update({"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"})
    model = AutoPagedModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, device_map=devices, offload_folder=str(tmp_path)
    )
    assert answer(model) == answer(tiny_model("llama"))


# --------------------------------------------------------------------------------------- the package


def test_importing_the_package_imports_neither_torch_nor_transformers():
    code = (
        "import sys, hf_paged; dir(hf_paged); hf_paged.PagedConfig(); hf_paged.SamplingParams(); hf_paged.errors;"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_every_public_name_resolves():
    for name in hf_paged.__all__:
        assert getattr(hf_paged, name) is not None
    errors = {
        name
        for name, value in vars(hf_paged.errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert errors <= set(hf_paged.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        hf_paged.Nonsense  # noqa: B018 - the attribute raises


def test_isinstance_of_the_base_class_and_auto_class_mapping():
    model = paged()
    assert isinstance(model, PreTrainedModel) and model.can_generate()
    assert model.main_input_name == "input_ids" and model.config.architectures in (None, ["LlamaForCausalLM"])
