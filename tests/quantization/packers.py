"""Quantized checkpoints made by hand, from the descriptions of their formats: number by number, with Python's integers.

Nothing here is shared with what loads them. Weights are random numbers, zero points and scales; the model that they
stand for is computed in float64.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tests.families import tiny_model

Tensors = dict[str, torch.Tensor]
Packer = Callable[[np.random.Generator, int, int], tuple[np.ndarray, Tensors]]


def words_of(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Each row's numbers as one long binary number, cut into 32-bit words: `[rows, words]` int32."""
    assert numbers.min() >= 0 and numbers.max() < 1 << bits
    count = -(-numbers.shape[1] * bits // 32)
    rows = []
    for row in numbers.tolist():
        stream = sum(number << (place * bits) for place, number in enumerate(row))
        rows.append([(stream >> (32 * word)) & 0xFFFFFFFF for word in range(count)])
    return np.array(rows, dtype=np.uint32).view(np.int32)


def numbers_of(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The inverse of `words_of`: the first numbers of each row."""
    rows = []
    for row in words.view(np.uint32).tolist():
        stream = sum(word << (32 * place) for place, word in enumerate(row))
        rows.append([(stream >> (place * bits)) & ((1 << bits) - 1) for place in range(count)])
    return np.array(rows)


def _draw(random: np.random.Generator, bits: int, out: int, inputs: int, groups: int):
    numbers = random.integers(0, 1 << bits, (out, inputs))
    zeros = random.integers(0, 1 << bits, (out, groups))
    scales = (random.uniform(0.5, 1.5, (out, groups)) * 0.4 / (1 << bits)).astype(np.float16)
    return numbers, zeros, scales


def gptq(bits: int, group_size: int, *, version: int = 1, act_order: bool = False, symmetric: bool = False) -> Packer:
    """GPTQ's tensors of one linear."""

    def packer(random: np.random.Generator, out: int, inputs: int):
        groups = 1 if group_size == -1 else inputs // group_size
        numbers, zeros, scales = _draw(random, bits, out, inputs, groups)
        if symmetric:
            zeros[:] = 1 << (bits - 1)
        group = np.arange(inputs) // (inputs if group_size == -1 else group_size)
        if act_order:
            group = random.permutation(group)
        weight = (numbers - zeros[:, group]) * scales.astype(np.float64)[:, group]
        stored = (zeros - 1) % (1 << bits) if version == 1 else zeros
        return weight, {
            "qweight": torch.from_numpy(words_of(numbers, bits).T.copy()),
            "qzeros": torch.from_numpy(words_of(stored.T, bits)),
            "scales": torch.from_numpy(scales.T.copy()),
            "g_idx": torch.from_numpy(group.astype(np.int32)),
        }

    return packer


def awq(group_size: int) -> Packer:
    """AWQ's tensors of one linear, GEMM layout: the words' places hold outputs 0 2 4 6 1 3 5 7."""

    def turned(numbers: np.ndarray) -> np.ndarray:
        rows = numbers.reshape(numbers.shape[0], -1, 8)
        return rows[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(numbers.shape)

    def packer(random: np.random.Generator, out: int, inputs: int):
        groups = 1 if group_size == -1 else inputs // group_size
        numbers, zeros, scales = _draw(random, 4, out, inputs, groups)
        zeros.reshape(-1)[:16] = np.arange(16)  # the whole range, its ends too
        group = np.arange(inputs) // (inputs if group_size == -1 else group_size)
        weight = (numbers - zeros[:, group]) * scales.astype(np.float64)[:, group]
        return weight, {
            "qweight": torch.from_numpy(words_of(turned(numbers.T), 4)),
            "qzeros": torch.from_numpy(words_of(turned(zeros.T), 4)),
            "scales": torch.from_numpy(scales.T.copy()),
        }

    return packer


def packed(bits: int, group_size: int, *, symmetric: bool = True, act_order: bool = False) -> Packer:
    """The tensors of one linear in compressed-tensors' "pack-quantized"."""

    def packer(random: np.random.Generator, out: int, inputs: int):
        groups = 1 if group_size == -1 else inputs // group_size
        numbers, zeros, scales = _draw(random, bits, out, inputs, groups)
        if symmetric:
            zeros[:] = 1 << (bits - 1)
        group = np.arange(inputs) // (inputs if group_size == -1 else group_size)
        if act_order:
            group = random.permutation(group)
        tensors = {
            "weight_packed": torch.from_numpy(words_of(numbers, bits)),
            "weight_scale": torch.from_numpy(scales),
            "weight_shape": torch.tensor([out, inputs]),
        }
        if act_order:
            tensors["weight_g_idx"] = torch.from_numpy(group.astype(np.int32))
        if not symmetric:
            tensors["weight_zero_point"] = torch.from_numpy(words_of(zeros.T, bits).T.copy())
        return (numbers - zeros[:, group]) * scales.astype(np.float64)[:, group], tensors

    return packer


def int8(shape: Callable[[int], tuple[int, ...]] = lambda out: (out, 1), *, symmetric: bool = True) -> Packer:
    """The tensors of one linear in compressed-tensors' "int-quantized"; `shape` is that of the scales."""

    def packer(random: np.random.Generator, out: int, inputs: int):
        numbers = random.integers(-128, 128, (out, inputs)).astype(np.int8)
        size = shape(out)
        scales = (random.uniform(0.5, 1.5, size) / 400).astype(np.float32)
        spread = scales.astype(np.float64).reshape(-1, 1)
        zeros = np.zeros(size, np.int8) if symmetric else random.integers(-20, 20, size).astype(np.int8)
        weight = (numbers.astype(np.float64) - zeros.reshape(-1, 1)) * spread
        tensors = {"weight": torch.from_numpy(numbers), "weight_scale": torch.from_numpy(scales)}
        if not symmetric:
            tensors["weight_zero_point"] = torch.from_numpy(zeros)
        return weight, tensors

    return packer


def float8(
    name: str, scale_shape: Callable[[int, int], tuple[int, ...]], block: tuple[int, int] | None = None
) -> Packer:
    """Tensors of one linear in float8, with scales of a shape: one, one a row, or one a block."""

    def packer(random: np.random.Generator, out: int, inputs: int):
        weight = torch.from_numpy(random.normal(0, 60, (out, inputs))).clamp(-440, 440).to(torch.float8_e4m3fn)
        scales = (random.uniform(0.5, 1.5, scale_shape(out, inputs)) * 0.2 / 60).astype(np.float32)
        spread = scales.astype(np.float64)
        if block is not None and spread.size > 1:
            rows, columns = np.arange(out) // block[0], np.arange(inputs) // block[1]
            spread = spread[np.ix_(rows, columns)]
        else:
            spread = spread.reshape(-1, 1)
        return weight.double().numpy() * spread, {"weight": weight, name: torch.from_numpy(np.asarray(scales))}

    return packer


def write_checkpoint(
    folder: Path,
    quantization_config: dict[str, Any],
    packer: Packer | Callable[[str], Packer | None],
    *,
    family: str = "llama",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **overrides: Any,
) -> torch.nn.Module:
    """Writes a tiny model of which the layers' linears are quantized.

    Returns the dense model that it stands for, float64. `packer` may be a function from a linear's name to its packer.
    """
    model = copy.deepcopy(tiny_model(family, **overrides)).double()
    random = np.random.default_rng(seed)
    tensors: Tensors = {}
    quantized = set()
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or name == "lm_head" or module.out_features == 1:
            continue
        own = packer if not _by_name(packer) else packer(name)
        if own is None:
            continue
        weight, packed_tensors = own(random, *module.weight.shape)
        module.weight.data = torch.from_numpy(weight)
        tensors |= {f"{name}.{key}": value for key, value in packed_tensors.items()}
        quantized.add(f"{name}.weight")
    for name, module in model.named_modules():
        if {"gate_up_proj", "down_proj"} <= module._parameters.keys():
            tensors |= _experts(name, module, packer, random)
            quantized |= {f"{name}.gate_up_proj", f"{name}.down_proj"}
    dense = {name: value.to(dtype) for name, value in model.state_dict().items() if name not in quantized}
    if family == "mixtral":  # as its files name them
        dense = {name.replace(".mlp.", ".block_sparse_moe."): value for name, value in dense.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: value.contiguous() for name, value in {**dense, **tensors}.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    model.config.dtype = dtype
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization_config
    config["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(config))
    model.generation_config.save_pretrained(folder)
    model.set_experts_implementation("eager")  # the others know no float64
    return model


def _experts(name: str, module: torch.nn.Module, packer: Packer, random: np.random.Generator) -> Tensors:
    """The tensors of all projections of all experts, under the names that Mixtral's files and others' have."""
    is_mixtral = type(module).__name__.startswith("Mixtral")
    names = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    file_name = name.replace(".mlp.", ".block_sparse_moe.") if is_mixtral else name
    tensors: Tensors = {}
    for expert in range(module.num_experts):
        gate, up = module.gate_up_proj.data[expert].chunk(2)
        for part, projection in zip((gate, up, module.down_proj.data[expert]), names, strict=True):
            weight, packed_tensors = packer(random, *part.shape)
            part.copy_(torch.from_numpy(weight))
            tensors |= {f"{file_name}.{expert}.{projection}.{key}": value for key, value in packed_tensors.items()}
    return tensors


def _by_name(packer: Any) -> bool:
    return packer.__code__.co_argcount == 1
