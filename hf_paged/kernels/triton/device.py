"""What a GPU is to the kernels: its architecture, its multiprocessors, and whether Triton can use it."""

from __future__ import annotations

import dataclasses
import functools
import os
import re

import torch

MIN_CAPABILITY = (8, 0)
MIN_TRITON = (3, 6)


@dataclasses.dataclass(frozen=True)
class DeviceTraits:
    """What a launch depends on.

    Args:
        architecture (`str`):
            A key of the tables in `configs.py`.
        num_processors (`int`):
            Multiprocessors, or compute units.
    """

    architecture: str
    num_processors: int


def interpreted() -> bool:
    """Returns whether Triton's interpreter runs the kernels, on a CPU, for tests."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def architecture_of(capability: tuple[int, int]) -> str:
    """Returns whose configurations an NVIDIA GPU uses.

    Args:
        capability (`tuple[int, int]`):
            Its compute capability.
    """
    known = {8: "sm_80" if capability[1] == 0 else "sm_89", 9: "sm_90", 10: "sm_100"}
    # The newest consumer GPUs have the least shared memory: what fits them fits what is not known yet.
    return known.get(capability[0], "sm_120")


@functools.cache
def device_traits(device: torch.device) -> DeviceTraits:
    """Returns what launches on a device depend on.

    Args:
        device (`torch.device`):
            A GPU; or, under the interpreter, a CPU, which is then taken for a GPU of the oldest kind.
    """
    if device.type != "cuda":
        return DeviceTraits("sm_80", 108)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return DeviceTraits("gfx942", properties.multi_processor_count)
    return DeviceTraits(architecture_of((properties.major, properties.minor)), properties.multi_processor_count)


def unavailable_reason() -> str | None:
    """Returns why Triton's kernels cannot run on this machine, or `None`."""
    if not interpreted():
        if not torch.cuda.is_available():
            return "needs a GPU, and torch sees none"
        if torch.version.hip is not None:
            name = torch.cuda.get_device_properties().gcnArchName.split(":")[0]
            if not name.startswith("gfx9"):
                return f"needs an AMD GPU of the gfx9 kind, not {name}"
        capability = torch.cuda.get_device_capability()
        if torch.version.hip is None and capability < MIN_CAPABILITY:
            return f"needs a GPU of compute capability {_dotted(MIN_CAPABILITY)} or more, not {_dotted(capability)}"
    # Only here: importing Triton takes long.
    try:
        import triton
    except ImportError as error:
        return f"needs the triton package, which cannot be imported: {error}"
    numbers = re.findall(r"\d+", triton.__version__)
    if tuple(map(int, numbers[:2])) < MIN_TRITON:
        return f"needs Triton {_dotted(MIN_TRITON)} or newer, not {triton.__version__}"
    return None


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
