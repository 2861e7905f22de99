"""New ids for requests and calls, unique and cheap."""

from __future__ import annotations

import random
import string

# Not `uuid4`: it asks the kernel, and meanwhile another thread may take the interpreter's lock for milliseconds.
_source = random.Random()
_ALPHABET = string.ascii_letters + string.digits


def new_id() -> str:
    """Returns 32 hexadecimal digits; nothing may depend on their being hard to guess."""
    return f"{_source.getrandbits(128):032x}"


def new_short_id(length: int) -> str:
    """Returns letters and digits, for those who take no more than a few.

    Args:
        length (`int`):
            How many.
    """
    return "".join(_source.choices(_ALPHABET, k=length))
