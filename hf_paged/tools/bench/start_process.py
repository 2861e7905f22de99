"""A process that times `from_pretrained` and the first token, by hf_paged or by stock Transformers."""

from __future__ import annotations

import time

from .fresh_process import answer_parent, settings_of_parent


def main() -> None:
    """Measures one start."""
    settings = settings_of_parent()
    import torch

    if settings["system"] == "transformers":
        from transformers import AutoModelForCausalLM as Loader
    else:
        from ...auto import AutoPagedModelForCausalLM as Loader  # type: ignore[assignment]
    input_ids = torch.tensor([settings["prompt"]])
    begin, begin_cpu = time.perf_counter(), time.process_time()
    model = Loader.from_pretrained(settings["model"], dtype=getattr(torch, settings["dtype"]))
    loaded = time.perf_counter()
    model.generate(input_ids, max_new_tokens=1, do_sample=False)
    end, end_cpu = time.perf_counter(), time.process_time()
    answer_parent(
        {
            "load_seconds": loaded - begin,
            "first_token_seconds": end - loaded,
            "seconds": end - begin,
            "cpu_seconds": end_cpu - begin_cpu,
        }
    )


if __name__ == "__main__":
    main()
