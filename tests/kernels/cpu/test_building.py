"""How the native library is compiled, and what its parts may share."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import zipfile
from pathlib import Path

import pytest

from hf_paged.kernels.cpu import building, isa, library, library_cache
from hf_paged.kernels.cpu.building import BuildError, Compiler, Torch
from tests.kernels.cpu.native_processes import STAND_IN, Place

ROOT = Path(__file__).parents[3]
KERNEL_FILES = sorted(path.name for path in building.SOURCES.glob("*.cpp") if building.level_of(path.name))
# A pointer to the function that unwinds the stack: the same data wherever it stands.
HARMLESS = {"DW.ref.__gxx_personality_v0"}


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    if isa.machine_isas() == ("torch",):
        pytest.skip("this machine has no native operators")
    try:
        return building.find_compiler()
    except BuildError as error:
        pytest.skip(str(error))


def _write(folder: Path, **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("name", "has", "lacks"),
    [
        ("op_norm.cpp", "-march=x86-64", "-mavx2"),
        ("isa.cpp", "-march=x86-64", "-mavx2"),
        ("norm_avx2.cpp", "-mavx2", "-mavx512f"),
        ("norm_avx512.cpp", "-mavx512vl", "-mavx512bf16"),
        ("isa_probe_avx512bf16.cpp", "-mavx512bf16", "-mamx-tile"),
        ("linear_amx.cpp", "-mamx-bf16", "-mavx512bf16"),
    ],
)
def test_a_file_is_compiled_for_what_its_name_says(name: str, has: str, lacks: str):
    flags = building.flags_of(name)
    assert has in flags and lacks not in flags


def test_an_inline_function_that_files_share_is_the_one_of_the_lowest_level(tmp_path: Path, compiler: Compiler):
    shared = """
        __attribute__((noinline)) inline int level() {
        #if defined(__AVX512F__)
          return 512;
        #elif defined(__AVX2__)
          return 2;
        #else
          return 0;
        #endif
        }
        #define EXPORT extern "C" __attribute__((visibility("default")))
    """
    _write(
        tmp_path,
        shared__h=shared,
        a_avx512__cpp='#include "shared.h"\nEXPORT int of_avx512() { return level(); }',
        b_avx2__cpp='#include "shared.h"\nEXPORT int of_avx2() { return level(); }',
        c__cpp='#include "shared.h"\nEXPORT int of_plain() { return level(); }',
    )
    output = tmp_path / "shared.so"
    building.compile_library(output, compiler, building.find_torch(), tmp_path)
    found = ctypes.CDLL(str(output))
    assert [found.of_plain(), found.of_avx2(), found.of_avx512()] == [0, 0, 0]


def test_a_failed_build_names_the_errors_and_leaves_nothing(tmp_path: Path, compiler: Compiler):
    sources = tmp_path / "csrc"
    sources.mkdir()
    _write(sources, good__cpp="int good() { return 1; }", bad__cpp="int bad() { return missing_name; }")
    with pytest.raises(BuildError, match=r"failed \(exit code 1\)\n +bad.cpp:1:20: error: .*missing_name"):
        building.compile_library(tmp_path / "out.so", compiler, building.find_torch(), sources)
    assert [path.name for path in tmp_path.iterdir()] == ["csrc"]


def test_a_name_that_no_file_defines_is_found_when_building(tmp_path: Path, compiler: Compiler):
    sources = tmp_path / "csrc"
    sources.mkdir()
    _write(sources, one__cpp="int nowhere(); int one() { return nowhere(); }")
    with pytest.raises(BuildError, match="undefined reference to `nowhere"):
        building.compile_library(tmp_path / "out.so", compiler, building.find_torch(), sources)


def test_the_compiler_is_the_one_that_cxx_names_with_its_words(place: Place, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", f"'{place.compiler}' --word")
    found = building.find_compiler()
    assert found.command == (str(place.compiler), "--word")
    building.compile_library(place.folder / "out.so", found, building.find_torch(), place.sources)
    calls = place.log.read_text().splitlines()
    assert len(calls) == 1 + sum(name.endswith(".cpp") for name in STAND_IN)
    assert all(call.startswith(" --word ") for call in calls)


def test_another_compiler_source_or_torch_is_another_library(tmp_path: Path, place: Place):
    def keys() -> tuple[str, str]:
        os.environ["CXX"] = str(place.compiler)
        return building.source_hash(tmp_path), building.compiler_key(building.find_compiler())

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", "")
        _write(tmp_path, a__cpp="1", b__h="2", notes__txt="3")
        sources, compiler = keys()
        _write(tmp_path, notes__txt="4")
        assert keys() == (sources, compiler)
        _write(tmp_path, b__h="3")
        assert keys()[0] != sources
        (tmp_path / "b.h").rename(tmp_path / "c.h")
        assert len({sources, keys()[0]}) == 2
        place.compiler.write_text(place.compiler.read_text() + "# newer\n")
        assert keys()[1] != compiler
    assert building.build_key(sources, "2.13.0") != building.build_key(sources, "2.14.0")


def test_a_compiler_behind_a_compiler_cache_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for folder in ("cache", "real"):
        program = _write(tmp_path / folder, **{"c++": "#!/bin/sh\n"}) / "c++"
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'cache'}:{tmp_path / 'real'}")
    monkeypatch.delenv("CXX", raising=False)
    before = building.find_compiler()
    program.write_text("#!/bin/sh\n# newer\n")
    after = building.find_compiler()
    assert before.command == after.command == ("c++",)
    assert building.compiler_key(before) != building.compiler_key(after)


def test_torch_without_headers_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    spec = building.importlib.util.spec_from_file_location("torch", tmp_path / "torch" / "__init__.py")
    monkeypatch.setattr(building.importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(BuildError, match="without the headers of its stable interface"):
        building.find_torch()


def test_the_library_names_no_path_of_this_machine_and_exports_no_symbol(stand_in_library: Path):
    assert str(stand_in_library.parent).encode() not in stand_in_library.read_bytes()
    assert str(ROOT).encode() not in stand_in_library.read_bytes()
    assert not [name for kind, name in _symbols(stand_in_library, "-D") if "hf_paged" in name]


def test_the_wheel_contains_the_library_and_names_the_platform(place: Place, monkeypatch: pytest.MonkeyPatch):
    wheel = pytest.importorskip("hatchling.builders.wheel")
    monkeypatch.setenv("HF_PAGED_BUILD_NATIVE", "1")
    monkeypatch.setenv("CXX", str(place.compiler))
    (path,) = wheel.WheelBuilder(str(ROOT)).build(directory=str(place.folder / "dist"), versions=["standard"])
    assert re.search(r"-py3-none-linux_x86_64\.whl$", path)
    unpacked = place.folder / "unpacked"
    with zipfile.ZipFile(path) as archive:
        archive.extractall(unpacked)
        assert "hf_paged/kernels/cpu/csrc/isa.cpp" in archive.namelist()
    entry = library_cache.read_entry(unpacked / "hf_paged" / "kernels" / "cpu")
    assert entry is not None and entry.path.read_bytes() == place.library.read_bytes()
    assert entry.sources == building.source_hash(unpacked / "hf_paged" / "kernels" / "cpu" / "csrc")


def test_without_the_library_the_wheel_is_for_every_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wheel = pytest.importorskip("hatchling.builders.wheel")
    monkeypatch.delenv("HF_PAGED_BUILD_NATIVE", raising=False)
    (path,) = wheel.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    assert path.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(path).namelist() if name.endswith(".so")]


def test_the_whole_library_is_there_on_a_machine_that_can_build_it(compiler: Compiler):
    if os.environ.get("HF_PAGED_CPU_ISA") == "torch":
        pytest.skip("HF_PAGED_CPU_ISA=torch asks for no library")
    assert library.load(), library.status().reason
    assert library.status().path.stat().st_size > 100_000


def _symbols(path: Path, *options: str) -> list[tuple[str, str]]:
    """Kind and name of each symbol that a file defines and shows to others."""
    command = ["nm", "-C", "--defined-only", "--extern-only", *options, str(path)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [(kind, name) for _, kind, name in (line.split(maxsplit=2) for line in lines)]


def _symbols_of_kernel(name: str, compiler: Compiler, torch: Torch, folder: Path) -> list[tuple[str, str]]:
    """Without optimization no inline function is hidden by being inlined, and compiling takes a second."""
    output = folder / f"{name}.o"
    command = [*compiler.command, *building.flags_of(name), "-O0", "-c", name, "-o", str(output)]
    subprocess.run(command, cwd=building.SOURCES, check=True)
    return [(kind, symbol) for kind, symbol in _symbols(output) if symbol not in HARMLESS]


@pytest.mark.slow
def test_kernel_files_show_only_their_tables(tmp_path: Path, compiler: Compiler):
    torch = building.find_torch()
    levels_of_weak: dict[str, set[str]] = {}
    for name in KERNEL_FILES:
        level = building.level_of(name)
        for kind, symbol in _symbols_of_kernel(name, compiler, torch, tmp_path):
            if kind in "WwVvu":
                levels_of_weak.setdefault(symbol, set()).add(level)
                continue
            last = symbol.partition("(")[0].rpartition("::")[2]
            assert last.endswith(level.removesuffix(".cpp")), f"{name} defines {symbol} for everybody; make it static"
    shared = {symbol for symbol, levels in levels_of_weak.items() if len(levels) > 1}
    assert not shared, f"the linker would keep one of several: {sorted(shared)}; make them static"
