"""RMS norm and layer norm against float64, at each instruction set and dtype."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hf_paged.kernels.cpu import norms
from tests.kernels.cpu.levels import LEVELS, at_level

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 7, 8, 16, 33, 64, 576]  # tails of either vector width, and less than one vector
# Half a unit in the last place, and a little for float32 arithmetic.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8 + 1e-6, torch.float16: 2**-11 + 1e-6}


@pytest.fixture(params=LEVELS, autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from at_level(request.param, norms.load)


def reference(kind: str, x: torch.Tensor, weight=None, bias=None, eps=1e-6, offset=0.0) -> torch.Tensor:
    """The norm in float64."""
    x = x.double()
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    y = y if weight is None else y * (weight.double() + offset)
    return y if bias is None else y + bias.double()


def run(kind: str, x: torch.Tensor, weight=None, bias=None, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """The native norm."""
    if kind == "rms":
        return norms.rms_norm(x, weight, **options)
    return norms.layer_norm(x, weight, bias, **{"eps": 1e-6, **options})


def assert_close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    """Asserts that only rounding separates a result from float64."""
    torch.testing.assert_close(actual.double(), wanted, rtol=TOLERANCE[actual.dtype], atol=2e-6)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_float64(kind: str, dtype: torch.dtype) -> None:
    for size in SIZES:
        x, weight, bias = (numbers(*shape, dtype=dtype, seed=size) for shape in ((5, size), (size,), (size,)))
        if kind == "rms":
            y, same = run(kind, x, weight)
            assert_close(y, reference(kind, x, weight))
        else:
            y, same = run(kind, x, weight, bias)
            assert_close(y, reference(kind, x, weight, bias))
        assert same is x
        assert y.dtype == dtype and y.is_contiguous()


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_weight_may_be_missing_offset_or_of_another_dtype(kind: str) -> None:
    x, weight = numbers(3, 50, dtype=torch.bfloat16), numbers(50)
    assert_close(run(kind, x)[0], reference(kind, x))
    assert_close(run(kind, x, weight, offset=1.0)[0], reference(kind, x, weight, offset=1.0))
    assert_close(norms.layer_norm(x, bias=weight, eps=1e-6)[0], reference("layer", x, bias=weight))


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual_dtype", DTYPES)
def test_residual_is_added_first_and_rounded_as_modules_do(kind: str, dtype, residual_dtype) -> None:
    x, residual, weight = numbers(2, 3, 70, dtype=dtype), numbers(2, 3, 70, dtype=residual_dtype, seed=1), numbers(70)
    y, total = run(kind, x, weight, residual=residual)
    wanted = (x.float() + residual.float()).to(residual_dtype)
    assert torch.equal(total, wanted)
    assert y.dtype == dtype
    assert_close(y, reference(kind, wanted, weight))


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_normed_where_they_are(kind: str, dtype: torch.dtype) -> None:
    fused = numbers(1, 6, 5 * 24, dtype=dtype)  # query heads 0-2, key head 3, value head 4
    weight = numbers(24, dtype=dtype)
    query = fused[..., : 3 * 24].view(1, 6, 3, 24)
    assert_close(run(kind, query, weight)[0], reference(kind, query, weight))
    transposed = query.transpose(1, 2)
    assert_close(run(kind, transposed, weight)[0], reference(kind, transposed, weight))


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_strided_rows_and_any_leading_dimensions(kind: str) -> None:
    wide = numbers(2, 3, 4, 90)
    for x in (wide[..., :40], wide[0, 0, 0], wide[:, 0, 0], wide.transpose(0, 2), wide[..., ::2]):
        assert_close(run(kind, x)[0], reference(kind, x))
    residual = wide[..., 45:85]
    y, total = run(kind, wide[..., :40], residual=residual)
    assert torch.equal(total, wide[..., :40] + residual)
    assert_close(y, reference(kind, total))


def test_layer_norm_keeps_its_digits_when_the_mean_is_large() -> None:
    x = numbers(8, 600) + 30_000.0
    x[3, 0] = 1e6  # where the first number is no guide to the mean
    y, _ = norms.layer_norm(x, eps=1e-6)
    torch.testing.assert_close(y.double(), reference("layer", x), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_nan_and_infinity_spoil_their_row_only_as_in_torch(kind: str) -> None:
    x = numbers(4, 20)
    x[1, 19], x[2, 0] = float("nan"), float("inf")
    y, _ = run(kind, x)
    assert_close(y[[0, 3]], reference(kind, x)[[0, 3]])
    torch.testing.assert_close(y[1:3], reference(kind, x)[1:3].float(), equal_nan=True)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_empty_and_constant_rows(kind: str) -> None:
    assert run(kind, torch.empty(0, 12))[0].shape == (0, 12)
    assert run(kind, torch.empty(2, 0, 12), residual=torch.empty(2, 0, 12))[1].shape == (2, 0, 12)
    assert run(kind, torch.empty(2, 0))[0].shape == (2, 0)
    assert_close(run(kind, torch.zeros(2, 12))[0], torch.zeros(2, 12).double())


def test_result_does_not_depend_on_the_number_of_threads() -> None:
    x = numbers(300, 576, dtype=torch.bfloat16)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(norms.rms_norm(x)[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


def test_compiles_without_a_graph_break() -> None:
    def block(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y, total = norms.rms_norm(x, weight, residual=residual)
        return norms.layer_norm(y * 2, weight)[0] + total

    inputs = numbers(2, 3, 40), numbers(2, 3, 40, seed=1), numbers(40)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), block(*inputs))


def test_operators_pass_torch_own_check() -> None:
    x, weight = numbers(3, 40), numbers(40)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.hf_paged.rms_norm.default, (x, weight, 1e-6, 1.0), test_utils=tests)
    torch.library.opcheck(torch.ops.hf_paged.add_rms_norm.default, (x, x + 1, None, 1e-6, 0.0), test_utils=tests)
    torch.library.opcheck(torch.ops.hf_paged.layer_norm.default, (x, weight, weight, 1e-6, 0.0), test_utils=tests)
    torch.library.opcheck(
        torch.ops.hf_paged.add_layer_norm.default, (x, x + 1, weight, None, 1e-6, 0.0), test_utils=tests
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: norms.rms_norm(x, torch.ones(7)), "weight"),
        (lambda x: norms.layer_norm(x, torch.ones(8), torch.ones(8).half()), "same dtype"),
        (lambda x: norms.rms_norm(x, residual=torch.ones(3, 8)), "shape of x"),
        (lambda x: norms.rms_norm(x.double()), "float32, bfloat16 and float16"),
    ],
)
def test_refuses_what_does_not_fit(call, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call(torch.ones(2, 8))
