"""The README.md of a quantized checkpoint: how it was made, what was measured, how it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .. import __version__

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

    from .quantize import QuantizeResult

_LOADED_BY = {
    "compressed-tensors": "Transformers (with the package compressed-tensors), vLLM",
    "gptq": "Transformers (with gptqmodel), vLLM, SGLang",
    "awq": "Transformers (with gptqmodel), vLLM, SGLang",
}
_RECIPES = {
    "rtn": "Weights are rounded to the nearest code, without looking at text.",
    "fp8": "Weights are rounded to float8 e4m3, each row with a scale of its own.",
    "gptq": "GPTQ (Frantar et al., arXiv 2210.17323): columns in the order of how much their inputs matter, with "
    "groups found before; 1 % damping.",
    "awq": "AWQ (Lin et al., arXiv 2306.00978): inputs scaled, and groups cut off, where that makes less output error.",
}


def model_card(result: QuantizeResult, measured: Mapping[str, str] | None = None, name: str | None = None) -> ModelCard:
    """Returns the card of a checkpoint.

    Args:
        result (`QuantizeResult`):
            How it was made.
        measured (`Mapping[str, str]`, *optional*):
            Further figures, by what they are: they become rows of a table.
        name (`str`, *optional*):
            What it is called; its folder's name by default.
    """
    name = name or Path(result.out).name
    source = Path(result.model).name if Path(result.model).is_dir() else result.model
    groups = "one scale a row" if result.group_size == -1 else f"groups of {result.group_size}"
    bits = "float8 e4m3" if result.method == "fp8" else f"{result.bits} bits"
    recipe = [_RECIPES[result.method]]
    if result.calibration is not None:
        recipe.append(f"Calibrated on {result.calibration_tokens:,} tokens: {result.calibration}.")
    rows = {
        "weights on disk": f"{result.weight_bytes / 1e6:,.1f} MB (dense {result.dense_bytes / 1e6:,.1f} MB)",
        "linears": f"{result.num_linears} quantized, {result.num_dense} dense",
        **({"squared error of a linear's output, mean": f"{result.error:.2%}"} if result.error is not None else {}),
        **(measured or {}),
    }
    text = f"""
# {name}

{source}, quantized by `hf-paged quantize --method {result.method}` (hf_paged {__version__}): {bits}, {groups},
{"symmetric" if result.symmetric else "asymmetric"}, in the layout of {result.layout}.

{" ".join(recipe)}

{_table(rows)}

{_loading(name, f"Also loaded by {_LOADED_BY[result.layout]}.")}
"""
    is_on_hub = "/" in result.model and not Path(result.model).is_dir()
    base = result.model if is_on_hub else None
    return _card(text, [result.layout, f"{result.bits}-bit"], base)


def dense_card(name: str, text: str, measured: Mapping[str, str]) -> ModelCard:
    """Returns the card of a checkpoint that is not quantized.

    Args:
        name (`str`):
            What it is called.
        text (`str`):
            How it was made.
        measured (`Mapping[str, str]`):
            Figures, by what they are.
    """
    return _card(f"\n# {name}\n\n{text}\n\n{_table(measured)}\n\n{_loading(name, '')}\n", [], None)


def _card(text: str, tags: list[str], base_model: str | None) -> ModelCard:
    from huggingface_hub import ModelCard, ModelCardData

    data = ModelCardData(
        library_name="transformers", pipeline_tag="text-generation", tags=["hf_paged", *tags], base_model=base_model
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n{text}")


def _table(rows: Mapping[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items())])


def _loading(name: str, others: str) -> str:
    return f"""## How to load it

```python
from hf_paged import AutoPagedModelForCausalLM

model = AutoPagedModelForCausalLM.from_pretrained("{name}")
```

`hf-paged serve {name}` serves it. {others}""".rstrip()
