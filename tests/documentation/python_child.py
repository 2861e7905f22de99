"""Runs the Python blocks of pages, one after the other, each page's in a namespace and a folder of its own.

Started by `runner.py`. Commands are JSON, one a line, on standard input; answers on what standard output was. What
blocks print goes to standard error.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import traceback


def main() -> None:
    """Runs blocks until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    namespace: dict = {}
    for line in sys.stdin:
        block = json.loads(line)
        if block["folder"] != os.getcwd():
            namespace = {"__name__": "__page__"}
            gc.collect()  # the models of the page before
            os.chdir(block["folder"])
            logging.getLogger("hf_paged").setLevel(logging.NOTSET)
        try:
            # Empty lines before, so that tracebacks name the line of the page.
            exec(compile("\n" * (block["line"] - 1) + block["text"], block["page"], "exec"), namespace)
            error = None
        except BaseException:
            error = traceback.format_exc()
        sys.stdout.flush()
        answers.write(json.dumps({"error": error}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
