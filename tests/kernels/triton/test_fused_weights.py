from __future__ import annotations

import torch

from hf_paged.kernels.triton.fused_weights import Linears, joined, lay_side_by_side
from tests.families import tiny_model


def test_rows_side_by_side_are_one_tensor():
    whole = torch.randn(10, 6)
    parts = whole.split([5, 2, 3])
    found = joined(parts)
    assert found is not None and torch.equal(found, whole) and found.data_ptr() == whole.data_ptr()
    bias = torch.randn(10)
    assert torch.equal(joined(bias.split([5, 2, 3])), bias)
    assert torch.equal(joined([torch.nn.Parameter(part) for part in parts]), whole)


def test_parts_of_each_block_are_one_tensor():
    whole = torch.randn(4 * 3 * 2, 6)
    parts = whole.view(4, 3, 2, 6).unbind(1)
    assert torch.equal(joined(parts, in_blocks=True), whole)
    bias = torch.randn(24)
    assert torch.equal(joined(bias.view(4, 3, 2).unbind(1), in_blocks=True), bias)
    assert torch.equal(joined(whole.view(1, 3, 8, 6).unbind(1), in_blocks=True), whole)
    assert joined(parts[::-1], in_blocks=True) is None
    assert joined([part[:, :1] for part in parts], in_blocks=True) is None
    assert joined(parts[:2], in_blocks=True) is None


def test_what_does_not_lie_side_by_side_is_not_joined():
    whole = torch.randn(10, 6)
    first, second, third = whole.split([5, 2, 3])
    assert joined([first, third]) is None
    assert joined([second, first]) is None
    assert joined([first, None]) is None
    assert joined([first, second.clone()]) is None
    assert joined([first, second.half()]) is None
    assert joined(whole.split(3, dim=1)) is None
    # Next to each other in memory, but not of one tensor.
    assert joined([first, second]) is not None and joined([torch.randn(4, 6), torch.randn(4, 6)]) is None


def test_products_are_the_same_joined_or_not():
    x, whole, bias = torch.randn(4, 6), torch.randn(12, 6), torch.randn(12)
    expected = (x @ whole.T + bias).split([6, 2, 4], dim=1)
    for weights, biases in (
        (whole.split([6, 2, 4]), bias.split([6, 2, 4])),
        ([part.clone() for part in whole.split([6, 2, 4])], bias.split([6, 2, 4])),
        (whole.split([6, 2, 4]), [part.clone() for part in bias.split([6, 2, 4])]),
    ):
        for part, right in zip(Linears(weights, biases)(x), expected, strict=True):
            torch.testing.assert_close(part, right)
    right = (x @ whole.T + bias).view(4, 2, 3, 2).unbind(2)
    weights, biases = whole.view(2, 3, 2, 6).unbind(1), bias.view(2, 3, 2).unbind(1)
    for given in (weights, [weight.clone() for weight in weights]):
        for part, other in zip(Linears(given, biases)(x), right, strict=True):
            torch.testing.assert_close(part, other)
    unbiased = Linears(whole.split([6, 6]), [None, None])(x)
    torch.testing.assert_close(torch.cat(list(unbiased), 1), x @ whole.T)


def test_parameters_that_are_moved_side_by_side_stay_what_they_are(tmp_path):
    model = tiny_model("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for layer in model.model.layers:
        attention = layer.self_attn
        weights = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        assert joined(weights) is None
        lay_side_by_side(weights)
        assert torch.equal(joined(weights), torch.cat(weights))
        assert attention.q_proj.weight is weights[0] and weights[0].requires_grad
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).state_dict()
    for name, tensor in before.items():
        assert torch.equal(model.state_dict()[name], tensor) and torch.equal(loaded[name], tensor)
    model(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert model.model.layers[0].self_attn.k_proj.weight.grad.abs().sum() > 0
