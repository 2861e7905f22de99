"""A process that serves requests and tells what that adds to the memory of one that only imported the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .fresh_process import answer_parent, settings_of_parent


def main() -> None:
    """Loads a model, answers requests, and measures after each."""
    settings = settings_of_parent()
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from ...configuration import PagedConfig
    from ...generation import mixin  # noqa: F401 - its memory is that of an import
    from .engine_run import forced, load_paged_model, weight_bytes
    from .machine import huge_page_bytes, peak_resident_bytes, resident_bytes, touched_bytes

    AutoModelForCausalLM._model_mapping.get(type(AutoConfig.from_pretrained(settings["model"])), None)
    imported = resident_bytes()
    model = load_paged_model(
        settings["model"], getattr(torch, settings["dtype"]), PagedConfig.from_dict(settings["config"])
    )
    loaded, peak_loading = resident_bytes(), peak_resident_bytes()
    is_reset = _reset_peak()
    model.engine.generate(settings["prompts"], [forced(length) for length in settings["output_lengths"]])
    served = resident_bytes()
    pool = _touched(model.engine, touched_bytes)
    weights = weight_bytes(model)
    known = None not in (served, imported, pool)
    answer_parent(
        {
            "imported_bytes": imported,
            "loaded_bytes": loaded,
            "served_bytes": served,
            "peak_loading_bytes": peak_loading,
            "peak_serving_bytes": peak_resident_bytes() if is_reset else None,
            "huge_page_bytes": huge_page_bytes(),
            "weight_bytes": weights,
            "touched_pool_bytes": pool,
            "other_bytes": served - imported - weights - pool if known else None,  # type: ignore[operator]
        }
    )


def _touched(engine: Any, touched_bytes: Any) -> int | None:
    from ...kernels.quantized_blocks import tensors_of

    layers = engine._loop.ready_runner().cache.layers
    caches = [cache for layer in layers for cache in (layer.spec.key_cache, layer.spec.value_cache)]
    parts = [touched_bytes(tensor) for tensor in tensors_of(*caches)]
    return None if None in parts else sum(parts)


def _reset_peak() -> bool:
    """Has the system forget the most memory that there was; whether it did."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
