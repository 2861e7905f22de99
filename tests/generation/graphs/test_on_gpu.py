"""CUDA graphs themselves, where there is a GPU: what `RecordedGraphs` stands for elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_paged import AutoPagedModelForCausalLM, PagedConfig, SamplingParams
from hf_paged.generation.graphs.capture import CudaGraphs, NotCapturableError
from tests.families import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LIMITS = {"max_num_seqs": 12, "num_blocks": 200, "max_model_len": 512, "block_size": 16}
PROMPTS = [[(7 * i + row) % 190 for i in range(length)] for row, length in enumerate((3, 40, 130, 5, 260, 17, 90))]


def model_on_gpu(family: str = "llama", **config: Any) -> Any:
    model = tiny_model(family, torch.float32).cuda()
    return AutoPagedModelForCausalLM.from_model(model, paged_config=PagedConfig(**LIMITS | config))


def answers_of(model: Any, **wishes: Any) -> list[list[int]]:
    params = [SamplingParams(max_tokens=30 + i, seed=i, ignore_eos=True, **wishes) for i in range(len(PROMPTS))]
    return [list(output.outputs[0].token_ids) for output in model.engine.generate(PROMPTS, params)]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_replayed_steps_give_the_answers_of_others(family, ahead):
    model, plain = (
        model_on_gpu(family, async_scheduling=ahead, enforce_eager=enforce_eager) for enforce_eager in (False, True)
    )
    for wishes in ({"temperature": 0}, {"temperature": 1.0, "top_k": 40}):
        assert answers_of(model, **wishes) == answers_of(plain, **wishes)
    graphs = model.engine._loop.runner.graphs
    assert graphs.num_replays > 50 and not [note for note in model.engine.plan.notes if "graphs" in note]


def test_weights_that_are_written_are_seen():
    model, plain = (model_on_gpu(enforce_eager=enforce_eager) for enforce_eager in (False, True))
    before = answers_of(model, temperature=0)
    for one in (model, plain):
        with torch.no_grad():
            one.lm_head.weight.copy_(one.lm_head.weight.flip(0))
    after = answers_of(model, temperature=0)
    assert after == answers_of(plain, temperature=0) and after != before


def test_a_call_that_waits_is_refused_and_does_no_harm():
    maker, x = CudaGraphs(torch.device("cuda")), torch.ones(3, device="cuda")
    for refused in (lambda: x * x.sum().item(), lambda: x[x > 0], lambda: x.cpu(), lambda: x + torch.ones(3).cuda()):
        with pytest.raises(NotCapturableError):
            maker.warm_up(refused)
        with pytest.raises(NotCapturableError):
            maker.capture(refused)
    target = torch.zeros(3, device="cuda")
    maker.warm_up(lambda: target.copy_(x * 2))
    replay = maker.capture(lambda: target.copy_(x * 2))
    x.fill_(5)
    replay()
    assert target.tolist() == [10.0, 10.0, 10.0]
    assert torch.rand(3, device="cuda").isfinite().all()  # the generator is not left capturing


def test_graphs_keep_to_the_plan():
    model = model_on_gpu()
    answers_of(model, temperature=0)
    graphs = model.engine._loop.runner.graphs
    assert 0 < graphs.num_bytes <= model.engine.plan.graph_bytes
