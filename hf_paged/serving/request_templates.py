"""Chat templates that came with requests, rendered in another process, where limits of time and memory hold.

A template is a program. Jinja's sandbox keeps it from touching anything, not from running forever or from filling the
memory, and a thread cannot be ended from outside. So one process serves all such templates, one at a time; it is
started when the first comes, and killed and started anew when one takes too long.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Mapping
from typing import Any

from ..child_process import ChildProcess
from . import template_process

_MEMORY = 512 << 20  # bytes that templates may use beside what the process has when it is ready
_START_SECONDS = 60.0  # importing Transformers; not the template's fault


class TemplateProcess(ChildProcess):
    """Renders templates in another process."""

    def __init__(self) -> None:
        super().__init__(template_process.__file__)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "hf_paged-templates")

    async def render(self, arguments: Mapping[str, Any], seconds: float) -> str:
        """Returns a rendered template.

        Args:
            arguments (`Mapping[str, Any]`):
                Of Transformers' `render_jinja_template`; plain JSON.
            seconds (`float`):
                How long it may take.

        Raises:
            TimeoutError: If it took longer.
            ValueError: If the template is wrong, refuses the messages, or needs too much memory.
        """
        loop = asyncio.get_running_loop()
        answer = await loop.run_in_executor(self._thread, self._render, arguments, seconds)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["text"]

    def _render(self, arguments: Mapping[str, Any], seconds: float) -> dict[str, str]:
        try:
            if self.start():
                self.ask({"chat_template": "", "conversations": [[]]}, _START_SECONDS)
                self.limit_memory(_MEMORY)
            return self.ask(arguments, seconds)
        except EOFError:
            raise ValueError("it needed too much memory, or its process was ended") from None
