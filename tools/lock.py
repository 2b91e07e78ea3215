"""Write ``vllm_hotfix/upstream.lock`` from unpacked vLLM releases: lock.py VERSION=FOLDER ...

``nox -s lock`` fetches the releases' wheels and calls this. The diff of the file is what a new release of vLLM
means for this package.
"""

from __future__ import annotations

import sys
from pathlib import Path

from packaging.version import Version

from vllm_hotfix._catalog import CATALOG
from vllm_hotfix._upstream import LOCK, Lock, Sources


def build(folders: dict[str, Path]) -> str:
    """The lock file's text.

    Args:
        folders: for each release, the folder that holds its ``vllm`` package.

    Raises:
        ValueError: a folder holds no vLLM, or that of another release.
    """
    releases = sorted(folders, key=Version)
    names = {name for patch in CATALOG for name in patch.known_names}
    targets: dict[str, dict[str, list[str]]] = {name: {} for name in names}
    for release in releases:
        sources = Sources(folders[release])
        if sources.version != release:
            raise ValueError(f"{folders[release]} holds vLLM {sources.version}, not {release}")
        for name in names:
            targets[name].setdefault(sources.fingerprint(name), []).append(release)
    return Lock.dump(releases, targets)


def main(arguments: list[str]) -> None:
    """Write the lock file and say how many bodies each target has."""
    folders = {version: Path(folder) for version, _, folder in (one.partition("=") for one in arguments)}
    text = build(folders)
    Path(__file__).parent.parent.joinpath("vllm_hotfix", LOCK).write_text(text, "utf-8")
    for target, marks in Lock(text).targets.items():
        print(f"{len(marks):3d} {target}")


if __name__ == "__main__":
    main(sys.argv[1:])
