"""guidellm against the server: a load generator of others, in an environment of its own.

python -m benchmarks.serving.guidellm_run
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_paged.cache_folder import cache_folder
from hf_paged.tools.bench.report import log_console
from hf_paged.tools.packaged_model import packaged_model_path

from ..cpu.environments import TORCH, Environment, make_environment
from .servers import OURS, end_servers_when_terminated, make_parser, our_command, serving

ENVIRONMENT = Environment(("guidellm==0.8.1",), TORCH)
TIMEOUT = 600.0


def main() -> None:
    """Runs what the command line asks for; exit code 1 if guidellm failed."""
    end_servers_when_terminated()
    arguments = parse()
    log = log_console()
    model = Path(arguments.model) if arguments.model else packaged_model_path()
    environment = make_environment("guidellm", cache_folder() / "bench-serving", log.print, ENVIRONMENT)
    report = arguments.results / "guidellm.json"
    with serving(
        our_command(model, "--dtype", "bfloat16", "--served-model-name", OURS), arguments.results / "guidellm.log"
    ) as server:
        command = [str(environment / "bin" / "guidellm"), "run", "--disable-progress"]
        command += ["--backend", f"kind=openai_http,target={server.url},model={OURS}"]
        command += ["--profile", f"kind=concurrent,streams={arguments.streams}"]
        command += ["--constraint", f"kind=max_requests,count={arguments.count}"]
        command += ["--tokenizer", f"kind=hf_auto,model={model}"]
        command += ["--data", "kind=synthetic_text,prompt_tokens=128,output_tokens=64"]
        command += ["--output", f"kind=json,path={report}", "--output", "kind=console"]
        done = subprocess.run(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, timeout=TIMEOUT)
    log.print(f"written: {report}", highlight=False, markup=False)
    sys.exit(1 if done.returncode else 0)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the arguments of the command line.

    Args:
        words (`Sequence[str]`, *optional*):
            Instead of the command line's.
    """
    parser = make_parser("guidellm_run", __doc__)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--count", type=int, default=64, help="how many requests")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
