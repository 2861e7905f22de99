"""Threads: as many as may run at a time, by affinity mask and container; pinned where the user asks for it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_paged.errors import ConfigurationError
from hf_paged.kernels.cpu import library, threads
from hf_paged.kernels.cpu.threads import ThreadLimits, cpu_quota, limit_threads, one_of_each_core


@pytest.fixture(autouse=True)
def restored():
    """The number of threads belongs to all tests."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_version_2_takes_the_tightest_of_a_group_and_its_parents(tmp_path: Path):
    groups, membership = tmp_path / "cgroup", tmp_path / "membership"
    write(membership, "0::/user.slice/job\n")
    assert cpu_quota(groups, membership) is None, "nothing is mounted"
    write(groups / "user.slice/job/cpu.max", "400000 100000\n")
    assert cpu_quota(groups, membership) == 4
    write(groups / "user.slice/cpu.max", "150000 100000\n")
    assert cpu_quota(groups, membership) == 1.5
    write(groups / "user.slice/cpu.max", "max 100000\n")
    assert cpu_quota(groups, membership) == 4


def test_version_1_takes_quota_and_period(tmp_path: Path):
    groups, membership = tmp_path / "cgroup", tmp_path / "membership"
    write(membership, "3:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n1:name=systemd:/x\n")
    write(groups / "memory/docker/abc/cpu.cfs_quota_us", "1\n")
    write(groups / "cpu,cpuacct/cpu.cfs_quota_us", "-1\n")
    write(groups / "cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    assert cpu_quota(groups, membership) is None
    # A container sees its own group at the root of the mount, although it is told the path outside.
    write(groups / "cpu,cpuacct/cpu.cfs_quota_us", "150000\n")
    assert cpu_quota(groups, membership) == 1.5
    write(groups / "cpu/docker/abc/cpu.cfs_quota_us", "50000\n")
    write(groups / "cpu/docker/abc/cpu.cfs_period_us", "100000\n")
    assert cpu_quota(groups, membership) == 0.5


@pytest.mark.parametrize("text", ["", "garbage", "max", "0 100000", "100000 0", "100000 x", "-1 100000"])
def test_unreadable_limits_are_no_limits(tmp_path: Path, text: str):
    write(tmp_path / "membership", "0::/\nnonsense\n")
    write(tmp_path / "cgroup/cpu.max", text)
    assert cpu_quota(tmp_path / "cgroup", tmp_path / "membership") is None


@pytest.mark.parametrize(
    ("processors", "quota", "expected"),
    [(2, None, 2), (2, 1.5, 2), (8, 1.5, 2), (8, 0.2, 1), (4, 16.0, 4), (1, 2.0, 1)],
)
def test_a_part_of_a_processor_counts_as_one(processors: int, quota: float | None, expected: int):
    assert ThreadLimits(processors, quota).num_threads == expected


def test_threads_are_lowered_to_what_may_run_and_never_raised(monkeypatch: pytest.MonkeyPatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(4)
    monkeypatch.setattr(threads, "thread_limits", lambda: ThreadLimits(4, 1.5))
    assert limit_threads() == 2 and torch.get_num_threads() == 2
    monkeypatch.setattr(threads, "thread_limits", lambda: ThreadLimits(16))
    assert limit_threads() == 2 and torch.get_num_threads() == 2


def test_what_the_environment_asks_for_is_kept_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(threads, "thread_limits", lambda: ThreadLimits(2))
    torch.set_num_threads(3)
    with caplog.at_level(logging.WARNING, logger=threads.__name__):
        assert limit_threads() == 3 and torch.get_num_threads() == 3
    assert "OMP_NUM_THREADS asks for 3 threads, but only 2 run at a time" in caplog.text


def test_one_processor_of_each_core_comes_first(tmp_path: Path):
    for processor, siblings in enumerate(["0,4", "1,5", "2,6", "3,7"] * 2):
        write(tmp_path / f"cpu{processor}/topology/thread_siblings_list", siblings)
    assert one_of_each_core((0, 1, 4, 5, 6), tmp_path) == (0, 1, 6, 4, 5)
    assert one_of_each_core((3, 1), tmp_path / "none") == (1, 3)


def test_pinning_takes_0_or_1(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(threads.PIN_VARIABLE, raising=False)
    assert not threads.pinning_requested()
    monkeypatch.setenv(threads.PIN_VARIABLE, "1")
    assert threads.pinning_requested()
    monkeypatch.setenv(threads.PIN_VARIABLE, "yes")
    with pytest.raises(ConfigurationError, match="HF_PAGED_CPU_PIN='yes'"):
        threads.pinning_requested()


PINNED = """
import os, torch
from hf_paged.kernels.cpu.threads import pin_threads_if_requested
torch.set_num_threads(2)
before = os.sched_getaffinity(0)
count = pin_threads_if_requested()
workers = [os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task") if int(task) != os.getpid()]
assert os.sched_getaffinity(0) == before, "Python's own thread, and what it starts, runs where it did"
print(count, sum(len(mask) == 1 for mask in workers), pin_threads_if_requested())
"""


@pytest.mark.skipif(not library.load(), reason=library.status().describe())
@pytest.mark.skipif(len(threads.usable_processors()) < 2, reason="one processor")
def test_workers_are_pinned_and_the_caller_is_not():
    environment = os.environ | {threads.PIN_VARIABLE: "1", "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", PINNED], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1", "0"]
