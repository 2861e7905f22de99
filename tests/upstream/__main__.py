"""Runs Transformers' own suites on paged models: `python -m tests.upstream FOLDER_OF_TRANSFORMERS_SOURCE`.

What fails is run again on the same models unpaged; what fails there too is nothing of ours.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import transformers

from hf_paged.tools.packaged_model import packaged_model_path

HERE = Path(__file__).parent
FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "gpt_neox")
BATCHING = "tests/generation/test_continuous_batching.py"
# What needs hours, several processes, or a GPU.
BATCHING_LEFT_OUT = (
    "not compile and not diverse_models and not TensorParallel and not flash_attention and not fast_path"
)
UNEXPLAINED = "UNEXPLAINED"
# Tests that a paged model is meant to fail, and why.
DECISIONS = {
    r"test_generate_compile_model_forward_fullgraph": "looks for a DynamicCache; a paged model returns a PagedCache",
    r"test_(prefix|block)_sharing": "counts blocks in the insides of Transformers' own manager",
    r"test_switch_to_cb_friendly_attn": "looks for the name of Transformers' own paged attention",
    r"test_(non_)?streaming": "empties `logit_processor`, a list inside Transformers' own manager",
    r"test_register_result_handler": "ends by looking into the output queue of Transformers' own manager",
}


def main() -> int:
    """Runs the suites, prints what came of them, and returns 1 if a failure has no explanation."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("source", type=Path, help="folder of the installed version's source, with its tests")
    parser.add_argument("--families", nargs="*", default=FAMILIES, help="folders under tests/models")
    parser.add_argument("--no-batching", action="store_true", help="leave out continuous batching")
    given = parser.parse_args()
    source = given.source.resolve()
    if not (source / "tests/generation/test_utils.py").is_file():
        parser.error(f"{source} has no tests/generation/test_utils.py; it must be a checkout, not a wheel")
    print(f"Transformers {transformers.__version__}, its tests from {source}")
    unexplained = 0
    for family in given.families:
        unexplained += _suite(family, source, [f"tests/models/{family}/test_modeling_{family}.py"])
    if not given.no_batching:
        unexplained += _suite("batching", source, [BATCHING, "-k", BATCHING_LEFT_OUT])
    print(f"{unexplained} failures without an explanation")
    return int(unexplained > 0)


def _suite(name: str, source: Path, tests: list[str]) -> int:
    found = _run(source, tests)
    outcomes: dict[str, list[str]] = found["outcomes"]
    if not outcomes:
        print(f"{name}: no test ran")
        return 1
    counts = [sum(outcome == what for outcome, _ in outcomes.values()) for what in ("passed", "skipped", "failed")]
    print(f"{name}: {counts[0]} passed, {counts[1]} skipped, {counts[2]} failed; {found['paged']} models were paged")
    for refusal, count in found["refused"].items():
        print(f"    {count} models were not: {refusal}")
    failed = {test: reason for test, (outcome, reason) in outcomes.items() if outcome == "failed"}
    unpaged = _run(source, [*failed, "--stock"])["outcomes"] if failed else {}
    groups: dict[str, list[str]] = {}
    for test, reason in failed.items():
        why = next((why for pattern, why in DECISIONS.items() if re.search(pattern, test)), None)
        said = " ".join(reason.split())[:120]
        if unpaged.get(test, [""])[0] == "failed":
            why = f"fails unpaged too: {' '.join(unpaged[test][1].split())[:120]}"
        groups.setdefault(why or f"{UNEXPLAINED}: {said}", []).append(test.rpartition("::")[2])
    for why, names in groups.items():
        print(f"    {len(names)} {why} ({', '.join(names[:4])}{' ...' if len(names) > 4 else ''})")
    return len(found["refused"]) + sum(len(names) for why, names in groups.items() if why.startswith(UNEXPLAINED))


def _run(source: Path, tests: list[str]) -> dict[str, Any]:
    """Runs tests in a process of their own, in the folder of the source."""
    paths = [str(HERE), str(HERE.parents[1]), str(source / "utils"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HF_HUB_OFFLINE": "1",
        "RUN_SLOW": "1" if any(BATCHING in test for test in tests) else "0",
    }
    with tempfile.TemporaryDirectory() as folder:
        outcomes = Path(folder) / "outcomes.json"
        command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "-W", "ignore"]
        command += ["-o", "log_cli=false", "-p", "paged_plugin", "--outcomes", str(outcomes), "--timeout", "600"]
        command += ["--model", str(packaged_model_path())] if environment["RUN_SLOW"] == "1" else []
        done = subprocess.run([*command, *tests], cwd=source, env=environment, capture_output=True, text=True)
        if not outcomes.is_file():
            print(done.stdout[-3000:], done.stderr[-3000:], sep="\n")
            return {"outcomes": {}, "paged": 0, "refused": {}}
        return json.loads(outcomes.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())
