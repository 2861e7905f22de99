"""`hf-paged demo`: real prompts through a real model, then the same through stock Transformers, measured there."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..configuration import PagedConfig
from ..generation.outputs import RequestOutput
from .bench.baseline_process import StockTransformers
from .bench.baselines import BUDGET_SECONDS, BaselineResult
from .bench.comparison import METHOD_TITLES, OURS
from .bench.engine_run import EngineRun, load_paged_model, run_workload, warm_up
from .bench.machine import load_average, machine_info, measure_bandwidth
from .bench.report import (
    Column,
    Report,
    log_console,
    mebibytes,
    one_decimal,
    output_console,
    percent,
    times,
    write_json,
)
from .bench.workloads import DEFAULT_SEED, TextTokens, Workload
from .packaged_model import packaged_model_path
from .prompts import user_prompts

NUM_REQUESTS = 32
NUM_ANSWERS = 3
SAMPLE_ONE_BY_ONE = 8
POOL_GIB = 1.0
# What all of it should take on two slow cores; the baselines get what is left, at most `BUDGET_SECONDS` each.
TOTAL_SECONDS = 165.0
LEAST_BUDGET_SECONDS = 15.0
LEAST_SHARE = 0.05  # of its tokens; a row for which fewer were measured is marked

COLUMNS = (
    Column("system", "system"),
    Column("output_tokens_per_s", "output tokens/s", one_decimal),
    Column("speedup", "speed-up of hf_paged", times),
    Column("kv_bytes_pool", "K/V pool", mebibytes),
    Column("kv_bytes_held", "K/V reserved", mebibytes),
    Column("kv_bytes_used", "really used", mebibytes),
    Column("kv_waste", "waste", percent),
    Column("huge_page_bytes", "huge pages", mebibytes),
)


def run_demo(model: str | None = None, json_file: Path | None = None, count: int = NUM_REQUESTS) -> Report:
    """Answers real prompts with the paged engine, then measures stock Transformers on the same ones.

    Prints answers and a table to stdout, progress to stderr.

    Args:
        model (`str`, *optional*):
            Path or hub id; the packaged model by default.
        json_file (`Path`, *optional*):
            Where everything in the table is written as well.
        count (`int`, defaults to 32):
            Number of prompts.
    """
    out, log = output_console(), log_console()
    say = _teller(log)
    path = model or str(packaged_model_path())
    tokenizer = _load_tokenizer(path)
    questions, workload = demo_workload(tokenizer, count)
    say(f"loading {path}")
    begin = time.perf_counter()
    loads: list[float] = []
    run, answers = _run_ours(path, TextTokens.from_tokenizer(tokenizer), workload, log)
    loads.append(load_average())
    out.print(f"{OURS} answered {len(workload)} prompts. {NUM_ANSWERS} of the answers:\n", highlight=False)
    for question, answer in _choose_answers(questions, answers, tokenizer):
        out.print(f"[bold]> {_escape(question)}[/bold]\n{_escape(answer)}\n", highlight=False)
    results = _run_stock(path, workload, begin + TOTAL_SECONDS, say, loads)
    report = make_report(workload, run, results, max(loads))
    report.print(out)
    if json_file is not None:
        write_json(json_file, summary(report) | {"model": path} | report.to_dict())
    return report


def demo_workload(tokenizer: Any, count: int = NUM_REQUESTS, seed: int = DEFAULT_SEED) -> tuple[list[str], Workload]:
    """Returns questions, and the workload of these as a chat each, with outputs of 16 to 256 tokens.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            The model's; without a chat template the plain questions are taken.
        count (`int`, defaults to 32):
            Number of questions.
        seed (`int`, defaults to 181):
            Fixes the choice of questions and the lengths.
    """
    numbers = random.Random(seed)
    questions = numbers.sample(user_prompts(), count)
    lengths = [numbers.randint(16, 256) for _ in range(count)]
    return questions, Workload("demo", [_prompt_tokens(tokenizer, question) for question in questions], lengths)


def make_report(workload: Workload, run: EngineRun, results: list[BaselineResult], load: float = 0.0) -> Report:
    """Returns the table: a row for each way of running the workload.

    Args:
        workload (`Workload`):
            What was run.
        run (`EngineRun`):
            How the paged engine did.
        results (`list[BaselineResult]`):
            How stock Transformers did, by each of its methods.
        load (`float`, defaults to 0.0):
            The machine's load average meanwhile, at its highest.
    """
    ours = {name: value for name, value in dataclasses.asdict(run).items() if name != "stats"}
    rows: list[dict[str, Any]] = [
        {"system": METHOD_TITLES[result.method] + (" *" if result.measured_share < LEAST_SHARE else "")}
        | result.row()
        | {"speedup": run.output_tokens_per_s / result.output_tokens_per_s}
        for result in results
    ]
    rows.append({"system": OURS, **ours, "speedup": None})
    notes = [
        f"{row['system']}: {row['how']} in {row['measured_seconds']:.0f} s, the rest is extrapolated"
        for row in rows
        if row.get("extrapolated")
    ]
    if any(result.measured_share < LEAST_SHARE for result in results):
        notes.append(
            f"* measured on less than {100 * LEAST_SHARE:.0f} % of its tokens: rough, and may be wrong either way"
        )
    num_threads = torch.get_num_threads()
    if load > num_threads + 1:
        notes.append(
            f"load average {load:.1f} on {psutil.cpu_count()} processors, of which this is about {num_threads}: other "
            "processes ran beside it, and rows were not measured under the same conditions"
        )
    machine, bandwidth = machine_info(), measure_bandwidth()
    notes.append(f"{machine.describe()}; {bandwidth.describe()}")
    details = {
        "workload": workload.describe(),
        "machine": dataclasses.asdict(machine),
        "bandwidth": bandwidth.to_dict(),
        "load_average": load,
        "engine": dataclasses.asdict(run.stats),
    }
    title = f"{workload.describe()}; the same for every row, greedy, end-of-sequence tokens ignored"
    return Report(title, COLUMNS, rows, notes, details)


def summary(report: Report) -> dict[str, float]:
    """Returns the main figures under fixed names.

    Args:
        report (`Report`):
            What `make_report` returned.
    """
    ours = report.rows[-1]
    speedups = {f"speedup_{row['method']}": row["speedup"] for row in report.rows[:-1]}
    return {
        "output_tokens_per_s": ours["output_tokens_per_s"],
        "kv_waste_percent": 100 * ours["kv_waste"],
        **speedups,
    }


def _run_ours(path: str, text: TextTokens, workload: Workload, log: Console) -> tuple[EngineRun, list[RequestOutput]]:
    model = load_paged_model(path, torch.bfloat16, PagedConfig(cpu_kv_cache_gib=POOL_GIB))
    try:
        warm_up(model, text)
        with _ProgressDisplay(log, len(workload)) as advance:
            return run_workload(model, workload, progress=advance)
    finally:
        model.engine.close()


def _run_stock(
    path: str, workload: Workload, deadline: float, say: Callable[[str], None], loads: list[float]
) -> list[BaselineResult]:
    say("loading stock Transformers in a process of its own")
    results: list[BaselineResult] = []
    methods = (("one_by_one", SAMPLE_ONE_BY_ONE), ("static_batch", None), ("generate_batch", None))
    with StockTransformers(path, "bfloat16", torch.get_num_threads()) as stock:
        stock.measure("static_batch", Workload("warm-up", [workload.prompts[0]], [4]))
        for method, sample in methods:
            share = (deadline - time.perf_counter()) / (len(methods) - len(results))
            budget = min(BUDGET_SECONDS, max(LEAST_BUDGET_SECONDS, share))
            say(f"{METHOD_TITLES[method]} (stops after {budget:.0f} s)")
            results.append(stock.measure(method, workload, budget=budget, sample=sample))
            loads.append(load_average())
    return results


class _ProgressDisplay:
    """A bar on a terminal, a line after each quarter elsewhere; as a context it returns what is to be called."""

    def __init__(self, log: Console, total: int):
        self._log = log
        self._total = total
        self._done = 0
        self._bar = Progress(
            TextColumn(f"{OURS} answers"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=log
        )

    def __enter__(self) -> Callable[[RequestOutput], None]:
        if self._log.is_terminal:
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total)
        return self._advance

    def __exit__(self, *error: object) -> None:
        if self._log.is_terminal:
            self._bar.stop()

    def _advance(self, output: RequestOutput) -> None:
        self._done += 1
        if self._log.is_terminal:
            self._bar.advance(self._task)
        elif self._done % max(1, self._total // 4) == 0:
            self._log.print(f"{OURS}: {self._done} of {self._total} prompts answered", highlight=False)


def _choose_answers(questions: list[str], outputs: list[RequestOutput], tokenizer: Any) -> list[tuple[str, str]]:
    """Answers that the model ended itself come first: the lengths are forced, the others break off."""
    chosen, cut = [], []
    for question, output in zip(questions, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        end = tokens.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in tokens else None
        text = tokenizer.decode(tokens[:end], skip_special_tokens=True).strip()
        if end is None:
            cut.append((question, f"{text} ... (cut after {len(tokens)} tokens)"))
        elif text:
            chosen.append((question, text))
    chosen.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
    return (chosen + cut)[:NUM_ANSWERS]


def _prompt_tokens(tokenizer: Any, question: str) -> list[int]:
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        return tokenizer(text, add_special_tokens=False).input_ids
    return tokenizer(question).input_ids


def _load_tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def _teller(log: Console) -> Callable[[str], None]:
    return lambda message: log.print(f"{message} ...", highlight=False, markup=False)


def _escape(text: str) -> str:
    return text.replace("[", "\\[")
