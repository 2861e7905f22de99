"""Models that change: a cached prefix of the old weights or hooks would go on for ever in the new one's answers."""

from __future__ import annotations

import functools

import pytest
import torch

from hf_paged import SamplingParams
from hf_paged.cache.block_manager import BlockManager
from hf_paged.generation import native_layers, seen_tensors
from hf_paged.generation.weights import WeightWatch
from tests.conftest import random_prompts
from tests.families import tiny_model
from tests.paged_models import assert_idle, paged

PROMPT = random_prompts(1, 199, seed=3, longest=60)[0][:21] * 2
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def ask(model, prompt=PROMPT) -> tuple[list[int], int]:
    """An answer, and how many tokens of the prompt were cached."""
    (output,) = model.engine.generate([prompt], PARAMS)
    return output.outputs[0].token_ids, output.num_cached_tokens


def stock_answer(model, prompt=PROMPT) -> list[int]:
    ids = torch.tensor([prompt])
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    return whole[0, len(prompt) :].tolist()


def v_proj(model) -> torch.nn.Module:
    return model.model.layers[0].self_attn.v_proj


def scaled(model, name: str = "v_proj") -> dict[str, torch.Tensor]:
    return {key: -value if name in key else value.clone() for key, value in model.state_dict().items()}


def in_place(model):
    with torch.no_grad():
        v_proj(model).weight.mul_(-1)


def optimizer(model):
    weight = v_proj(model).weight
    weight.grad = 2 * weight.detach()
    torch.optim.SGD([weight], lr=1.0).step()
    weight.grad = None


def fused_optimizer(model):
    model(input_ids=torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss.backward()
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()


def load_state_dict(model):
    model.load_state_dict(scaled(model))


def load_and_assign(model):
    model.load_state_dict(scaled(model), assign=True)


def parameter_replaced(model):
    v_proj(model).weight = torch.nn.Parameter(-v_proj(model).weight.detach())


def parameter_deleted_and_made_again(model):
    """The new one may well get the old one's place in memory."""
    new = (-v_proj(model).weight).detach().numpy().tolist()
    del v_proj(model).weight
    v_proj(model).weight = torch.nn.Parameter(torch.tensor(new))


def module_replaced(model):
    attention, old = model.model.layers[0].self_attn, v_proj(model)
    attention.v_proj = torch.nn.Linear(old.in_features, old.out_features, bias=False)
    with torch.no_grad():
        attention.v_proj.weight.copy_(-old.weight)


def data_replaced(model):
    v_proj(model).weight.data = -v_proj(model).weight.data


def swapped(model):
    torch.utils.swap_tensors(v_proj(model).weight, torch.nn.Parameter(-v_proj(model).weight.detach()))


def layers_swapped(model):
    layers = model.model.layers
    weights = [layer.self_attn.v_proj for layer in layers]
    layers[0].self_attn.v_proj, layers[1].self_attn.v_proj = weights[1], weights[0]


def steered(module, arguments, result):
    return result + torch.arange(result.shape[-1]) / 8


def hook(model):
    return model.model.layers[0].register_forward_hook(steered)


def pre_hook(model):
    return model.model.layers[0].register_forward_pre_hook(lambda module, arguments: (-arguments[0], *arguments[1:]))


def forward_patched(model):
    module = v_proj(model)
    module.forward = lambda states: -type(module).forward(module, states)


def frequencies(model):
    model.model.rotary_emb.inv_freq.mul_(0.5)  # not saved with the model


WAYS = [
    in_place,
    optimizer,
    fused_optimizer,
    load_state_dict,
    load_and_assign,
    parameter_replaced,
    parameter_deleted_and_made_again,
    module_replaced,
    data_replaced,
    swapped,
    layers_swapped,
    hook,
    pre_hook,
    forward_patched,
    frequencies,
]


@pytest.mark.parametrize("change", WAYS, ids=lambda change: change.__name__)
def test_changed_weights_flush_the_prefix_cache(change):
    model, fresh = paged(block_size=4), tiny_model("llama")
    before = ask(model)[0]
    assert ask(model) == (before, 40)
    for each in (model, fresh):
        change(each)
    after = ask(model)
    assert after == (stock_answer(fresh), 0) and after[0] != before
    assert ask(model) == (after[0], 40)


@pytest.mark.parametrize("change", WAYS, ids=lambda change: change.__name__)
def test_weights_that_change_while_a_request_runs_do_not_poison_the_cache(change):
    """Nobody asks for anything between the change and the end of the request that runs."""
    model, fresh = paged(block_size=4), tiny_model("llama")
    engine = model.engine
    with engine.requests() as states:
        states.append(engine.add_request(PROMPT, PARAMS.replace(max_tokens=20)))
        for _ in range(5):
            engine.step()
        for each in (model, fresh):
            change(each)
        list(engine.as_finished(states))
    whole = states[0].group.requests[0].token_ids
    assert len(whole) == len(PROMPT) + 20
    for prompt in (whole, PROMPT):
        assert ask(model, prompt) == (stock_answer(fresh, prompt), 0 if prompt is whole else 40)
    assert_idle(engine)


def test_weights_that_change_during_a_step_do_not_poison_the_cache():
    model, fresh = paged(block_size=4), tiny_model("llama")

    def change(module, arguments, result):
        handle.remove()
        in_place(model)

    handle = model.model.layers[0].register_forward_hook(change)
    ask(model)
    in_place(fresh)
    assert ask(model) == (stock_answer(fresh), 0)


@pytest.mark.parametrize("put_in", [hook, pre_hook])
def test_hooks_that_are_removed_take_their_cache_along(put_in):
    model = paged(block_size=4)
    clean = ask(model)[0]
    for _ in range(2):
        handle = put_in(model)
        assert ask(model)[0] != clean and ask(model)[1] == 40
        handle.remove()
        assert ask(model) == (clean, 0)
    assert ask(model) == (clean, 40)


def test_a_patched_forward_that_is_removed_takes_its_cache_along():
    model = paged(block_size=4)
    clean = ask(model)[0]
    forward_patched(model)
    assert ask(model)[0] != clean and ask(model)[1] == 40
    del v_proj(model).forward
    assert ask(model) == (clean, 0)


def test_hooks_that_come_and_go_while_a_request_runs_do_not_poison_the_cache():
    """At the next look the model is what it was at the last one."""
    model = paged(block_size=4)
    engine = model.engine
    with engine.requests() as states:
        states.append(engine.add_request(PROMPT, PARAMS.replace(max_tokens=20)))
        for put_in in (lambda: None, lambda: hook(model)):
            handle = put_in()
            for _ in range(6):
                engine.step()
        handle.remove()
        list(engine.as_finished(states))
    whole = states[0].group.requests[0].token_ids
    answer, num_cached = ask(model, whole)
    assert answer == stock_answer(tiny_model("llama"), whole)
    assert 40 <= num_cached <= len(PROMPT) + 6
    assert_idle(engine)


def test_tied_weights():
    model, fresh = (tiny(overrides={"tie_word_embeddings": True}) for tiny in (paged, _tied))
    ask(model)
    for each in (model, fresh):
        with torch.no_grad():
            each.lm_head.weight[3:50].mul_(-1)
        assert each.model.embed_tokens.weight is each.lm_head.weight
    assert ask(model) == (stock_answer(fresh), 0)


def _tied(overrides):
    return tiny_model("llama", **overrides)


def test_a_write_that_nothing_shows_has_to_be_said():
    model, fresh = paged(block_size=4), tiny_model("llama")
    ask(model)
    for each in (model, fresh):
        v_proj(each).weight.data.mul_(-1)
    model.engine.weights_changed()
    assert ask(model) == (stock_answer(fresh), 0)


def test_what_changes_no_weights_keeps_the_cache():
    model = paged(block_size=4)
    answer, _ = ask(model)
    model(input_ids=torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss.backward()
    assert ask(model) == (answer, 40)
    model.train()
    assert ask(model.eval()) == (answer, 40)
    model.requires_grad_(False).zero_grad()
    model.to("cpu").float().state_dict()
    assert ask(model) == (answer, 40)


def test_hidden_states_keep_the_cache():
    """Transformers puts hooks of its own into a model to return them."""
    model = paged(block_size=4)
    answer, _ = ask(model)
    model(input_ids=torch.tensor([PROMPT]), output_hidden_states=True)
    assert ask(model) == (answer, 40)


def test_hooks_of_peft_count_once():
    """`prepare_model_for_kbit_training` and gradient checkpointing leave a hook in the model."""
    model = paged(block_size=4)
    model.enable_input_require_grads()
    answer, _ = ask(model)
    assert ask(model) == (answer, 40)


# --------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("checkpointing", [False, True])
def test_generate_batch_between_training_steps_answers_by_the_weights_of_the_moment(checkpointing):
    """huggingface/trl PR#5765: generation beside training."""
    stock, model = tiny_model("llama"), paged(block_size=4)
    prompts = [PROMPT[:n] for n in (5, 9, 21, 33)]
    optimizers = []
    for each in (stock, model):
        if checkpointing:
            each.gradient_checkpointing_enable()
        optimizers.append(torch.optim.AdamW(each.parameters(), lr=3e-2, fused=True))  # the Trainer's default
    answers = []
    for _ in range(3):
        results = model.eval().generate_batch(prompts * 2, max_new_tokens=12, progress_bar=False)
        answers.append([result.generated_tokens for result in results.values()])
        assert answers[-1][:4] == answers[-1][4:] == fresh_answers(model, prompts)
        rows = torch.tensor([tokens[-12:] for tokens in answers[-1][:4]])
        losses = []
        for each, optimizer in zip((stock, model), optimizers, strict=True):
            each.train()
            losses.append(each(input_ids=rows, labels=rows, use_cache=False).loss)
            losses[-1].backward()
            assert all(parameter.grad is not None for parameter in each.parameters())
            optimizer.step()
            optimizer.zero_grad()
        assert losses[0].item() == losses[1].item()
    assert answers[0] != answers[1] != answers[2]


def fresh_answers(model, prompts) -> list[list[int]]:
    fresh = paged(block_size=4)
    fresh.load_state_dict(model.state_dict())
    results = fresh.generate_batch(prompts, max_new_tokens=12, progress_bar=False)
    return [result.generated_tokens for result in results.values()]


# --------------------------------------------------------------------------------------- the watch alone


class Blocks(BlockManager):
    """Counts what it is told."""

    def __init__(self):
        super().__init__([4], 4)
        self.told: list[str] = []

    def reset_prefix_cache(self):
        self.told.append("written")
        super().reset_prefix_cache()

    def confirm(self):
        self.told.append("same")


def told(watch: WeightWatch) -> list[str]:
    blocks = Blocks()
    watch.guard(blocks)
    return blocks.told


def test_saved_buffers_are_weights_and_others_are_not():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
    model.register_buffer("scratch", torch.zeros(3), persistent=False)
    watch = WeightWatch(model)
    model.scratch.add_(1)
    model.scratch = torch.ones(3)
    assert told(watch) == ["same"]
    model[0].running_mean.add_(1)
    assert told(watch) == ["written", "same"]


def test_forwards_of_modules():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    watch = WeightWatch(model)
    model[0].forward = functools.partial(torch.nn.Linear.forward, model[0])
    assert [told(watch) for _ in range(2)] == [["written", "same"], ["same"]]
    for _ in range(3):  # the new one may well get the old one's place in memory
        del model[0].forward
        model[0].forward = functools.partial(torch.nn.Linear.forward, model[0])
        assert [told(watch) for _ in range(2)] == [["written", "same"], ["same"]]
    model[0].forward = model[0].forward
    assert told(watch) == ["same"]


def test_hooks_of_all_modules():
    watch = WeightWatch(model := torch.nn.Linear(3, 3))
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, arguments, result: None)
    try:
        assert told(watch)[0] == "written"
        assert told(watch) == ["same"]
    finally:
        handle.remove()
    assert told(watch) == ["written", "same"] and model is not None


def test_frequencies_that_transformers_writes_anew_are_no_weights():
    model = torch.nn.Module()
    model.register_buffer("inv_freq", torch.ones(3), persistent=False)
    watch = WeightWatch(model)
    model.inv_freq = torch.zeros(3)
    assert told(watch) == ["written", "same"]
    model.rope_type = {"full_attention": "dynamic"}
    assert told(watch) == ["written", "same"]
    model.inv_freq = torch.ones(3)
    assert told(watch) == ["same"]


def test_memory_that_is_used_again_is_another_weight(monkeypatch):
    """Objects, addresses and versions come back: all three together do not tell two weights apart."""
    model = torch.nn.Linear(3, 3)
    monkeypatch.setattr(seen_tensors, "_signs", lambda tensors: [len(tensors)])
    watch = WeightWatch(model)
    assert told(watch) == ["same"]
    model.weight = torch.nn.Parameter(torch.zeros(3, 3))
    assert told(watch) == ["written", "same"]


def test_steps_of_an_optimizer_concern_its_own_weights_only():
    """Fused optimizers do not count versions up."""
    models = [torch.nn.Linear(3, 3) for _ in range(2)]
    watches = [WeightWatch(model) for model in models]
    models[0](torch.ones(3)).sum().backward()
    torch.optim.AdamW(models[0].parameters(), fused=True).step()
    assert [told(watch)[0] for watch in watches] == ["written", "same"]


def test_weights_are_not_kept_alive():
    model = torch.nn.Linear(1000, 1000)
    watch, storage = WeightWatch(model), torch.multiprocessing.reductions.StorageWeakRef(model.weight.untyped_storage())
    del model
    assert storage.expired() and watch.key == ()


class _Negated(torch.nn.Linear):
    def forward(self, input):
        return -super().forward(input)


def _patched_class(model, monkeypatch):
    forward = type(model.model.layers[0].mlp).forward
    monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", lambda self, x: 2 * forward(self, x))


def _other_class(model, monkeypatch):
    v_proj(model).__class__ = _Negated


def _other_activation(model, monkeypatch):
    model.model.layers[0].mlp.act_fn = torch.nn.Tanh()


def _attribute(model, monkeypatch):
    model.model.layers[0].self_attn.scaling *= 2


def _norm(model, monkeypatch):
    model.model.layers[0].input_layernorm.variance_epsilon = 0.5


@pytest.mark.parametrize("change", [_patched_class, _other_class, _other_activation, _attribute, _norm])
@pytest.mark.parametrize("isa", [None, "torch"])
def test_a_forward_that_becomes_another_one_flushes_the_prefix_cache(change, isa, monkeypatch):
    """With native operators and without."""
    if isa is not None:
        monkeypatch.setattr(native_layers, "native_operators", lambda: None)
    model = paged("llama")
    ask(model)
    before, cached = ask(model)
    assert cached > 0
    change(model, monkeypatch)
    answer, cached = ask(model)
    assert (answer, cached) == (stock_answer(model), 0)
    assert answer != before and ask(model)[1] > 0


def test_weights_made_in_inference_mode():
    with torch.inference_mode():
        model = torch.nn.Linear(3, 3)
    watch = WeightWatch(model)
    assert told(watch) == ["same"]
    with torch.inference_mode():
        model.weight = torch.nn.Parameter(torch.zeros(3, 3))
    assert told(watch) == ["written", "same"]
