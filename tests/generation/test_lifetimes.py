"""Copies, processes and the end: the pool goes nowhere with the model, and with the model it goes."""

from __future__ import annotations

import copy
import gc
import io
import multiprocessing
import os
import pickle
import sys
import threading
import weakref

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from hf_paged import AutoPagedModelForCausalLM, EngineClosedError, PagedGenerationMixin, SamplingParams
from tests.conftest import random_prompts
from tests.families import greedy, tiny_model
from tests.paged_models import assert_idle, broken_forward, paged

PROMPT = torch.tensor([[5, 17, 33, 8, 61, 90, 4]])
MANY = [[7 * i % 190 + 1 for i in range(n)] for n in (3, 20, 33, 50)]
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="fork is for Linux")


def answer(model) -> list[int]:
    return model.generate(PROMPT, max_new_tokens=8)[0, PROMPT.shape[1] :].tolist()


def resident() -> int:
    return psutil.Process().memory_info().rss


def with_full_pool(num_blocks: int, **config):
    """A paged model whose whole pool was written to, so that it is resident: 4 KiB a block."""
    model = paged(num_blocks=num_blocks, **config)
    model.generate(PROMPT, max_new_tokens=2)
    for slab in model.engine._loop.runner.pools[0]._slabs:
        slab.add_(0)
    return model


# --------------------------------------------------------------------------------------- copies


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch"])
def test_copies_are_paged_models_without_the_pool(how):
    model = paged(num_blocks=3000, block_size=16)
    expected = answer(model)
    size = sum(p.numel() * 4 for p in model.parameters())
    assert model.engine.plan.pool_bytes > 5 * size
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        data = pickle.dumps(model)
        assert len(data) < size + 200_000
        twin = pickle.loads(data)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        assert file.tell() < size + 200_000
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert isinstance(twin, PagedGenerationMixin) and isinstance(twin, LlamaForCausalLM)
    assert answer(twin) == expected
    assert twin.engine is not model.engine and twin.engine.plan == model.engine.plan
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    assert answer(model) == expected


def test_files_of_a_model_hold_its_weights_and_nothing_else(tmp_path):
    model = with_full_pool(3000)
    size = sum(p.numel() * 4 for p in model.parameters())
    model.save_pretrained(tmp_path / "folder")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    for file in (tmp_path / "folder" / "model.safetensors", tmp_path / "state.pt"):
        assert size <= file.stat().st_size < size + 50_000
    assert answer(AutoModelForCausalLM.from_pretrained(tmp_path / "folder")) == answer(model)


def test_a_copy_taken_while_requests_run_is_a_model_of_its_own():
    model, expected = paged(), greedy(tiny_model("llama"), MANY, 12)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with model.engine.requests() as states:
        states += [model.engine.add_request(prompt, params) for prompt in MANY]
        model.engine.step()
        twin = pickle.loads(pickle.dumps(model))
        assert [output.outputs[0].token_ids for output in twin.engine.generate(MANY, params)] == expected
        list(model.engine.as_finished(states))
    assert [state.output().outputs[0].token_ids for state in states] == expected


# --------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("how", ["del", "close", "release", "sleep", "unpaged"])
def test_pool_is_freed_at_once(how):
    """vllm-project/vllm#3281: release an engine's memory and load another model."""
    model = with_full_pool(16384)
    model.generate(PROMPT, max_new_tokens=2, num_beams=2, return_dict_in_generate=True, output_scores=True)
    engine = model.engine
    gc.collect()
    gc.disable()  # nothing of the pool waits for the garbage collector
    try:
        before = resident()
        if how == "del":
            del model
        elif how == "unpaged":
            model.unpaged()
        else:
            getattr(engine, how)()
        assert before - resident() > 48 << 20  # of 64 MiB
    finally:
        gc.enable()
    if how == "release":
        assert answer(model) == answer(tiny_model("llama"))


def test_engine_of_a_deleted_model_says_so():
    engine = paged().engine
    gc.collect()
    with pytest.raises(EngineClosedError, match="model was deleted"):
        engine.generate(MANY)


def test_two_hundred_models_leave_nothing_behind():
    """vllm-project/vllm#1908: deleting the engine did not free its memory."""
    references = []

    def use_one(number: int) -> None:
        model = with_full_pool(4096, overrides={"num_hidden_layers": 1})  # 8 MiB
        if number % 4 == 0:
            model.generate_batch([[1, 2, 3]], max_new_tokens=2, progress_bar=False)
        references.extend(weakref.ref(each) for each in (model, model.engine, model.engine._loop.runner))

    for number in range(20):
        use_one(number)
    gc.collect()
    before, objects, threads = resident(), len(gc.get_objects()), threading.active_count()
    for number in range(180):
        use_one(number)
    gc.collect()
    assert [reference for reference in references if reference() is not None] == []
    assert resident() - before < 16 << 20  # two pools, of a hundred and eighty
    assert len(gc.get_objects()) - len(references) - objects < 2000
    assert threading.active_count() == threads


def test_memory_stays_flat_over_many_requests():
    """huggingface/text-generation-inference#801: free memory fell for hours."""
    model = with_full_pool(64, block_size=8, max_num_seqs=8)
    engine, sizes = model.engine, []
    for number in range(8):
        prompts = random_prompts(16, 199, seed=number)
        params = [SamplingParams(temperature=1.0, max_tokens=1 + i % 5, n=1 + i % 2, logprobs=i % 3) for i in range(16)]
        engine.generate(prompts, params)
        assert_idle(engine)
        if number in (2, 7):
            gc.collect()
            sizes.append((resident(), len(gc.get_objects())))
    assert sizes[1][0] - sizes[0][0] < 4 << 20
    assert sizes[1][1] - sizes[0][1] < 500


def test_two_engines_side_by_side():
    models = [paged("llama"), paged("mistral", block_size=8), paged("llama", num_blocks=6)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with models[0].engine.requests() as first, models[1].engine.requests() as second:
        first += [models[0].engine.add_request(prompt, params) for prompt in MANY]
        second += [models[1].engine.add_request(prompt, params) for prompt in MANY]
        while models[0].engine.has_unfinished or models[1].engine.has_unfinished:
            for model in models[:2]:
                if model.engine.has_unfinished:
                    model.engine.step()
    third = models[2].engine.generate(MANY, params)
    expected = {family: greedy(tiny_model(family), MANY, 12) for family in ("llama", "mistral")}
    assert [state.output().outputs[0].token_ids for state in first] == expected["llama"]
    assert [state.output().outputs[0].token_ids for state in second] == expected["mistral"]
    assert [output.outputs[0].token_ids for output in third] == expected["llama"]
    for model in models:
        assert_idle(model.engine)


# --------------------------------------------------------------------------------------- processes


def in_a_fork(function) -> list:
    """What a function returns in a forked process."""
    here, there = multiprocessing.Pipe()

    def child() -> None:
        try:
            there.send(function())
        finally:
            os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    try:
        assert here.poll(60), "the forked process hangs"
        return here.recv()
    finally:
        process.kill()
        process.join()


def refusals(model) -> list[str]:
    seen = []
    for call in (lambda: model.generate(PROMPT), lambda: model.generate_batch([[1]]), model.engine.step):
        try:
            call()
            seen.append("no error")
        except EngineClosedError as error:
            seen.append(str(error))
    return seen


@on_linux
def test_engine_does_not_survive_a_fork():
    model = paged()
    expected = answer(model)
    seen = in_a_fork(lambda: refusals(model))
    assert len(seen) == 3 and all("does not survive a fork" in message for message in seen)
    assert answer(model) == expected


@on_linux
def test_fork_in_the_middle_of_a_step_hangs_nowhere():
    """The forked process has locks held by threads that it has not; a new engine there has its own."""
    model = paged()
    expected = answer(model)
    in_step, go_on, outputs = threading.Event(), threading.Event(), []

    def stop(forward, kwargs):
        in_step.set()
        go_on.wait(60)
        return forward()

    def child():
        torch.set_num_threads(1)
        return refusals(model), answer(AutoPagedModelForCausalLM.from_model(model))

    with broken_forward(model, stop):
        thread = threading.Thread(target=lambda: outputs.append(answer(model)))
        thread.start()
        assert in_step.wait(30)
        with model.engine._turns.lock:  # as another thread would that is just about to wait
            seen, again = in_a_fork(child)
        go_on.set()
        thread.join(60)
    assert len(seen) == 3 and all("does not survive a fork" in message for message in seen)
    assert again == expected and outputs == [expected]


class Prompts(torch.utils.data.Dataset):
    def __init__(self, model=None):
        self.model = model

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if self.model is not None:
            return self.model.generate(PROMPT + index, max_new_tokens=2)[0]
        return PROMPT[0] + index


@on_linux
def test_data_is_loaded_by_forked_processes_beside_the_engine():
    model = paged()
    rows = torch.cat(list(torch.utils.data.DataLoader(Prompts(), batch_size=2, num_workers=2)))
    before = model.generate(rows, max_new_tokens=3)
    rows = torch.cat(list(torch.utils.data.DataLoader(Prompts(), batch_size=2, num_workers=2)))
    assert torch.equal(model.generate(rows, max_new_tokens=3), before)
    assert torch.equal(before, tiny_model("llama").generate(rows, max_new_tokens=3))
    with pytest.raises(EngineClosedError, match="does not survive a fork"):
        list(torch.utils.data.DataLoader(Prompts(model), num_workers=1))
    assert torch.equal(model.generate(rows, max_new_tokens=3), before)
