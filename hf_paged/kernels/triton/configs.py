"""The shapes of the attention kernels' launches: tables and formulas instead of autotuning, and no Triton.

Nothing is compiled or timed while serving. The tables are keyed by architecture and by the size of a head; the group
and the block size give the height of a tile and how its block ids are read. `all_configurations` lists what they hold.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator

from . import launching
from .variant import KernelVariant

# What the attention kernel can: tokens in a block, and heads up to a size.
BLOCK_SIZES = frozenset({16, 32, 64, 128})
MAX_HEAD_DIM = 256
MAX_GROUP_BYTES = 32 << 10  # of queries, which a program keeps with its tiles of keys and values
# Splitting further costs more in merging than it gains in reading (sgl-project/sglang#35801).
MIN_KEYS_PER_SPLIT = 256
MAX_SPLITS = 64
# So many programs on a multiprocessor keep its loads in flight; registers and shared memory leave room for them.
PROGRAMS_PER_PROCESSOR = 2
ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """The shape of one launch.

    Args:
        block_m (`int`):
            Rows (query token, head of the group) of a program.
        tile (`int`):
            Keys visited at a time.
        num_warps (`int`):
            Warps of a program.
        num_stages (`int`):
            Depth of the pipeline that loads keys ahead.
    """

    block_m: int
    tile: int
    num_warps: int
    num_stages: int


# (architecture, bytes of a head) -> {rows of a program: (keys of a tile, warps, stages)}. No entry spills registers;
# what its stages load ahead fits into shared memory. Tiles are found through block ids, which take every other stage:
# with 5 there are two tiles of keys on their way, with 3 one.
_TABLE: dict[tuple[str, int], dict[int, tuple[int, int, int]]] = {
    ("sm_80", 128): {16: (64, 4, 5), 64: (64, 4, 5), 128: (64, 8, 5)},
    ("sm_80", 256): {16: (32, 4, 5), 64: (64, 8, 5)},
    ("sm_80", 512): {16: (32, 4, 5), 64: (32, 8, 3)},
    ("sm_89", 128): {16: (64, 4, 5), 64: (64, 4, 5), 128: (64, 8, 5)},
    ("sm_89", 256): {16: (32, 4, 5), 64: (64, 8, 3)},
    ("sm_89", 512): {16: (32, 4, 3), 64: (32, 8, 2)},
    ("sm_90", 128): {16: (64, 4, 5), 64: (64, 4, 5), 128: (128, 8, 5)},
    ("sm_90", 256): {16: (64, 4, 5), 64: (64, 4, 5), 128: (64, 8, 5)},
    ("sm_90", 512): {16: (32, 4, 5), 64: (32, 8, 3), 128: (32, 8, 3)},
    ("sm_100", 128): {16: (64, 4, 5), 64: (64, 4, 5), 128: (64, 8, 5)},
    ("sm_100", 256): {16: (64, 4, 5), 64: (64, 4, 5), 128: (64, 8, 5)},
    ("sm_100", 512): {16: (32, 4, 5), 64: (32, 8, 3), 128: (32, 8, 3)},
    ("sm_120", 128): {16: (64, 4, 5), 64: (64, 4, 5), 128: (64, 8, 5)},
    ("sm_120", 256): {16: (32, 4, 5), 64: (64, 8, 3)},
    ("sm_120", 512): {16: (32, 4, 3), 64: (32, 8, 2)},
    ("gfx942", 128): {16: (32, 4, 2), 64: (32, 4, 2)},
    ("gfx942", 256): {16: (64, 4, 2), 64: (32, 4, 2)},
    ("gfx942", 512): {16: (32, 4, 2), 64: (16, 8, 2)},
}
# float32 multiplies without tensor cores: one entry for each size of a head, on every architecture.
_FLOAT32 = {128: {16: (32, 4, 3)}, 256: {16: (32, 4, 3)}, 512: {16: (16, 4, 3)}, 1024: {16: (16, 4, 3)}}


@functools.cache
def padded(head_dim: int) -> int:
    """Returns the size of a tile that holds a head: a power of two, as large as a tensor core's smallest operand.

    Args:
        head_dim (`int`):
            Numbers of a head.
    """
    return launching.padded(head_dim, least=16)


@functools.cache
def launch_config(architecture: str, group: int, head_dim: int, itemsize: int, longest_query: int) -> LaunchConfig:
    """Returns the shape of a launch.

    Args:
        architecture (`str`):
            One of `ARCHITECTURES`.
        group (`int`):
            Query heads per K/V head.
        head_dim (`int`):
            Numbers of a head, key or value, the larger.
        itemsize (`int`):
            Bytes of a number of the query.
        longest_query (`int`):
            New tokens of the longest request; 1 for decoding.
    """
    head_bytes = max(128, padded(head_dim) * itemsize)
    entries = _FLOAT32[head_bytes] if itemsize == 4 else _TABLE[architecture, head_bytes]
    num_rows = longest_query * group
    # The lowest tile that holds all rows, so that keys are read once.
    height = next((block_m for block_m in entries if block_m >= num_rows), max(entries))
    tile, num_warps, num_stages = entries[height]
    whole_group = max(16, 1 << (group - 1).bit_length())
    block_m = whole_group if longest_query == 1 else max(height, whole_group)
    return LaunchConfig(block_m, tile, 8 if block_m >= 128 else num_warps, num_stages)


def split_count(num_processors: int, num_programs: int, longest_context: int) -> int:
    """Returns into how many parts the keys of each request are divided.

    Args:
        num_processors (`int`):
            Multiprocessors of the device.
        num_programs (`int`):
            Programs without splits: requests, K/V heads and query tiles.
        longest_context (`int`):
            Keys that the longest request visits; of a captured launch, the most that it will be replayed with.
    """
    idle = num_processors * PROGRAMS_PER_PROCESSOR // num_programs
    return max(1, min(MAX_SPLITS, -(-longest_context // MIN_KEYS_PER_SPLIT), idle))


def merge_chunk(value_dim: int) -> int:
    """Returns how many parts the merging kernel holds at a time.

    Args:
        value_dim (`int`):
            Numbers of a value head.
    """
    return max(8, min(32, 2048 // padded(value_dim)))


@dataclasses.dataclass(frozen=True)
class _Use:
    """A model's layers: heads, blocks, dtypes, and the features that make other code."""

    group: int
    key_dim: int
    value_dim: int
    block_size: int = 16
    dtype: str = "bf16"
    cache_dtype: str | None = None
    features: tuple[str, ...] = ()
    launches: tuple[str, ...] = ("decode", "many")

    @property
    def name(self) -> str:
        words = [f"group{self.group}", f"head{self.key_dim}x{self.value_dim}", f"block{self.block_size}", self.dtype]
        return "-".join([*words, *([f"kv_{self.cache_dtype}"] if self.cache_dtype else []), *self.features])


_ALL_LAUNCHES = ("decode", "split", "few", "many")
_USES = (
    _Use(3, 64, 64, launches=_ALL_LAUNCHES),
    _Use(4, 128, 128, launches=_ALL_LAUNCHES),
    _Use(8, 128, 128, 128, "fp16"),
    _Use(1, 96, 96),
    _Use(1, 192, 128, 64),
    _Use(2, 256, 256, 32, features=("window", "softcap"), launches=("decode", "few", "many")),
    _Use(8, 64, 64, features=("window", "sinks")),
    _Use(1, 128, 128, features=("alibi",)),
    _Use(4, 128, 128, cache_dtype="i8"),
    _Use(4, 128, 128, cache_dtype="fp8e4nv"),
    _Use(4, 128, 128, features=("shared",), launches=("few", "many")),
    _Use(4, 128, 128, dtype="fp32"),
)


def all_configurations() -> list[KernelVariant]:
    """Returns every configuration of the table in the uses of well-known families, and the merging kernel's.

    For each use, the kernel for decoding (`decode`, or with splits `split`: float32 parts) and for more new tokens
    (`few`: about 64 rows a request, `many`). What is the same on several architectures, or for several launches, is
    listed once. The kernels are `paged_attention:paged_attention_kernel` and `reduce:merge_parts_kernel`.
    """
    targets: dict[tuple[_Use, bool, LaunchConfig], set[str]] = {}
    first_launch: dict[tuple[_Use, bool, LaunchConfig], str] = {}
    for architecture, use in itertools.product(ARCHITECTURES, _USES):
        # GPUs older than sm_89 have no float8.
        if use.cache_dtype == "fp8e4nv" and architecture == "sm_80":
            continue
        for launch in use.launches:
            longest_query = {"decode": 1, "split": 1, "few": 64 // use.group, "many": 4096}[launch]
            head_dim, itemsize = max(use.key_dim, use.value_dim), DTYPE_BYTES[use.dtype]
            config = launch_config(architecture, use.group, head_dim, itemsize, longest_query)
            key = use, launch == "split", config
            first_launch.setdefault(key, launch)
            targets.setdefault(key, set()).add(architecture)
    attention = [
        _attention_variant(key[0], first_launch[key], key[2], frozenset(names)) for key, names in targets.items()
    ]
    return [*attention, *_merge_variants()]


def _attention_variant(use: _Use, launch: str, config: LaunchConfig, targets: frozenset[str]) -> KernelVariant:
    cache_dtype = use.cache_dtype or use.dtype
    is_split = launch == "split" or "shared" in use.features
    signature: dict[str, str | None] = {
        "output_ptr": "*fp32" if is_split else f"*{use.dtype}",
        "lse_ptr": "*fp32" if is_split else None,
        "query_ptr": f"*{use.dtype}",
        "key_ptr": f"*{cache_dtype}",
        "value_ptr": f"*{cache_dtype}",
        "key_scale_ptr": "*fp16" if use.cache_dtype else None,
        "value_scale_ptr": "*fp16" if use.cache_dtype else None,
        "block_tables_ptr": "*i32",
        "cu_seqlens_q_ptr": "*i32",
        "seq_lens_ptr": "*i32",
        "starts_ptr": None,
        "sinks_ptr": f"*{use.dtype}" if "sinks" in use.features else None,
        "slopes_ptr": "*fp32" if "alibi" in use.features else None,
        "scale": "fp32",
        "softcap": "fp32" if "softcap" in use.features else None,
        "window": "i32" if "window" in use.features else None,
        "first_request": "i32",
        "max_blocks": "i32",
        "num_splits": "i32",
        "rows_per_part": "i32",
        "query_stride_token": "i32",
        "query_stride_head": "i32",
    }
    constants = {name: None for name, kind in signature.items() if kind is None}
    shape = f"m{config.block_m}-t{config.tile}-w{config.num_warps}-s{config.num_stages}"
    return KernelVariant(
        name=f"attention-{launch}-{use.name}-{shape}",
        kernel="hf_paged.kernels.triton.paged_attention:paged_attention_kernel",
        signature={name: kind for name, kind in signature.items() if kind is not None},
        constexprs={
            **constants,
            "NUM_KV_HEADS": 8,
            "GROUP": use.group,
            "BLOCK_SIZE": use.block_size,
            "KEY_DIM": use.key_dim,
            "VALUE_DIM": use.value_dim,
            "KEY_PAD": padded(use.key_dim),
            "VALUE_PAD": padded(use.value_dim),
            "BLOCK_M": config.block_m,
            "TILE": config.tile,
            "SHARED": "shared" in use.features,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        max_registers=launching.MAX_REGISTERS,
        divisible=frozenset(
            name
            for name in ("output_ptr", "query_ptr", "key_ptr", "value_ptr", "key_scale_ptr", "value_scale_ptr")
            if name not in constants
        )
        | {"query_stride_token", "query_stride_head"},
        has_dot=use.dtype != "fp32",
        targets=targets,
    )


def _merge_variants() -> Iterator[KernelVariant]:
    for value_dim, dtype in ((64, "bf16"), (96, "bf16"), (128, "bf16"), (128, "fp32"), (256, "fp16")):
        yield KernelVariant(
            name=f"attention-merge-head{value_dim}-{dtype}",
            kernel="hf_paged.kernels.triton.reduce:merge_parts_kernel",
            signature={
                "output_ptr": f"*{dtype}",
                "parts_ptr": "*fp32",
                "part_lse_ptr": "*fp32",
                "num_parts": "i32",
                "rows_per_part": "i32",
            },
            constexprs={
                "lse_ptr": None,
                "VALUE_DIM": value_dim,
                "VALUE_PAD": padded(value_dim),
                "CHUNK": merge_chunk(value_dim),
            },
            num_warps=1,
            num_stages=1,
            divisible=frozenset({"output_ptr", "parts_ptr"}),
            has_dot=False,
        )
