"""The kernels for the matrix unit: emulated on every AVX-512 machine, and on the unit where there is one."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_paged.kernels.cpu import building, isa

from .amx_cases import check_that_only_given_memory_is_read, make_case, packed_block, weight_rows
from .amx_library import AmxLibrary, AttentionCase, from_bf16, to_bf16

HERE = Path(__file__).parent


# How the kernels run: from their source with the unit emulated; as the machine code that the package has, each of the
# unit's instructions carried out by a handler (amx_trap.cpp); on the unit.
VARIANTS = {
    "emulated": ("avx512", ["-DHF_PAGED_EMULATE_AMX", "-O1"], []),
    "trapped": ("avx512", [], [HERE / "amx_trap.cpp"]),
    "unit": ("amx", [], []),
}


def reason_to_skip(variant: str) -> str | None:
    needed, _, _ = VARIANTS[variant]
    if needed not in isa.machine_isas():
        return f"this machine has no {needed}"
    try:
        building.find_compiler()
    except building.BuildError as error:
        return str(error)
    if variant == "trapped" and "amx" in isa.machine_isas():
        return "the instructions run here"
    if variant == "unit" and ctypes.CDLL(None).syscall(158, 0x1023, 18) != 0:
        return "the operating system does not let this process use AMX"
    return None


REASONS = {variant: reason_to_skip(variant) for variant in VARIANTS}


def compile_kernels(output: Path, variant: str) -> None:
    """Builds amx_kernels.cpp and the package's `*_amx.cpp` as the package does, but for the variant's own flags."""
    _, own_flags, own_sources = VARIANTS[variant]
    flags = [*building._FLAGS, *building._FLAGS_OF_SUFFIX["_amx.cpp"], f"-I{building.SOURCES}", "-shared", *own_flags]
    sources = [HERE / "amx_kernels.cpp", *own_sources, *sorted(building.SOURCES.glob("*_amx.cpp"))]
    command = [*building.find_compiler().command, *flags, *map(str, sources), "-o", str(output), "-lm"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert finished.returncode == 0, finished.stderr


@pytest.fixture(scope="module", params=[name for name, reason in REASONS.items() if not reason] or ["emulated"])
def library_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if REASONS[request.param]:
        pytest.skip(str(REASONS[request.param]))
    path = tmp_path_factory.mktemp("amx") / f"amx_{request.param}.so"
    compile_kernels(path, request.param)
    return path


@pytest.fixture(scope="module")
def library(library_path: Path) -> Iterator[AmxLibrary]:
    library = AmxLibrary(library_path)
    yield library
    library.close()


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(0)


def test_the_kernels_run_on_the_unit_itself():
    if REASONS["unit"]:
        pytest.skip(f"{REASONS['unit']}: the tests below run without it")


# The instruction


def dot_product_as_documented(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """TDPBF16PS on a [16, 32], b [16, 16, 2] (bf16 bits) and c [16, 16], number by number.

    Every step is computed in float64, exactly for the numbers of these tests, and rounded to float32 once.
    """

    def flushed(x: np.ndarray) -> np.ndarray:
        return np.where(np.abs(x) < np.finfo(np.float32).tiny, 0.0, x)

    left = flushed(from_bf16(a).astype(np.float64)).reshape(16, 16, 2)
    right = flushed(from_bf16(b).astype(np.float64))
    sums = np.zeros((16, 16, 2))
    for pair in range(16):
        sums = flushed((sums + left[:, pair, None] * right[None, pair]).astype(np.float32)).astype(np.float64)
    both = flushed((sums[..., 0] + sums[..., 1]).astype(np.float32)).astype(np.float64)
    return flushed((flushed(c.astype(np.float64)) + both).astype(np.float32)).astype(np.float32)


def test_a_product_of_tiles_is_the_documented_one_bit_for_bit(library: AmxLibrary, random: np.random.Generator):
    for _ in range(20):
        a, b = to_bf16(random.standard_normal((16, 32))), to_bf16(random.standard_normal((16, 16, 2)))
        c = random.standard_normal((16, 16)).astype(np.float32)
        np.testing.assert_array_equal(library.multiply_tiles(a, b, c), dot_product_as_documented(a, b, c))


@pytest.mark.parametrize(
    ("left", "right", "start", "expected"),
    [
        pytest.param(2.0**-130, 2.0**20, 1.0, 1.0, id="denormal in a"),
        pytest.param(2.0**20, 2.0**-130, 1.0, 1.0, id="denormal in b"),
        pytest.param(2.0**-70, 2.0**-70, 0.0, 0.0, id="denormal product"),
        pytest.param(0.0, 0.0, 2.0**-130, 0.0, id="denormal in c"),
        pytest.param(2.0**-60, 2.0**-60, 0.0, 2.0**-120, id="small but normal"),
    ],
)
def test_denormals_are_zero(library: AmxLibrary, left: float, right: float, start: float, expected: float):
    a, b, c = np.zeros((16, 32)), np.zeros((16, 16, 2)), np.full((16, 16), start, dtype=np.float32)
    a[:, 0], b[0, :, 0] = left, right
    out = library.multiply_tiles(to_bf16(a), to_bf16(b), c)
    np.testing.assert_array_equal(out, np.full((16, 16), expected, dtype=np.float32))


def test_the_processors_own_settings_are_left_alone(library: AmxLibrary):
    library.multiply_tiles(np.zeros((16, 32), np.uint16), np.zeros((16, 16, 2), np.uint16), np.zeros((16, 16)))
    denormal = np.full(1, 2.0**-130, dtype=np.float32)
    assert (denormal * np.float32(0.5)).view(np.uint32)[0] == 1 << 18, "2 ** -131 was flushed to zero"


def test_emulations_notice_tiles_that_nobody_configured(library_path: Path, library: AmxLibrary):
    if "unit" in library_path.name:
        pytest.skip("the unit ends the process")
    ones = np.full((16, 32), 0x3F80, np.uint16)
    assert np.isnan(library.multiply_tiles(ones, ones, np.zeros((16, 16)), configured=False)).all()


# Linear


def check_linear(library: AmxLibrary, rows: list[np.ndarray], stride: int, tokens: int, random: np.random.Generator):
    k = len(rows[0])
    x = from_bf16(to_bf16(random.standard_normal((tokens, k))))
    width = -(-tokens // 16) * 16
    out = library.linear(rows, stride, packed_block(x, width), k, width)
    expected = x.astype(np.float64) @ np.stack([from_bf16(row) for row in rows]).astype(np.float64).T
    np.testing.assert_allclose(out[:tokens, : len(rows)], expected, rtol=0, atol=2e-6 * k + 1e-6)


@pytest.mark.parametrize("k", [1, 31, 32, 33, 96, 320, 577])
@pytest.mark.parametrize("num_rows", [48, 32, 16, 41, 7, 1])
def test_linear_of_any_size(library: AmxLibrary, random: np.random.Generator, num_rows: int, k: int):
    rows, stride = weight_rows(random, num_rows, k, "dense")
    check_linear(library, rows, stride, 40, random)


@pytest.mark.parametrize("tokens", [1, 16, 17, 32, 33, 48, 49, 64])
@pytest.mark.parametrize("num_rows", [48, 30])
def test_linear_of_any_number_of_tokens(library: AmxLibrary, random: np.random.Generator, num_rows: int, tokens: int):
    rows, stride = weight_rows(random, num_rows, 160, "dense")
    check_linear(library, rows, stride, tokens, random)


@pytest.mark.parametrize("layout", ["dense", "apart", "two parts"])
def test_linear_on_rows_wherever_they_lie(library: AmxLibrary, random: np.random.Generator, layout: str):
    rows, stride = weight_rows(random, 48, 100, layout)
    check_linear(library, rows, stride, 20, random)


def test_linear_results_do_not_depend_on_the_other_tokens(library: AmxLibrary, random: np.random.Generator):
    rows, stride = weight_rows(random, 48, 100, "dense")
    x = random.standard_normal((64, 100))
    whole = library.linear(rows, stride, packed_block(x, 64), 100, 64)
    alone = library.linear(rows, stride, packed_block(x[37:38], 16), 100, 16)
    np.testing.assert_array_equal(whole[37], alone[0])


# Attention


def attention_formula(case: AttentionCase, token: int, head: int) -> tuple[np.ndarray, float]:
    """Output and log-sum-exp of one token and head in float64."""
    query = case.query if case.query.dtype == np.float32 else from_bf16(case.query)
    position, block_size = int(case.positions[token]), case.key_cache.shape[2]
    seen = np.arange(case.first_key, min(case.end_key, position + 1))
    if case.window > 0:
        seen = seen[seen > position - case.window]
    blocks, slots = case.block_table[seen // block_size], seen % block_size
    keys, values = (
        from_bf16(x[blocks, case.kv_head, slots]).astype(np.float64) for x in (case.key_cache, case.value_cache)
    )
    scores = keys @ query[token, head].astype(np.float64) * case.scale
    if case.softcap:
        scores = case.softcap * np.tanh(scores / case.softcap)
    if case.alibi_slopes is not None:
        scores = scores + float(case.alibi_slopes[head]) * (seen - position)
    everything = scores if case.sinks is None else np.append(scores, float(case.sinks[head]))
    lse = float(np.logaddexp.reduce(everything))
    return np.exp(scores - lse) @ values, lse


def check_attention(case: AttentionCase, output: np.ndarray, lse: np.ndarray) -> None:
    exact = output.dtype == np.float32
    numbers = output if exact else from_bf16(output)
    for token in case.tokens:
        for head in case.heads:
            expected, expected_lse = attention_formula(case, token, head)
            # Weights are rounded to bf16 (2 ** -9 of each), and so is a bf16 output.
            np.testing.assert_allclose(numbers[token, head], expected, rtol=0, atol=6e-3 if exact else 1.6e-2)
            assert math.isclose(lse[token, head], expected_lse, rel_tol=2e-6, abs_tol=2e-5)
    others = np.delete(numbers, list(case.heads), axis=1)
    assert np.isnan(others).all(), "another head's output was written"


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 20},
    "window of one token": {"window": 1},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": np.linspace(-2, 3, 6, dtype=np.float32)},
    "alibi": {"alibi_slopes": np.linspace(0.01, 0.5, 6, dtype=np.float32)},
}
FEATURES["all together"] = {key: value for features in FEATURES.values() for key, value in features.items()} | {
    "window": 150
}


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize(("context", "new"), [(300, 30), (23, 23), (129, 4)])
def test_attention_with_every_feature(
    library: AmxLibrary, random: np.random.Generator, context: int, new: int, features: dict[str, Any]
):
    case = make_case(random, context=context, new=new, **features)
    check_attention(case, *library.attend(case))


@pytest.mark.parametrize("dims", [(32, 32), (64, 64), (80, 80), (128, 128), (256, 256), (72, 40), (192, 128), (5, 3)])
def test_attention_of_any_head_size(library: AmxLibrary, random: np.random.Generator, dims: tuple[int, int]):
    case = make_case(random, context=140, new=12, dims=dims, scale=dims[0] ** -0.5)
    check_attention(case, *library.attend(case))


@pytest.mark.parametrize("block_size", [8, 12, 16, 32, 128])
def test_attention_on_blocks_of_any_size(library: AmxLibrary, random: np.random.Generator, block_size: int):
    case = make_case(random, context=150, new=10, block_size=block_size)
    check_attention(case, *library.attend(case))


@pytest.mark.parametrize(("heads", "new"), [(1, 1), (1, 96), (3, 32), (16, 1), (96, 1), (7, 5)])
def test_attention_of_any_number_of_rows(library: AmxLibrary, random: np.random.Generator, heads: int, new: int):
    case = make_case(random, context=100, new=new, heads=heads)
    check_attention(case, *library.attend(case))


def test_attention_in_bfloat16(library: AmxLibrary, random: np.random.Generator):
    case = make_case(random, context=200, new=20, as_float=False)
    check_attention(case, *library.attend(case))


@pytest.mark.parametrize("sinks", [None, FEATURES["sinks"]["sinks"]], ids=["", "sinks"])
def test_parts_of_the_keys_merge_to_the_whole(
    library: AmxLibrary, random: np.random.Generator, sinks: np.ndarray | None
):
    case = make_case(random, context=300, new=16, sinks=sinks)
    check_attention(case, *library.attend_in_parts(case, [64, 240]))


def test_tokens_of_several_requests_share_keys(library: AmxLibrary, random: np.random.Generator):
    case = make_case(random, context=128, new=20)
    scattered = dataclasses.replace(case, tokens=np.array([17, 2, 9], dtype=np.int32), positions=case.positions + 1000)
    output, lse = library.attend(scattered)
    check_attention(scattered, output, lse)
    assert np.isnan(np.delete(output, scattered.tokens, axis=0)).all()


# Memory


def test_nothing_beyond_the_given_memory_is_read(library_path: Path):
    code = f"from {check_that_only_given_memory_is_read.__module__} import *; " + (
        f"check_that_only_given_memory_is_read(Path({str(library_path)!r}))"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, f"exit code {finished.returncode}: {finished.stderr}"
