"""What the GPU can do: the bandwidth of a copy and the rate of a large product, against which all else is held."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from ..settings import Run
from ..sizes import Sizes, sizes_for
from ..timing import Timing, measure


def run(run: Run) -> Iterator[dict[str, Any]]:
    """Yields versions, bandwidth and peak.

    Args:
        run (`Run`):
            What the part is given.
    """
    yield describe(run.device)
    sizes = sizes_for(run.dry_run)
    copy = time_copy(run, sizes)
    bandwidth = 2 * sizes.copy_bytes / copy.seconds
    yield {
        "copy_bandwidth": bandwidth,
        "best_copy_bandwidth": 2 * sizes.copy_bytes / copy.best_seconds,
        "says": f"copies at {bandwidth / 1e9:,.0f} GB/s (read and written bytes together)",
    }
    left, right = (torch.randn(sizes.product, sizes.product, device=run.device, dtype=sizes.dtype) for _ in range(2))
    product = measure([lambda: left @ right], run.device, sizes.min_seconds)
    peak = 2.0 * sizes.product**3 / product.best_seconds
    yield {"peak_flops": peak, "says": f"multiplies {sizes.dtype} at {peak / 1e12:,.1f} TFLOP/s"}


def time_copy(run: Run, sizes: Sizes) -> Timing:
    """Returns how long a copy within the device's memory takes.

    Args:
        run (`Run`):
            What the part is given.
        sizes (`Sizes`):
            Of the run.
    """
    source = torch.ones(sizes.copy_bytes, dtype=torch.uint8, device=run.device)
    target = torch.empty_like(source)
    return measure([lambda: target.copy_(source)], run.device, sizes.min_seconds)


def describe(device: str) -> dict[str, Any]:
    """Returns what is known without measuring.

    Args:
        device (`str`):
            `"cuda"` or `"cpu"`.
    """
    import hf_paged

    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "triton": _triton_version(),
        "hf_paged": hf_paged.__version__,
    }
    row: dict[str, Any] = {"versions": versions, "device": "CPU (dry run)"}
    if device != "cpu":
        properties = torch.cuda.get_device_properties(0)
        row |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "num_sms": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
        }
    row["says"] = f"{row['device']}; " + ", ".join(f"{name} {version}" for name, version in versions.items())
    return row


def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)
