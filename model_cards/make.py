"""Makes quantized checkpoints of a real model, measures each, and writes a card for it into this folder.

    python model_cards/make.py          of the packaged model; about 20 minutes on two cores

All figures are of one run of `hf-paged bench quantization`; `figures.json` beside the cards has them all, and
`--figures FILE` writes cards from those of an earlier run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hf_paged.tools.bench.quantization import DENSE
from hf_paged.tools.bench.report import log_console, output_console
from hf_paged.tools.bench.session import BenchOptions, run_benchmark
from hf_paged.tools.model_card import dense_card, model_card
from hf_paged.tools.packaged_model import MODEL_NAME
from hf_paged.tools.quantize import QuantizeResult

HERE = Path(__file__).parent
# Rows of the benchmark, and what their checkpoints are called behind the model's name.
CARDS = {
    DENSE: "bf16",
    "rtn-int8": "int8",
    "rtn-int4": "int4-RTN",
    "gptq-int4": "int4-GPTQ",
    "awq-int4": "int4-AWQ",
    "rtn-fp8": "fp8",
}
ORGANISATION = "HuggingFaceTB"


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a folder or a name on the Hub; the packaged model by default")
    parser.add_argument("--runs", type=int, default=3, help="measurements of speed, of which the median is taken")
    parser.add_argument("--figures", type=Path, help="write cards from the figures of an earlier run")
    parser.add_argument("--out", type=Path, default=HERE, help="the folder of the cards")
    arguments = parser.parse_args()
    if arguments.figures is not None:
        found = json.loads(arguments.figures.read_text(encoding="utf-8"))
    else:
        found = measure(arguments.model, arguments.runs)
        (arguments.out / "figures.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for path in write_cards(found, arguments.model or f"{ORGANISATION}/{MODEL_NAME}", arguments.out):
        print(path)


def measure(model: str | None, runs: int) -> dict[str, Any]:
    """Returns the report of the benchmark on all checkpoints.

    Args:
        model (`str`, *optional*):
            A folder or a name on the Hub; the packaged model by default.
        runs (`int`):
            Measurements of speed.
    """
    log = log_console()
    options = BenchOptions(
        model=model, runs=runs, only=",".join(CARDS), log=lambda text: log.print(text, highlight=False, markup=False)
    )
    report = run_benchmark("quantization", options)
    report.print(output_console())
    return report.to_dict() | {"model": MODEL_NAME if model is None else model}


def write_cards(found: dict[str, Any], model: str, folder: Path) -> list[Path]:
    """Writes a card for each row, and returns their files.

    Args:
        found (`dict[str, Any]`):
            From `measure`.
        model (`str`):
            What the model is called.
        folder (`Path`):
            Where to.
    """
    written = []
    for row in found["rows"]:
        name = f"{Path(model).name}-{CARDS[row['system']]}"
        if row.get("recipe"):
            result = QuantizeResult(**row["recipe"] | {"out": name, "model": model})
            card = model_card(result, figures(row, found))
        else:
            text = f"{model} with dense weights in bfloat16: what the other cards are compared with."
            card = dense_card(name, text, figures(row, found))
        path = folder / f"{name}.md"
        card.save(path)
        written.append(path)
    return written


def figures(row: dict[str, Any], found: dict[str, Any]) -> dict[str, str]:
    """Returns the rows of a card's table.

    Args:
        row (`dict[str, Any]`):
            Of the report.
        found (`dict[str, Any]`):
            The report: machine, versions, day.
    """
    machine = found["machine"]
    change = f" ({row['perplexity_change']:+.2%} of bf16)" if "perplexity_change" in row else ""
    return {
        "weights in memory": f"{row['model_bytes'] / 1e6:,.1f} MB",
        "perplexity": f"{row['perplexity']:.3f}{change}",
        "of": found["notes"][0].removeprefix("perplexity of "),
        "one stream": f"{row['seconds_per_token'] * 1e3:.1f} ms a token",
        "64 requests at once": f"{row['output_tokens_per_s']:,.0f} output tokens/s",
        "measured on": f"{machine['processor']}, {machine['num_threads']} cores, operators {found['isa']}, "
        f"{found['date']}",
        "with": ", ".join(f"{name} {version}" for name, version in found["versions"].items()),
    }


if __name__ == "__main__":
    main()
