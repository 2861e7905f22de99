"""The view of an engine step: whatever does not go through paged attention is noticed, never answered wrongly."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hf_paged import AttentionBypassedError, StepFailedError, UnsupportedAttentionError, UnsupportedModelError
from hf_paged.cache.step_cache import AttentionRequest, StepCache, StepLayerSpec, StepLength, paged_layer_of
from hf_paged.generation import native_layers
from hf_paged.generation.attention import paged_attention_forward, paged_mask
from hf_paged.generation.sampling.params import SamplingParams
from tests.families import greedy, tiny_model
from tests.paged_models import assert_idle, paged

PROMPT = list(range(5, 25))
PARAMS = SamplingParams(temperature=0, max_tokens=6)


class ZeroBackend:
    """Stores nothing and answers zeros."""

    def prepare(self, metadata, num_kv_heads):
        pass

    def store(self, *args):
        pass

    def attend(self, query, key_cache, value_cache, metadata, **kwargs):
        return query.new_zeros(*query.shape[:2], value_cache.shape[3])


@pytest.fixture
def view() -> StepCache:
    blocks = torch.zeros(1, 1, 4, 8)
    cache = StepCache(ZeroBackend(), [StepLayerSpec(i, 0, blocks, blocks, None) for i in range(3)])
    cache.begin((SimpleNamespace(token_rows=None),))
    return cache


def states() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 2, 8)


def attend(key: torch.Tensor) -> None:
    rows = torch.zeros(2, 1, 8)
    paged_layer_of(key).attend(rows, rows, rows, AttentionRequest(1.0))


def test_layer_that_stores_but_does_not_attend_is_named_by_the_next(view):
    """huggingface/transformers PR#36737: attention of one's own would see the new tokens only, silently."""
    key, _ = view.update(*states(), 0)
    attend(key)
    view.update(*states(), 1)
    with pytest.raises(AttentionBypassedError, match="Layer 1 gave its keys"):
        view.update(*states(), 2)


def test_last_layer_that_stores_but_does_not_attend_is_named_at_the_end(view):
    for layer_idx in range(3):
        key, _ = view.update(*states(), layer_idx)
        if layer_idx < 2:
            attend(key)
    with pytest.raises(AttentionBypassedError, match="Layer 2 gave its keys"):
        view.end()


def test_layer_that_neither_stores_nor_attends_is_noticed(view):
    for layer_idx in (0, 2):
        attend(view.update(*states(), layer_idx)[0])
    with pytest.raises(AttentionBypassedError, match="2 of 3 layers"):
        view.end()


def test_view_is_clean_after_a_step_that_failed(view):
    view.update(*states(), 0)
    view.abandon()
    view.begin((SimpleNamespace(token_rows=None),))
    for layer_idx in range(3):
        attend(view.update(*states(), layer_idx)[0])
    view.end()


def test_step_needs_no_mask_and_anything_else_gets_the_stock_one(view):
    sizes = view.get_mask_sizes(2, 0)
    assert isinstance(sizes[0], StepLength) and sizes == (2, 0)
    assert paged_mask(kv_length=sizes[0], stock="sdpa") is None


@pytest.mark.parametrize(
    ("argument", "what"),
    [
        ({"position_bias": torch.zeros(1)}, r"\['position_bias'\]"),
        ({"head_mask": 1, "alibi": 2, "use_cache": True}, r"\['alibi', 'head_mask'\]"),
        ({"attention_mask": torch.zeros(1, 1, 2, 2)}, "a mask"),
        ({"module": SimpleNamespace(is_causal=False)}, "no causal order"),
    ],
    ids=["one", "several", "mask", "bidirectional"],
)
def test_unknown_attention_arguments_are_refused(view, argument, what):
    """vllm-project/vllm PR#52156: learned sinks were accepted, dropped, and the text became garbage."""
    key, value = view.update(*states(), 0)
    given = {"module": SimpleNamespace(), "attention_mask": None, "scaling": 1.0, "dropout": 0.0, **argument}
    with pytest.raises(UnsupportedAttentionError, match=what):
        paged_attention_forward(query=torch.zeros(1, 1, 2, 8), key=key, value=value, stock="sdpa", **given)


def test_arguments_that_change_nothing_and_absent_ones_are_fine(view):
    key, value = view.update(*states(), 0)
    output, weights = paged_attention_forward(
        SimpleNamespace(), torch.zeros(1, 1, 2, 8), key, value, None, stock="sdpa",
        position_ids=torch.arange(2), use_cache=True, output_attentions=False, position_bias=None, is_causal=True,
    )  # fmt: skip
    assert output.shape == (1, 2, 1, 8) and weights is None


def test_model_with_an_unknown_attention_argument_is_not_paged(caplog):
    model = tiny_model("llama")
    expected = greedy(model, [PROMPT], 4)
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, **kwargs, position_bias=torch.ones(1))
    from hf_paged import AutoPagedModelForCausalLM

    model = AutoPagedModelForCausalLM.from_model(model)
    (message,) = [record.message for record in caplog.records if record.name.startswith("hf_paged")]
    assert "position_bias" in message and "Transformers' own loop" in message
    with pytest.raises(UnsupportedModelError, match="position_bias"):
        model.engine  # noqa: B018 - the property raises
    model.forward = forward
    assert greedy(model, [PROMPT], 4) == expected


def fails_once(model, break_it, mend_it) -> BaseException:
    """A broken step fails its request, leaves nothing behind, and the mended model answers as ever."""
    expected = greedy(tiny_model("mistral"), [PROMPT], 6)
    break_it()
    with pytest.raises(StepFailedError) as caught:
        model.engine.generate([PROMPT], PARAMS)
    assert_idle(model.engine)
    mend_it()
    assert [output.outputs[0].token_ids for output in model.engine.generate([PROMPT], PARAMS)] == expected
    return caught.value.__cause__


def test_attention_implementation_set_away_under_a_running_engine_is_noticed(monkeypatch):
    monkeypatch.setattr(native_layers, "native_operators", lambda: None)
    model = paged("mistral")
    cause = fails_once(
        model, lambda: model.set_attn_implementation("eager"), lambda: model.set_attn_implementation("hf_paged")
    )
    assert isinstance(cause, AttentionBypassedError)


def test_native_layers_attend_whatever_implementation_is_set():
    model = paged("mistral")
    if model.engine.plan.native == "off":
        pytest.skip("no native library on this machine")
    expected = greedy(tiny_model("mistral"), [PROMPT], 6)
    model.engine.generate([PROMPT], PARAMS)
    model.set_attn_implementation("eager")
    assert [output.outputs[0].token_ids for output in model.engine.generate([PROMPT], PARAMS)] == expected


def test_layer_that_is_skipped_is_noticed():
    model = paged("mistral")
    layer = model.model.layers[1]
    cause = fails_once(
        model, lambda: setattr(layer, "forward", lambda hidden, *a, **k: hidden), lambda: delattr(layer, "forward")
    )
    assert isinstance(cause, AttentionBypassedError) and "1 of 2 layers" in str(cause)


def test_window_that_changed_since_load_is_noticed():
    model = paged("mistral")
    attention = model.model.layers[1].self_attn
    before = attention.sliding_window if hasattr(attention, "sliding_window") else model.config.sliding_window
    owner = attention if hasattr(attention, "sliding_window") else model.config
    cause = fails_once(
        model, lambda: setattr(owner, "sliding_window", 3), lambda: setattr(owner, "sliding_window", before)
    )
    assert isinstance(cause, UnsupportedModelError) and "sliding window of 3; at load it was 9" in str(cause)
