"""A tiny checkpoint for what only needs something that runs, and real processes that start at once."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_paged.cache_folder import cache_folder
from hf_paged.tools.packaged_model import FORMAT_VERSION, MODEL_NAME, PACKAGE
from tests.cli.processes import Zygote
from tests.tools.tiny_checkpoint import tiny_checkpoint  # noqa: F401


@pytest.fixture(scope="session")
def demo_is_tiny(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:  # noqa: F811
    """Variables with which `--demo` is the tiny checkpoint."""
    cache = tmp_path_factory.mktemp("cache")
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        version = "0"
    (cache / "models").mkdir()
    (cache / "native").symlink_to(cache_folder() / "native")  # for whoever wants the native operators
    (cache / "models" / f"{MODEL_NAME}-{version}-f{FORMAT_VERSION}").symlink_to(tiny_checkpoint)
    return {"HF_PAGED_CACHE": str(cache), "HF_PAGED_CPU_ISA": "torch", "HF_PAGED_NUM_BLOCKS": "256"}


@pytest.fixture(scope="session")
def hf_paged(demo_is_tiny: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Starts processes of `hf-paged`, whose `--demo` is the tiny checkpoint."""
    folder = tmp_path_factory.mktemp("processes")
    zygote = Zygote(folder, {**demo_is_tiny, "XDG_STATE_HOME": str(folder / "state")})
    yield zygote
    zygote.end()
