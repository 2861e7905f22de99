"""A small native library, compiled once per session, and places in which processes load it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_paged.kernels.cpu import building, isa
from tests.kernels.cpu.native_processes import Place, write_stand_in_sources


@pytest.fixture(scope="session")
def stand_in_sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of few C++ sources."""
    return write_stand_in_sources(tmp_path_factory.mktemp("native") / "csrc")


@pytest.fixture(scope="session")
def stand_in_library(stand_in_sources: Path) -> Path:
    """The library made of them, by the system's compiler."""
    if isa.machine_isas() == ("torch",):
        pytest.skip("this machine has no native operators")
    try:
        compiler = building.find_compiler()
    except building.BuildError as error:
        pytest.skip(str(error))
    output = stand_in_sources.parent / "stand_in.so"
    building.compile_library(output, compiler, building.find_torch(), stand_in_sources)
    return output


@pytest.fixture
def place(tmp_path: Path, stand_in_sources: Path, stand_in_library: Path) -> Place:
    """An empty cache and a compiler that counts."""
    return Place(tmp_path, stand_in_sources, stand_in_library)
