"""Where a layer's inputs of linears can be scaled, because what makes them can be scaled the other way.

    a norm                 gain / s,  columns of the linears that it feeds * s
    another linear         its rows / s,  columns of the linear that is fed by them * s

No names are known here. Whether a layer stays the same is tried out: with random s, and with each layer's own at last.
The second holds for a value projection and the output projection behind attention, also where heads share values, and
for whatever passes through an MLP as a factor.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...modeling.patterns.observation import relative_error, tolerance
from .inputs import Tap

Run = Callable[[], torch.Tensor]
_TELLING = 100  # times the tolerance: so much must a layer's output change where only one side is scaled


@dataclasses.dataclass(frozen=True)
class Producer:
    """What makes an input.

    Args:
        module (`str`):
            A norm or a linear of the layer.
        start (`int`, defaults to 0):
            Its first row that belongs to the input.
        offset (`float`, defaults to 0.0):
            What a norm adds to its weight to get its gain.
    """

    module: str
    start: int = 0
    offset: float = 0.0

    def divide(self, layer: nn.Module, factors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Divides what it makes, in place.

        Args:
            layer (`torch.nn.Module`):
                The layer, in float32.
            factors (`torch.Tensor`):
                By which.
            dtype (`torch.dtype`):
                In which gains are kept.

        Returns:
            `torch.Tensor`: By what it is divided, now that gains are rounded.
        """
        module = layer.get_submodule(self.module)
        rows = slice(self.start, self.start + len(factors))
        weight = module.weight.data[rows]  # type: ignore[index]
        if weight.ndim == 1:
            gain = weight + self.offset
            weight.copy_((gain / factors - self.offset).to(dtype))
            now = weight + self.offset
            factors = torch.where(now.abs() > 0, gain / now, factors)
        else:
            weight.div_(factors[:, None])
        if getattr(module, "bias", None) is not None:
            module.bias.data[rows].div_(factors)  # type: ignore[index]
        return factors


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Inputs that can be scaled.

    Args:
        tap (`int`):
            Whose: the index of the `Tap`.
        linears (`tuple[str, ...]`):
            The linears that are fed.
        producer (`Producer`):
            What feeds them.
        width (`int`):
            How many factors there are.
        heads (`tuple[int, int]`, *optional*):
            Where heads share them: K/V heads, and how many heads share one's.
    """

    tap: int
    linears: tuple[str, ...]
    producer: Producer
    width: int
    heads: tuple[int, int] | None = None

    def spread(self, factors: torch.Tensor) -> torch.Tensor:
        """Returns the factor of each input.

        Args:
            factors (`torch.Tensor`):
                `[width]`.
        """
        if self.heads is None:
            return factors
        kv_heads, sharing = self.heads
        return factors.view(kv_heads, 1, -1).expand(-1, sharing, -1).reshape(-1)

    def gather(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns the mean over inputs that share a factor.

        Args:
            inputs (`torch.Tensor`):
                A number for each input.
        """
        if self.heads is None:
            return inputs
        kv_heads, sharing = self.heads
        return inputs.view(kv_heads, sharing, -1).mean(1).reshape(-1)

    def apply(self, layer: nn.Module, factors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Scales both sides, in place.

        Args:
            layer (`torch.nn.Module`):
                The layer, in float32.
            factors (`torch.Tensor`):
                `[width]`.
            dtype (`torch.dtype`):
                In which the gains of norms are kept.

        Returns:
            `torch.Tensor`: What each input is divided by.
        """
        spread = self.spread(self.producer.divide(layer, factors, dtype))
        for name in self.linears:
            layer.get_submodule(name).weight.data.mul_(spread)  # type: ignore[operator]
        return spread


@contextlib.contextmanager
def restored(layer: nn.Module, names: Sequence[str]) -> Iterator[Callable[[], None]]:
    """Puts the parameters of modules back at the end, unless what it yields was called.

    Args:
        layer (`torch.nn.Module`):
            The layer.
        names (`Sequence[str]`):
            Of its modules.

    Yields:
        `Callable[[], None]`: Lets them be as they are.
    """
    modules = [layer.get_submodule(name) for name in dict.fromkeys(names)]
    before = [(parameter, parameter.data.clone()) for module in modules for parameter in module.parameters()]
    kept: list[bool] = []
    try:
        yield lambda: kept.append(True)
    finally:
        for parameter, data in before if not kept else ():
            parameter.data.copy_(data)


def is_unchanged(result: torch.Tensor, expected: torch.Tensor, states: torch.Tensor) -> bool:
    """Returns whether a layer gives the same as before.

    Args:
        result (`torch.Tensor`):
            What it gives.
        expected (`torch.Tensor`):
            What it gave.
        states (`torch.Tensor`):
            What it was given, which it adds to.
    """
    return relative_error(result, expected, states) <= tolerance(expected.dtype)


@torch.no_grad()
def find_scalings(
    layer: nn.Module, linears: Mapping[str, nn.Linear], taps: Sequence[Tap], config: Any, run: Run, states: torch.Tensor
) -> list[Scaling]:
    """Returns what can be scaled in a layer without changing what it gives.

    Args:
        layer (`torch.nn.Module`):
            The layer, in float32.
        linears (`Mapping[str, torch.nn.Linear]`):
            Those that are to be quantized, by their names.
        taps (`Sequence[Tap]`):
            Which of them share their input.
        config (`PreTrainedConfig`):
            Of the model: how many heads there are.
        run (`Callable[[], torch.Tensor]`):
            Calls the layer.
        states (`torch.Tensor`):
            What it is given then.
    """
    expected = run()
    found = []
    for index, tap in enumerate(taps):
        candidates = _of_norm(index, tap, linears) if tap.norm else _of_rows(index, tap, linears, taps, config)
        for scaling in candidates:
            if _holds(layer, scaling, run, expected, states):
                found.append(scaling)
                break
    return found


def _of_norm(index: int, tap: Tap, linears: Mapping[str, nn.Linear]) -> Iterator[Scaling]:
    width = linears[tap.linears[0]].in_features
    for offset in (0.0, 1.0):
        assert tap.norm is not None, "asked for with one"
        yield Scaling(index, tap.linears, Producer(tap.norm, offset=offset), width)


def _of_rows(
    index: int, tap: Tap, linears: Mapping[str, nn.Linear], taps: Sequence[Tap], config: Any
) -> Iterator[Scaling]:
    called = [name for other in taps[:index] for name in other.linears]
    in_features = linears[tap.linears[0]].in_features
    for name in reversed(called):
        rows = linears[name].out_features
        for width, heads in _widths(in_features, config):
            for start in dict.fromkeys((rows - width, 0)):
                if start >= 0:
                    yield Scaling(index, tap.linears, Producer(name, start), width, heads)


def _widths(in_features: int, config: Any) -> Iterator[tuple[int, tuple[int, int] | None]]:
    """How many factors inputs can have: one each, or one for each dimension of each K/V head."""
    yield in_features, None
    heads = getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None)
    if not isinstance(heads, int) or not isinstance(kv_heads, int) or not 0 < kv_heads < heads:
        return
    if heads % kv_heads == 0 and in_features % heads == 0:
        yield in_features * kv_heads // heads, (kv_heads, heads // kv_heads)


def _holds(layer: nn.Module, scaling: Scaling, run: Run, expected: torch.Tensor, states: torch.Tensor) -> bool:
    """Whether a layer gives the same with random factors, and something else with them on one side only."""
    producer = layer.get_submodule(scaling.producer.module)
    if producer.weight.shape[0] < scaling.producer.start + scaling.width:  # type: ignore[index]
        return False
    generator = torch.Generator().manual_seed(0)
    factors = torch.exp(torch.rand(scaling.width, generator=generator) * 1.4 - 0.7).to(expected.device)
    with restored(layer, [scaling.producer.module, *scaling.linears]):
        spread = scaling.apply(layer, factors, torch.float32)
        if not is_unchanged(run(), expected, states):
            return False
        for name in scaling.linears:
            layer.get_submodule(name).weight.data.div_(spread)  # type: ignore[operator]
        return relative_error(run(), expected, states) > _TELLING * tolerance(expected.dtype)
