"""A process that loads one kind of weights and tells how fast, how good and how large they are."""

from __future__ import annotations

import statistics
from typing import Any

from .fresh_process import answer_parent, settings_of_parent


def main() -> None:
    """Measures one row."""
    settings = settings_of_parent()
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from ...auto import AutoPagedModelForCausalLM
    from ...configuration import PagedConfig
    from ...generation import mixin  # noqa: F401 - its memory is that of an import
    from ...quantization import making  # noqa: F401
    from ..perplexity import measure_perplexity
    from .engine_run import forced, run_workload
    from .machine import resident_bytes
    from .workloads import Workload

    AutoModelForCausalLM._model_mapping.get(type(AutoConfig.from_pretrained(settings["model"])), None)
    imported = resident_bytes()
    where: dict[str, Any] = {"device_map": "cuda"} if torch.cuda.is_available() else {}
    model = AutoPagedModelForCausalLM.from_pretrained(
        settings["model"],
        dtype=getattr(torch, settings["dtype"]),
        paged_config=PagedConfig.from_dict(settings["config"]),
        quantize=settings["quantize"],
        **where,
    )
    loaded = resident_bytes()
    one, many = Workload(**settings["one"]), Workload(**settings["many"])
    model.engine.generate([prompt[:16] for prompt in many.prompts[:2]], [forced(4)] * len(many.prompts[:2]))
    seconds, speeds = [], []
    for _ in range(settings["runs"]):
        model.engine.weights_changed()  # a prefix that is known is not computed
        between = run_workload(model, one)[0].seconds_per_token
        assert between is not None, "W3 has many tokens"
        seconds.append(between)
        speeds.append(run_workload(model, many)[0].output_tokens_per_s)
    found = measure_perplexity(model, settings["windows"], settings["text"])
    answer_parent(
        {
            "model_bytes": sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())),
            "growth_bytes": None if loaded is None or imported is None else loaded - imported,
            "seconds_per_token": statistics.median(seconds),
            "output_tokens_per_s": statistics.median(speeds),
            "every_seconds_per_token": seconds,
            "every_output_tokens_per_s": speeds,
            "perplexity": found.value,
            "perplexity_tokens": found.tokens,
        }
    )


if __name__ == "__main__":
    main()
