"""What systems are called in reports. Without torch, so that pictures can be drawn without it."""

from __future__ import annotations

OURS = "hf_paged"
METHOD_TITLES = {
    "one_by_one": "Transformers, one by one",
    "static_batch": "Transformers, static padded batch",
    "generate_batch": "Transformers, generate_batch",
}


def short_title(system: str) -> str:
    """Returns a system's name for a legend that has little room.

    Args:
        system (`str`):
            Its name in a report.
    """
    return system.removeprefix("Transformers, ")
