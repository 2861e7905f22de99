"""New ids for requests and calls, unique and cheap."""

from __future__ import annotations

import random

# Not `uuid4`: it asks the kernel, and meanwhile another thread may take the interpreter's lock for milliseconds.
_source = random.Random()


def new_id() -> str:
    """Returns 32 hexadecimal digits; nothing may depend on their being hard to guess."""
    return f"{_source.getrandbits(128):032x}"
