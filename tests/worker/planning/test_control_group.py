"""What control groups of both versions allow a process."""

from pathlib import Path

import pytest

from barnraise.planning.control_group import ControlGroup

V1 = "11:cpu,cpuacct:/box\n7:memory:/box\n0::/\n"


@pytest.fixture
def group(tmp_path):
    """Return a function that writes the files of control groups and returns the process's group."""

    def create(membership: str, files: dict[str, str]) -> ControlGroup:
        for name, text in files.items():
            path = tmp_path / "fs" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (tmp_path / "cgroup").write_text(membership)
        return ControlGroup(tmp_path / "cgroup", tmp_path / "fs")

    return create


def test_memory_limit_of_any_parent_group_counts(group):
    files = {
        "memory.max": "max\n",
        "user/memory.max": "4294967296\n",
        "user/worker/memory.max": "max\n",
    }
    assert group("0::/user/worker\n", files).memory_limits() == [4294967296]


def test_memory_that_is_slowed_down_counts_as_limited(group):
    files = {"box/memory.max": "4294967296\n", "box/memory.high": "3221225472\n"}
    assert group("0::/box\n", files).memory_limits() == [3221225472]


def test_memory_limit_of_version_1_counts(group):
    files = {
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/box/memory.limit_in_bytes": "1073741824\n",
    }
    assert group(V1, files).memory_limits() == [1073741824]


def test_path_outside_the_container_counts_as_the_root(group):
    memory = group("0::/../../docker/4f5e\n", {"memory.max": "2147483648\n"})
    assert memory.memory_limits() == [2147483648]


def test_version_2_is_found_below_version_1(group):
    files = {"unified/memory.max": "2147483648\n", "memory/memory.limit_in_bytes": "99999\n"}
    assert sorted(group("4:memory:/\n0::/\n", files).memory_limits()) == [99999, 2147483648]


def test_machine_without_control_groups_has_no_limits(tmp_path):
    none = ControlGroup(tmp_path / "none", tmp_path)
    assert none.memory_limits() == none.memory_available() == []
    assert none.cpu_quota() is None and none.pressure_file() is None and none.oom_kills() == 0


@pytest.mark.parametrize("prefix", ["", "total_"])
def test_pages_of_files_count_as_available(group, prefix):
    stat = f"{prefix}inactive_file 300\n{prefix}active_file 100\nanon 500\n"
    if prefix:
        files = {"memory.limit_in_bytes": "1000", "memory.usage_in_bytes": "900"}
        files = {f"memory/box/{name}": text for name, text in files.items()}
        files["memory/box/memory.stat"] = stat
    else:
        files = {"box/memory.max": "1000", "box/memory.current": "900", "box/memory.stat": stat}
    membership = V1 if prefix else "0::/box\n"
    assert group(membership, files).memory_available() == [1000 - (900 - 300 - 50)]


def test_full_group_has_no_memory_available(group):
    files = {"memory.max": "1000\n", "memory.current": "1004\n"}
    assert group("0::/\n", files).memory_available() == [0]


def test_smallest_cpu_quota_counts(group):
    files = {"cpu.max": "max 100000\n", "a/cpu.max": "250000 100000\n", "a/b/cpu.max": "9 1\n"}
    assert group("0::/a/b\n", files).cpu_quota() == 2.5
    old = {"cpu/box/cpu.cfs_quota_us": "150000\n", "cpu/box/cpu.cfs_period_us": "100000\n"}
    unlimited = {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}
    assert group(V1, old | unlimited).cpu_quota() == 1.5


def test_kills_and_pressure_are_those_of_the_group(group, tmp_path):
    files = {
        "box/memory.events": "low 0\nmax 7\noom 2\noom_kill 1\n",
        "box/memory.pressure": "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
    }
    found = group("0::/box\n", files)
    assert found.oom_kills() == 1
    assert found.pressure_file() == tmp_path / "fs" / "box" / "memory.pressure"
    old = {"memory/box/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"}
    assert group(V1, old).oom_kills() == 3


def test_own_group_can_be_read_on_this_machine():
    own = ControlGroup()
    assert all(limit > 0 for limit in own.memory_limits())
    assert Path("/proc/self/cgroup").exists() or own.memory_available() == []
