"""A copy of a checkpoint whose weights carry a little noise.

The packaged model's weights were rounded to 4 bits once, so that a rounding onto the same numbers loses nothing of
them. With noise they are as those of any other model.
"""

from __future__ import annotations

from pathlib import Path

SEED = 20260101


def write_noisy_copy(model: str, folder: Path, noise: float, seed: int = SEED) -> None:
    """Writes a copy.

    Args:
        model (`str`):
            A folder or a name on the Hub.
        folder (`Path`):
            Where to.
        noise (`float`):
            Each weight of a matrix is multiplied with a normal number of this standard deviation around 1.
        seed (`int`, defaults to 20260101):
            Of the noise.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto", use_safetensors=True)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in loaded.parameters():
            if parameter.ndim > 1:
                factors = 1 + noise * torch.randn(parameter.shape, generator=generator)
                parameter.copy_(parameter.float() * factors)
    loaded.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
