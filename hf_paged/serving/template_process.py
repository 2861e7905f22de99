"""Renders chat templates, in a process of its own that may be ended at any time. Imports nothing of hf_paged.

Messages are JSON, one a line, on standard input and output: the arguments of Transformers' `render_jinja_template`, and
{"text": ...} or {"error": ...}.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Answers messages until there are no more."""
    from transformers.utils.chat_template_utils import render_jinja_template

    for line in sys.stdin.buffer:
        arguments = json.loads(line)
        try:
            answer = {"text": render_jinja_template(**arguments)[0][0]}
        except MemoryError:
            answer = {"error": "it needs too much memory"}
        except Exception as error:  # whatever a template does
            answer = {"error": str(error)[:2000] or type(error).__name__}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
