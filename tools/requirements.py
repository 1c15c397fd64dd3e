"""Lock the versions of all packages that Twostroke uses, and install environments from the locks.

    python tools/requirements.py lock                   write requirements/*.txt anew
    python tools/requirements.py install dev            install the locked versions of `dev`
    python tools/requirements.py install dev --newest   install the newest versions instead

`install` installs into the environment of the Python that runs this script. A lock has exact
versions with hashes and names no package index, so that each machine uses its own. The lock of
an extra is installed together with `run`; the others are complete. uv installs where it is
available, since it takes a tenth of pip's time; pip is asked where uv fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "requirements"
PYPROJECT = "pyproject.toml"
OLDEST_PYTHON = "3.11"

# PyTorch's own index, which has wheels without CUDA. They are a twentieth of the default's size.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA_PACKAGE = re.compile(r"(torch|nvidia-.*|cuda-.*)==")


class LockSource(NamedTuple):
    """The files that say what a lock contains."""

    files: tuple[str, ...]
    extra: str | None = None
    needs_cuda: bool = True  # if false, a PyTorch without CUDA is installed where one can be had


def main() -> int:
    """Do what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("lock", help="write requirements/*.txt with the newest versions")
    install_parser = commands.add_parser("install", help="install the packages of a lock")
    install_parser.add_argument("name", choices=sorted(lock_sources()))
    install_parser.add_argument("--newest", action="store_true", help="ignore the locked versions")
    options = parser.parse_args()
    if options.command == "lock":
        return write_locks()
    return install(options.name, is_newest=options.newest)


def lock_sources() -> dict[str, LockSource]:
    """Return the source of each lock: the build tools, the package, its extras, and test tools."""
    project = tomllib.loads((ROOT / PYPROJECT).read_text())["project"]
    sources = {
        "build": LockSource(files=("requirements/build.in",)),
        "wheel": LockSource(files=("requirements/wheel.in",)),
        "run": LockSource(files=(PYPROJECT,)),
    }
    for extra in project["optional-dependencies"]:
        sources[extra] = LockSource(files=(PYPROJECT,), extra=extra)
    for path in sorted(ROOT.glob("tests/*/requirements.txt")):
        test_file = path.relative_to(ROOT).as_posix()
        name = f"test-{path.parent.name}"
        sources[name] = LockSource(files=(PYPROJECT, test_file), needs_cuda=name == "test-cuda")
    return sources


def write_locks() -> int:
    """Write all locks; what several of them contain has the same version in each."""
    sources = lock_sources()
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        everything = ["--all-extras", *sources["build"].files, *sources["wheel"].files, PYPROJECT]
        if not _compile([*everything, "--output-file", str(constraints)]):
            return 1
        for name, source in sources.items():
            print(f"Locking requirements/{name}.txt")
            arguments = [*source.files, "--generate-hashes", "--upgrade"]
            arguments += ["--extra", source.extra] if source.extra else []
            if not name.startswith("test-"):
                arguments += ["--constraint", str(constraints)]
            if not _compile([*arguments, "--output-file", f"requirements/{name}.txt"]):
                return 1
    run_entries = set(split_entries((LOCKS / "run.txt").read_text()))
    for path in LOCKS.glob("*.txt"):
        if path.stem not in sources:
            path.unlink()
        elif sources[path.stem].extra:
            entries = split_entries(path.read_text())
            path.write_text("".join(entry for entry in entries if entry not in run_entries))
    return 0


def split_entries(lock: str) -> list[str]:
    """Split a lock into its entries: a version, and the lines of its hashes below it."""
    return re.findall(r"^\S.*\n(?:[ \t].*\n)*", lock, re.MULTILINE)


def _compile(arguments: list[str]) -> bool:
    """Let uv resolve requirements for every supported Python and platform; false if it cannot."""
    options = ["--quiet", "--universal", "--python-version", OLDEST_PYTHON, "--no-annotate"]
    options += ["--no-header", "--no-emit-index-url", "--no-emit-find-links"]
    command = [sys.executable, "-m", "uv", "pip", "compile", *options, *arguments]
    return subprocess.run(command, cwd=ROOT, check=False, env=_uv_environment()).returncode == 0


def install(name: str, *, is_newest: bool) -> int:
    """Install a lock, or the newest versions that its source allows; return the exit code."""
    source = lock_sources()[name]
    if is_newest:
        arguments = ["--quiet", "--upgrade"]
        for path in source.files:
            arguments += ["--requirement", path]
        arguments += ["--extra", source.extra] if source.extra else []
        return 0 if _install_with_uv(arguments) else 1
    lock = (LOCKS / f"{name}.txt").read_text()
    if source.extra:
        lock += (LOCKS / "run.txt").read_text()
    if not source.needs_cuda and _install_cpu_torch(lock):
        lock = without_cuda(lock)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(lock)
        file.flush()
        arguments = ["--quiet", "--require-hashes", "--requirement", file.name]
        return 0 if _install_with_uv(arguments) else _install_with_pip(arguments)


def _install_with_uv(arguments: list[str]) -> bool:
    """Install with uv; false if uv cannot be had, or if it fails."""
    if not _has_uv():
        return False
    command = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable, *arguments]
    if subprocess.run(command, cwd=ROOT, check=False, env=_uv_environment()).returncode == 0:
        return True
    print("uv could not install; trying pip, which may be configured for another index.")
    return False


def _has_uv() -> bool:
    """Whether this environment has uv; the locked version is installed if there is none."""
    if importlib.util.find_spec("uv") is not None:
        return True
    build_entries = split_entries((LOCKS / "build.txt").read_text())
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.writelines(entry for entry in build_entries if entry.startswith("uv=="))
        file.flush()
        return _install_with_pip(["--quiet", "--require-hashes", "--requirement", file.name]) == 0


def _install_with_pip(arguments: list[str]) -> int:
    command = [sys.executable, "-m", "pip", "install", "--no-compile", *arguments]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def _install_cpu_torch(lock: str) -> bool:
    """Install the locked PyTorch's build without CUDA; false if none is locked or can be had.

    pip's own indexes are asked first, then PyTorch's, once. Its wheels are not among the hashes of
    a lock, which has those of the default index.
    """
    version = re.search(r"^torch==([\w.]+)", lock, re.MULTILINE)
    if version is None:
        return False
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps"]
    command += ["--retries", "0", f"torch=={version[1]}+cpu"]
    for index in ([], ["--index-url", os.environ.get("TORCH_CPU_INDEX", TORCH_CPU_INDEX)]):
        attempt = subprocess.run([*command, *index], check=False, capture_output=True)
        if attempt.returncode == 0:
            return True
    print(f"PyTorch {version[1]} without CUDA cannot be had; installing the one with CUDA.")
    return False


def without_cuda(lock: str) -> str:
    """Drop PyTorch and the CUDA packages that it needs from the text of a lock."""
    return "".join(entry for entry in split_entries(lock) if not CUDA_PACKAGE.match(entry))


def _uv_environment() -> dict[str, str]:
    """Return the environment for uv, which does not read pip's configuration by itself."""
    environment = dict(os.environ)
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        check=False,
        capture_output=True,
        text=True,
    ).stdout
    settings = dict(re.findall(r"^\S*?\.([a-z-]+)='(.*)'$", listing, re.MULTILINE))
    for setting, variable in (("index-url", "UV_DEFAULT_INDEX"), ("cert", "SSL_CERT_FILE")):
        if value := os.environ.get(variable, settings.get(setting)):
            environment[variable] = value
    return environment


if __name__ == "__main__":
    sys.exit(main())
