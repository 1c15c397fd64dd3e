"""Limits that Linux control groups (versions 1 and 2) set on this process.

A process belongs to one group in each hierarchy (`/proc/self/cgroup`). The limits of the parent
groups also apply, so all mounted levels up to the root are read (`/proc/self/mountinfo`). Sources:
cgroups(7), proc(5), and Documentation/admin-guide/cgroup-v1 and cgroup-v2.rst of Linux.

Swap does not count as memory, since swapped-out weights or pages would stall every step, so limits
of swap are not read. `memory.soft_limit_in_bytes`, `memory.low` and `cpu.shares` are not limits.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_ROOT: Final = Path("/")
# Version 1 reports a limit near 2^63 if there is no limit.
_UNLIMITED: Final = 1 << 60


class MemoryLimit(Frozen):
    """A memory limit that a Linux control group sets, and how many bytes of it are free.

    `source` names the file that sets the limit, such as "memory.max of
    /sys/fs/cgroup/system.slice".
    """

    limit_bytes: int
    free_bytes: int
    source: str


class CoreLimit(Frozen):
    """A limit of processor time that a Linux control group sets, as a number of cores (2.5, say).

    `source` names the file that sets the limit.
    """

    num_cores: float
    source: str


class _Mount(Frozen):
    """A place where control groups are mounted: one line of /proc/self/mountinfo.

    The folder `folder` of the file system shows the control group with the path `root`, and the
    groups below it. `controllers` is only used for version 1 of control groups, in which each
    controller has a separate hierarchy.
    """

    version: int
    controllers: frozenset[str]  # only of version 1
    root: str
    folder: str


def memory_limits(root: Path = _ROOT) -> list[MemoryLimit]:
    """Return the memory limits of this process's control group and of each parent group.

    `root` is the folder above `proc` and `sys`; tests pass a copy.
    """
    limits: list[MemoryLimit] = []
    for version, groups in _hierarchies(root, "memory"):
        read = _v1_memory_limits if version == 1 else _v2_memory_limits
        limits += read(root, groups)
    return limits


def core_limits(root: Path = _ROOT) -> list[CoreLimit]:
    """Return the processor-time limits of this process's control group and of each parent group.

    `root` is the folder above `proc` and `sys`; tests pass a copy.
    """
    limits = []
    for version, groups in _hierarchies(root, "cpu"):
        for group in groups:
            folder = _within(root, group)
            if version == 1:
                name = "cpu.cfs_quota_us"
                words = _words(folder / name) + _words(folder / "cpu.cfs_period_us")
            else:
                name = "cpu.max"
                words = _words(folder / name)
            # The words are the microseconds of each period, and the length of the period.
            if len(words) == 2 and all(map(_is_number, words)) and int(words[1]):
                num_cores = int(words[0]) / int(words[1])
                limits.append(CoreLimit(num_cores, f"{name} of {group}"))
    return limits


def _v2_memory_limits(root: Path, groups: Sequence[str]) -> Iterator[MemoryLimit]:
    """Yield the memory limits of version 2 control groups, whose folders are `groups`.

    `memory.high` is a limit too: Linux slows down a group that uses more.
    """
    for group in groups:
        folder = _within(root, group)
        stat, used_bytes = (
            _named_numbers(folder / "memory.stat"),
            _number(folder / "memory.current") or 0,
        )
        cached = sum(stat.get(key, 0) for key in ("inactive_file", "active_file"))
        for name in ("memory.max", "memory.high"):
            limit = _number(folder / name)
            if limit is not None:
                free_bytes = _free_bytes(limit, used_bytes, cached)
                yield MemoryLimit(limit, free_bytes, f"{name} of {group}")


def _v1_memory_limits(root: Path, groups: Sequence[str]) -> Iterator[MemoryLimit]:
    """Yield the memory limits of version 1 control groups, whose folders are `groups`.

    The last limit, from memory.stat of the first group, covers parent groups that are not mounted.
    """
    for group in groups:
        folder = _within(root, group)
        limit = _number(folder / "memory.limit_in_bytes")
        limits_inner_groups = _number(folder / "memory.use_hierarchy") != 0
        if limit is not None and (group == groups[0] or limits_inner_groups):
            yield from _v1_memory_limit(root, group, "memory.limit_in_bytes", limit)
    stat = _named_numbers(_within(root, groups[0]) / "memory.stat")
    if "hierarchical_memory_limit" in stat:
        name = "hierarchical_memory_limit in memory.stat"
        yield from _v1_memory_limit(root, groups[0], name, stat["hierarchical_memory_limit"])


def _v1_memory_limit(root: Path, group: str, name: str, limit: int) -> Iterator[MemoryLimit]:
    """Yield the memory limit `limit` of a version 1 control group, unless it means "no limit"."""
    if limit >= _UNLIMITED:
        return
    folder = _within(root, group)
    stat, used_bytes = (
        _named_numbers(folder / "memory.stat"),
        _number(folder / "memory.usage_in_bytes"),
    )
    cached = stat.get("total_inactive_file", 0) + stat.get("total_active_file", 0)
    yield MemoryLimit(limit, _free_bytes(limit, used_bytes or 0, cached), f"{name} of {group}")


def _free_bytes(limit_bytes: int, used_bytes: int, reclaimable_bytes: int) -> int:
    """Return how many bytes a process can still allocate within a control group's memory limit.

    Cached files count as free, since the system drops them before it refuses memory.
    """
    return max(0, limit_bytes - max(0, used_bytes - reclaimable_bytes))


def _hierarchies(root: Path, controller: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the groups that limit this process, for each control group hierarchy with a controller.

    Each item is the version (1 or 2) and a list of folders: the folder of this process's own group,
    then the folders of its parent groups. `controller` is "memory" or "cpu".
    """
    mounts = list(_mounts(root)) or _usual_mounts(controller)
    for controllers, path in _own_groups(root):
        version = 1 if controllers else 2
        if version == 1 and controller not in controllers:
            continue
        candidate_mounts = [
            mount
            for mount in mounts
            if mount.version == version and (version == 2 or controller in mount.controllers)
        ]
        # Other mounts may show the subtrees of other containers.
        with_group = [mount for mount in candidate_mounts if _is_visible(mount, path)]
        for mount in with_group or candidate_mounts:
            yield version, _group_folders(root, mount, path)


def _usual_mounts(controller: str) -> list[_Mount]:
    """Return where control groups are usually mounted, for systems without a list of mounts."""
    return [
        _Mount(2, frozenset(), "/", "/sys/fs/cgroup"),
        _Mount(1, frozenset((controller,)), "/", f"/sys/fs/cgroup/{controller}"),
    ]


def _is_visible(mount: _Mount, path: str) -> bool:
    """Return whether a mount shows the control group with this path."""
    return not _relative_path(mount, path).startswith("..")


def _relative_path(mount: _Mount, path: str) -> str:
    """Return the path of a control group relative to the root of a mount."""
    relative = posixpath.relpath(posixpath.normpath(path), posixpath.normpath(mount.root))
    return relative if relative.split("/")[0] == ".." else f"./{relative}"


def _group_folders(root: Path, mount: _Mount, path: str) -> list[str]:
    """Return the folders of a control group and of its parents, from the group up to the mount.

    A container may see only its own subtree, with or without a namespace. If the path does not lie
    below the root of the mount, it is taken relative to the mount's folder; if that folder does not
    exist, the mount's folder counts as the group.
    """
    top = PurePosixPath(mount.folder)
    relative = _relative_path(mount, path)
    if not _is_visible(mount, path):
        relative = posixpath.normpath(path).lstrip("/")
        if not _within(root, str(top / relative)).is_dir():
            relative = "."
    group = top / relative
    levels = [group, *group.parents]
    return [str(level) for level in levels[: levels.index(top) + 1]]


def _own_groups(root: Path) -> Iterator[tuple[frozenset[str], str]]:
    """Yield the controllers and the path of each control group that this process belongs to.

    The set of controllers is empty for version 2.
    """
    for line in _lines(root / "proc/self/cgroup"):
        parts = line.split(":", 2)
        if len(parts) == 3:
            yield frozenset(filter(None, parts[1].split(","))), parts[2]


def _mounts(root: Path) -> Iterator[_Mount]:
    """Yield the hierarchies of control groups that are mounted for this process."""
    versions = {"cgroup": 1, "cgroup2": 2}
    for line in _lines(root / "proc/self/mountinfo"):
        # number, parent, device, root, folder, options, [fields ...] - type, source, options
        first, separator, last = line.partition(" - ")
        fields, kind = first.split(" "), last.split(" ")
        if not separator or len(fields) < 6 or kind[0] not in versions:
            continue
        controllers = frozenset(kind[2].split(",")) if len(kind) > 2 else frozenset[str]()
        yield _Mount(versions[kind[0]], controllers, _unescaped(fields[3]), _unescaped(fields[4]))


def _unescaped(text: str) -> str:
    """Return a path from /proc/self/mountinfo with its octal escapes replaced."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _within(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def _number(path: Path) -> int | None:
    words = _words(path)
    return int(words[0]) if words and _is_number(words[0]) else None


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdecimal()


def _named_numbers(path: Path) -> dict[str, int]:
    """Return a control group file's numbers by name, from lines like "inactive_file 4096"."""
    pairs = (line.split() for line in _lines(path))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and _is_number(pair[1])}


def _words(path: Path) -> list[str]:
    lines = _lines(path)
    return lines[0].split() if lines else []


def _lines(path: Path) -> list[str]:
    """Return the lines of a control group's file; empty if it cannot be read."""
    try:
        # Names of groups may be any bytes.
        return path.read_bytes().decode(errors="surrogateescape").split("\n")
    except (OSError, ValueError):
        return []
