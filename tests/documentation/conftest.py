"""A hub that needs no network: the packaged real model under the name that the pages use."""

from __future__ import annotations

from pathlib import Path

import pytest

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
REVISION = "0" * 40


@pytest.fixture(scope="session")
def hub_environment(tmp_path_factory: pytest.TempPathFactory, real_model_path: str) -> dict[str, str]:
    """Variables with which the hub's name is found in a cache, as after a download, and nothing is asked for."""
    home = tmp_path_factory.mktemp("hf_home")
    repository = home / "hub" / f"models--{HUB_NAME.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(REVISION)
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / REVISION).symlink_to(Path(real_model_path), target_is_directory=True)
    return {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
