"""What structured output costs: 64 requests at once, each bound to a JSON schema, beside the same requests without one.

The schema is a list that cannot end before the answer's length is reached, so that both have the same number of tokens.
Processor time is printed beside the clock's, as other programs change only the latter.

    python -m benchmarks.serving.constrained
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from hf_paged import LLM, SamplingParams
from hf_paged.tools.bench.report import log_console, output_console, write_json
from hf_paged.tools.bench.workloads import TextTokens, mixed_lengths
from hf_paged.tools.packaged_model import packaged_model_path

from ..target import Target
from .servers import make_parser

SCHEMA = {
    "type": "array",
    "minItems": 100,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 120}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
}


def main() -> None:
    """Runs what the command line asks for."""
    arguments = parse()
    console, log = output_console(), log_console()
    model = Path(arguments.model) if arguments.model else packaged_model_path()
    llm = LLM(str(model), dtype="bfloat16", enable_prefix_caching=False)
    ring = TextTokens.from_tokenizer(llm.get_tokenizer())
    measure(llm, ring, 8, SCHEMA)  # compiles the grammar, and takes the first blocks
    rounds = []
    for number in range(arguments.rounds):
        kinds = [("free", None), ("bound", SCHEMA)][:: 1 if number % 2 == 0 else -1]
        rounds.append({name: measure(llm, ring, arguments.count, schema) for name, schema in kinds})
        free, bound = rounds[-1]["free"], rounds[-1]["bound"]
        log.print(
            f"round {number + 1}: {free['throughput']:.0f} tok/s free, {bound['throughput']:.0f} bound; processor "
            f"seconds {free['cpu']:.1f} and {bound['cpu']:.1f}",
            highlight=False,
        )
    by_clock = statistics.median(r["bound"]["throughput"] / r["free"]["throughput"] for r in rounds)
    by_cpu = statistics.median(r["free"]["cpu"] / r["bound"]["cpu"] for r in rounds)
    target = Target(f"throughput of {arguments.count} requests bound to a schema against free", 0.75, True, by_clock)
    console.print(target.describe(), highlight=False, markup=False)
    console.print(f"the same by processor time: {by_cpu:.3g}", highlight=False)
    content = {"date": time.strftime("%Y-%m-%d %H:%M:%S"), "load_average": os.getloadavg()[0], "rounds": rounds}
    write_json(arguments.results / "constrained.json", content | {"targets": [target.to_dict()]})


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the arguments of the command line.

    Args:
        words (`Sequence[str]`, *optional*):
            Instead of the command line's.
    """
    parser = make_parser("constrained", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=64, help="requests at once")
    return parser.parse_args(words)


def measure(llm: LLM, ring: TextTokens, count: int, schema: dict | None) -> dict[str, float]:
    """Returns the tokens per second of W1's requests, and the processor time that they took.

    Args:
        llm (`LLM`):
            The engine.
        ring (`TextTokens`):
            Cuts prompts.
        count (`int`):
            How many.
        schema (`dict`, *optional*):
            Binds all answers.
    """
    workload = mixed_lengths(ring, count)
    form = None if schema is None else {"json": schema}
    params = [
        SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, structured_outputs=form)
        for length in workload.output_lengths
    ]
    started, cpu = time.perf_counter(), time.process_time()
    outputs = llm.generate(workload.prompts, params, use_tqdm=False)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    tokens = [len(output.outputs[0].token_ids) for output in outputs]
    assert tokens == workload.output_lengths, "both kinds have answers of the same lengths"
    return {"throughput": sum(tokens) / seconds, "cpu": cpu, "seconds": seconds}


if __name__ == "__main__":
    main()
