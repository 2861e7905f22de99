"""Rotary position embedding and the store of K/V, against the modules of Transformers' families and float64."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator

import pytest
import torch

from hf_paged.kernels.cpu import rope as native
from hf_paged.kernels.cpu.rope import RopeLayout
from tests.kernels.cpu.levels import LEVELS, at_level

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Half a unit in the last place, and a little for float32 arithmetic.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8 + 1e-6, torch.float16: 2**-11 + 1e-6}
POSITIONS = torch.tensor([[0, 1, 2, 50, 51, 700]])


@pytest.fixture(params=LEVELS, autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from at_level(request.param, native.load)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def modeling(family: str):
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def tables(family: str, rotary: str, config: str, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin as a family's rotary module returns them."""
    module = modeling(family)
    configuration = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    settings = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, **options}
    embedding = getattr(module, rotary)(getattr(configuration, config)(**settings))
    return embedding(torch.zeros(1, len(POSITIONS[0]), 8), POSITIONS)


def by_module(family: str, name: str = "apply_rotary_pos_emb") -> Callable:
    """The family's own function on `[1, tokens, heads, head_dim]`."""
    return lambda x, cos, sin: getattr(modeling(family), name)(x, x, cos, sin, unsqueeze_dim=2)[0]


def gptj_tables() -> tuple[torch.Tensor, torch.Tensor]:
    sin, cos = modeling("gptj").create_sinusoidal_positions(1024, 16)[POSITIONS].chunk(2, dim=-1)
    return cos, sin


def partly(apply: Callable, begin: int, dim: int) -> Callable:
    """Rotates a part of the head, as attention classes do that slice before they rotate."""

    def apply_to_part(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        part = apply(x[..., begin : begin + dim], cos, sin)
        return torch.cat([x[..., :begin], part, x[..., begin + dim :]], dim=-1)

    return apply_to_part


def llama4(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return modeling("llama4").apply_rotary_emb(x, x, torch.complex(cos, sin))[0]


# Each: the tables, the layout, and the family's own rotation.
FAMILIES: dict[str, tuple[Callable, RopeLayout, Callable]] = {
    "llama": (
        lambda: tables("llama", "LlamaRotaryEmbedding", "LlamaConfig"),
        RopeLayout(32),
        by_module("llama"),
    ),
    "gpt_neox": (
        lambda: tables(
            "gpt_neox",
            "GPTNeoXRotaryEmbedding",
            "GPTNeoXConfig",
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        ),
        RopeLayout(8),
        by_module("gpt_neox"),
    ),
    "gptj": (
        gptj_tables,
        RopeLayout(16, pairs="interleaved"),
        partly(lambda x, cos, sin: modeling("gptj").apply_rotary_pos_emb(x, sin, cos), 0, 16),
    ),
    "cohere": (
        lambda: tables("cohere", "CohereRotaryEmbedding", "CohereConfig"),
        RopeLayout(32, pairs="interleaved", cos_step=2),
        by_module("cohere"),
    ),
    "glm": (
        lambda: tables("glm", "GlmRotaryEmbedding", "GlmConfig", head_dim=32),
        RopeLayout(16, pairs="interleaved"),
        by_module("glm"),
    ),
    "phi": (
        lambda: tables("phi", "PhiRotaryEmbedding", "PhiConfig"),
        RopeLayout(16),
        partly(by_module("phi"), 0, 16),
    ),
    "gpt_oss": (
        lambda: tables("gpt_oss", "GptOssRotaryEmbedding", "GptOssConfig", head_dim=32),
        RopeLayout(32),
        by_module("gpt_oss"),
    ),
    "deepseek_v3": (
        lambda: tables("llama", "LlamaRotaryEmbedding", "LlamaConfig", head_dim=24),
        RopeLayout(24, pairs="interleaved_to_half"),
        partly(by_module("deepseek_v3", "apply_rotary_pos_emb_interleave"), 0, 24),
    ),
    "deepseek_v4": (
        lambda: tuple(t[..., :12] for t in tables("llama", "LlamaRotaryEmbedding", "LlamaConfig", head_dim=24)),
        RopeLayout(24, pairs="interleaved", rotary_begin=8),
        lambda x, cos, sin: modeling("deepseek_v4").apply_rotary_pos_emb(x, cos, sin, unsqueeze_dim=2),
    ),
    "llama4": (
        lambda: native.complex_angles(torch.polar(torch.ones(1, 6, 16), POSITIONS[..., None] * numbers(16))),
        RopeLayout(32, pairs="interleaved"),
        llama4,
    ),
    "nanochat": (
        lambda: tables("nanochat", "NanoChatRotaryEmbedding", "NanoChatConfig"),
        RopeLayout(32, reverse=True),
        by_module("nanochat"),
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_matches_transformers(family: str) -> None:
    make_tables, layout, oracle = FAMILIES[family]
    cos, sin = make_tables()
    x = numbers(1, 6, 3, 32)
    torch.testing.assert_close(native.rope(x, cos, sin, layout), oracle(x, cos, sin), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_layout_is_found_by_trying(family: str) -> None:
    make_tables, layout, oracle = FAMILIES[family]
    cos, sin = make_tables()
    x = numbers(1, 6, 3, 32)
    wanted = oracle(x, cos, sin)
    candidates = native.possible_layouts(32, cos.shape[-1])
    matching = [each for each in candidates if torch.allclose(native.rope(x, cos, sin, each), wanted, atol=1e-5)]
    assert matching == [layout]


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: RopeLayout) -> torch.Tensor:
    """The rotation in float64; cos and sin are `[tokens, pairs]`."""
    y = x.double().clone()
    part = y[..., layout.rotary_begin : layout.rotary_begin + layout.rotary_dim]
    split = (lambda t: t.chunk(2, -1)) if layout.pairs == "half" else (lambda t: (t[..., ::2], t[..., 1::2]))
    a, b = (half.clone() for half in split(part))
    cos, sin = cos.double()[:, None], sin.double()[:, None] * (-1 if layout.reverse else 1)
    turned_pairs = a * cos - b * sin, b * cos + a * sin
    if layout.pairs == "interleaved":
        part[..., ::2], part[..., 1::2] = turned_pairs
    else:
        part.copy_(torch.cat(turned_pairs, dim=-1))
    return y


def table_of(values: torch.Tensor, layout: RopeLayout) -> torch.Tensor:
    return values.repeat_interleave(layout.cos_step, dim=-1)


LAYOUTS = [
    RopeLayout(dim, pairs, begin, step, reverse)
    for dim, begin in ((64, 0), (22, 5), (2, 0), (48, 16))
    for pairs, step, reverse in (("half", 1, False), ("interleaved", 2, True), ("interleaved_to_half", 1, False))
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cos_dtype", [torch.float32, torch.bfloat16])
def test_every_layout_matches_float64(dtype: torch.dtype, cos_dtype: torch.dtype) -> None:
    x = numbers(5, 3, 70, dtype=dtype)[:, 1:, :64]  # strided tokens and heads
    for layout in LAYOUTS:
        angles = numbers(5, layout.rotary_dim // 2, seed=3)
        cos, sin = angles.cos().to(cos_dtype), angles.sin().to(cos_dtype)
        y = native.rope(x, table_of(cos, layout), table_of(sin, layout), layout)
        wanted = turned(x, cos, sin, layout)
        torch.testing.assert_close(y.double(), wanted, rtol=TOLERANCE[dtype], atol=2e-6)


def caches(heads: int, dims: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of 8 slots full of NaN; keys are a view that skips every other block."""
    nan = float("nan")
    return torch.full((12, heads, 8, dims[0]), nan, dtype=dtype)[::2], torch.full(
        (6, heads, 8, dims[1]), nan, dtype=dtype
    )


def stored(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """What lies in some slots, `[tokens, heads, dim]`."""
    return cache[slots // 8, :, slots % 8]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize(
    "layout", [RopeLayout(40), RopeLayout(20, "interleaved"), RopeLayout(24, "interleaved_to_half")]
)
def test_store_writes_rotated_keys_and_values_into_their_slots(dtype, cache_dtype, layout) -> None:
    merged = numbers(1, 4, 3 * 40 + 2 * 40 + 2 * 24, dtype=dtype)  # 3 query heads, 2 K/V heads, Dk 40, Dv 24
    query, key, value = merged.split([120, 80, 48], dim=-1)
    query, key, value = query.view(1, 4, 3, 40), key.view(1, 4, 2, 40), value.view(1, 4, 2, 24)
    angles = numbers(4, layout.rotary_dim // 2, seed=3)
    slots = torch.tensor([9, 47, -1, 3])
    key_cache, value_cache = caches(2, (40, 24), cache_dtype)
    before = merged.clone()
    cos, sin = angles.cos(), angles.sin()
    out = native.rope_store(query, key, value, (cos[None], sin[None]), layout, (key_cache, value_cache), slots)
    assert torch.equal(merged, before)
    tolerance = {"rtol": TOLERANCE[dtype], "atol": 2e-6}
    torch.testing.assert_close(out[0].double(), turned(query[0], cos, sin, layout), **tolerance)
    kept = slots >= 0
    tolerance = {"rtol": TOLERANCE[cache_dtype], "atol": 2e-6}
    keys = turned(key[0], cos, sin, layout)[kept]
    torch.testing.assert_close(stored(key_cache, slots[kept]).double(), keys, **tolerance)
    assert torch.equal(stored(value_cache, slots[kept]), value[0][kept].to(cache_dtype))
    for cache in (key_cache, value_cache):  # nothing else was touched
        stored_count = kept.sum() * cache.shape[1] * cache.shape[3]
        assert cache.isnan().sum() == cache.numel() - stored_count


@pytest.mark.parametrize("dtype", DTYPES)
def test_store_without_angles_copies(dtype: torch.dtype) -> None:
    query, key, value = numbers(3, 4, 17, dtype=dtype), numbers(3, 1, 17, dtype=dtype), numbers(3, 1, 9, dtype=dtype)
    key_cache, value_cache = caches(1, (17, 9), dtype)
    slots = torch.tensor([0, 20, 40])
    assert torch.equal(
        native.rope_store(query, key, value, None, RopeLayout(0), (key_cache, value_cache), slots), query
    )
    assert torch.equal(stored(key_cache, slots), key)
    assert torch.equal(stored(value_cache, slots), value)


def test_nan_stays_in_its_pair() -> None:
    x, angles = numbers(1, 1, 32), numbers(1, 16)
    x[0, 0, 3] = float("nan")
    for layout, spoiled in ((RopeLayout(32), [3, 19]), (RopeLayout(32, "interleaved"), [2, 3])):
        y = native.rope(x, angles.cos(), angles.sin(), layout)
        assert y[0, 0].isnan().nonzero()[:, 0].tolist() == spoiled


def test_no_tokens() -> None:
    empty = torch.empty(0, 2, 16)
    assert native.rope(empty, torch.empty(0, 8), torch.empty(0, 8), RopeLayout(16)).shape == (0, 2, 16)
    cache = torch.zeros(1, 2, 8, 16)
    slots = torch.empty(0, dtype=torch.int64)
    assert native.rope_store(empty, empty, empty, None, RopeLayout(0), (cache, cache.clone()), slots).numel() == 0


def test_result_does_not_depend_on_the_number_of_threads() -> None:
    x, angles = numbers(300, 9, 64, dtype=torch.bfloat16), numbers(300, 32)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(native.rope(x, angles.cos(), angles.sin(), RopeLayout(64)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


def test_compiles_without_a_graph_break() -> None:
    query, key, value, angles = numbers(3, 2, 16), numbers(3, 1, 16), numbers(3, 1, 16), numbers(3, 8)
    layout, slots = RopeLayout(16), torch.tensor([4, 5, 6])

    def block(key_cache: torch.Tensor, value_cache: torch.Tensor) -> torch.Tensor:
        cos, sin = angles.cos(), angles.sin()
        rotated = native.rope(query, cos, sin, layout)
        return native.rope_store(query, key, value, (cos, sin), layout, (key_cache, value_cache), slots) + rotated

    plain, compiled = (tuple(torch.zeros(2, 1, 1, 8, 16)) for _ in range(2))
    wanted = block(*plain)
    torch.testing.assert_close(torch.compile(block, fullgraph=True, backend="aot_eager")(*compiled), wanted)
    torch.testing.assert_close(compiled, plain)
    assert plain[0].any() and plain[1].any()


def call_store(slots: list[int] | None = None, layout: RopeLayout | None = None, value_heads: int = 1, n: int = 8):
    x, angles = torch.ones(2, 1, 16), torch.ones(2, n)
    cache = torch.zeros(2, 1, 8, 16)
    slots = torch.tensor([0, 1] if slots is None else slots)
    value = torch.ones(2, value_heads, 16)
    return native.rope_store(x, x, value, (angles, angles), layout or RopeLayout(16), (cache, cache.clone()), slots)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": [0, 16]}, "slot 16 of token 1"),
        ({"slots": [0]}, "slot_mapping"),
        ({"layout": RopeLayout(15)}, "even"),
        ({"layout": RopeLayout(2048)}, "at most 1024"),
        ({"layout": RopeLayout(16, rotary_begin=2)}, "exceeds the head_dim of 16"),
        ({"layout": RopeLayout(16), "n": 7}, "too few"),
        ({"value_heads": 2}, "differ"),
    ],
)
def test_refuses_what_does_not_fit(options: dict, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call_store(**options)
