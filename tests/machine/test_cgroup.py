from __future__ import annotations

import pytest

from moet.machine.cgroup import cpu_quota, levels, memory_room

from .conftest import Tree

V2_MOUNT = "25 1 0:22 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1_MOUNTS = (
    "30 1 0:9 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
    "31 1 0:10 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    "32 1 0:11 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "33 1 0:12 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)


def v2(**files: str) -> dict[str, str]:
    names = {"proc/self/cgroup": "0::/a/b", "proc/self/mountinfo": V2_MOUNT}
    return names | {"sys/fs/cgroup/a/b/cgroup.procs": ""} | files


def test_a_machine_without_cgroups_has_no_limits(tree: Tree) -> None:
    root = tree({})
    assert (cpu_quota(root), memory_room(root), levels("cpu", root)) == (None, None, [])


@pytest.mark.parametrize(
    ("text", "quota"),
    [("150000 100000", 1.5), ("max 100000", None), ("400000 100000", 4.0), ("", None)],
)
def test_v2_quota(tree: Tree, text: str, quota: float | None) -> None:
    assert cpu_quota(tree(v2(**{"sys/fs/cgroup/a/b/cpu.max": text}))) == quota


def test_the_tightest_level_wins(tree: Tree) -> None:
    root = tree(
        v2(
            **{
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000",
                "sys/fs/cgroup/a/cpu.max": "200000 100000",
                "sys/fs/cgroup/a/b/memory.max": "1000",
                "sys/fs/cgroup/a/b/memory.current": "100",
                "sys/fs/cgroup/a/memory.max": "2000",
                "sys/fs/cgroup/a/memory.current": "1900",
                "sys/fs/cgroup/a/memory.stat": "anon 7\ninactive_file 50\n",
            }
        )
    )
    assert cpu_quota(root) == 2.0
    assert memory_room(root) == (1000, 150)


def test_a_container_sees_its_own_group_as_the_mount_point(tree: Tree) -> None:
    """Docker without a cgroup namespace: the path in /proc/self/cgroup is the host's."""
    root = tree(
        {
            "proc/self/cgroup": "0::/system.slice/docker-77.scope",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/cpu.max": "50000 100000",
        }
    )
    assert cpu_quota(root) == 0.5


def test_a_bind_mounted_subtree(tree: Tree) -> None:
    """The mount shows only a part of the hierarchy: paths are relative to the mount's root."""
    root = tree(
        {
            "proc/self/cgroup": "0::/pods/one/web",
            "proc/self/mountinfo": V2_MOUNT.replace(" / /sys", " /pods/one /sys"),
            "sys/fs/cgroup/web/cpu.max": "300000 100000",
        }
    )
    assert cpu_quota(root) == 3.0


def test_v1_is_asked_before_an_empty_unified_hierarchy(tree: Tree) -> None:
    root = tree(
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/job\n4:memory:/job/step\n0::/",
            "proc/self/mountinfo": V1_MOUNTS,
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "250000",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/job/step/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/job/step/memory.usage_in_bytes": "10",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "5000",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "4000",
            "sys/fs/cgroup/memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 500",
        }
    )
    assert cpu_quota(root) == 2.5
    assert memory_room(root) == (5000, 1500)


def test_v1_without_a_quota(tree: Tree) -> None:
    root = tree(
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/",
            "proc/self/mountinfo": V1_MOUNTS,
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        }
    )
    assert cpu_quota(root) is None
