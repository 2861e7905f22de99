"""Rounding that looks at inputs makes less output error than rounding to the nearest, on inputs that are correlated."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_paged.quantization.calibration.awq import awq, best_factors
from hf_paged.quantization.calibration.gptq import gptq
from hf_paged.quantization.calibration.grids import DTYPE, dequantized, grouped
from hf_paged.quantization.calibration.inputs import Hessian
from hf_paged.quantization.calibration.scalings import Producer, Scaling
from hf_paged.quantization.rounding import Rounding, round_to_nearest

OUT, IN = 48, 128
ROUNDINGS = [
    Rounding(4, 32, False, lowest_zero=1),
    Rounding(4, 64, True),
    Rounding(3, -1, False, lowest_zero=1),
    Rounding(8, 32, False),
    Rounding(2, 32, True),
]


def inputs(count: int = 600, *, dead: int = 0, seed: int = 0) -> torch.Tensor:
    """Rows that lie near a few directions, some of their numbers much larger than others."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 24, generator=generator) @ torch.randn(24, IN, generator=generator)
    x += 0.3 * torch.randn(count, IN, generator=generator)
    x *= torch.exp(1.5 * torch.randn(IN, generator=generator))
    x[:, :dead] = 0
    return x


def weight(seed: int = 1) -> torch.Tensor:
    return torch.randn(OUT, IN, generator=torch.Generator().manual_seed(seed)) * 0.1


def hessian_of(x: torch.Tensor) -> Hessian:
    hessian = Hessian.of(nn.Linear(x.shape[1], 1))
    for part in x.split(200):
        hessian.add(part[None])
    return hessian


def output_error(result: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> float:
    return float(((result - w) @ x.T).double().square().sum())


def nearest(w: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    codes, scale, zero = round_to_nearest(w, rounding, DTYPE)
    return dequantized(grouped(codes.float(), rounding), scale, zero)


def test_a_hessian_tells_the_output_error():
    x, w = inputs(), weight()
    hessian = hessian_of(x)
    difference = nearest(w, ROUNDINGS[0]) - w
    right = (difference.double() @ x.T.double()).square().sum(1)
    assert torch.allclose(hessian.row_errors(difference).double(), right, rtol=1e-3)
    assert torch.allclose(hessian.magnitude(), x.square().mean(0).sqrt(), rtol=1e-4)
    factors = torch.rand(IN) + 0.5
    assert torch.allclose(hessian.scaled(factors).total, hessian_of(x / factors).total, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("method", [gptq, awq])
def test_the_output_error_is_less_than_that_of_rounding_to_the_nearest(method, rounding):
    x, w = inputs(), weight()
    result = method(w.clone(), hessian_of(x), rounding)
    assert result.codes.dtype == torch.uint8 and int(result.codes.max()) < 1 << rounding.bits
    assert torch.equal(result.scale, result.scale.to(DTYPE).float()), "scales are kept in float16"
    assert rounding.lowest_zero <= float(result.zero.min()) and float(result.zero.max()) < 1 << rounding.bits
    factor = 0.5 if method is gptq else 1.0  # without scaled inputs, AWQ has only its cut
    assert output_error(result.dequantize(), w, x) <= factor * output_error(nearest(w, rounding), w, x)


def test_gptq_is_what_its_paper_says_written_out_column_by_column():
    """The same in float64 by the paper's inverse Hessian, from which a column and a row go with each step."""
    x, w = inputs(400), weight()
    rounding = Rounding(4, -1, True)
    hessian = hessian_of(x)
    found = gptq(w.clone(), hessian, rounding)
    total = hessian.total.double()
    total += 0.01 * total.diagonal().mean() * torch.eye(IN)
    order = hessian.total.diagonal().argsort(descending=True)
    left, rest = w.double()[:, order], total[order][:, order].inverse()
    scale = found.scale.double()
    result = torch.empty_like(left)
    for column in range(IN):
        code = (left[:, column : column + 1] / scale).round().add(8).clamp(0, 15) - 8
        result[:, column : column + 1] = code * scale
        error = (left[:, column] - result[:, column]) / rest[column, column]
        left -= error[:, None] * rest[column][None]
        rest -= rest[:, column : column + 1] * rest[column : column + 1] / rest[column, column]
    same = (result[:, order.argsort()].float() - found.dequantize()).abs() < 1e-5
    assert float(same.float().mean()) > 0.98, "what lies between two codes may go either way"
    assert output_error(found.dequantize(), w, x) < 1.05 * output_error(result[:, order.argsort()].float(), w, x)


def test_inputs_that_were_always_zero_leave_their_weights_at_the_nearest_codes():
    x, w = inputs(dead=20), weight()
    rounding = Rounding(4, -1, True)
    found = gptq(w.clone(), hessian_of(x), rounding)
    difference = (found.dequantize() - w)[:, :20].abs()
    assert bool((difference <= 0.501 * found.scale)[w[:, :20].abs() < 7 * found.scale].all())


def test_without_any_input_the_result_is_finite_and_near():
    w = weight()
    found = gptq(w.clone(), Hessian(torch.zeros(IN, IN)), ROUNDINGS[0])
    assert float((found.dequantize() - w).norm() / w.norm()) < 0.12


def test_inputs_that_are_all_alike_have_an_inverse_with_damping():
    x = torch.randn(50, 1, generator=torch.Generator().manual_seed(0)) @ torch.ones(1, IN)
    found = gptq(weight(), hessian_of(x), ROUNDINGS[0])
    assert bool(torch.isfinite(found.dequantize()).all())


def test_awq_finds_factors_that_protect_large_inputs():
    x, w = inputs(), weight()
    rounding = Rounding(4, 32, False)
    scaling = Scaling(0, ("l",), Producer("norm"), IN)
    factors = best_factors(w, scaling, hessian_of(x), rounding)
    large = x.square().mean(0) > x.square().mean()
    assert factors[large].mean() > factors[~large].mean()
    scaled = nearest(w * factors, rounding) / factors
    assert output_error(scaled, w, x) < 0.9 * output_error(nearest(w, rounding), w, x)


def test_factors_that_heads_share_are_the_same_for_each_of_them():
    scaling = Scaling(0, ("o",), Producer("v"), 8, (2, 3))  # two K/V heads of four dimensions, three heads to each
    spread = scaling.spread(torch.arange(8.0))
    assert spread.tolist() == [*range(4)] * 3 + [*range(4, 8)] * 3
    assert scaling.gather(spread).tolist() == [*range(8)]


@pytest.mark.parametrize("sign", [1, -1])
def test_zero_points_of_groups_with_one_sign_stay_above_the_lowest(sign):
    groups = sign * (torch.rand(4, 2, 32, generator=torch.Generator().manual_seed(0)) + 0.2)
    rounding = Rounding(4, 32, False, lowest_zero=1)
    scale, zero = rounding.grid(groups, DTYPE)
    assert float(zero.min()) >= 1
    result = (rounding.codes(groups, scale, zero) - zero[..., None]) * scale[..., None]
    assert float((result - groups).abs().max()) <= 0.51 * float(scale.max()), "nothing is cut off"
