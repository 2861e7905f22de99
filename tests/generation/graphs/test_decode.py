"""Decoding steps that are replayed: nobody can tell them from others, and whatever cannot be replayed is not."""

from __future__ import annotations

import contextlib
import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from hf_paged import ConfigurationError, PagedConfig, SamplingParams
from hf_paged.generation.engine import Engine
from hf_paged.generation.graphs import decode, sizes
from hf_paged.generation.step import ScheduledRequest, SchedulerOutput
from hf_paged.kernels.triton.shared_prefix import keys_saved
from tests.generation.graphs.backend import DeviceLengths, HostLengths
from tests.generation.graphs.engines import GraphSetup, graphs_of, set_up
from tests.generation.graphs.recorder import RecordedGraphs

LIMITS = {"max_num_seqs": 6, "num_blocks": 60, "block_size": 8, "max_model_len": 96}
PROMPTS = [[5, 17, 33, 8, 61], [9, 3, 120], [1, 2, 3, 4, 5, 6, 7]]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def setup(monkeypatch) -> GraphSetup:
    return set_up(monkeypatch)


@pytest.fixture
def short_contexts(monkeypatch):
    """Several widths of block tables within the limits."""
    monkeypatch.setattr(sizes, "SMALLEST_CONTEXT", 16)
    monkeypatch.setattr(sizes, "CONTEXT_FACTOR", 2)


@pytest.fixture
def eager(setup):
    """What the same model answers without graphs."""
    return tokens_of(setup.engine(wanted=False, **LIMITS))


def tokens_of(engine: Engine, prompts: Any = PROMPTS, params: Any = GREEDY) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in engine.generate(prompts, params)]


def replays_of(engine: Engine) -> int:
    graphs = graphs_of(engine)
    return 0 if graphs is None else graphs.num_replays


# ------------------------------------------------------------------ results


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "mixtral", "opt", "deepseek_v3"])
def test_replayed_steps_give_the_answers_of_others(setup, family):
    engine, plain = (setup.engine(family, wanted, **LIMITS) for wanted in (True, False))
    assert tokens_of(engine) == tokens_of(plain)
    assert replays_of(engine) == 7 and replays_of(plain) == 0


def random_requests(source: random.Random) -> list[tuple[int, list[int], SamplingParams]]:
    """Requests with the step before which they arrive."""
    stem = [source.randrange(2, 190) for _ in range(20)]
    requests = []
    for _ in range(source.randint(3, 8)):
        prompt = stem[: source.choice([0, 8, 17])] + [source.randrange(2, 190) for _ in range(source.randint(1, 30))]
        wishes: dict[str, Any] = {"max_tokens": source.randint(1, 25), "ignore_eos": True, "temperature": 0}
        if source.random() < 0.5:
            wishes |= {"temperature": 1.0, "seed": source.randrange(99), "top_k": source.choice([0, 20])}
            wishes["n"] = source.choice([1, 1, 3])
        if source.random() < 0.25:  # these need the host between two tokens
            wishes |= source.choice([{"logprobs": 2}, {"repetition_penalty": 1.3}, {"prompt_logprobs": 1}])
        requests.append((source.choice([0, 0, 1, 3, 9]), prompt, SamplingParams(**wishes)))
    return requests


def run(engine: Engine, requests: list[tuple[int, list[int], SamplingParams]]) -> tuple[list[list[int]], list[float]]:
    """All answers, and all log-probabilities that were wanted."""
    states, step = [], 0
    while len(states) < len(requests) or engine.has_unfinished:
        for number, (arrives_at, prompt, params) in enumerate(requests):
            if arrives_at == step:
                states.append((number, engine.add_request(prompt, params)))
        engine.step()
        step += 1
    answers, numbers = [], []
    for _, state in sorted(states, key=lambda item: item[0]):
        for answer in state.output().outputs:
            answers.append(list(answer.token_ids))
            for step_logprobs in answer.logprobs or ():
                numbers += [entry.logprob for _, entry in sorted(step_logprobs.items())]
    return answers, numbers


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("chosen", [None, (1, 3, 5)])
def test_random_schedules_give_the_same(setup, short_contexts, ahead, chosen):
    limits = LIMITS | {"num_blocks": 40, "async_scheduling": ahead}  # some are preempted
    engine = setup.engine(**limits, cuda_graph_sizes=chosen)
    plain = setup.engine(wanted=False, **limits)
    for seed in range(4):
        requests = random_requests(random.Random(seed))
        (answers, numbers), (expected, exact) = run(engine, requests), run(plain, requests)
        assert answers == expected and numbers == pytest.approx(exact, abs=1e-3)
    assert replays_of(engine) > 40
    graphs = graphs_of(engine)
    assert {shape.table_width for shape in graphs.shapes} == {2, 4, 12}
    assert {shape.num_requests for shape in graphs.shapes} == set(chosen or (1, 2, 4, 6))


def test_a_backend_that_reads_lengths_on_the_host_would_be_found_out(setup, eager):
    setup.backend = HostLengths
    engine = setup.engine(**LIMITS)
    assert tokens_of(engine) != eager
    assert replays_of(engine) > 0


def test_logits_that_the_host_reads_outlive_the_next_step(setup):
    runner = setup.engine(**LIMITS)._loop.ready_runner()
    shares = [ScheduledRequest("a", 0, 4, (3, 4, 5, 6), ((0,),), is_new=True, sample_ids=("a",))]
    shares += [ScheduledRequest("a", 4 + i, 1, (7 + i,), sample_ids=("a",)) for i in range(2)]
    handles = [runner.launch(SchedulerOutput(i, (share,))) for i, share in enumerate(shares)]
    second = runner.collect(handles[1]).logits
    kept = second.clone()
    assert runner.graphs.num_replays == 2
    runner.launch(SchedulerOutput(3, (ScheduledRequest("a", 6, 1, (11,), sample_ids=("a",)),)))
    assert torch.equal(second, kept) and second.isfinite().all()


def test_more_answers_than_requests(setup):
    """A prompt of which one token is left is answered many times: the sampler has more rows than the model."""
    engine, plain = (setup.engine(wanted=wanted, async_scheduling=True, **LIMITS) for wanted in (True, False))
    params = SamplingParams(temperature=1.0, seed=3, n=5, max_tokens=6, ignore_eos=True)
    for _ in range(2):
        outputs = [one.generate([[7] * 17], params)[0].outputs for one in (engine, plain)]
        answers, expected = ([list(answer.token_ids) for answer in one] for one in outputs)
        assert answers == expected
    assert replays_of(engine) >= 10


# ------------------------------------------------------------------ what is not replayed


def test_steps_that_want_more_than_tokens_run_without(setup):
    model = setup.model(**LIMITS)
    graphs = graphs_of(model.engine)
    model.generate(
        torch.tensor([PROMPTS[0]]), max_new_tokens=5, output_hidden_states=True, return_dict_in_generate=True
    )
    assert graphs.num_replays == 0
    model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=5)
    assert graphs.num_replays == 4


def test_steps_that_would_read_much_more_by_a_graph_run_without(setup, eager, monkeypatch):
    class Sharing(DeviceLengths):
        def keys_saved(self, block_tables: Any, seq_lens: Any) -> int:
            assert block_tables.shape[0] == len(seq_lens)
            return 1000 if len(seq_lens) > 1 else 0

    setup.backend = Sharing
    monkeypatch.setattr(decode, "MAX_WASTE", 1000)
    engine = setup.engine(**LIMITS)
    assert tokens_of(engine) == eager and replays_of(engine) == 0
    assert tokens_of(engine, PROMPTS[:1]) == eager[:1] and replays_of(engine) == 7


@pytest.mark.parametrize(
    ("shared_blocks", "saved"), [((0, 0, 0, 0, 0), 0), ((20, 20, 20, 20, 0), 960), ((20, 20, 20, 0, 0), 0)]
)
def test_keys_are_saved_by_runs_of_requests(shared_blocks, saved):
    tables = np.arange(5 * 30, dtype=np.int32).reshape(5, 30)
    for row, count in enumerate(shared_blocks):
        tables[row, :count] = np.arange(count) + 1000
    assert keys_saved(tables, np.full(5, 470), 16) == saved


def test_a_model_that_needs_the_host_runs_without_and_says_why(setup, caplog):
    model = setup.model("gpt2", **LIMITS)  # looks at its padding token in every call
    plain = setup.model("gpt2", False, **LIMITS)
    assert tokens_of(model.engine) == tokens_of(plain.engine)
    assert replays_of(model.engine) == 0 and setup.makers[0].num_captures == 0
    told = [record.message for record in caplog.records if "CUDA graphs" in record.message]
    assert len(told) == 1 and "reads a number on the host, in modeling_utils.py" in told[0]
    assert model.engine.plan.notes[-1] == told[0] and told[0] in model.engine.plan.describe()


def test_a_capture_that_fails_is_the_last(setup, eager):
    setup.make = lambda: RecordedGraphs(error=RuntimeError("operation not permitted"))
    engine = setup.engine(**LIMITS)
    assert tokens_of(engine) == eager
    assert len(setup.makers) == 1 and setup.makers[0].is_closed
    assert "RuntimeError: operation not permitted" in engine.plan.notes[-1]


@pytest.mark.parametrize("where", ["model", "layer", "all modules"])
def test_hooks_are_called(setup, where):
    model = setup.model(**LIMITS)
    tokens_of(model.engine)
    calls: list[int] = []

    def count(*_: Any) -> None:
        calls.append(1)

    if where == "all modules":
        handle = torch.nn.modules.module.register_module_forward_hook(count)
    else:
        handle = (model if where == "model" else model.model.layers[1].mlp).register_forward_hook(count)
    before = replays_of(model.engine)
    try:
        tokens_of(model.engine)
    finally:
        handle.remove()
    assert len(calls) >= 8 and replays_of(model.engine) == before
    tokens_of(model.engine)
    assert replays_of(model.engine) > before


def test_a_model_in_training_mode_is_called(setup):
    model = setup.model(**LIMITS)
    before = tokens_of(model.engine)
    count = replays_of(model.engine)
    model.train()
    assert tokens_of(model.engine) == before and replays_of(model.engine) == count


# ------------------------------------------------------------------ changes of the model


def test_weights_that_are_written_are_seen(setup):
    model, plain = (setup.model(wanted=wanted, **LIMITS) for wanted in (True, False))
    before = tokens_of(model.engine)
    captures = setup.makers[0].num_captures
    for one in (model, plain):
        with torch.no_grad():
            one.model.layers[0].mlp.down_proj.weight.mul_(-3)
            one.lm_head.weight.copy_(one.lm_head.weight.flip(0))
    after = tokens_of(model.engine)
    assert after == tokens_of(plain.engine) and after != before
    assert setup.makers[0].num_captures == captures and len(setup.makers) == 1


def replace_parameter(model: Any) -> None:
    torch.manual_seed(0)
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))


def move_data(model: Any) -> None:
    model.model.embed_tokens.weight.data = model.model.embed_tokens.weight.data.flip(0).clone()


def replace_module(model: Any) -> None:
    torch.manual_seed(0)
    model.model.norm = type(model.model.norm)(64, eps=0.5).eval()


def change_setting(model: Any) -> None:
    model.model.layers[0].self_attn.scaling *= 3


def replace_buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 2


@pytest.mark.parametrize("change", [replace_parameter, move_data, replace_module, change_setting, replace_buffer])
def test_graphs_of_a_model_that_is_another_now_are_dropped_and_captured_anew(setup, monkeypatch, change):
    monkeypatch.setattr(decode, "STEPS_BEFORE_ANEW", 10)
    model, plain = (setup.model(wanted=wanted, **LIMITS) for wanted in (True, False))
    tokens_of(model.engine)
    count = replays_of(model.engine)
    for one in (model, plain):
        change(one)
    expected = tokens_of(plain.engine)
    assert tokens_of(model.engine) == expected
    assert replays_of(model.engine) == count and setup.makers[0].is_closed
    assert tokens_of(model.engine) == tokens_of(model.engine) == expected
    assert replays_of(model.engine) > count and len(setup.makers) == 2


def test_a_model_that_changes_all_the_time_has_no_graphs(setup, monkeypatch, caplog):
    monkeypatch.setattr(decode, "STEPS_BEFORE_ANEW", 0)
    monkeypatch.setattr(decode, "MAX_CHANGES", 3)
    model = setup.model(**LIMITS)
    for _ in range(5):
        tokens_of(model.engine)
        replace_parameter(model)
    assert len(setup.makers) == 3
    assert [note for note in model.engine.plan.notes if "has changed 3 times" in note]


def test_a_model_that_changes_between_many_steps_keeps_its_graphs(setup, monkeypatch):
    monkeypatch.setattr(decode, "STEPS_BEFORE_ANEW", 0)
    monkeypatch.setattr(decode, "MAX_CHANGES", 2)
    monkeypatch.setattr(decode, "MIN_REPLAYS", 6)
    model = setup.model(**LIMITS, cuda_graph_sizes=(4,))
    for _ in range(5):
        tokens_of(model.engine)
        replace_parameter(model)
    assert len(setup.makers) == 5 and not model.engine.plan.notes


def test_adapters_may_be_switched(setup, monkeypatch):
    peft = pytest.importorskip("peft")
    monkeypatch.setattr(decode, "STEPS_BEFORE_ANEW", 2)
    answers = []
    for wanted in (True, False):
        model = setup.model(wanted=wanted, **LIMITS)
        torch.manual_seed(5)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        adapted = peft.get_peft_model(model, config, adapter_name="one").eval()
        adapted.add_adapter("two", config)
        found = []
        for name in ("one", "two", "off", "one"):
            adapted.set_adapter(name if name != "off" else "one")
            adapted.eval()
            with adapted.disable_adapter() if name == "off" else contextlib.nullcontext():
                found += [tokens_of(model.engine), tokens_of(model.engine)]
        answers.append(found)
        assert not wanted or replays_of(model.engine) > 20
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][2] != answers[0][4] != answers[0][6] == answers[0][0]


# ------------------------------------------------------------------ memory


def test_graphs_keep_to_their_budget(setup, eager, caplog):
    setup.make = lambda: RecordedGraphs(num_bytes=10, first_bytes=90)
    setup.budget = 125
    engine = setup.engine(**LIMITS)
    graphs = graphs_of(engine)
    assert graphs.shapes == [(4, 12), (6, 12)] or [shape.num_requests for shape in graphs.shapes] == [2, 4, 6]
    assert graphs.num_bytes <= 125
    assert tokens_of(engine) == eager
    assert tokens_of(engine, PROMPTS[:1]) == eager[:1]  # by the graph for two, as there is none for one
    told = [record.message for record in caplog.records if "no more are captured" in record.message]
    assert len(told) == 1 and told[0] in engine.plan.notes


def test_where_the_largest_do_not_fit_smaller_ones_may(setup, eager):
    sizes_made: list[int] = []

    class Growing(RecordedGraphs):
        def capture(self, call: Any) -> Any:
            rows = call().shape[0]
            self._first_bytes = 50 * rows
            sizes_made.append(rows)
            return super().capture(call)

    setup.make = Growing
    setup.budget = 150
    engine = setup.engine(**LIMITS)
    assert [shape.num_requests for shape in graphs_of(engine).shapes] == [1, 2]
    assert sizes_made == [6, 4, 2, 1] and [maker.is_closed for maker in setup.makers] == [True, True, False]
    assert tokens_of(engine) == eager
    (note,) = engine.plan.notes
    assert "none is captured for 4 requests or more: it takes 0 MiB" in note


def test_no_budget_no_graphs(setup, eager):
    setup.budget = 0
    setup.make = lambda: RecordedGraphs(num_bytes=1)
    engine = setup.engine(**LIMITS)
    assert tokens_of(engine) == eager and replays_of(engine) == 0 and not graphs_of(engine).shapes
    (note,) = engine.plan.notes
    assert note.startswith("CUDA graphs are off: as to the smallest, it takes 0 MiB")


def test_a_capture_that_runs_out_of_memory_ends_captures_only(setup, eager):
    class Short(RecordedGraphs):
        def capture(self, call: Any) -> Any:
            if self.num_captures == 2:
                raise torch.OutOfMemoryError("no more")
            return super().capture(call)

    setup.make = Short
    engine = setup.engine(**LIMITS)
    assert tokens_of(engine) == eager and replays_of(engine) > 0
    assert len(graphs_of(engine).shapes) == 2
    assert [note for note in engine.plan.notes if "there is no memory for it" in note]


def test_graphs_that_were_not_captured_at_start_are_when_they_are_wanted(setup, eager):
    model = setup.model(**LIMITS)
    handle = model.register_forward_hook(lambda *_: None)
    graphs = graphs_of(model.engine)
    assert not graphs.shapes and not setup.makers
    handle.remove()
    assert tokens_of(model.engine) == eager
    assert [shape.num_requests for shape in graphs.shapes] == [4] and graphs.num_replays > 0


# ------------------------------------------------------------------ lives


def test_graphs_go_with_the_pool_and_come_back_with_it(setup, eager):
    model = setup.model(**LIMITS)
    tokens_of(model.engine)
    model.engine.sleep()
    assert model.engine._loop.runner is None
    model.engine.wake_up()
    assert tokens_of(model.engine) == eager
    assert len(setup.makers) == 2 and replays_of(model.engine) > 0


def test_graphs_keep_no_model_alive(setup):
    model = setup.model(**LIMITS)
    tokens_of(model.engine)
    gc.collect()
    gc.disable()
    try:
        seen = weakref.ref(model), weakref.ref(model.engine._loop.runner.pools[0])
        del model
        setup.makers.clear()
        assert [reference() for reference in seen] == [None, None]
    finally:
        gc.enable()


# ------------------------------------------------------------------ settings


def test_sizes_are_the_users(setup):
    engine = setup.engine(**LIMITS, cuda_graph_sizes=[4, 2, 100])
    assert engine.config.cuda_graph_sizes == (4, 2, 100)
    assert engine.plan.cuda_graph_sizes == (2, 4)
    assert "2 sizes up to 4 requests" in engine.plan.describe()
    assert [note for note in engine.plan.notes if note.startswith("cuda_graph_sizes is (2, 4)")]
    assert PagedConfig.from_dict(engine.config.to_dict()) == engine.config


@pytest.mark.parametrize("sizes", [(0,), (True,), (1.5,), "12", 8, {4}])
def test_other_sizes_are_refused(sizes):
    with pytest.raises(ConfigurationError, match="cuda_graph_sizes"):
        PagedConfig(cuda_graph_sizes=sizes)
