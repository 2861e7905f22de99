"""Native linears against float64: every way through the kernels, every dtype, every instruction set."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from hf_paged.kernels.cpu import linear as native
from hf_paged.kernels.packed_rows import Codes, dequantized, pack_rows, rounded_tokens
from tests.kernels.cpu.levels import LEVELS, at_level
from tests.kernels.test_packed_rows import numbers

# float32 sums of float32 products; half precision: the result, and with the dot product also x, is rounded once.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}
DTYPES = tuple(TOLERANCE)
# One, a pair, one and two groups of few; a padded block; blocks with a remainder for the kernel for few, or padded.
TOKENS = (1, 2, 3, 8, 9, 17, 25, 64, 70, 131)


@pytest.fixture(params=[*LEVELS, "avx512, bf16 by FMA", "avx512, bf16 by dot product"])
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    name, _, arithmetic = request.param.partition(", ")
    for used in at_level(name, native.load):
        if arithmetic == "bf16 by dot product" and not torch.ops.hf_paged.has_bf16_dot():
            pytest.skip("this machine has no bf16 dot product")
        if arithmetic:
            torch.ops.hf_paged.set_bf16_dot(int(arithmetic == "bf16 by dot product"))
        yield used
        torch.ops.hf_paged.set_bf16_dot(-1)


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_every_size_equal_float64(level: str, dtype: torch.dtype):
    torch.manual_seed(0)
    for tokens in TOKENS:
        for size, columns in ((64, 48), (131, 51), (31, 7)):
            x = torch.randn(tokens, size, dtype=dtype)
            first, second = (torch.randn(n, size, dtype=dtype) for n in (columns, columns + 5))
            bias = torch.randn(columns, dtype=dtype)
            expected = torch.cat(
                [F.linear(x.double(), first.double(), bias.double()), x.double() @ second.double().T], 1
            )
            result = native.linears(x, [first, second], [bias, None])
            assert relative_error(result, expected) < TOLERANCE[dtype], (tokens, size, columns)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gate_activation_bias_and_residual_are_applied_in_that_order(level: str, dtype: torch.dtype):
    torch.manual_seed(0)
    for tokens in (2, 20):
        x, residual = torch.randn(tokens, 40, dtype=dtype), torch.randn(tokens, 33, dtype=dtype)
        weight = torch.randn(66, 40, dtype=dtype) / 6
        bias = torch.randn(66, dtype=dtype)
        gate, up = F.linear(x.double(), weight.double(), bias.double()).chunk(2, -1)
        result = native.gated_linear(x, weight[:33], weight[33:], "silu", bias.chunk(2), residual)
        assert relative_error(result, residual.double() + F.silu(gate) * up) < TOLERANCE[dtype]
        result = native.linears(x, [weight[:33]], [bias[:33]], "gelu", residual)
        assert relative_error(result, residual.double() + F.gelu(gate)) < TOLERANCE[dtype]


def test_parts_of_an_interleaved_projection_are_read_where_they_lie(level: str):
    heads, dim, size = 3, 20, 36
    fused, bias = torch.randn(heads * 3 * dim, size), torch.randn(heads * 3 * dim)
    x = torch.randn(21, size)
    parts = fused.view(heads, 3, dim, size).unbind(1)
    biases = bias.view(heads, 3, dim).unbind(1)
    expected = F.linear(x.double(), fused.double(), bias.double()).view(-1, heads, 3, dim).transpose(1, 2).flatten(1)
    assert relative_error(native.linears(x, parts, biases), expected) < 1e-6


def test_a_weight_at_the_end_of_memory_and_strided_rows_are_read_within_their_bounds(level: str):
    for dtype in DTYPES:
        for size in (33, 47, 64):
            around = torch.full((40, size + 3), float("nan"), dtype=dtype)
            around[:, 1 : size + 1] = torch.randn(40, size)
            weight = around[:35, 1 : size + 1]
            wide = torch.full((9, size + 5), float("nan"), dtype=dtype)
            wide[:, :size] = torch.randn(9, size)
            x = wide[:, :size]
            assert relative_error(native.linears(x, [weight]), x.double() @ weight.double().T) < TOLERANCE[dtype]


def test_rows_do_not_see_each_other(level: str):
    """A NaN or an infinity in one token's activations stays in its row."""
    for tokens in (4, 13, 20):
        x, weight = torch.randn(tokens, 50, dtype=torch.bfloat16), torch.randn(31, 50, dtype=torch.bfloat16)
        expected = native.linears(x, [weight])
        x[1, 7], x[2, 3] = float("nan"), float("inf")
        result = native.linears(x, [weight])
        assert result[1].isnan().all() and not result[2].isfinite().any()
        others = [token for token in range(tokens) if token not in (1, 2)]
        assert torch.equal(result[others], expected[others])


def test_results_do_not_depend_on_the_number_of_threads(level: str):
    x, weight = torch.randn(70, 96, dtype=torch.bfloat16), torch.randn(203, 96, dtype=torch.bfloat16)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(native.linears(x, [weight]))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_shapes_that_do_not_fit_are_refused():
    if not native.load():
        pytest.skip("no native library on this machine")
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    for arguments, message in (
        ((x, [torch.randn(5, 9)]), "x's k"),
        ((x, [weight.double()]), "float32"),
        ((x, [torch.zeros(5, 9, dtype=torch.uint8)]), "packed row of 9 bytes does not fit x's k, 8"),
        ((x, [weight], [torch.randn(4)]), "one number per row"),
        ((x, [weight.t().contiguous().t()]), "contiguous"),
        ((x, [weight], None, "linear", torch.randn(3, 4)), "residual"),
    ):
        with pytest.raises(RuntimeError, match=message):
            native.linears(*arguments)
    assert native.linears(torch.randn(0, 8), [weight]).shape == (0, 5)


def test_the_operator_compiles_into_a_full_graph():
    if not native.load():
        pytest.skip("no native library on this machine")
    x, weight = torch.randn(3, 8), torch.randn(6, 8)

    def both(x: torch.Tensor) -> torch.Tensor:
        return native.linears(x, [weight]) + native.gated_linear(x, weight, weight, "silu")

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), both(x))


def test_sums_of_nothing_are_zero(level: str):
    bias = torch.randn(35)
    for tokens in (1, 5, 40):
        native.linears(torch.ones(tokens, 64), [torch.ones(35, 64)])  # leaves sums in the memory that calls share
        result = native.linears(torch.ones(tokens, 0), [torch.ones(35, 0)], [bias])
        assert torch.equal(result, bias.expand(tokens, -1))


@pytest.mark.parametrize("kind", [Codes.Q4, Codes.Q8, Codes.E4M3])
def test_products_with_packed_rows_equal_float64(level: str, kind: Codes):
    torch.manual_seed(0)
    for tokens in TOKENS:
        for size, num_groups, columns in ((128, 1, 48), (256, 4, 51), (37, 1, 7), (320, 10, 19)):
            x = torch.randn(tokens, size)
            first, second = (pack_rows(numbers(kind, rows, size, num_groups)) for rows in (columns, columns + 5))
            bias = torch.randn(columns).bfloat16()
            dense = [dequantized(packed, size).double() for packed in (first, second)]
            expected = torch.cat([F.linear(x.double(), dense[0], bias.double()), x.double() @ dense[1].T], 1)
            result = native.linears(x, [first, second], [bias, None])
            assert relative_error(result, expected) < 1e-6, (tokens, size, columns)


def test_a_call_may_mix_packed_rows_and_dense_weights(level: str):
    torch.manual_seed(0)
    x = torch.randn(21, 64)
    weights = [pack_rows(numbers(Codes.Q4, 24, 64, 2)), torch.randn(17, 64).bfloat16(), torch.randn(9, 64)]
    dense = [dequantized(weights[0], 64), *weights[1:]]
    expected = x.double() @ torch.cat([weight.double() for weight in dense]).T
    assert relative_error(native.linears(x, weights), expected) < 1e-6
    gate, up = pack_rows(numbers(Codes.Q8, 33, 64, 1)), torch.randn(33, 64)
    expected = F.silu(x.double() @ dequantized(gate, 64).double().T) * (x.double() @ up.double().T)
    assert relative_error(native.gated_linear(x, gate, up, "silu"), expected) < 1e-6


def test_packed_rows_at_the_end_of_memory_are_read_within_their_bounds(level: str):
    """The last row ends where a page that nobody may read begins."""
    page = mmap.PAGESIZE
    for kind in (Codes.Q4, Codes.Q8):
        packed = pack_rows(numbers(kind, 35, 96, 3))
        held = mmap.mmap(-1, 4 * page)
        whole = torch.frombuffer(held, dtype=torch.uint8)
        start = 3 * page - packed.numel()
        weight = whole[start : 3 * page].view(packed.shape)
        weight.copy_(packed)
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(whole.data_ptr() + 3 * page), page, 0) == 0
        for tokens in (1, 3, 20):
            x = torch.randn(tokens, 96)
            assert relative_error(native.linears(x, [weight]), x.double() @ dequantized(packed, 96).double().T) < 1e-6


def test_int8_rows_are_multiplied_with_activations_rounded_to_int8(level: str):
    torch.manual_seed(0)
    for tokens in TOKENS:
        for size, columns in ((64, 48), (288, 51), (37, 7), (1000, 33)):
            x = torch.randn(tokens, size) * torch.logspace(-3, 3, tokens)[:, None]
            first, second = (pack_rows(numbers(Codes.W8A8, rows, size, 1)) for rows in (columns, columns + 5))
            rounded = rounded_tokens(x).double()  # in float32, as the kernels do, so that ties fall alike
            expected = torch.cat([rounded @ dequantized(rows, size).double().T for rows in (first, second)], 1)
            result = native.linears(x, [first, second])
            error = (result.double() - expected).abs().amax(1) / expected.abs().amax(1)
            assert float(error.max()) < 1e-5, (tokens, size, columns)


def test_tokens_of_zeros_and_of_no_numbers_stay_by_themselves_in_int8(level: str):
    weight = pack_rows(numbers(Codes.W8A8, 31, 70, 1))
    for tokens in (1, 4, 13, 20):
        x = torch.randn(tokens, 70)
        expected = native.linears(x, [weight])
        x = torch.cat([x, torch.zeros(1, 70), torch.full((1, 70), float("nan")), x[:1] * float("inf")])
        result = native.linears(x, [weight])
        assert torch.allclose(result[:tokens], expected)
        assert bool((result[tokens] == 0).all()) and bool(result[tokens + 1 :].isnan().all())


def test_activations_are_not_rounded_where_int8_rows_share_a_product_with_others(level: str):
    torch.manual_seed(0)
    int8, plain = pack_rows(numbers(Codes.W8A8, 8, 64, 1)), torch.randn(8, 64)
    for tokens in (2, 20):
        x = torch.randn(tokens, 64)
        expected = x.double() @ torch.cat([dequantized(int8, 64), plain]).double().T
        assert relative_error(native.linears(x, [int8, plain]), expected) < 1e-6
