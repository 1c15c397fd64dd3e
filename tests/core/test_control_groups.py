"""Limits of control groups: both versions, every level, and what containers see of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from twostroke.core import hardware
from twostroke.core.control_groups import core_limits, memory_limits

if TYPE_CHECKING:
    from pathlib import Path

NO_LIMIT = "9223372036854771712"  # of version 1
V2 = "31 23 0:28 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MEMORY = "35 31 0:32 / /sys/fs/cgroup/memory rw shared:7 - cgroup cgroup rw,memory\n"
V1_CPU = "36 31 0:33 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
UNIT = "/system.slice/twostroke.service"


def made_up(root: Path, groups: str, mounts: str, files: dict[str, str]) -> Path:
    """Return a made-up root folder with `proc` and `sys`; `files` are below sys/fs/cgroup."""
    written = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    written |= {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts}
    for name, text in written.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


# What a process sees, and the limit of memory that holds: its bytes and the file that says so.
MEMORY = {
    "version 2, a unit of systemd": (
        f"0::{UNIT}\n",
        V2,
        {f"{UNIT[1:]}/memory.max": "350", f"{UNIT[1:]}/memory.current": "100"},
        (350, 250, f"memory.max of /sys/fs/cgroup{UNIT}"),
    ),
    "version 2, the level above has less": (
        f"0::{UNIT}\n",
        V2,
        {f"{UNIT[1:]}/memory.max": "max", "system.slice/memory.max": "400"},
        (400, 400, "memory.max of /sys/fs/cgroup/system.slice"),
    ),
    "version 2, a group whose limit is five levels up": (
        "0::/a/b/c/d/e\n",
        V2,
        {"a/b/c/d/e/memory.max": "max", "a/memory.max": "77"},
        (77, 77, "memory.max of /sys/fs/cgroup/a"),
    ),
    "version 2, a group that is slowed before it is killed": (
        "0::/a\n",
        V2,
        {"a/memory.max": "500", "a/memory.high": "300"},
        (300, 300, "memory.high of /sys/fs/cgroup/a"),
    ),
    "version 2, in a container's namespace": (
        "0::/\n",
        V2,
        {"memory.max": "350", "memory.current": "50"},
        (350, 300, "memory.max of /sys/fs/cgroup"),
    ),
    "version 2, a container that sees only its own subtree": (
        "0::/kubepods/pod7/c1\n",
        V2.replace(" / /sys", " /kubepods/pod7/c1 /sys"),
        {"memory.max": "350"},
        (350, 350, "memory.max of /sys/fs/cgroup"),
    ),
    "version 2, a group below the mounted subtree": (
        "0::/kubepods/pod7/c1/inner\n",
        V2.replace(" / /sys", " /kubepods/pod7 /sys"),
        {"c1/inner/memory.max": "max", "memory.max": "350"},
        (350, 350, "memory.max of /sys/fs/cgroup"),
    ),
    "version 2, a mount from outside of the namespace": (
        "0::/\n",
        V2.replace(" / /sys", " /../../.. /sys"),
        {"memory.max": "350"},
        (350, 350, "memory.max of /sys/fs/cgroup"),
    ),
    "version 2, a process outside of its namespace": (
        "0::/../other\n",
        V2,
        {"memory.max": "350"},
        (350, 350, "memory.max of /sys/fs/cgroup"),
    ),
    "version 2, a name with a colon, a blank and two dots": (
        "0::/a b/..c:d\n",
        V2,
        {"a b/..c:d/memory.max": "350"},
        (350, 350, "memory.max of /sys/fs/cgroup/a b/..c:d"),
    ),
    "version 2, mounted where a blank is in the name": (
        "0::/a\n",
        V2.replace("/sys/fs/cgroup", "/sys/fs/cgroup/my\\040groups"),
        {"my groups/a/memory.max": "350"},
        (350, 350, "memory.max of /sys/fs/cgroup/my groups/a"),
    ),
    "version 2, beside a mount of another container's subtree": (
        f"0::{UNIT}\n",
        V2.replace(" / /sys/fs/cgroup", " /lxc/c1 /var/lib/c1") + V2,
        {f"{UNIT[1:]}/memory.max": "350", "../../../var/lib/c1/memory.max": "100"},
        (350, 350, f"memory.max of /sys/fs/cgroup{UNIT}"),
    ),
    "version 2, mounted twice": (
        f"0::{UNIT}\n",
        V2.replace("/sys/fs/cgroup", "/host/sys/fs/cgroup") + V2,
        {f"{UNIT[1:]}/memory.max": "350"},
        (350, 350, f"memory.max of /sys/fs/cgroup{UNIT}"),
    ),
    "version 2, no mount is listed": (
        f"0::{UNIT}\n",
        "",
        {f"{UNIT[1:]}/memory.max": "350"},
        (350, 350, f"memory.max of /sys/fs/cgroup{UNIT}"),
    ),
    "version 2, a group that was removed while its process runs": (
        "0::/pod/gone (deleted)\n",
        V2,
        {"pod/memory.max": "350"},
        (350, 350, "memory.max of /sys/fs/cgroup/pod"),
    ),
    "version 1, its own group": (
        "4:memory:/box\n1:name=systemd:/\n0::/\n",
        V1_MEMORY,
        {"memory/box/memory.limit_in_bytes": "350", "memory/memory.limit_in_bytes": NO_LIMIT},
        (350, 350, "memory.limit_in_bytes of /sys/fs/cgroup/memory/box"),
    ),
    "version 1, the level above has less": (
        "4:memory:/box/inner\n",
        V1_MEMORY,
        {
            "memory/box/inner/memory.limit_in_bytes": "500",
            "memory/box/inner/memory.stat": "hierarchical_memory_limit 350\n",
            "memory/box/memory.limit_in_bytes": "350",
            "memory/box/memory.usage_in_bytes": "100",
            "memory/box/memory.stat": "inactive_file 3\ntotal_inactive_file 20\n",
        },
        (350, 270, "memory.limit_in_bytes of /sys/fs/cgroup/memory/box"),
    ),
    "version 1, a level above that does not limit those below it": (
        "4:memory:/box/inner\n",
        V1_MEMORY,
        {
            "memory/box/inner/memory.limit_in_bytes": "500",
            "memory/box/memory.limit_in_bytes": "350",
            "memory/box/memory.use_hierarchy": "0",
        },
        (500, 500, "memory.limit_in_bytes of /sys/fs/cgroup/memory/box/inner"),
    ),
    "version 1, a container that sees only its own subtree": (
        "4:memory:/docker/c1\n",
        V1_MEMORY.replace(" / /sys", " /docker/c1 /sys"),
        {"memory/memory.limit_in_bytes": "350"},
        (350, 350, "memory.limit_in_bytes of /sys/fs/cgroup/memory"),
    ),
    "version 1, beside a mount of another container's subtree": (
        "4:memory:/docker/c1\n",
        V1_MEMORY.replace(" / /sys/fs/cgroup/memory", " /docker/c2 /var/lib/c2") + V1_MEMORY,
        {
            "memory/docker/c1/memory.limit_in_bytes": "350",
            "../../../var/lib/c2/memory.limit_in_bytes": "100",
        },
        (350, 350, "memory.limit_in_bytes of /sys/fs/cgroup/memory/docker/c1"),
    ),
    "version 1, no mount is listed": (
        "4:memory:/docker/c1\n",
        "",
        {"memory/docker/c1/memory.limit_in_bytes": "350"},
        (350, 350, "memory.limit_in_bytes of /sys/fs/cgroup/memory/docker/c1"),
    ),
    "version 1, a limit above the mounted subtree": (
        "4:memory:/pod/c1\n",
        V1_MEMORY.replace(" / /sys", " /pod/c1 /sys"),
        {
            "memory/memory.limit_in_bytes": NO_LIMIT,
            "memory/memory.stat": "cache 1\nhierarchical_memory_limit 350\n",
        },
        (350, 350, "hierarchical_memory_limit in memory.stat of /sys/fs/cgroup/memory"),
    ),
    "both versions: memory is in the first": (
        f"4:memory:/box\n0::{UNIT}\n",
        V1_MEMORY + V2.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified"),
        {
            "memory/box/memory.limit_in_bytes": "350",
            f"unified{UNIT}/cgroup.controllers": "",
        },
        (350, 350, "memory.limit_in_bytes of /sys/fs/cgroup/memory/box"),
    ),
}


@pytest.mark.parametrize("name", MEMORY)
def test_the_lowest_memory_limit_applies(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, mounts, files, (limit_bytes, free_bytes, source) = MEMORY[name]
    monkeypatch.setattr(hardware, "_ROOT", made_up(tmp_path, groups, mounts, files))
    result = hardware.memory_limit()
    assert result is not None
    assert (result.limit_bytes, result.free_bytes, result.source) == (
        limit_bytes,
        free_bytes,
        source,
    )
    assert hardware.memory_total() == limit_bytes
    assert hardware.memory_available() == free_bytes
    assert hardware.scarcest_memory() == result


@pytest.mark.parametrize(
    ("groups", "mounts", "files"),
    [
        ("", "", {}),
        ("0::/a\n", V2, {"a/memory.max": "max\n"}),
        ("0::/a\n", V2, {"a/memory.max": "damaged\n", "memory.max": ""}),
        ("0::/gone\n", V2, {}),
        ("4:memory:/\n", V1_MEMORY, {"memory/memory.limit_in_bytes": NO_LIMIT}),
        ("4:cpu:/box\n", V1_MEMORY, {"memory/box/memory.limit_in_bytes": "350"}),
        ("not a line\n4:memory\n", "damaged - cgroup2\n- \n", {"memory.max": "350"}),
    ],
)
def test_without_a_limit_the_machine_is_the_limit(
    groups: str,
    mounts: str,
    files: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = made_up(tmp_path, groups, mounts, files)
    assert memory_limits(root) == core_limits(root) == []
    monkeypatch.setattr(hardware, "_ROOT", root)
    assert hardware.memory_limit() is None
    assert hardware.scarcest_memory() is None
    assert hardware.memory_total() > hardware.memory_available() > 10**6


def test_the_scarcest_memory_need_not_have_the_lowest_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other programs may use up the memory of a parent group, whose limit is higher."""
    files = {
        "a/b/memory.max": "300",
        "a/b/memory.current": "10",
        "a/memory.max": "1000",
        "a/memory.current": "900",
    }
    monkeypatch.setattr(hardware, "_ROOT", made_up(tmp_path, "0::/a/b\n", V2, files))
    limit, scarcest = hardware.memory_limit(), hardware.scarcest_memory()
    assert limit is not None
    assert scarcest is not None
    assert (limit.source, scarcest.source) == (
        "memory.max of /sys/fs/cgroup/a/b",
        "memory.max of /sys/fs/cgroup/a",
    )
    assert (hardware.memory_total(), hardware.memory_available()) == (300, 100)


def test_cached_files_count_as_free_memory(tmp_path: Path) -> None:
    """Files in a RAM disk (`shmem`) do not, though the counter `file` includes them."""
    files = {
        "a/memory.max": "1000",
        "a/memory.current": "900",
        "a/memory.stat": "anon 300\nfile 600\nshmem 50\ninactive_file 400\nactive_file 150\n",
    }
    [limit] = memory_limits(made_up(tmp_path, "0::/a\n", V2, files))
    assert limit.free_bytes == 650


# What a process sees, and how many of 64 cores it may keep busy.
CORES = {
    "version 2": ("0::/a/b\n", V2, {"a/b/cpu.max": "200000 100000"}, 2),
    "version 2, the level above has less": (
        "0::/a/b\n",
        V2,
        {"a/b/cpu.max": "400000 100000", "a/cpu.max": "150000 50000"},
        3,
    ),
    "version 2, less than a core": ("0::/a\n", V2, {"a/cpu.max": "50000 100000"}, 1),
    "version 2, one and a half": ("0::/a\n", V2, {"a/cpu.max": "150000 100000"}, 1),
    "version 2, no quota": ("0::/a\n", V2, {"a/cpu.max": "max 100000"}, 64),
    "version 2, more than there are": ("0::/a\n", V2, {"a/cpu.max": "9900000 100000"}, 64),
    "version 2, damaged": ("0::/a\n", V2, {"a/cpu.max": "100000 0"}, 64),
    "version 1": (
        "2:cpu,cpuacct:/a/b\n",
        V1_CPU,
        {
            "cpu,cpuacct/a/b/cpu.cfs_quota_us": "-1",
            "cpu,cpuacct/a/b/cpu.cfs_period_us": "100000",
            "cpu,cpuacct/a/cpu.cfs_quota_us": "300000",
            "cpu,cpuacct/a/cpu.cfs_period_us": "100000",
        },
        3,
    ),
    "version 1, beside a mount of another container's subtree": (
        "2:cpu,cpuacct:/docker/c1\n",
        V1_CPU.replace(" / /sys/fs/cgroup/cpu,cpuacct", " /docker/c2 /var/lib/c2") + V1_CPU,
        {
            "cpu,cpuacct/docker/c1/cpu.cfs_quota_us": "500000",
            "cpu,cpuacct/docker/c1/cpu.cfs_period_us": "100000",
            "../../../var/lib/c2/cpu.cfs_quota_us": "100000",
            "../../../var/lib/c2/cpu.cfs_period_us": "100000",
        },
        5,
    ),
    "version 1, no mount is listed": (
        "2:cpuacct,cpu:/docker/c1\n",
        "",
        {
            "cpu/docker/c1/cpu.cfs_quota_us": "500000",
            "cpu/docker/c1/cpu.cfs_period_us": "100000",
        },
        5,
    ),
    "version 1, a container that sees only its own subtree": (
        "2:cpu,cpuacct:/docker/c1\n",
        V1_CPU.replace(" / /sys", " /docker/c1 /sys"),
        {"cpu,cpuacct/cpu.cfs_quota_us": "500000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
        5,
    ),
}


@pytest.mark.parametrize("name", CORES)
def test_the_lowest_quota_limits_the_cores(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, mounts, files, num_cores = CORES[name]
    monkeypatch.setattr(hardware, "_ROOT", made_up(tmp_path, groups, mounts, files))
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda _: set(range(64)))
    assert hardware.num_cores() == num_cores
    assert (hardware.core_limit() is None) == (num_cores == 64)
