"""Real processes of `hf-paged` that start in no time: forks of one that has imported what they need.

Each line of the standard input is a job: arguments, environment, where the three streams are. A job's process is the
leader of a session of its own and has its own terminal, if it was given one; its exit code is written to a file.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any


def run(job: dict[str, Any]) -> None:
    """Becomes the process of a job, and returns at its end as `hf-paged` does: by SystemExit."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job of a shell in the background had it ignored
    if job["terminal"]:
        streams = [os.open(job["terminal"], os.O_RDWR)] * 3  # the first terminal of a leader becomes its own
    else:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        streams = [os.open(job["stdin"], os.O_RDONLY), *(os.open(job[name], flags) for name in ("stdout", "stderr"))]
    for descriptor, stream in enumerate(streams):
        os.dup2(stream, descriptor)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    os.environ.update(job["environment"])
    os.chdir(job["folder"])
    sys.argv = ["hf-paged", *job["arguments"]]
    from hf_paged.cli import main

    main()


def watch(child: int, job: dict[str, Any]) -> None:
    """Waits for the process of a job, and writes down how it ended."""
    _, status = os.waitpid(child, 0)
    temporary = job["exit_code"] + ".part"
    with open(temporary, "w") as file:
        file.write(str(os.waitstatus_to_exitcode(status)))
    os.replace(temporary, job["exit_code"])


def serve() -> None:
    """Takes jobs until there are no more."""
    import transformers.models.llama.modeling_llama  # noqa: F401
    from transformers import conversion_mapping

    import hf_paged.generation.mixin
    import hf_paged.serving.app
    import hf_paged.serving.lifecycle
    import hf_paged.serving.loading
    import hf_paged.tools.environment
    import hf_paged.tools.info
    import hf_paged.tools.terminal.generate  # noqa: F401

    conversion_mapping.get_checkpoint_conversion_mapping("llama")  # compiles hundreds of expressions
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # of watchers
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            child = os.fork()
            if child == 0:
                run(job)
                return
            print(child, flush=True)
            watch(child, job)
            os._exit(0)


if __name__ == "__main__":
    serve()
