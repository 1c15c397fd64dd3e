"""A page cache's folder as people see it: what it holds, whether that is whole, removing it."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from twostroke.core.errors import UsageError
from twostroke.core.frozen import Frozen
from twostroke.engine.kv_offload.disk import ABOUT, HEADER_BYTES, entry_of, read_page, stored_pages

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class StoredKind(Frozen):
    """The pages of one kind: the model's name, what they fit, and how many there are.

    `saved_s` is the computing that they would save, and `kept` how many are to stay until a time to
    come. `used_s` is the last use and `until_s` the last moment until which any is to stay, both in
    seconds since 1970 (0.0 if there is none).
    """

    folder: str
    model: str
    kv_format: str
    arithmetic: str
    page_size: int
    num_pages: int
    num_bytes: int
    saved_s: float
    kept: int
    used_s: float
    until_s: float


def read_folder(root: Path, now_s: float) -> list[StoredKind]:
    """Return the kinds of pages in a folder.

    Raises:
        UsageError: it is not the folder of a page cache.
    """
    _check(root)
    return [_kind(place, now_s) for place in sorted(root.iterdir()) if (place / ABOUT).is_file()]


def verify(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Read all pages; yield those that are damaged, with what is wrong, after removing them.

    The last text says why a page could not be removed; it is empty if it was.

    Raises:
        UsageError: it is not the folder of a page cache.
    """
    _check(root)
    for path in stored_pages(root):
        name = bytes.fromhex(path.parent.name + path.name)
        try:
            page = memoryview(bytearray(max(0, path.stat().st_size - HEADER_BYTES)))
            fault = read_page(path, name, page)
        except OSError as error:
            fault = f"cannot be read: {error.strerror}."
        if fault is not None:
            why = ""
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                why = error.strerror or str(error)
            yield path, fault, why


def clean(root: Path, model: str | None, before_s: float) -> tuple[int, int, str]:
    """Remove pages that were last used before a moment, of one model or of all.

    Returns how many pages and bytes, and why others could not be removed; empty if all were. A page
    that is to stay longer was not used before then.

    Raises:
        UsageError: it is not the folder of a page cache, or has nothing of the model.
    """
    kinds = read_folder(root, before_s)
    chosen = [kind.folder for kind in kinds if model in {None, kind.model}]
    if model is not None and not chosen:
        known = ", ".join(sorted({kind.model for kind in kinds})) or "nothing"
        raise UsageError(f"{root} has no pages of {model!r}; it has: {known}.")
    count, num_bytes, why = 0, 0, ""
    for path in stored_pages(root):
        if path.parent.parent.name not in chosen:
            continue
        try:
            facts = path.stat()
            if facts.st_mtime < before_s:
                path.unlink()
                count, num_bytes = count + 1, num_bytes + facts.st_size
        except FileNotFoundError:  # a server has removed it
            continue
        except OSError as error:
            why = error.strerror or str(error)
    for name in chosen:
        if not any((root / name).glob("??/*")):
            shutil.rmtree(root / name, ignore_errors=True)
    return count, num_bytes, why


def _check(root: Path) -> None:
    if not root.is_dir():
        raise UsageError(f"There is no folder {str(root)!r}.")
    if any(root.iterdir()) and not any(root.glob(f"*/{ABOUT}")):
        raise UsageError(f"{str(root)!r} is not the folder of a page cache.")


def _kind(place: Path, now_s: float) -> StoredKind:
    about: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        found = json.loads((place / ABOUT).read_text())
        about = found if isinstance(found, dict) else {}
    entries, used_s = [], 0.0
    for path in place.glob("??/*"):
        with suppress(OSError):
            facts = path.stat()
            if (entry := entry_of(path)) is not None:
                entries.append(entry)
                # A use sets the file's own times, so the inode changes last at the last use.
                used_s = max(used_s, min(facts.st_mtime, facts.st_ctime))
    kept = [entry.used_s for entry in entries if entry.used_s > now_s]
    return StoredKind(
        folder=place.name,
        model=str(about.get("name", "?")),
        kv_format=str(about.get("kv_format", "?")),
        arithmetic=str(about.get("arithmetic", "?")),
        page_size=_page_size(about.get("groups")),
        num_pages=len(entries),
        num_bytes=sum(entry.num_bytes for entry in entries),
        saved_s=sum(entry.saved_s for entry in entries),
        kept=len(kept),
        used_s=used_s,
        until_s=max(kept, default=0.0),
    )


def _page_size(groups: Any) -> int:
    found = groups.get("page_size") if isinstance(groups, dict) else None
    return found if isinstance(found, int) else 0
