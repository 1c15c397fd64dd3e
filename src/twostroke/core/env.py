"""The environment: variables that Twostroke reads, and how the package was installed."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from twostroke.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping


def cache_dir() -> Path:
    """Return the folder for downloaded models, measured machine limits and chosen bits.

    It is `TWOSTROKE_CACHE` if set, else `$XDG_CACHE_HOME/twostroke`, else `~/.cache/twostroke`.

    Raises:
        UsageError: the user has no home folder, as in some containers.
    """
    if path := os.environ.get("TWOSTROKE_CACHE"):
        return expand_home(path)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "twostroke"
    except RuntimeError:
        reason = "This user has no home folder for models: set TWOSTROKE_CACHE to a folder."
        raise UsageError(reason) from None


def expand_home(path: str | Path) -> Path:
    """Return a path with its `~` or `~user` replaced by the home folder.

    Raises:
        UsageError: the system does not know the user, or the user has no home folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = Path(path).parts[0]
        raise UsageError(f"There is no home folder {user!r}: write the whole path.") from None


def cpu_level() -> str | None:
    """Return the instruction-set level of the kernels that `TWOSTROKE_CPU_LEVEL` forces, or None.

    Without the variable, kernels use the highest level of the processor.
    """
    return os.environ.get("TWOSTROKE_CPU_LEVEL") or None


def num_threads() -> str | None:
    """Return the text of `TWOSTROKE_NUM_THREADS` (the number of threads); None if not set."""
    return os.environ.get("TWOSTROKE_NUM_THREADS") or None


def native_dir() -> Path | None:
    """Return the folder of compiled kernels that `TWOSTROKE_NATIVE_DIR` names; None if not set."""
    path = os.environ.get("TWOSTROKE_NATIVE_DIR")
    return Path(path) if path else None


def api_key() -> str | None:
    """Return the key that a server's clients must send, from `TWOSTROKE_API_KEY`; None if not set.

    Raises:
        UsageError: the variable is set and empty. A secret that was not filled in must not make
            a server open to all.
    """
    return _secret("TWOSTROKE_API_KEY", "key")


def client_api_key() -> str | None:
    """Return the API key that this command sends to a server; None if no key is set.

    It is in `TWOSTROKE_API_KEY`, like the key that a server demands of its clients.
    """
    return os.environ.get("TWOSTROKE_API_KEY", "").strip() or None


def replica_key() -> str | None:
    """Return the key that a router sends to its replicas, from `TWOSTROKE_REPLICA_KEY`.

    It is None if the variable is not set.

    Raises:
        UsageError: the variable is set and empty.
    """
    return _secret("TWOSTROKE_REPLICA_KEY", "key")


def _secret(name: str, kind: str = "secret") -> str | None:
    """Return the secret in the environment variable `name`; None if the variable is not set.

    `kind` names the secret in the error: "key" or "secret". Raises UsageError if the variable is
    set and empty, since this is probably a mistake of a script.
    """
    secret = os.environ.get(name)
    if secret is not None and not secret.strip():
        raise UsageError(f"{name} is empty: set it to a {kind}, or unset it.")
    return secret


def launcher_variables() -> dict[str, str]:
    """Return the environment variables with which torchrun, MPI or Slurm tells a process its rank.

    Only variables that are set are returned; empty if no launcher started this process.
    """
    name_groups = (
        ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"),
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID"),
    )
    return {
        name: os.environ[name] for group in name_groups for name in group if os.environ.get(name)
    }


def rank_secret() -> bytes:
    """Return the secret that all ranks of a model share, from `TWOSTROKE_RANK_SECRET`.

    Raises:
        UsageError: the variable is set and empty, for example by a script that found no secret.
    """
    return (_secret("TWOSTROKE_RANK_SECRET") or "").encode()


def peer_secret() -> bytes:
    """Return the secret that decode and prefill engines share, from `TWOSTROKE_PEER_SECRET`.

    Raises:
        UsageError: the variable is set and empty.
    """
    return (_secret("TWOSTROKE_PEER_SECRET") or "").encode()


def store_key() -> bytes:
    """Return the key that encrypts KV pages in Redis, from `TWOSTROKE_STORE_KEY`: 32 bytes.

    Raises:
        UsageError: the variable is not set, or is not 64 hexadecimal digits.
    """
    text = os.environ.get("TWOSTROKE_STORE_KEY", "").strip()
    with suppress(ValueError):
        if len(text) == 64:
            return bytes.fromhex(text)
    fault = "not 64 hexadecimal digits" if text else "not set"
    reason = (
        f"needs a secret, and TWOSTROKE_STORE_KEY is {fault}: make one by openssl rand -hex 32."
    )
    raise UsageError(reason, field="page_store")


def store_password() -> str | None:
    """Return the Redis password from `TWOSTROKE_STORE_PASSWORD`; None if not set."""
    return os.environ.get("TWOSTROKE_STORE_PASSWORD") or None


def hub_endpoint() -> str:
    """Return the address of the Hugging Face hub, or of its mirror in `HF_ENDPOINT`.

    Raises:
        UsageError: the variable is not an http address.
    """
    address = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    if not address.startswith(("https://", "http://")):
        raise UsageError("HF_ENDPOINT must begin with https:// or http://.")
    return address


def hub_is_offline() -> bool:
    """Whether `HF_HUB_OFFLINE` forbids requests to the Hugging Face hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def forced_link() -> str | None:
    """Return the type of link between hosts that `TWOSTROKE_LINK` forces, such as "gloo"; or None.

    Ranks on different hosts exchange values over a link. None means that the fastest type is
    chosen.
    """
    return os.environ.get("TWOSTROKE_LINK") or None


def ray_address() -> str | None:
    """Return the address of the Ray cluster to use from `RAY_ADDRESS`, None if not set."""
    return os.environ.get("RAY_ADDRESS") or None


def use_ray_token(token: str) -> None:
    """Set Ray's environment variables so that a Ray cluster requires and sends a secret token.

    The variables apply to this process and its child processes.
    """
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token)


def notify_socket() -> str | None:
    """Return the address of systemd's socket, to which the server reports that it is ready.

    It is None if systemd did not start this process.
    """
    return os.environ.get("NOTIFY_SOCKET") or None


def watchdog_s() -> float | None:
    """Return the seconds within which the server must report to systemd's watchdog.

    Returns None if systemd does not watch this process.
    """
    period_us, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not period_us.isdigit() or (pid and pid != str(os.getpid())):
        return None
    return int(period_us) / 1e6 or None


def set_default(name: str, value: str) -> None:
    """Set an environment variable for a library, unless the user has set the variable."""
    os.environ.setdefault(name, value)


def engine_environment() -> dict[str, str]:
    """Return the environment variables for the engine process that a server starts.

    The server's API key is left out, since only the server needs it.
    """
    return {name: value for name, value in os.environ.items() if name != "TWOSTROKE_API_KEY"}


def child_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables for a child process: its parent's, with `changes`."""
    return {**os.environ, **changes}


def install_command(extra: str) -> str:
    """Return the shell command that installs an extra such as "train", for messages to the user.

    If the package was installed from a clone or from a wheel in a folder, the command names the
    clone or the wheel.
    """
    source = _install_source()
    if source is None:
        return f"pip install 'twostroke[{extra}]'"
    path = "." if source == Path.cwd() else str(source)
    return f"pip install '{path}[{extra}]'"


def _install_source() -> Path | None:
    """Return the clone or wheel that Twostroke was installed from; None for a package index."""
    from importlib.metadata import PackageNotFoundError, distribution  # slow to import
    from urllib.parse import unquote, urlsplit

    try:
        text = distribution("twostroke").read_text("direct_url.json")
        address = urlsplit(json.loads(text)["url"]) if text else None
    except PackageNotFoundError:  # a clone whose folder is on Python's path
        clone = Path(__file__).parents[3]
        return clone if (clone / "pyproject.toml").is_file() else None
    except (ValueError, KeyError, TypeError):
        return None
    if address is None or address.scheme != "file":
        return None
    path = Path(unquote(address.path))
    return path if path.exists() else Path.cwd()
