"""What is measured on a GPU, and the tiny versions of a dry run."""

from __future__ import annotations

import dataclasses

import torch

from .problems import COLD_BYTES, Problem

# Heads of an 8B model and of a small one.
_LARGE = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
_SMALL = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
_TINY = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """A llama-like model with random weights.

    Args:
        name (`str`):
            For people.
        num_layers (`int`):
            Layers.
        hidden_size (`int`):
            Width.
        intermediate_size (`int`):
            Width of the MLP.
        num_heads (`int`):
            Query heads.
        num_kv_heads (`int`):
            K/V heads.
        vocab_size (`int`):
            Tokens.
        tied (`bool`, defaults to `False`):
            Whether the head is the embedding.
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    tied: bool = False


@dataclasses.dataclass(frozen=True)
class Sizes:
    """All sizes of a run.

    Args:
        dtype (`torch.dtype`):
            Of everything.
        cold_bytes (`int`):
            See `PagedProblem`.
        copy_bytes (`int`):
            Bytes that are copied to measure bandwidth.
        product (`int`):
            Rows and columns of the matrices that are multiplied to measure the peak.
        decodes (`tuple[Problem, ...]`):
            Decoding.
        prefills (`tuple[Problem, ...]`):
            Prompts, whole and in chunks.
        sweeps (`tuple[Problem, ...]`):
            Decoding whose block size and number of splits are varied.
        block_sizes (`tuple[int, ...]`):
            For the sweeps.
        splits (`tuple[int, ...]`):
            For the sweeps.
        large_model (`ModelSize`):
            Shaped like Llama 3 8B.
        small_model (`ModelSize`):
            Shaped like SmolLM2 135M.
        loads (`tuple[int, ...]`):
            Requests that arrive together.
        max_output (`int`):
            Longest answer of a load.
        max_prompt (`int`):
            Longest prompt of a load.
        memory_model (`ModelSize`):
            Whose memory is held against the plan, and which sleeps.
        steps (`tuple[tuple[int, int], ...]`):
            Requests that decode together while a step is timed, and the tokens of their prompts.
        cascade (`tuple[int, int]`):
            Requests that have a prefix in common, and its tokens.
        step_tokens (`int`):
            Tokens that each of them decodes.
        case_stride (`int`):
            Every so-manieth kernel case is run.
        min_seconds (`float`):
            How long each kernel is timed.
    """

    dtype: torch.dtype
    cold_bytes: int
    copy_bytes: int
    product: int
    decodes: tuple[Problem, ...]
    prefills: tuple[Problem, ...]
    sweeps: tuple[Problem, ...]
    block_sizes: tuple[int, ...]
    splits: tuple[int, ...]
    large_model: ModelSize
    small_model: ModelSize
    loads: tuple[int, ...]
    max_output: int
    max_prompt: int
    memory_model: ModelSize
    steps: tuple[tuple[int, int], ...]
    cascade: tuple[int, int]
    step_tokens: int
    case_stride: int
    min_seconds: float


def _decode(num_requests: int, context: int, heads: dict[str, int], label: str = "8B") -> Problem:
    return Problem(f"decode {label}, {num_requests} x {context:,}", num_requests, 1, context, **heads)


def _prefill(num_requests: int, new: int, context: int, heads: dict[str, int], label: str = "8B") -> Problem:
    return Problem(f"prefill {label}, {num_requests} x {new:,} of {context:,}", num_requests, new, context, **heads)


FULL = Sizes(
    dtype=torch.bfloat16,
    cold_bytes=COLD_BYTES,
    copy_bytes=4 << 30,
    product=8192,
    decodes=(
        _decode(1, 32768, _LARGE),
        _decode(32, 2048, _LARGE),
        _decode(64, 2048, _LARGE),
        _decode(32, 8192, _LARGE),
        _decode(256, 2048, _LARGE),
        _decode(64, 2048, _SMALL, "small"),
        _decode(1, 2048, _LARGE),
        _decode(8, 2048, _LARGE),
        _decode(64, 256, _LARGE),
    ),
    prefills=(
        _prefill(1, 8192, 8192, _LARGE),
        _prefill(4, 2048, 2048, _LARGE),
        _prefill(16, 512, 512, _LARGE),
        _prefill(4, 512, 8192, _LARGE),
        _prefill(4, 2048, 2048, _SMALL, "small"),
    ),
    sweeps=(_decode(1, 32768, _LARGE), _decode(32, 2048, _LARGE), _decode(8, 512, _LARGE)),
    block_sizes=(16, 32, 64, 128),
    splits=(1, 2, 4, 8, 16, 32, 64),
    large_model=ModelSize("8B", 32, 4096, 14336, 32, 8, 128256),
    small_model=ModelSize("135M", 30, 576, 1536, 9, 3, 49152, tied=True),
    loads=(1, 8, 64, 256),
    max_output=256,
    max_prompt=256,
    memory_model=ModelSize("8B of 8 layers", 8, 4096, 14336, 32, 8, 128256),
    steps=((1, 32), (8, 32), (64, 32), (64, 1024)),
    cascade=(64, 2048),
    step_tokens=64,
    case_stride=1,
    min_seconds=0.25,
)
DRY = Sizes(
    dtype=torch.float32,
    cold_bytes=1,
    copy_bytes=1 << 20,
    product=128,
    decodes=(_decode(2, 40, _TINY, "tiny"), _decode(1, 70, _TINY, "tiny")),
    prefills=(_prefill(1, 24, 24, _TINY, "tiny"), _prefill(1, 8, 40, _TINY, "tiny")),
    sweeps=(_decode(1, 70, _TINY, "tiny"),),
    block_sizes=(16, 32),
    splits=(1, 2),
    large_model=ModelSize("tiny", 2, 64, 96, 4, 2, 199),
    small_model=ModelSize("tiny, tied", 2, 64, 96, 4, 2, 199, tied=True),
    loads=(1, 3),
    max_output=8,
    max_prompt=24,
    memory_model=ModelSize("tiny", 2, 64, 96, 4, 2, 199),
    steps=((1, 8), (2, 8)),
    cascade=(4, 64),
    step_tokens=4,
    case_stride=30,
    min_seconds=0.0,
)


def sizes_for(dry_run: bool) -> Sizes:
    """Returns the sizes of a run.

    Args:
        dry_run (`bool`):
            Whether it is a dry run.
    """
    return DRY if dry_run else FULL
