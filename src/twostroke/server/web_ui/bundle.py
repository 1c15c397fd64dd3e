"""Bundles the JavaScript modules of the web UI into one script, and its style sheets into one.

The sources are ES modules and CSS. Of ES modules, only imports of names and exports of declarations
are understood, each at the beginning of a line. A module becomes a function that returns its
exports.
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
    """Bundle the ES module `entry` and the modules that it imports into one script.

    Browsers then load the web UI in one request. `modules` has the JavaScript sources by path. A
    module without imports is returned unchanged.

    Raises:
        ValueError: a module is missing, imports itself indirectly, or has an import or export
            in a form that this bundler does not know.
    """
    if not IMPORT.search(modules[entry]):
        return modules[entry]
    parts = _parts(modules, entry, {})
    return "\n".join(["const modules = {};", *parts])


def style(sheets: Mapping[str, str], entry: str) -> str:
    """Bundle the style sheet `entry` and the sheets that it imports into one sheet."""
    return _SHEET.sub(lambda match: sheets[_resolved(entry, match[1])], sheets[entry])


def _parts(modules: Mapping[str, str], name: str, state: dict[str, bool]) -> Iterator[str]:
    """Yield the bundled JavaScript of the modules that a module imports, then its own.

    `state` tells, by module name, whether a module is complete; False means in progress.
    """
    if name not in modules or state.get(name) is False:
        raise ValueError(f"{name} is missing, or part of a circle of imports")
    if state.get(name):
        return
    state[name] = False
    source = modules[name]
    paths = {}
    for _, path in IMPORT.findall(source):
        paths[path] = _resolved(name, path)
        yield from _parts(modules, paths[path], state)
    state[name] = True
    exports = ", ".join(export for _, export in _EXPORT.findall(source))
    body = IMPORT.sub(lambda match: f'const {{{match[1]}}} = modules["{paths[match[2]]}"];', source)
    body = _EXPORT.sub(r"\1", body)
    if _OTHER_FORM.search(body):
        raise ValueError(f"{name} has an import or export in another form")
    yield f'modules["{name}"] = (() => {{\n{body}return {{ {exports} }};\n}})();'


def _resolved(importer: str, path: str) -> str:
    """Return the path of the JavaScript or CSS file that `importer` imports as `path`."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(importer), path))
