"""Which instruction sets are found, which one is used, and what the library's operators say of them."""

from __future__ import annotations

import pytest
import torch

from hf_paged.errors import ConfigurationError
from hf_paged.kernels.cpu import isa
from tests.kernels.cpu.native_processes import Place

AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
AMX = AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"}


@pytest.mark.parametrize(
    ("flags", "levels"),
    [
        (AMX, ("amx", "avx512", "avx2", "torch")),
        (AMX - {"amx_bf16"}, ("avx512", "avx2", "torch")),
        (AVX512, ("avx512", "avx2", "torch")),
        (AVX512 - {"avx512vl"}, ("avx2", "torch")),
        (AMX - {"avx512bw"}, ("avx2", "torch")),
        (AVX2, ("avx2", "torch")),
        (AVX2 - {"fma"}, ("torch",)),
        (AMX - {"f16c"}, ("torch",)),
        (set(), ("torch",)),
    ],
)
def test_a_level_needs_all_of_its_instructions_and_the_levels_below(
    flags: set[str], levels: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(isa, "unsupported_platform", lambda: None)
    monkeypatch.setattr(isa, "_cpu_flags", lambda: flags)
    assert isa.machine_isas() == levels


def test_other_processors_and_systems_have_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(isa, "_cpu_flags", lambda: AMX)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert isa.machine_isas() == ("torch",)


@pytest.mark.parametrize("level", isa.LEVELS)
def test_each_level_can_be_asked_for(level: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(isa.VARIABLE, level)
    assert isa.requested_isa() == level


@pytest.mark.parametrize("value", ["AVX512", "avx-512", "none", "sse", " ", "avx2,avx512"])
def test_another_value_is_refused_with_the_way_out(value: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(isa.VARIABLE, value)
    with pytest.raises(ConfigurationError) as refused:
        isa.requested_isa()
    for word in (isa.VARIABLE, repr(value), "amx, avx512, avx2, torch", ", ".join(isa.machine_isas())):
        assert word in str(refused.value)


def test_without_the_variable_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(isa.VARIABLE, raising=False)
    assert isa.requested_isa() is None
    monkeypatch.setenv(isa.VARIABLE, "")
    assert isa.requested_isa() is None


def _levels() -> dict[str, object]:
    operators = torch.ops.hf_paged
    found = {"available": operators.available_isas(), "detected": operators.detected_isa(), "first": operators.isa()}
    found["chosen"] = []
    for level in operators.available_isas():
        operators.set_isa(level)
        found["chosen"].append(operators.isa())
    return found


def test_the_library_finds_the_same_levels_and_uses_the_one_that_is_chosen(place: Place):
    answer = place.load(_levels).answer
    assert tuple(answer["available"]) == isa.machine_isas()
    assert answer["detected"] == answer["first"] == answer["available"][0]
    assert answer["chosen"] == answer["available"]


def _choose_what_is_missing() -> list[str]:
    operators, messages = torch.ops.hf_paged, []
    for level in {"amx", "sse", ""} - set(operators.available_isas()):
        with pytest.raises(RuntimeError) as refused:
            operators.set_isa(level)
        messages.append(str(refused.value))
    return [*messages, operators.isa()]


def test_the_library_refuses_a_level_that_is_missing_and_keeps_its_own(place: Place):
    *messages, level = place.load(_choose_what_is_missing).answer
    assert level == isa.machine_isas()[0] and messages
    assert all(f"it has {', '.join(isa.machine_isas())}" in message for message in messages)


def _bf16_dot() -> dict[str, object]:
    operators = torch.ops.hf_paged
    found: dict[str, object] = {"has": operators.has_bf16_dot(), "speedup": operators.bf16_dot_speedup()}
    found["measured"] = [operators.prefers_bf16_dot() for _ in range(3)]
    for choice in (0, 1, -1):
        operators.set_bf16_dot(choice)
        found[str(choice)] = operators.prefers_bf16_dot()
    operators.set_bf16_dot(1)
    operators.set_isa("avx2")
    found["below avx512"] = operators.prefers_bf16_dot()
    return found


def test_the_bf16_dot_product_is_used_where_it_was_measured_to_be_faster(place: Place):
    found = place.load(_bf16_dot).answer
    if not found["has"]:
        assert found["speedup"] == 0 and not any(found["measured"]) and not found["1"]
        return
    # Half the operations of FMA at worst, and no processor has more than twice.
    assert 0.2 < found["speedup"] < 4.5
    assert found["measured"] == [found["speedup"] >= 1.3] * 3
    assert (found["0"], found["1"], found["-1"], found["below avx512"]) == (False, True, found["measured"][0], False)
