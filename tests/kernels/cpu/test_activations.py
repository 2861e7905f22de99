"""Activation functions against float64, at each instruction set and dtype."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from transformers.activations import ACT2FN

from hf_paged.errors import UnknownNameError
from hf_paged.kernels.cpu import activations
from hf_paged.kernels.cpu.activations import ACTIVATIONS
from tests.kernels.cpu.levels import LEVELS, at_level

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Half a unit in the last place, and the error that float32 arithmetic may make.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8 + 1e-6, torch.float16: 2**-11 + 1e-6}

# In float64, by formulas that do not cancel.
REFERENCES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "linear": lambda x: x,
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": lambda x: x * 0.5 * torch.special.erfc(-x / math.sqrt(2)),
    "gelu_tanh": lambda x: x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


@pytest.fixture(params=LEVELS, autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from at_level(request.param, activations.load)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def assert_close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    """Asserts the relative error, and an absolute one where numbers (or 1 over them) leave the normal range."""
    smallest = 6e-8 if actual.dtype == torch.float16 else 1e-36
    torch.testing.assert_close(actual.double(), wanted, rtol=TOLERANCE[actual.dtype], atol=smallest)


def whole_range() -> torch.Tensor:
    """From the smallest numbers to those whose exponential overflows."""
    powers = 10 ** torch.linspace(-35, 1, 2001)
    return torch.cat([torch.linspace(-88, 88, 20001), torch.linspace(-6, 6, 20001), powers, -powers])


@pytest.mark.parametrize("name", REFERENCES)
def test_relative_error_over_the_whole_range(name: str) -> None:
    x = whole_range()
    assert_close(activations.activation(x, name), REFERENCES[name](x.double()))


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_product_rounds_once(name: str, dtype: torch.dtype) -> None:
    for size in (1, 7, 16, 45):
        merged = numbers(2, 3, 2 * size + 3, dtype=dtype, seed=size)
        gate, up = merged[..., :size], merged[..., size : 2 * size]
        y = activations.gated_activation(gate, up, name)
        assert y.dtype == dtype and y.is_contiguous()
        assert_close(y, REFERENCES[name](gate.double()) * up.double())
        assert_close(activations.activation(gate, name), REFERENCES[name](gate.double()))


@pytest.mark.parametrize("name", REFERENCES)
def test_nan_infinities_and_huge_numbers_give_what_the_formula_gives(name: str) -> None:
    formulas = {
        "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
        "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    }
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 1e30, -1e30, 3e38, -3e38, 1e-40, -1e-40])
    wanted = formulas.get(name, REFERENCES[name])(x)
    torch.testing.assert_close(activations.activation(x, name), wanted, rtol=1e-6, atol=1e-38, equal_nan=True)


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name in ACT2FN])
def test_names_mean_what_they_mean_in_transformers(name: str) -> None:
    x = numbers(4, 50)
    torch.testing.assert_close(activations.activation(x, name), ACT2FN[name](x), rtol=1e-5, atol=2e-6)
    assert activations.recognize_activation(ACT2FN[name]) == ACTIVATIONS[name]


def test_recognizes_no_other_function() -> None:
    for name in ("gelu_10", "mish", "hardswish", "leaky_relu", "relu6", "laplace", "xielu"):
        assert activations.recognize_activation(ACT2FN[name]) is None
    assert activations.recognize_activation(lambda x: x.sum()) is None


def test_shapes_and_strides() -> None:
    x = numbers(3, 4, 20)
    for view in (x.transpose(0, 2), x[..., ::2], x[0, 0], x[0, 0, 0], x[:0], x[..., :0]):
        assert torch.equal(activations.activation(view, "relu"), view.relu())
        assert torch.equal(activations.gated_activation(view, view, "linear"), view * view)


def test_result_does_not_depend_on_the_number_of_threads() -> None:
    x = numbers(64, 1536, dtype=torch.bfloat16)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(activations.gated_activation(x, x, "silu"))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


def test_compiles_without_a_graph_break() -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        return activations.gated_activation(x, x + 1, "silu") + activations.activation(x, "gelu")

    x = numbers(2, 3, 40)
    torch.testing.assert_close(torch.compile(block, fullgraph=True, backend="aot_eager")(x), block(x))


def test_refuses_what_does_not_fit() -> None:
    with pytest.raises(UnknownNameError, match="mish"):
        activations.activation(torch.ones(2), "mish")
    with pytest.raises(RuntimeError, match="shape"):
        activations.gated_activation(torch.ones(2), torch.ones(3), "silu")
    with pytest.raises(RuntimeError, match="dtype"):
        activations.gated_activation(torch.ones(2), torch.ones(2).half(), "silu")
    with pytest.raises(RuntimeError, match="number 9"):
        torch.ops.hf_paged.activation(torch.ones(1, 2), 9)
