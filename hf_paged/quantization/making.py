"""Makes a dense model in memory a quantized one, in the layout of a recipe; `save_pretrained` then writes that."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import NotSupportedError
from .base import LinearFormat
from .calibration.awq import awq, scale_layer
from .calibration.gptq import gptq
from .calibration.grids import Codes
from .calibration.inputs import Hessian, Tap, collect, find_taps
from .calibration.layers import (
    LayerCall,
    States,
    call_in_float32,
    decoder_layers,
    first_states,
    in_float32,
    observe_calls,
)
from .calibration.scalings import Scaling, find_scalings
from .compressed_writing import Tensors
from .on_load import mark_quantized, quantized
from .recipes import Recipe

Progress = Callable[[int, int], object]  # layers done, layers


@dataclasses.dataclass(frozen=True)
class Made:
    """What has been made.

    Args:
        recipe (`Recipe`):
            With the group size that was chosen.
        linears (`tuple[str, ...]`):
            Names of those that are quantized.
        dense (`tuple[str, ...]`):
            Names of those that are not.
        errors (`dict[str, float]`):
            With calibration: by each linear's name, the squared error of its output in relation to the output's square.
        scaled (`int`, defaults to 0):
            Of AWQ: inputs of linears that were scaled, over all layers.
    """

    recipe: Recipe
    linears: tuple[str, ...]
    dense: tuple[str, ...]
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    scaled: int = 0


def choose_linears(model: Any, recipe: Recipe) -> tuple[dict[str, nn.Linear], list[str]]:
    """Returns the linears that a recipe quantizes, and the names of those that stay dense.

    Args:
        model (`PreTrainedModel`):
            A dense model.
        recipe (`Recipe`):
            The recipe.

    Raises:
        NotSupportedError: If the model is quantized already, or has no linears in its layers.
    """
    if getattr(model, "hf_quantizer", None) is not None:
        raise NotSupportedError(f"{type(model).__name__} is quantized already; name the dense checkpoint.")
    prefix, _ = decoder_layers(model)
    chosen, dense = {}, []
    for name, module in model.named_modules():
        if type(module) is not nn.Linear:
            continue
        if name.startswith(f"{prefix}.") and recipe.can_pack(module.out_features, module.in_features):
            chosen[name] = module
        else:
            dense.append(name)
    if not chosen:
        raise NotSupportedError(f"{type(model).__name__} has no `nn.Linear` in its layers that could be quantized.")
    return chosen, dense


@torch.no_grad()
def quantize_with(
    model: Any,
    recipe: Recipe,
    windows: Sequence[torch.Tensor] = (),
    progress: Progress = lambda done, count: None,
) -> Made:
    """Quantizes a model in place.

    Args:
        model (`PreTrainedModel`):
            A dense model.
        recipe (`Recipe`):
            How.
        windows (`Sequence[torch.Tensor]`, *optional*):
            Token ids, `[1, tokens]` each, all of one length: the texts that are looked at where the method does so.
        progress (`Callable[[int, int], object]`, *optional*):
            Told after each layer.

    Raises:
        NotSupportedError: If the model is quantized already, or cannot be quantized so.
        ConfigurationError: If the group size does not divide a linear's inputs.
    """
    linears, dense = choose_linears(model, recipe)
    recipe = recipe.for_rows([linear.in_features for linear in linears.values()])
    config = recipe.config(dense, list(linears))
    format = recipe.format(config)
    formats: dict[str, LinearFormat] = {}
    for name in linears:
        linear = format.linear_format(name)
        assert linear is not None, "the configuration names what is dense"
        formats[name] = linear
    made = Made(recipe, tuple(linears), tuple(dense))

    def put(name: str, tensors: Tensors) -> None:
        model.set_submodule(name, quantized(linears[name], formats[name], tensors))

    if recipe.is_calibrated:
        made = _calibrate(model, made, windows, put, progress)
    else:
        _, layers = decoder_layers(model)
        for done, (name, linear_module) in enumerate(linears.items(), 1):
            put(name, recipe.round(linear_module.weight))
            progress(done * len(layers) // len(linears), len(layers))
    mark_quantized(model, config)
    return made


def _calibrate(
    model: Any,
    made: Made,
    windows: Sequence[torch.Tensor],
    put: Callable[[str, Tensors], None],
    progress: Progress,
) -> Made:
    prefix, layers = decoder_layers(model)
    calls = [call_in_float32(call) for call in observe_calls(model, layers, windows)]
    states = first_states(model, layers, windows)
    errors: dict[str, float] = {}
    scaled = 0
    known: dict[Any, list[Scaling]] = {}  # what can be scaled, by what a layer looks like
    for index, layer in enumerate(layers):
        start = f"{prefix}.{index}."
        names = [name.removeprefix(start) for name in made.linears if name.startswith(start)]
        with in_float32(layer) as dtypes:
            work = LayerWork(layer, {name: layer.get_submodule(name) for name in names}, calls[index], states)  # type: ignore[misc]
            if made.recipe.method == "awq":
                scaled += work.scale(made.recipe, dtypes, model.config.get_text_config(decoder=True), known)
            found = work.quantize(made.recipe)
            states = work.next_states()
        for name, codes in found.items():
            put(start + name, made.recipe.tensors(codes))
        errors |= {start + name: error for name, error in work.errors.items()}
        progress(index + 1, len(layers))
    return dataclasses.replace(made, errors=errors, scaled=scaled)


class LayerWork:
    """One layer while it is quantized, in float32.

    Args:
        layer (`torch.nn.Module`):
            The layer.
        linears (`Mapping[str, torch.nn.Linear]`):
            Those that are to be quantized, by their names within it.
        call (`LayerCall`):
            How the model calls it.
        states (`list[torch.Tensor]`):
            What it is given, for each text.
    """

    def __init__(self, layer: nn.Module, linears: Mapping[str, nn.Linear], call: LayerCall, states: States):
        self.layer, self.linears, self.call, self.states = layer, linears, call, states
        self.errors: dict[str, float] = {}
        self.taps: list[Tap] = find_taps(layer, linears, self.run)
        self.hessians: list[Hessian] = collect(linears, self.taps, self.next_states)

    def run(self) -> torch.Tensor:
        """Returns what the layer gives for the first text."""
        return self.call.run(self.layer, self.states[0])

    def next_states(self) -> States:
        """Returns what the layer gives for all texts."""
        return [self.call.run(self.layer, states) for states in self.states]

    def scale(
        self, recipe: Recipe, dtypes: Mapping[str, torch.dtype], config: Any, known: dict[Any, list[Scaling]]
    ) -> int:
        """Scales inputs, as AWQ does, and returns how many.

        Args:
            recipe (`Recipe`):
                How weights will be quantized.
            dtypes (`Mapping[str, torch.dtype]`):
                In which the layer's tensors are kept, by their names.
            config (`PreTrainedConfig`):
                Of the model.
            known (`dict[Any, list[Scaling]]`):
                What was found in layers that look alike; added to.
        """
        looks = (tuple(self.taps), tuple((name, tuple(p.shape)) for name, p in self.layer.named_parameters()))
        if looks not in known:
            known[looks] = find_scalings(self.layer, self.linears, self.taps, config, self.run, self.states[0])
        scalings = known[looks]
        self.hessians, kept = scale_layer(
            self.layer, scalings, self.hessians, recipe.rounding, dtypes, self.run, self.states[0]
        )
        return len(scalings) if kept else 0

    def quantize(self, recipe: Recipe) -> dict[str, Codes]:
        """Quantizes all linears; the layer then computes with what their codes stand for.

        Args:
            recipe (`Recipe`):
                How.
        """
        method = gptq if recipe.method == "gptq" else awq
        found: dict[str, Codes] = {}
        for tap, hessian in zip(self.taps, self.hessians, strict=True):
            weights = [self.linears[name].weight.data for name in tap.linears]
            codes, start = method(torch.cat(weights), hessian, recipe.rounding), 0
            for name, weight in zip(tap.linears, weights, strict=True):
                found[name] = codes.rows(start, start + len(weight))
                start += len(weight)
                result = found[name].dequantize()
                size = float(hessian.row_errors(weight).sum())
                self.errors[name] = float(hessian.row_errors(result - weight).sum()) / size if size > 0 else 0.0
                weight.copy_(result)
        return found
