"""Choosing tokens by native code against float64 and torch, at each instruction set and dtype."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_paged.generation.sampling.random import uniforms
from hf_paged.kernels.cpu import sampling
from hf_paged.kernels.cpu.sampling import ANY, BEST, TRUNCATED
from tests.kernels.cpu.levels import LEVELS, at_level
from tests.kernels.sampling_cuts import CUTS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 2, 7, 16, 17, 129, 1000, 5003]  # less than a vector, tails of either width, several chunks


@pytest.fixture(params=LEVELS, autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from at_level(request.param, sampling.load)


def rows_of(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def draw(scores, uniform, kind=TRUNCATED, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> torch.Tensor:
    """Draws from each row with the same settings."""
    settings = torch.tensor([[kind, temperature, top_k, top_p, min_p]] * len(scores), dtype=torch.float64)
    return sampling.draw_tokens(scores, settings, torch.as_tensor(uniform, dtype=torch.float64))[0]


def weights_of(row: torch.Tensor, temperature: float) -> np.ndarray:
    return ((row.double() - row.double().max()) / temperature).exp().numpy()


def remaining(row, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> tuple[np.ndarray, np.ndarray, float]:
    """The tokens that remain, best first, their probabilities, and the top-p that cuts halfway through its last token.

    With that top-p, and since the last token weighs a little, float32 rounding cannot decide which token is the last.
    """
    order = row.double().sort(descending=True, stable=True).indices.numpy()
    weights, scores = weights_of(row, temperature)[order], row.double().numpy()[order]
    if top_k:
        weights = weights[scores >= scores[min(top_k, len(scores)) - 1]]
    cumulative = np.cumsum(weights)
    if top_p < 1:
        last = int(np.searchsorted(cumulative, top_p * cumulative[-1]))
        last = min(last, int(np.flatnonzero(weights > 1e-5 * cumulative[-1])[-1]))
        top_p = float((cumulative[last] - weights[last] / 2) / cumulative[-1])
        weights = weights[: last + 1]
    weights = weights[(weights > 0) & (weights >= min_p)]
    return order[: len(weights)], weights / weights.sum(), top_p


# ------------------------------------------------------------------ the best token


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_best_token_is_torchs(dtype: torch.dtype) -> None:
    for size in SIZES:
        scores = rows_of(9, size, dtype=dtype, seed=size)
        token_ids, best = sampling.argmax_tokens(scores)
        assert token_ids.tolist() == scores.float().argmax(1).tolist()
        assert best.tolist() == scores.float().amax(1).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_of_equal_scores_is_the_best(dtype: torch.dtype) -> None:
    scores = rows_of(6, 4000, dtype=dtype).clamp(max=1.0)
    scores[5] = -torch.inf
    first = [int((row == row.max()).nonzero()[0, 0]) for row in scores]
    assert sampling.argmax_tokens(scores)[0].tolist() == first
    assert draw(scores, torch.full((6,), 0.5), kind=BEST).tolist() == first


@pytest.mark.parametrize("place", [0, 15, 16, 1500, 2999])
def test_nan_and_infinities_show_in_the_best_score(place: int) -> None:
    scores = rows_of(4, 3000)
    scores[0, place], scores[1, place], scores[2] = torch.nan, torch.inf, -torch.inf
    for token_ids, best in (
        sampling.argmax_tokens(scores),
        sampling.draw_tokens(
            scores, torch.tensor([[TRUNCATED, 1.0, 5, 0.9, 0]] * 4, dtype=torch.float64), torch.rand(4).double()
        ),
    ):
        assert best[0].isnan() and best[1] == torch.inf and best[2] == -torch.inf and best[3] == scores[3].max()
        assert token_ids[0] == 0 and token_ids[2] == 0
    assert sampling.argmax_tokens(scores)[0][1] == place


def test_rows_may_lie_apart() -> None:
    scores = rows_of(8, 700)
    part = scores[1::3, 100:633]
    assert sampling.argmax_tokens(part)[0].tolist() == part.argmax(1).tolist()
    uniform = torch.rand(len(part)).double()
    assert draw(part, uniform, top_k=20).tolist() == draw(part.contiguous(), uniform, top_k=20).tolist()


# ------------------------------------------------------------------ draws


@pytest.mark.parametrize("scale", [0.01, 3.0, 12.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_exactly_the_right_tokens_with_the_right_probabilities(dtype: torch.dtype, scale: float) -> None:
    for size in SIZES:
        row = rows_of(size, dtype=dtype, scale=scale, seed=size)
        for cut in CUTS:
            token_ids, probabilities, top_p = remaining(row, **cut)
            ends = np.cumsum(probabilities)
            starts = np.concatenate(([0], ends[:-1]))
            # Close to both ends of each token's share: of the first, the last and some other tokens.
            tried = np.flatnonzero(probabilities > 1e-10)
            tried = np.unique(np.concatenate((tried[:20], tried[-20:], tried[:: len(tried) // 20 + 1])))
            margin = np.minimum(1e-9, probabilities / 4)
            uniform = np.concatenate(((starts + margin)[tried], (ends - margin)[tried]))
            drawn = draw(row.expand(len(uniform), -1), uniform, **{**cut, "top_p": top_p})
            assert drawn.tolist() == [*token_ids[tried], *token_ids[tried]], (size, cut)


def test_tokens_that_tie_with_the_kth_remain() -> None:
    row = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0] * 60)
    token_ids, _, _ = remaining(row, top_k=70)
    assert len(token_ids) == 60 + 180
    uniform = (np.arange(5000) + 0.5) / 5000
    assert set(draw(row.expand(5000, -1), uniform, top_k=70).tolist()) == set(token_ids.tolist())


def test_of_equal_scores_the_first_ones_remain() -> None:
    scores = torch.zeros(1000, 2000, dtype=torch.bfloat16)
    scores[:, 1::2] = -0.0  # the same number
    drawn = draw(scores, (np.arange(1000) + 0.5) / 1000, top_p=0.24999)
    assert drawn.tolist() == [i // 2 for i in range(1000)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_token_by_its_share(dtype: torch.dtype) -> None:
    for size in SIZES:
        row = rows_of(size, dtype=dtype, seed=size)
        row[1::7] = -torch.inf
        uniform = (np.arange(500) + 0.5) / 500
        drawn = draw(row.expand(500, -1), uniform, kind=ANY, temperature=1.3).numpy()
        weights = weights_of(row, 1.3)
        ends = np.cumsum(weights) / weights.sum()
        assert (weights[drawn] > 0).all()
        assert (uniform <= ends[drawn] + 1e-6).all() and (
            uniform >= ends[drawn] - weights[drawn] / weights.sum() - 1e-6
        ).all()


@pytest.mark.parametrize("kind", [ANY, TRUNCATED])
def test_extreme_temperatures(kind: int) -> None:
    scores = rows_of(1, 300).expand(64, -1).clone()
    scores[:, 100:] = -torch.inf
    uniform = (np.arange(64) + 0.5) / 64
    assert set(draw(scores, uniform, kind, temperature=1e-30, top_p=0.9).tolist()) == {int(scores[0].argmax())}
    hot = draw(scores, uniform, kind, temperature=1e30, top_k=100)
    assert len(set(hot.tolist())) == 64 and max(hot.tolist()) < 100


def test_a_row_depends_on_itself_alone() -> None:
    scores, uniform = rows_of(12, 3001, dtype=torch.bfloat16), torch.rand(12).double()
    kinds = [BEST, ANY, TRUNCATED] * 4
    settings = torch.tensor([[kind, 0.8, 40 * (row % 2), 0.9, 0] for row, kind in enumerate(kinds)]).double()
    scores[4, 7] = torch.nan
    alone = [
        int(sampling.draw_tokens(scores[i : i + 1], settings[i : i + 1], uniform[i : i + 1])[0]) for i in range(12)
    ]
    num_threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert sampling.draw_tokens(scores, settings, uniform)[0].tolist() == alone
    finally:
        torch.set_num_threads(num_threads)


def test_uniform_numbers_are_those_of_the_other_implementation() -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(-(2**63), 2**63 - 1, (200, 3), generator=generator)
    keys[:, 1:] &= 2**32 - 1
    seeds, branches, positions = keys.numpy().view(np.uint64).T
    assert sampling.philox_uniforms(keys).tolist() == uniforms(seeds, branches, positions).tolist()


# ------------------------------------------------------------------ log-probabilities


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_sums_and_ranks(dtype: torch.dtype) -> None:
    for size in SIZES:
        scores = rows_of(8, size, dtype=dtype, seed=size)
        scores[:, 1:] = scores[:, 1:].masked_fill(torch.rand(8, size - 1) < 0.2, -torch.inf)
        token_ids = torch.randint(0, size, (8,))
        log_sums, num_larger = sampling.measure_tokens(scores, token_ids)
        torch.testing.assert_close(log_sums.double(), scores.double().logsumexp(1), rtol=1e-6, atol=2e-6)
        assert num_larger.tolist() == (scores > scores.gather(1, token_ids[:, None])).sum(1).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_in_order(dtype: torch.dtype) -> None:
    for size in SIZES:
        scores = rows_of(5, size, dtype=dtype, seed=size)
        ordered = scores.float().sort(dim=1, descending=True, stable=True)
        for k in {min(k, size) for k in (1, 2, 9, 100, 400, size)}:
            values, token_ids = sampling.largest_tokens(scores, k)
            assert values.tolist() == ordered.values[:, :k].tolist()
            assert token_ids.tolist() == ordered.indices[:, :k].tolist()


def test_impossible_tokens_are_no_candidates() -> None:
    scores = torch.full((1, 500), -torch.inf)
    scores[0, [3, 400]] = torch.tensor([1.0, 2.0])
    values, token_ids = sampling.largest_tokens(scores, 4)
    assert values.tolist() == [[2.0, 1.0, -torch.inf, -torch.inf]] and token_ids.tolist() == [[400, 3, 0, 0]]


# ------------------------------------------------------------------ arguments


def test_wrong_arguments_are_refused() -> None:
    scores, settings, uniform = rows_of(2, 10), torch.zeros(2, 5).double(), torch.rand(2).double()
    for call in (
        lambda: sampling.argmax_tokens(scores.double()),
        lambda: sampling.argmax_tokens(scores[0]),
        lambda: sampling.argmax_tokens(scores.T),
        lambda: sampling.draw_tokens(scores, settings.float(), uniform),
        lambda: sampling.draw_tokens(scores, settings, uniform[:1]),
        lambda: sampling.measure_tokens(scores, torch.tensor([0, 10])),
        lambda: sampling.measure_tokens(scores, torch.tensor([-1, 0])),
        lambda: sampling.largest_tokens(scores, 11),
        lambda: sampling.largest_tokens(scores, 0),
    ):
        with pytest.raises(RuntimeError, match="sampling|float32"):
            call()


def test_fake_implementations_have_the_right_shapes() -> None:
    def shapes(*tensors: torch.Tensor) -> list[tuple]:
        return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]

    def results(scores, settings, uniform, token_ids, keys) -> list[tuple]:
        return [
            *shapes(*sampling.argmax_tokens(scores)),
            *shapes(*sampling.draw_tokens(scores, settings, uniform)),
            *shapes(*sampling.measure_tokens(scores, token_ids)),
            *shapes(*sampling.largest_tokens(scores, 3)),
            *shapes(sampling.philox_uniforms(keys)),
        ]

    real = [
        rows_of(4, 10),
        torch.tensor([[BEST, 1.0, 0, 1, 0]] * 4).double(),
        torch.rand(4).double(),
        torch.tensor([0, 1, 2, 3]),
        torch.zeros(4, 3, dtype=torch.int64),
    ]
    with FakeTensorMode() as mode:
        fake = results(*map(mode.from_tensor, real))
    assert fake == results(*real)
