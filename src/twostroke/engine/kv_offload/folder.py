"""Lists, verifies and removes the pages of a disk tier, for `twostroke cache`."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from msgspec import field

from twostroke.core.errors import UsageError
from twostroke.core.frozen import Frozen
from twostroke.engine.kv_offload.disk import ABOUT, HEADER_BYTES, entry_of, read_page, stored_pages

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class StoredPages(Frozen):
    """Counts and times of the stored KV pages of one `KvCacheSpec`, for `twostroke cache`.

    Times are seconds since 1970; 0.0 if there is none.

    Attributes:
        folder: the name of the pages' folder.
        model: the name of the model.
        kv_format, arithmetic, page_size: fields of the spec.
        num_pages: number of the pages, without snapshots of recurrent states.
        num_bytes: bytes of all files.
        saved_s: seconds of prefill that all pages together save.
        num_kept: pages that must be kept at present.
        used_s: the last use of any page.
        kept_until_s: the latest time until which any page must be kept.
    """

    folder: str
    model: str
    kv_format: str
    arithmetic: str
    page_size: int
    num_pages: int
    num_bytes: int
    saved_s: float
    num_kept: int = field(name="kept")
    used_s: float
    kept_until_s: float = field(name="until_s")


def read_folder(root: Path, now_s: float) -> list[StoredPages]:
    """Return a summary of the KV pages in a folder, one for each `KvCacheSpec`.

    Raises:
        UsageError: `root` is not the folder of a page cache.
    """
    _check(root)
    folders = [folder for folder in sorted(root.iterdir()) if (folder / ABOUT).is_file()]
    return [_read_spec_folder(folder, now_s) for folder in folders]


def verify(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Read all stored KV pages; remove the damaged files, and yield each with two texts.

    The first text says how the file is damaged. The second says why the file could not be removed;
    it is empty if the file was removed.

    Raises:
        UsageError: `root` is not the folder of a page cache.
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
            failure = ""
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                failure = error.strerror or str(error)
            yield path, fault, failure


def clean(root: Path, model: str | None, before_s: float) -> tuple[int, int, str]:
    """Remove stored KV pages last used before a time, of one model or of all models.

    Returns the number of removed pages and bytes, and why a page could not be removed (empty if all
    were). A page that must be kept until some time counts as used at that time.

    Raises:
        UsageError: `root` is not the folder of a page cache, or has no pages of the model.
    """
    stored = read_folder(root, before_s)
    folders = [pages.folder for pages in stored if model in {None, pages.model}]
    if model is not None and not folders:
        models = ", ".join(sorted({pages.model for pages in stored})) or "nothing"
        raise UsageError(f"{root} has no pages of {model!r}; it has: {models}.")
    count, num_bytes, failure = 0, 0, ""
    for path in stored_pages(root):
        if path.parent.parent.name not in folders:
            continue
        try:
            file_stat = path.stat()
            if file_stat.st_mtime < before_s:
                path.unlink()
                count += 1
                num_bytes += file_stat.st_size
        except FileNotFoundError:  # a server has removed it
            continue
        except OSError as error:
            failure = error.strerror or str(error)
    for folder in folders:
        if not any((root / folder).glob("??/*")):
            shutil.rmtree(root / folder, ignore_errors=True)
    return count, num_bytes, failure


def _check(root: Path) -> None:
    if not root.is_dir():
        raise UsageError(f"There is no folder {str(root)!r}.")
    if any(root.iterdir()) and not any(root.glob(f"*/{ABOUT}")):
        raise UsageError(f"{str(root)!r} is not the folder of a page cache.")


def _read_spec_folder(folder: Path, now_s: float) -> StoredPages:
    about: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        content = json.loads((folder / ABOUT).read_text())
        about = content if isinstance(content, dict) else {}
    entries, used_s = [], 0.0
    for path in folder.glob("??/*"):
        with suppress(OSError):
            file_stat = path.stat()
            if (entry := entry_of(path)) is not None:
                entries.append(entry)
                # `st_mtime` can be in the future, for pages to keep. Each use sets the file's
                # times, so `st_ctime` is the time of the last use.
                used_s = max(used_s, min(file_stat.st_mtime, file_stat.st_ctime))
    state_bytes = about.get("state_bytes") or 0
    pages = [e for e in entries if not state_bytes or e.num_bytes != HEADER_BYTES + state_bytes]
    keep_times = [page.used_s for page in pages if page.used_s > now_s]
    return StoredPages(
        folder=folder.name,
        model=str(about.get("name", "?")),
        kv_format=str(about.get("kv_format", "?")),
        arithmetic=str(about.get("arithmetic", "?")),
        page_size=_page_size(about.get("groups")),
        num_pages=len(pages),
        num_bytes=sum(entry.num_bytes for entry in entries),
        saved_s=sum(entry.saved_s for entry in entries),
        num_kept=len(keep_times),
        used_s=used_s,
        kept_until_s=max(keep_times, default=0.0),
    )


def _page_size(groups: Any) -> int:
    page_size = groups.get("page_size") if isinstance(groups, dict) else None
    return page_size if isinstance(page_size, int) else 0
