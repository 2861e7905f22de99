"""Whether two models returned the same: tokens, scores, what else was asked for, its types and shapes, and errors."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from transformers.utils import ModelOutput

from hf_paged.compat import output_cache
from tests.parity.cases import Case
from tests.parity.world import World

TOLERANCE = 1e-4
STATE_TOLERANCE = 1e-5  # of a hidden state's norm
SCORES = ("scores", "logits", "sequences_scores")
CACHES = ("cache", "past_key_values")


@dataclasses.dataclass
class Comparison:
    """What came of a comparison.

    Args:
        error (`str`, *optional*):
            The error that both calls raised.
        max_difference (`float`):
            Largest difference of a score, logit or beam score; 0 where there are none.
        engine_steps (`int`):
            Steps of the paged model's engine; 0 if Transformers' loop ran without it.
        compared_scores (`int`):
            Rows of scores that were compared; of sampled texts, those up to the first token that differs.
        problems (`list[str]`):
            Everything that is not the same.
    """

    error: str | None = None
    max_difference: float = 0.0
    engine_steps: int = 0
    compared_scores: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)


def call(model: Any, arguments: dict[str, Any], *, with_scores: bool) -> tuple[Any, str | None]:
    """Returns what `generate` returned, and the error that it raised instead.

    Args:
        model (`PreTrainedModel`):
            Whose `generate`.
        arguments (`dict[str, Any]`):
            Its arguments; `None` is left out.
        with_scores (`bool`):
            Ask for a `ModelOutput` with scores, unless the arguments say otherwise.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    if with_scores:
        given = {"return_dict_in_generate": True, "output_scores": True} | given
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return model.generate(**given), None
        except Exception as error:
            return None, f"{type(error).__name__}: {error}"


def compare(world: World, case: Case) -> Comparison:
    """Calls both models with scores, and the paged one also as simply as people do.

    Args:
        world (`World`):
            The models.
        case (`Case`):
            The call.
    """
    found = Comparison()
    for_stock, for_paged = case.arguments(world, world.stock), case.arguments(world, world.paged)
    sampled = bool(for_stock.get("do_sample"))
    expected, error = call(world.stock, for_stock, with_scores=True)
    before = world.paged.engine.stats().num_steps
    got, paged_error = call(world.paged, for_paged, with_scores=True)
    found.engine_steps = world.paged.engine.stats().num_steps - before
    found.error = error
    if error != paged_error:
        found.problems.append(f"Transformers: {error}; paged: {paged_error}")
    if error is not None or paged_error is not None:
        return found
    if list(_leaves(getattr(got, "attentions", None))) and not list(_leaves(expected.attentions)):
        expected = _with_weights(world, case)
    _compare_outputs(found, expected, got, sampled)
    if "streamer" in for_stock and for_stock["streamer"].parts != for_paged["streamer"].parts:
        found.problems.append("the streamers were given other tokens")
    if not sampled:
        _compare_plainly(found, world, case, _sequences(expected))
    return found


def _with_weights(world: World, case: Case) -> Any:
    """Transformers' SDPA has no attention weights to return, a paged model has: they are to be the eager ones."""
    before = world.stock.config._attn_implementation
    world.stock.set_attn_implementation("eager")
    try:
        return call(world.stock, case.arguments(world, world.stock), with_scores=True)[0]
    finally:
        world.stock.set_attn_implementation(before)


def _compare_plainly(found: Comparison, world: World, case: Case, expected: torch.Tensor) -> None:
    """Without scores, a paged model may run the call in another way."""
    got, error = call(world.paged, case.arguments(world, world.paged), with_scores=False)
    if error is None:
        _compare_sequences(found, expected, _sequences(got), "without scores ")
        return
    _, stock_error = call(world.stock, case.arguments(world, world.stock), with_scores=False)
    if error != stock_error:
        found.problems.append(f"without scores: Transformers: {stock_error}; paged: {error}")


def same(world: World, one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Returns whether Transformers itself answers two calls alike.

    Args:
        world (`World`):
            The models.
        one (`dict[str, Any]`):
            Arguments of a call.
        other (`dict[str, Any]`):
            Those of another.
    """
    (expected, error), (got, other_error) = (call(world.stock, given, with_scores=True) for given in (one, other))
    if error is not None or other_error is not None:
        return error == other_error
    found = Comparison()
    _compare_outputs(found, expected, got, sampled=False)
    return not found.problems


def _compare_outputs(found: Comparison, expected: Any, got: Any, sampled: bool) -> None:
    if type(expected) is not type(got):
        found.problems.append(f"{type(got).__name__} instead of {type(expected).__name__}")
        return
    if not isinstance(expected, ModelOutput):
        _compare_sequences(found, expected, got)
        return
    if list(expected) != list(got):
        found.problems.append(f"{list(got)} instead of {list(expected)}")
        return
    alike = _alike(expected.sequences, got.sequences, len(expected.get("scores") or expected.get("logits") or ()))
    if not sampled:
        _compare_sequences(found, expected.sequences, got.sequences)
    for name in expected:
        if name in SCORES[:2]:
            _compare_scores(found, name, expected[name], got[name], alike if sampled else None)
        elif name in CACHES:
            lengths = [output_cache(output).get_seq_length() for output in (expected, got)]
            if lengths[0] != lengths[1] and not sampled:
                found.problems.append(f"the cache holds {lengths[1]} tokens instead of {lengths[0]}")
        elif name != "sequences" and not sampled:
            _compare_tensors(found, name, expected[name], got[name])


def _alike(expected: torch.Tensor, got: torch.Tensor, steps: int) -> list[int] | None:
    """For each row, before how many of its steps both have drawn the same tokens."""
    if steps == 0 or len(expected) != len(got):
        return None
    counts = []
    for one, other in zip(expected[:, -steps:].tolist(), got[:, -steps:].tolist(), strict=True):
        same_tokens = [a == b for a, b in zip(one, other, strict=False)]
        counts.append(1 + (same_tokens.index(False) if False in same_tokens else len(same_tokens)))
    return counts


def _compare_sequences(found: Comparison, expected: torch.Tensor, got: Any, what: str = "") -> None:
    if not isinstance(got, torch.Tensor) or expected.dtype != got.dtype or expected.tolist() != got.tolist():
        found.problems.append(f"{what}other tokens: {_shown(got)} instead of {_shown(expected)}")


def _compare_scores(found: Comparison, name: str, expected: Any, got: Any, alike: list[int] | None) -> None:
    if len(expected) != len(got) and alike is None:
        found.problems.append(f"{len(got)} steps of {name} instead of {len(expected)}")
    for step, (one, other) in enumerate(zip(expected, got, strict=False)):
        rows = range(len(one)) if alike is None else [row for row, count in enumerate(alike) if step < count]
        if one.shape != other.shape or one.dtype != other.dtype:
            found.problems.append(f"{name} are {tuple(other.shape)} {other.dtype} instead of {tuple(one.shape)}")
            return
        for row in rows:
            _compare_row(found, f"{name} of row {row} at step {step}", one[row], other[row], sampled=alike is not None)


def _compare_row(found: Comparison, what: str, one: torch.Tensor, other: torch.Tensor, sampled: bool) -> None:
    found.compared_scores += 1
    finite = one.isfinite() & other.isfinite()
    difference = float((one - other)[finite].abs().max()) if bool(finite.any()) else 0.0
    found.max_difference = max(found.max_difference, difference)
    if difference > TOLERANCE:
        found.problems.append(f"{what} differ by {difference:.2e}")
    # A token next to a threshold of sampling may fall on its other side by rounding alone.
    apart = int(((one != other) & ~(one.isnan() & other.isnan()))[~finite].sum())
    if apart > int(sampled):
        found.problems.append(f"{what}: {apart} tokens are banned in one only")


def _compare_tensors(found: Comparison, name: str, expected: Any, got: Any) -> None:
    ones, others = list(_leaves(expected)), list(_leaves(got))
    if [tuple(one.shape) for one in ones] != [tuple(other.shape) for other in others]:
        found.problems.append(f"{name} have other shapes")
        return
    for one, other in zip(ones, others, strict=True):
        if one.dtype != other.dtype or not _is_close(name, one, other):
            found.problems.append(f"{name} differ by {float((one - other).abs().max()):.2e}")
            return


def _is_close(name: str, one: torch.Tensor, other: torch.Tensor) -> bool:
    if name != "hidden_states":
        return torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE)
    # A state is a sum whose parts are far larger than some of its entries: what rounding does is seen on the whole.
    return bool(((one - other).norm(dim=-1) <= STATE_TOLERANCE * one.norm(dim=-1)).all())


def _leaves(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _leaves(part)


def _sequences(output: Any) -> Any:
    return output.sequences if isinstance(output, ModelOutput) else output


def _shown(tokens: Any) -> Any:
    return tokens.tolist() if isinstance(tokens, torch.Tensor) else tokens
