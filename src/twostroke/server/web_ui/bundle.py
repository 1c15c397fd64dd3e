"""Joins the page's modules into one script, and its style sheets into one.

The sources are plain ES modules and CSS, in one form: imports of names, exports of declarations,
each at the beginning of a line. A module becomes a function that returns its exports.
"""

from __future__ import annotations

import posixpath
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

IMPORT: Final = re.compile(r'^import \{([^}]*)\} from "([^"]+)";$', re.MULTILINE)
_EXPORT: Final = re.compile(
    r"^export ((?:async )?(?:function\*?|class|const) ([A-Za-z_$][\w$]*))", re.MULTILINE
)
_OTHER_FORM: Final = re.compile(r"^(?:import|export)\b", re.MULTILINE)
_SHEET: Final = re.compile(r'^@import "([^"]+)";$', re.MULTILINE)


def script(modules: Mapping[str, str], entry: str) -> str:
    """Return one script that does what `entry` does with its imports.

    `modules` are sources by path. A script that imports nothing stays as it is.

    Raises:
        ValueError: a module is missing, imports itself through others, or is not in our form.
    """
    if not IMPORT.search(modules[entry]):
        return modules[entry]
    parts = _parts(modules, entry, {})
    return "\n".join(["const modules = {};", *parts])


def style(sheets: Mapping[str, str], entry: str) -> str:
    """Return a style sheet with the contents of those that it imports."""
    return _SHEET.sub(lambda found: sheets[_resolved(entry, found[1])], sheets[entry])


def _parts(modules: Mapping[str, str], name: str, state: dict[str, bool]) -> Iterator[str]:
    """Yield a module's function after those that it imports; `state` says which are complete."""
    if name not in modules or state.get(name) is False:
        raise ValueError(f"{name} is missing, or imports itself through others")
    if state.get(name):
        return
    state[name] = False
    source, paths = modules[name], {}
    for _, path in IMPORT.findall(source):
        paths[path] = _resolved(name, path)
        yield from _parts(modules, paths[path], state)
    state[name] = True
    exports = ", ".join(export for _, export in _EXPORT.findall(source))
    body = IMPORT.sub(lambda found: f'const {{{found[1]}}} = modules["{paths[found[2]]}"];', source)
    body = _EXPORT.sub(r"\1", body)
    if _OTHER_FORM.search(body):
        raise ValueError(f"{name} has an import or export in another form")
    yield f'modules["{name}"] = (() => {{\n{body}return {{ {exports} }};\n}})();'


def _resolved(importer: str, path: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(importer), path))
