"""What systems are called in reports. Without torch, so that pictures can be drawn without it."""

from __future__ import annotations

OURS = "hf_paged"
METHOD_TITLES = {
    "one_by_one": "Transformers, one by one",
    "static_batch": "Transformers, static padded batch",
    "generate_batch": "Transformers, generate_batch",
}
