"""How the native library arrives: each process of these tests is a fresh one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hf_paged.errors import ConfigurationError
from hf_paged.kernels.cpu import building, isa, library, library_cache
from hf_paged.kernels.cpu.library import NativeStatus
from tests.kernels.cpu.native_processes import Place, only_owner_writes


def _operators() -> list[str]:
    return [name for name in ("isa", "set_isa") if hasattr(torch.ops.hf_paged, name)]


def _load_again() -> list[bool]:
    return [library.load() for _ in range(3)]


def _load_in_forked_children() -> list[int]:
    return [_exit_code_of_child(lambda: library.load() and torch.ops.hf_paged.isa() != "torch") for _ in range(2)]


def _exit_code_of_child(succeeds: Callable[[], bool]) -> int:
    child = os.fork()
    if child == 0:
        os._exit(0 if succeeds() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _fork_while_a_thread_decides() -> int:
    """The child finds the lock held by a thread that it does not have."""
    library._status = library._loaded = None
    with library._lock:
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            os._exit(0 if library.load() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _load_from_threads() -> set[str]:
    library._status = library._loaded = None
    found: list[NativeStatus] = []
    threads = [threading.Thread(target=lambda: found.append(library.status())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {status.source for status in found}


def test_the_first_process_builds_and_the_next_one_finds_it(place: Place):
    first, second = place.load(_operators), place.load(_operators)
    assert (first.status.source, second.status.source) == ("built", "cache")
    assert first.status.path == second.status.path == place.built_library()
    assert first.answer == second.answer == ["isa", "set_isa"]
    assert place.num_builds == 1
    assert "Building the native CPU operators" in first.warnings[0] and len(first.warnings) == 1
    assert second.messages == [("INFO", f"CPU operators: native, {second.status.isa} (cache, {second.status.path}).")]


def test_a_warm_start_runs_no_process(place: Place):
    place.load()
    calls = place.log.read_text()
    assert place.load().status.source == "cache"
    assert place.log.read_text() == calls


def test_ten_processes_at_once_build_once_and_all_load_it(place: Place):
    running = [place.start(_operators, FAKE_SECONDS="0.5") for _ in range(10)]
    loaded = [process.result() for process in running]
    assert sorted(each.status.source for each in loaded) == ["built"] + ["cache"] * 9
    assert all(each.answer == ["isa", "set_isa"] for each in loaded)
    assert place.num_builds == 1
    assert {text for each in loaded for text in each.warnings} == {
        "Building the native CPU operators, once; this takes half a minute, on a busy machine minutes ...",
        "Another process is building the native CPU operators; waiting for it ...",
    }


def test_a_builder_that_is_killed_blocks_nobody_and_leaves_nothing_half_written(place: Place):
    running = place.start(FAKE_SECONDS="2")
    while not place.num_builds:
        time.sleep(0.01)
    running.kill()
    loaded = place.load(CXX=str(place.write_compiler("other-c++")))
    assert loaded.status.source == "built" and place.num_builds == 2
    assert not [*place.cache.rglob("build-*")]
    assert sorted(path.name for path in loaded.status.path.parent.iterdir()) == [
        "libhf_paged_cpu.json",
        "libhf_paged_cpu.so",
    ]


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _fill_with_zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _write_garbage(path: Path) -> None:
    path.write_bytes(os.urandom(4096))


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _flip_one_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [_truncate, _fill_with_zeros, _write_garbage, _empty, _flip_one_bit])
def test_a_damaged_library_is_noticed_and_built_again(damage: Callable[[Path], None], place: Place):
    path = place.load().status.path
    damage(path)
    loaded, after = place.load(_operators), place.load()
    assert loaded.status.source == "built" and loaded.answer == ["isa", "set_isa"]
    assert loaded.warnings[0] == f"The library in {path.parent} is damaged and not used."
    assert (after.status.source, place.num_builds) == ("cache", 2)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, '{"sha256": "0"}', '{"sha256": "0", "sources": "0"}'])
def test_a_damaged_manifest_is_noticed_and_the_library_built_again(text: str, place: Place):
    path = place.load().status.path
    path.with_suffix(".json").write_text(text)
    assert place.load().status.source == "built"
    assert place.load().status.source == "cache"


def _write_library_for_another_torch(folder: Path) -> Path:
    """It is complete, but wants a function that no torch has."""
    source, output = folder / "other.cpp", folder / "other.so"
    source.write_text('extern "C" void torch_of_another_age(); extern "C" void f() { torch_of_another_age(); }')
    command = [*building.find_compiler().command, "-shared", "-fPIC", str(source), "-o", str(output)]
    subprocess.run(command, check=True)
    return output


def test_a_cached_library_that_does_not_load_is_built_again_once(place: Place):
    path = place.load().status.path
    path.write_bytes(_write_library_for_another_torch(place.folder).read_bytes())
    library_cache.write_manifest(path, "whatever")
    loaded = place.load(_operators)
    assert loaded.status.source == "built" and loaded.answer == ["isa", "set_isa"]
    assert "torch_of_another_age; building it again." in loaded.warnings[0]
    assert place.load().status.source == "cache"


def test_a_built_library_that_does_not_load_is_told_and_torch_runs(place: Place):
    other = place.write_compiler("other-c++", library=_write_library_for_another_torch(place.folder))
    loaded = place.load(_load_again, CXX=str(other))
    assert loaded.status.source == "none" and "torch_of_another_age" in loaded.status.reason
    assert loaded.answer == [False] * 3 and place.num_builds == 1


def test_a_library_in_the_package_is_used_without_a_compiler_or_a_cache(place: Place):
    package = place.folder / "package"
    package.mkdir()
    packaged = package / library_cache.LIBRARY_NAME
    packaged.write_bytes(place.library.read_bytes())
    library_cache.write_manifest(packaged, building.source_hash(place.sources))
    loaded = place.load(_operators, patches=["packaged"], CXX="/bin/false")
    assert (loaded.status.source, loaded.status.path, loaded.warnings) == ("wheel", packaged, [])
    assert loaded.answer == ["isa", "set_isa"] and not place.cache.exists()


@pytest.mark.parametrize("what", ["damaged", "of other sources", "for another torch"])
def test_a_library_in_the_package_that_does_not_fit_is_told_and_one_built(what: str, place: Place):
    package = place.folder / "package"
    package.mkdir()
    packaged = package / library_cache.LIBRARY_NAME
    another = what == "for another torch"
    packaged.write_bytes((_write_library_for_another_torch(place.folder) if another else place.library).read_bytes())
    library_cache.write_manifest(packaged, "0" if what == "of other sources" else building.source_hash(place.sources))
    if what == "damaged":
        _truncate(packaged)
    loaded = place.load(patches=["packaged"])
    assert loaded.status.source == "built" and place.num_builds == 1
    assert str(package) in loaded.warnings[0] and len(loaded.warnings) == 2


@pytest.mark.parametrize(
    ("compiler", "patches", "reason"),
    [
        ("/bin/false", (), "/bin/false failed (exit code 1), without a word"),
        ("/nowhere/c++", (), "CXX names '/nowhere/c++', which is no program"),
        ('c++ "-O2', (), "CXX='c++ \"-O2' is no command: No closing quotation"),
        ("/bin/true", (), "/bin/true ended without an error, but made no library"),
        ("", ("no programs",), "there is no C++ compiler (none of c++, g++, clang++; CXX may name another)"),
    ],
)
def test_without_a_compiler_torch_runs_and_one_line_says_why(compiler: str, patches, reason: str, place: Place):
    loaded = place.load(_operators, patches=patches, CXX=compiler, CC=compiler)
    assert loaded.status == NativeStatus("none", None, "torch", isa.machine_isas(), reason)
    assert loaded.answer == [] and loaded.error is None
    expected = f"Native CPU operators are not used, torch's are, which is slower: {reason}."
    assert [text for text in loaded.warnings if not text.startswith("Building")] == [expected]


def test_the_words_of_a_failing_compiler_are_told_and_it_is_not_asked_again(place: Place):
    program = place.folder / "failing-c++"
    program.write_text(f"#!/bin/sh\necho call >> {place.log}\necho 'isa.cpp:1: error: no such thing' >&2\nexit 3\n")
    program.chmod(0o755)
    loaded = place.load(_load_again, CXX=str(program))
    assert loaded.status.reason == f"{program} failed (exit code 3)\n    isa.cpp:1: error: no such thing"
    assert loaded.answer == [False] * 3
    assert place.log.read_text().count("call") <= len(list(place.sources.glob("*.cpp"))), "tried once"
    assert place.load().status.source == "built", "a failure is not remembered on disk"


def test_a_library_of_any_compiler_is_used_where_there_is_none(place: Place):
    built = place.load().status.path
    loaded = place.load(patches=["no programs"], CXX="")
    assert (loaded.status.source, loaded.status.path, loaded.warnings) == ("cache", built, [])


@pytest.mark.parametrize("home", ["a file", "no home"])
def test_a_home_that_cannot_be_written_sends_the_library_to_a_folder_of_ones_own(home: str, place: Place):
    blocked = place.folder / "blocked"
    blocked.write_text("a file where the folder should be")
    patches, cache = (("no home",), "") if home == "no home" else ((), str(blocked / "cache"))
    first = place.load(patches=patches, HF_PAGED_CACHE=cache)
    second = place.load(patches=patches, HF_PAGED_CACHE=cache)
    assert (first.status.source, second.status.source) == ("built", "cache")
    assert place.temporary in first.status.path.parents and place.num_builds == 1
    assert only_owner_writes(place.temporary / f"hf_paged-native-{os.getuid()}")


def test_a_cache_folder_whose_name_is_too_long_sends_the_library_to_a_folder_of_ones_own(place: Place):
    loaded = place.load(HF_PAGED_CACHE=str(place.folder / ("long" * 100)))
    assert place.temporary in loaded.status.path.parents
    (told,) = [text for text in loaded.warnings if "HF_PAGED_CACHE" in text]
    assert "longlong" in told and str(place.temporary) in told


def test_a_cache_folder_that_runs_no_programs_sends_the_library_to_a_folder_of_ones_own(place: Place):
    for source in ("built", "cache"):
        status = place.load(patches=["cache of no programs"]).status
        assert status.source == source and place.temporary in status.path.parents
    assert place.num_builds == 1 and not list(place.cache.rglob("*.so"))


def test_a_full_disk_sends_the_library_to_a_folder_of_ones_own(place: Place):
    program = place.folder / "c++"
    full = f'case "$*" in *{place.cache}*) echo "final link failed: No space left on device"; exit 1;; esac'
    program.write_text(place.compiler.read_text().replace("#!/bin/sh\n", f"#!/bin/sh\n{full}\n"))
    program.chmod(0o755)
    loaded = place.load(patches=["full cache"], CXX=str(program))
    assert loaded.status.source == "built" and place.temporary in loaded.status.path.parents
    assert "No space left on device" in place.load(CXX=str(program), TMPDIR="").status.reason


@pytest.mark.skipif(os.getuid() == 0, reason="nothing is read-only to root")
def test_a_read_only_cache_folder_sends_the_library_to_a_folder_of_ones_own(place: Place):
    place.cache.mkdir(mode=0o500)
    assert place.temporary in place.load().status.path.parents


def test_a_library_in_a_cache_that_cannot_be_written_is_used(place: Place):
    built = place.load().status.path
    (place.cache / "native" / "build.lock").unlink()
    for path in [*place.cache.rglob("*"), place.cache]:
        path.chmod(0o500 if path.is_dir() else 0o400)
    try:
        assert place.load().status == NativeStatus("cache", built, isa.machine_isas()[0], isa.machine_isas())
    finally:
        for path in [place.cache, *place.cache.rglob("*")]:
            path.chmod(0o700)
    assert not (place.cache / "native" / "build.lock").exists()


def test_a_temporary_folder_that_others_can_write_to_is_not_trusted(place: Place):
    blocked = place.folder / "blocked"
    blocked.write_text("")
    own = place.temporary / f"hf_paged-native-{os.getuid()}"
    own.mkdir()
    own.chmod(0o777)
    loaded = place.load(HF_PAGED_CACHE=str(blocked / "cache"))
    assert loaded.status.source == "none" and place.num_builds == 0
    assert f"{own}: belongs to somebody else, or others can write to it" in loaded.status.reason
    assert "HF_PAGED_CACHE may name one" in loaded.status.reason


@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        ("old torch", "they need torch 2.10 or newer, this is 2.9.1+cpu"),
        ("no AVX2", "they need a processor with AVX2, FMA and F16C"),
        ("ARM", "they are made for x86-64 processors, not for aarch64"),
        ("macOS", "they are made for Linux, not for darwin"),
    ],
)
def test_where_it_cannot_run_nothing_is_built_and_the_reason_is_told(patch: str, reason: str, place: Place):
    loaded = place.load(_operators, patches=[patch])
    assert (loaded.status.source, loaded.status.isa, loaded.status.reason) == ("none", "torch", reason)
    assert loaded.answer == [] and place.num_builds == 0 and not place.cache.exists()
    assert len(loaded.warnings) == 1 and reason in loaded.warnings[0]


def test_forced_torch_neither_builds_nor_loads(place: Place):
    loaded = place.load(_operators, HF_PAGED_CPU_ISA="torch")
    assert (loaded.status.isa, loaded.status.reason, loaded.answer) == ("torch", "HF_PAGED_CPU_ISA=torch", [])
    assert place.num_builds == 0 and not place.cache.exists() and not loaded.warnings


@pytest.mark.parametrize("level", [level for level in isa.LEVELS if level != "torch"])
def test_each_level_can_be_forced_or_is_refused(level: str, place: Place):
    loaded = place.load(_current_level, HF_PAGED_CPU_ISA=level)
    if level in isa.machine_isas():
        assert (loaded.status.isa, loaded.answer, loaded.status.reason) == (level, level, "HF_PAGED_CPU_ISA")
    else:
        assert isinstance(loaded.error, ConfigurationError) and place.num_builds == 0
        for word in ("HF_PAGED_CPU_ISA", repr(level), ", ".join(isa.machine_isas()), "unset"):
            assert word in str(loaded.error)


def _current_level() -> str:
    return torch.ops.hf_paged.isa()


def test_a_level_that_only_the_library_knows_to_be_missing_is_refused(place: Place):
    """A system may list AMX and still refuse it to a process."""
    if "amx" in isa.machine_isas():
        pytest.skip("this machine has AMX")
    loaded = place.load(patches=["all of AMX"], HF_PAGED_CPU_ISA="amx")
    assert isinstance(loaded.error, ConfigurationError) and "'amx'" in str(loaded.error)


def _correct_the_variable() -> tuple[str, str]:
    os.environ["HF_PAGED_CPU_ISA"] = "avx3"
    library._status = None
    with pytest.raises(ConfigurationError, match="is not a level") as refused:
        library.load()
    os.environ["HF_PAGED_CPU_ISA"] = "avx2"
    return str(refused.value), library.status().isa


def test_a_wrong_level_can_be_corrected_in_the_same_process(place: Place):
    message, level = place.load(_correct_the_variable).answer
    assert level == "avx2" and place.num_builds == 1
    assert message == (
        "HF_PAGED_CPU_ISA='avx3' is not a level; take one of amx, avx512, avx2, torch "
        f"(this machine has {', '.join(isa.machine_isas())}), or leave it unset for the fastest."
    )


@pytest.mark.parametrize("ask", [_load_in_forked_children, _fork_while_a_thread_decides, _load_from_threads])
def test_forks_and_threads(ask: Callable[[], object], place: Place):
    loaded = place.load(ask)
    assert loaded.error is None
    assert loaded.answer in ([0, 0], 0, {"cache"})


def test_only_the_newest_libraries_are_kept(place: Place):
    place.load()
    native = place.cache / "native"
    for number in range(12):
        (native / f"old-{number}").mkdir()
        os.utime(native / f"old-{number}", (number, number))
    built = place.load(CXX=str(place.write_compiler("newer-c++"))).status.path
    left = [path.name for path in native.iterdir() if path.is_dir()]
    assert len(left) == library_cache._KEPT and built.parent.name in left
    assert "old-11" in left and "old-0" not in left


def test_a_build_that_takes_long_gives_signs_of_life(tmp_path: Path, monkeypatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setenv("HF_PAGED_CACHE", str(tmp_path))
    monkeypatch.setattr(library_cache, "_WAITING_NOTE", 0.01)

    def build(target: Path) -> None:
        while "Still building" not in caplog.text:
            time.sleep(0.01)
        target.write_bytes(b"a library")

    _, built_here = library_cache.obtain_entry("key", "compiler", "sources", build)
    num_notes = caplog.text.count("Still building")
    assert built_here and num_notes >= 1
    time.sleep(0.05)
    assert caplog.text.count("Still building") == num_notes  # and none after it


def test_a_status_survives_json(place: Place):
    status = place.load().status
    assert NativeStatus.from_dict(json.loads(json.dumps(status.to_dict()))) == status
    assert str(status.path) in status.describe() and "built now" in status.describe()
