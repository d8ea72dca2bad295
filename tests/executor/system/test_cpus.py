"""Default threads: what affinity, cores and the quota of the cgroup allow."""

import pytest

from vllm_duck.executor.compute import kernel
from vllm_duck.executor.serve import local
from vllm_duck.executor.system import cpus
from vllm_duck.executor.system.cpus import cpu_quota, describe_cpus, within_quota


@pytest.fixture
def system(tmp_path):
    """A fake root of the system: write(path, text) makes its files."""

    def write(path, text):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return tmp_path

    write("proc/self/cgroup", "0::/\n")
    return write


def test_a_container_s_quota_is_its_root_s(system):
    root = system("sys/fs/cgroup/cpu.max", "150000 100000\n")
    assert cpu_quota(root) == 1.5
    assert within_quota(64, root) == 1


def test_the_tightest_of_all_cgroups_above_counts(system):
    system("proc/self/cgroup", "0::/system.slice/duck.service\n")
    system("sys/fs/cgroup/system.slice/duck.service/cpu.max", "max 100000\n")
    system("sys/fs/cgroup/system.slice/cpu.max", "350000 50000\n")
    root = system("sys/fs/cgroup/cpu.max", "max 100000\n")
    assert cpu_quota(root) == 7
    assert within_quota(64, root) == 7
    assert within_quota(4, root) == 4


@pytest.mark.parametrize("path", ["/docker/0123", "/"])
def test_a_quota_of_cgroup_v1(system, path):
    """In a container the directory of that path is missing, or the container's own."""
    system("proc/self/cgroup", f"5:memory:{path}\n4:cpu,cpuacct:{path}\n0::/init\n")
    system("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    root = system("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "250000\n")
    assert cpu_quota(root) == 2.5
    assert within_quota(64, root) == 2


def test_without_a_quota_nothing_is_cut(system, tmp_path):
    assert cpu_quota(tmp_path) is None
    system("proc/self/cgroup", "4:cpu:/\n")
    system("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    root = system("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    assert cpu_quota(root) is None
    assert within_quota(64, root) == 64
    assert within_quota(64, tmp_path / "no such system") == 64


def test_less_than_a_cpu_is_one_thread(system):
    root = system("sys/fs/cgroup/cpu.max", "20000 100000\n")
    assert within_quota(64, root) == 1


def test_people_are_told_of_the_quota(system, monkeypatch):
    monkeypatch.setattr(cpus.os, "cpu_count", lambda: 64)
    monkeypatch.setattr(cpus, "thread_cpus", lambda: set(range(8)))
    root = system("sys/fs/cgroup/cpu.max", "150000 100000\n")
    expected = "64 cpus, 8 of them allowed, a quota of 1.5: 1 threads by default"
    assert describe_cpus(root) == expected


@pytest.fixture
def large_machine(monkeypatch):
    """64 cores, of which the cgroup may use a cpu and a half."""
    monkeypatch.setattr(cpus, "cpu_quota", lambda root: 1.5)
    for module in (cpus, kernel):
        monkeypatch.setattr(module, "physical_cores", lambda: list(range(64)))


def test_a_duck_s_kernel_keeps_to_the_quota(large_machine):
    assert kernel.MoeKernel(pin=False).num_threads == 1


def test_local_ducks_share_out_the_quota(
    tmp_path, bf16_checkpoint, large_machine, monkeypatch
):
    flags = []
    monkeypatch.setattr(local, "_spawn", flags.append)
    monkeypatch.setattr(local, "_wait_ready", lambda *args: None)
    local.LocalDucks.start(bf16_checkpoint.model_dir, num_ducks=2, cpus=range(64))
    assert ["--threads=1" in each for each in flags] == [True, True]
