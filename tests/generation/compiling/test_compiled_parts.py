"""Parts of a model are compiled inside of engine steps only, and never after they have changed.

What Dynamo sees is run as it is here, by a backend that counts; Inductor itself is left to one slow test. Expected
answers are those of plain forwards without a cache, or of an engine that compiles nothing.
"""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import weakref

import pytest
import torch

from hf_paged import AutoPagedModelForCausalLM, ConfigurationError, EngineError, PagedConfig, SamplingParams
from hf_paged.generation import engine as engine_module
from hf_paged.generation import native_layers
from hf_paged.generation.compiling import compiled_parts
from hf_paged.generation.compiling.compiled_forward import NotCompilableError, check_operators
from hf_paged.generation.native_operators import REFERENCE
from tests.families import greedy, tiny_model
from tests.generation.graphs.engines import set_up
from tests.generation.graphs.recorder import RecordedGraphs, Recorder
from tests.paged_models import answers_without_cache, paged

PROMPTS = [[5, 17, 33, 8, 61, 90, 4, 12, 13, 77, 21], [9, 3, 120], [1, 2], [7] * 20]
NEW = 4
PARAMS = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
MAX_COMPILATIONS = 3  # one token, several, and perhaps as many as something else in the module


class Backend:
    """Runs graphs as they are; counts graphs and their calls, and fails if it is told to."""

    def __init__(self):
        self.num_graphs = self.num_calls = 0
        self.error: Exception | None = None
        self.fails_if = lambda graph: self.error is not None

    def __call__(self, graph, inputs):
        if self.error is not None and self.fails_if(graph):
            raise self.error
        self.num_graphs += 1

        def run(*args):
            self.num_calls += 1
            return graph(*args)

        return run


@pytest.fixture
def backend(monkeypatch) -> Backend:
    backend = Backend()
    monkeypatch.setattr(compiled_parts, "inductor", backend)
    monkeypatch.setattr(engine_module, "native_layers", lambda *args: None)
    return backend


def answers(model, prompts=PROMPTS) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in model.engine.generate(prompts, PARAMS)]


def plain_answers(model, prompts=PROMPTS) -> list[list[int]]:
    return answers_without_cache(model, prompts, NEW)


def compiled(model) -> str:
    """What is compiled in a step that begins now, whose answers are the model's own."""
    assert answers(model) == plain_answers(model)
    return model.engine._compiled.describe()


ALL = "4 LlamaRMSNorm, 2 LlamaMLP"


# ------------------------------------------------------------------ results


@pytest.mark.parametrize(
    ("family", "parts"),
    [
        ("llama", ALL),
        ("qwen3", "8 Qwen3RMSNorm, 2 Qwen3MLP"),  # of two widths
        ("mixtral", "4 MixtralRMSNorm, 2 MixtralSparseMoeBlock"),
        ("gpt_oss", "4 GptOssRMSNorm, 2 GptOssMLP"),
        ("gpt2", "2 GPT2MLP"),  # its norms are torch's
        ("opt", "off: nothing is left to compile"),
    ],
)
def test_steps_give_the_same_tokens_and_compile_each_kind_of_part_a_few_times(backend, family, parts):
    model, plain = (paged(family, compile_parts=wanted, enable_prefix_caching=False) for wanted in (True, False))
    assert model.engine.plan.compiled == parts and parts in model.engine.plan.describe()
    assert plain.engine.plan.compiled == "off"
    for prompts in (PROMPTS, PROMPTS[:1], PROMPTS[2:], [[3] * 64, [4] * 96], [[8] * 50]):
        assert answers(model, prompts) == answers(plain, prompts)
    forwards = model.engine._compiled.forwards.values()
    assert all(1 <= forward.num_compilations <= MAX_COMPILATIONS for forward in forwards)
    assert backend.num_graphs == sum(forward.num_compilations for forward in forwards)
    assert (backend.num_calls > 0) == (family != "opt") and model.engine.plan.notes == ()


def test_plain_forwards_never_meet_what_was_compiled(backend):
    model = paged(compile_parts=True)
    before = model.state_dict()
    answers(model)
    num_calls = backend.num_calls
    plain_answers(model)
    model(input_ids=torch.tensor(PROMPTS[:1]), use_cache=True)
    model.train()
    model(input_ids=torch.tensor(PROMPTS[:1]), labels=torch.tensor(PROMPTS[:1])).loss.backward()
    assert backend.num_calls == num_calls
    assert not any("forward" in vars(module) for module in model.modules())
    assert list(model.state_dict()) == list(before)


def test_each_part_of_a_layer_runs_compiled_in_each_step(backend):
    model = paged(compile_parts=True)
    answers(model)
    before, steps = backend.num_calls, model.engine.stats().num_steps
    answers(model)
    assert backend.num_calls - before == 6 * (model.engine.stats().num_steps - steps)


def test_what_is_native_is_not_compiled(backend, monkeypatch):
    monkeypatch.setattr(engine_module, "native_layers", native_layers.native_layers)
    monkeypatch.setattr(native_layers, "native_operators", lambda: REFERENCE)
    model = paged("mixtral", compile_parts=True)
    assert "2 attentions" in model.engine.plan.native and "5 norms" in model.engine.plan.native
    assert compiled(model) == "2 MixtralSparseMoeBlock"
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda module, args, output: -output)
    handle = model.model.layers[0].input_layernorm.register_forward_hook(lambda module, args, output: -output)
    assert compiled(model) == "2 MixtralSparseMoeBlock"  # neither native nor compiled: the norm has a hook
    handle.remove()
    assert compiled(model) == "2 MixtralSparseMoeBlock"
    assert paged("llama", compile_parts=True).engine.plan.compiled == "off: nothing is left to compile"


def test_hidden_states_come_from_the_model_as_it_is(backend):
    model = paged("mixtral", compile_parts=True)
    inputs = torch.tensor(PROMPTS[:1])
    given = model.generate(
        inputs, max_new_tokens=2, do_sample=False, return_dict_in_generate=True, output_hidden_states=True
    )
    assert backend.num_calls == 0
    expected = model(input_ids=inputs, output_hidden_states=True, output_router_logits=True, use_cache=False)
    torch.testing.assert_close(given.hidden_states[0][-1], expected.hidden_states[-1], rtol=1e-4, atol=1e-4)
    # Transformers' hooks in the blocks of experts stay, where Dynamo would meet them.
    assert compiled(model) == "4 MixtralRMSNorm, 2 MixtralTopKRouter, 2 MixtralExperts"
    assert backend.num_calls > 0 and model.engine.plan.notes == ()


# ------------------------------------------------------------------ changes


def write_in_place(layer):
    layer.mlp.down_proj.weight.data.mul_(-1)


def swap_data(layer):
    layer.mlp.up_proj.weight.data = -layer.mlp.up_proj.weight.data.clone()


def assign(layer):
    layer.input_layernorm.weight = torch.nn.Parameter(torch.linspace(-1, 1, len(layer.input_layernorm.weight)))


@pytest.mark.parametrize("write", [write_in_place, swap_data, assign])
def test_weights_are_those_of_the_moment(backend, write):
    model = paged(compile_parts=True)
    before, num_graphs = answers(model), backend.num_graphs
    write(model.model.layers[0])
    model.engine.weights_changed()  # forgets K/V; `.data` leaves no trace
    assert compiled(model) == ALL
    assert answers(model) != before
    assert backend.num_graphs == num_graphs


def test_a_hook_keeps_a_part_as_it_is_until_it_goes(backend):
    model = paged(compile_parts=True)
    own, mlp = answers(model), model.model.layers[1].mlp
    for module in (mlp, mlp.up_proj):
        handle = module.register_forward_hook(lambda module, args, output: -2 * output)
        assert compiled(model) == "4 LlamaRMSNorm, 1 LlamaMLP"
        assert answers(model) != own
        handle.remove()
        assert compiled(model) == ALL
    assert answers(model) == own


def test_what_is_around_a_hook_gives_way_to_what_is_beside_it(backend):
    model = paged("mixtral", compile_parts=True)
    handle = model.model.layers[1].mlp.gate.register_forward_pre_hook(lambda module, args: (-args[0],))
    assert compiled(model) == "4 MixtralRMSNorm, 1 MixtralSparseMoeBlock, 1 MixtralExperts"
    handle.remove()
    assert compiled(model) == "4 MixtralRMSNorm, 2 MixtralSparseMoeBlock"


def test_a_hook_on_all_modules_keeps_everything_as_it_is(backend):
    model = paged(compile_parts=True)
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, output: -output if isinstance(module, torch.nn.Linear) else None
    )
    try:
        assert compiled(model) == "off: nothing is left to compile"
    finally:
        handle.remove()
    assert compiled(model) == ALL


def test_forwards_that_others_have_set_or_compiled_are_called(backend):
    model = paged(compile_parts=True)
    norm, mlp = model.model.layers[0].input_layernorm, model.model.layers[1].mlp
    norm.forward = lambda x: -type(norm).forward(norm, x)
    mlp.compile(backend="eager")
    assert compiled(model) == "3 LlamaRMSNorm, 1 LlamaMLP"
    model.model.layers[0].compile(backend="eager")
    assert model.engine._compiled.describe() == "off: nothing is left to compile"


def test_another_class_or_another_forward_of_a_class_is_noticed(backend, monkeypatch):
    model = paged(compile_parts=True)
    own, cls = answers(model), type(model.model.layers[0].mlp)
    forward = cls.forward
    monkeypatch.setattr(cls, "forward", lambda self, x: -forward(self, x))
    model.engine.weights_changed()
    assert compiled(model) == ALL
    assert answers(model) != own
    model.model.layers[1].mlp = torch.nn.Linear(64, 64)
    model.engine.weights_changed()
    assert compiled(model) == "4 LlamaRMSNorm, 1 LlamaMLP"


def test_training_mode_uses_the_model_as_it_is(backend):
    model = paged(compile_parts=True)
    model.train()
    assert compiled(model) == "off: nothing is left to compile"
    model.eval()
    assert compiled(model) == ALL


# ------------------------------------------------------------------ failures


def told(caplog) -> list[str]:
    return [record.message for record in caplog.records if "compile_parts" in record.message]


def test_what_cannot_be_compiled_runs_as_it_is_with_one_warning(backend, caplog):
    backend.error = RuntimeError("no such luck\nwhatever else")
    backend.fails_if = lambda graph: "silu" in graph.code
    model = paged(compile_parts=True)
    assert compiled(model) == "4 LlamaRMSNorm"
    assert told(caplog) == ["compile_parts leaves LlamaMLP as it is: RuntimeError: no such luck"]
    assert told(caplog)[0] in model.engine.plan.describe()
    backend.error = None
    assert compiled(model) == "4 LlamaRMSNorm"


def test_a_block_of_experts_that_cannot_be_compiled_gives_way_to_its_parts(backend, caplog):
    backend.error = NotCompilableError("experts are not wanted")
    backend.fails_if = lambda graph: "grouped_mm" in graph.code
    model = paged("mixtral", compile_parts=True)
    answers(model)
    assert compiled(model) == "4 MixtralRMSNorm, 2 MixtralTopKRouter"
    names = ["MixtralSparseMoeBlock", "MixtralExperts"]
    assert told(caplog) == [f"compile_parts leaves {name} as it is: experts are not wanted" for name in names]


class Asking(torch.nn.Module):
    """An MLP that reads a number of what it computes, which waits for a device."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, x):
        y = self.mlp(x)
        return y * 2 if y.abs().max() > 3 else y


def test_what_waits_for_the_device_is_not_compiled(backend, caplog):
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.mlp = Asking(layer.mlp).eval()
    model = AutoPagedModelForCausalLM.from_model(model, paged_config=PagedConfig(compile_parts=True))
    answers(model)
    assert compiled(model) == ALL  # the MLPs inside
    assert len(told(caplog)) == 1 and told(caplog)[0].startswith("compile_parts leaves Asking as it is: ")


def test_a_modules_own_error_is_raised_and_no_reason_to_give_up(backend, caplog):
    model = paged(compile_parts=True)
    weight = model.model.layers[0].mlp.up_proj.weight
    data, weight.data = weight.data, torch.zeros(96, 5)
    with pytest.raises(EngineError, match="cannot be multiplied"):
        answers(model)
    weight.data = data
    assert compiled(model) == ALL and told(caplog) == []


def test_out_of_memory_is_left_to_the_engine(backend, caplog):
    model = paged(compile_parts=True)
    expected = answers(model)
    failures = [torch.OutOfMemoryError("full")]
    forward = next(iter(model.engine._compiled.forwards.values()))
    function = forward._function
    forward._function = lambda *args, **kwargs: function(*args, **kwargs) if not failures else raise_(failures.pop())
    assert answers(model) == expected
    assert told(caplog) == [] and not failures and not forward.is_off


def raise_(error):
    raise error


def test_a_model_that_cannot_be_watched_is_left_as_it_is(backend, monkeypatch, caplog):
    monkeypatch.setattr(compiled_parts, "find_candidates", lambda watched: raise_(ValueError("seen nothing")))
    model = paged(compile_parts=True)
    assert compiled(model) == "off: nothing is left to compile"
    assert told(caplog) == ["compile_parts has no effect: ValueError: seen nothing"]


def test_an_operator_that_is_not_torch_s_own_is_refused_on_a_device():
    class Model(torch.nn.Module):
        def forward(self, x, w, offsets):
            return torch.ops.transformers.grouped_mm_fallback(torch.relu(x) + 1, w, offsets)

    with pytest.raises(NotCompilableError, match="transformers::grouped_mm_fallback is not torch's own"):
        check_operators(torch.fx.symbolic_trace(Model()))
    check_operators(torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SiLU())))


def test_nothing_is_left_of_a_model_that_is_gone(backend):
    model = paged(compile_parts=True)
    answers(model)
    parts = model.engine._compiled
    left = [weakref.ref(found) for found in (model, model.model.layers[0].mlp, parts, *parts.forwards.values())]
    del model, parts
    gc.collect()
    assert [reference() for reference in left] == [None] * 5


def test_copies_compile_for_themselves(backend):
    model = paged(compile_parts=True)
    expected = answers(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        num_graphs = backend.num_graphs
        assert answers(copied) == expected
        assert backend.num_graphs > num_graphs


# ------------------------------------------------------------------ settings


def test_settings_that_contradict_each_other_are_refused_or_told(backend, caplog):
    with pytest.raises(ConfigurationError, match="`compile_parts=True` and `enforce_eager=True`"):
        PagedConfig(compile_parts=True, enforce_eager=True)
    with pytest.raises(ConfigurationError, match="`compile_parts` must be True or False"):
        PagedConfig(compile_parts="yes")
    with caplog.at_level(logging.WARNING, logger="hf_paged"):
        model = paged(compile_parts=True, batch_invariant=True)
        assert answers(model) == greedy(tiny_model("llama"), PROMPTS, NEW)
    assert model.engine.plan.compiled == "off" and backend.num_graphs == 0
    assert "compile_parts is off" in told(caplog)[0]


# ------------------------------------------------------------------ graphs


class Recording(RecordedGraphs):
    """Records what compiled code does, as a capture on a GPU would."""

    def capture(self, call):
        Recorder.ignore_compile_internals = classmethod(lambda cls: True)
        try:
            return super().capture(call)
        finally:
            del Recorder.ignore_compile_internals


@pytest.fixture
def graphs(backend, monkeypatch):
    setup = set_up(monkeypatch)
    setup.make = Recording
    return setup


LIMITS = {"max_num_seqs": 6, "num_blocks": 60, "block_size": 8, "max_model_len": 96, "cuda_graph_sizes": (1, 4)}


def test_compiled_parts_are_captured_and_not_called_in_a_replay(graphs, backend):
    engine = graphs.engine("mixtral", compile_parts=True, **LIMITS)
    plain = graphs.engine("mixtral", wanted=False, **LIMITS)
    runner = engine._loop.ready_runner()
    assert len(runner.graphs.shapes) == 2 and backend.num_calls > 0
    for prompts in (PROMPTS, PROMPTS[:1]):
        expected = [output.outputs[0].token_ids for output in plain.generate(prompts, PARAMS)]
        num_calls, replays, steps = backend.num_calls, runner.graphs.num_replays, engine.stats().num_steps
        assert [output.outputs[0].token_ids for output in engine.generate(prompts, PARAMS)] == expected
        assert runner.graphs.num_replays - replays == NEW - 1
        num_others = engine.stats().num_steps - steps - (NEW - 1)
        assert backend.num_calls - num_calls == 6 * num_others


def test_a_step_whose_parts_cannot_be_compiled_is_captured_all_the_same(graphs, backend):
    backend.error = RuntimeError("no such luck")
    engine = graphs.engine("llama", compile_parts=True, **LIMITS)
    plain = graphs.engine("llama", wanted=False, **LIMITS)
    expected = [output.outputs[0].token_ids for output in plain.generate(PROMPTS, PARAMS)]
    assert [output.outputs[0].token_ids for output in engine.generate(PROMPTS, PARAMS)] == expected
    assert engine._loop.ready_runner().graphs.num_replays == NEW - 1
    assert len(engine.plan.notes) == 2


# ------------------------------------------------------------------ Inductor


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_inductor_gives_the_same_tokens(monkeypatch, caplog, family):
    monkeypatch.setattr(engine_module, "native_layers", lambda *args: None)
    model, plain = (paged(family, compile_parts=wanted) for wanted in (True, False))
    for prompts in (PROMPTS, PROMPTS[:1]):
        assert answers(model, prompts) == answers(plain, prompts)
    forwards = model.engine._compiled.forwards.values()
    assert len(forwards) == 2 and all(forward.num_compilations == 2 for forward in forwards)
    assert told(caplog) == []
