"""The releases of vLLM and of the Run:ai streamer that the tests know, and their real files.

`python tests/releases.py [VERSION | default | all | newer]...` fetches ahead of time.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

RELEASES = (
    "0.20.0",
    "0.20.1",
    "0.20.2",
    "0.21.0",
    "0.22.0",
    "0.22.1",
    "0.23.0",
    "0.24.0",
    "0.25.0",
    "0.25.1",
    "0.26.0",
    "0.27.0",
    "0.27.1",
    "0.28.0",
    "0.29.0",
    "0.30.0",
    "0.31.0",
    "0.32.0",
    "0.33.0",
)
"""Every release whose functions the lock file was made from, oldest first."""

STREAMERS = ("0.15.7", "0.16.1", "0.17.1")
"""Every release of the Run:ai streamer whose functions the lock file was made from, oldest first."""

DEFAULT = ("0.20.2", "0.22.1", "0.24.0", "0.26.0", "0.28.0", "0.33.0")
"""What the tests run against unless told otherwise: between them, nearly every body a target has had."""

WHOLE = ("0.20.2", "0.33.0")
"""Those of them with which faults, other code than a release's and undoing are tested, besides the patches."""

# The Python files are the same on every platform and Python, so one kind of wheel is asked for everywhere.
_WHEEL = ["--only-binary=:all:", "--implementation=cp", "--python-version=3.12"] + [
    f"--platform={tag}_x86_64"
    for tag in ("manylinux_2_35", "manylinux_2_28", "manylinux_2_24", "manylinux2014", "manylinux1")
]
# What importing a module can need. METADATA makes the folder an installed release to importlib.metadata.
_WANTED = re.compile(r"vllm/.*\.(py|json)|vllm-[^/]*\.dist-info/METADATA")


def newer() -> tuple[str, ...]:
    """Final releases on the index that are newer than the last of `RELEASES`, oldest first.

    Raises:
        RuntimeError: The index cannot be asked, or knows no release at all.
    """
    listing = _pip("index", "versions", *_WHEEL, "vllm")
    found = re.search(r"^Available versions: (.+)$", listing, re.MULTILINE)
    if not found:
        raise RuntimeError(f"pip lists no releases of vllm:\n{listing}")
    final = [v for v in found[1].split(", ") if re.fullmatch(r"\d+(\.\d+)+(\.post\d+)?", v)]
    return tuple(sorted((v for v in final if _key(v) > _key(RELEASES[-1])), key=_key))


def sources(version: str) -> Path:
    """A folder whose `vllm/` holds the Python files of that release, fetched once and kept.

    The wheel comes from the package index; its compiled code is not unpacked. The cache is
    `$HOTFIX_SOURCES`, or else a folder in the user's cache. Any number of processes may ask at once.

    Args:
        version: A release as the index writes it, `0.33.0`.

    Raises:
        RuntimeError: pip found no such wheel, or what it found holds no vLLM.
    """

    def unpack(tree: Path) -> None:
        downloads = tree.with_name("wheel")
        _pip("download", "--quiet", "--no-deps", f"--dest={downloads}", *_WHEEL, f"vllm=={version}")
        (wheel,) = downloads.glob("vllm-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tree, [name for name in archive.namelist() if _WANTED.fullmatch(name)])
        if not (tree / "vllm/__init__.py").is_file():
            raise RuntimeError(f"{wheel.name} holds no vllm/__init__.py")

    return _kept(version, unpack)


def streamer(version: str) -> Path:
    """A folder with that release of `runai_model_streamer` as pip installs it on x86-64, fetched once and kept.

    Its compiled library is there: the tests run it.

    Args:
        version: A release as the index writes it, `0.17.1`.

    Raises:
        RuntimeError: pip found no such wheel.
    """

    def install(tree: Path) -> None:
        wanted = f"runai-model-streamer=={version}"
        _pip("install", "--quiet", "--no-deps", "--no-compile", f"--target={tree}", *_WHEEL, wanted)

    return _kept(f"runai_model_streamer-{version}", install)


def _kept(name: str, make: Callable[[Path], None]) -> Path:
    """The folder of that name in the cache; `make` makes it if it is not there."""
    cache = _cache()
    home = cache / name
    # The name appears in one rename, once everything is inside.
    if home.is_dir():
        return home
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=cache) as temporary:
        tree = Path(temporary, "tree")
        make(tree)
        try:
            tree.rename(home)
        except OSError:
            if not home.is_dir():  # otherwise another process was first, with the same files
                raise
    return home


def _cache() -> Path:
    # Not named VLLM_HOTFIX_...: every variable of that name is a gate.
    if chosen := os.environ.get("HOTFIX_SOURCES"):
        return Path(chosen).absolute()
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(user, "vllm-hotfix", "sources")


def _key(version: str) -> tuple[tuple[int, ...], int]:
    release, _, post = version.partition(".post")
    return tuple(map(int, release.split("."))), int(post or 0)


def _pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def _main(arguments: list[str]) -> None:
    named = {"default": lambda: DEFAULT, "all": lambda: RELEASES, "newer": newer}
    for argument in arguments or ["default"]:
        for version in named.get(argument, lambda argument=argument: (argument,))():
            print(version, sources(version), flush=True)


if __name__ == "__main__":
    _main(sys.argv[1:])
