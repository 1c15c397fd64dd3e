"""The memory in which this process holds mapped files."""

from __future__ import annotations

from pathlib import Path


def resident_bytes(*paths: Path) -> int:
    """Return the bytes of all mappings of files that are in memory for this process (Linux)."""
    total, is_ours = 0, False
    names = tuple(str(path.resolve()) for path in paths)
    with Path("/proc/self/smaps").open(encoding="utf-8") as lines:
        for line in lines:
            first, *rest = line.split()
            if "-" in first and not first.endswith(":"):
                is_ours = line.rstrip().endswith(names)
            elif is_ours and first == "Rss:":
                total += 1024 * int(rest[0])
    return total
