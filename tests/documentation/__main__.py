"""`python -m tests.documentation`: a line for each code block of the documentation, and what the tests do with it."""

from __future__ import annotations

from tests.documentation.pages import documentation

for page in documentation():
    for block in page.blocks:
        reason = f"  ({block.reason})" if block.reason else ""
        print(f"{block.place:<40} {block.language or '-':<8} {block.treatment}{reason}")
