"""Write ``vllm_hotfix/upstream.lock`` from unpacked releases: lock.py [PACKAGE==]VERSION=FOLDER ...

Without a package it is a release of vLLM. ``nox -s lock`` fetches the releases' wheels and calls this. The diff of
the file is what a new release means for this package.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from packaging.version import Version

from vllm_hotfix._catalog import CATALOG
from vllm_hotfix._upstream import LOCK, Lock, Sources, package_of


def build(folders: Mapping[str, Mapping[str, Path]]) -> str:
    """The lock file's text.

    Args:
        folders: for each package, and each release of it, the folder that holds the package.

    Raises:
        ValueError: a folder does not hold that release, or a patch has names of a package that is not given.
    """
    names = {name for patch in CATALOG for name in patch.known_names}
    if missing := {"vllm", *map(package_of, names)} - folders.keys():
        raise ValueError(f"no release of {', '.join(sorted(missing))} is given")
    releases = {package: sorted(some, key=Version) for package, some in folders.items()}
    targets: dict[str, dict[str, list[str]]] = {name: {} for name in names}
    for package, release in [(package, release) for package, some in releases.items() for release in some]:
        folder = folders[package][release]
        sources = Sources(folder)
        found = sources.version if package == "vllm" else sources.version_of(package)
        if found != release:
            raise ValueError(f"{folder} holds {package} {found}, not {release}")
        for name in names:
            if package_of(name) == package:
                targets[name].setdefault(sources.fingerprint(name), []).append(release)
    return Lock.dump(releases.pop("vllm"), targets, releases)


def main(arguments: list[str]) -> None:
    """Write the lock file and say how many bodies each target has."""
    folders: dict[str, dict[str, Path]] = {}
    for argument in arguments:
        parts = re.fullmatch(r"(?:(\w+)==)?(\d[^=]*)=(.+)", argument)
        if parts is None:
            sys.exit(f"{argument} is not [PACKAGE==]VERSION=FOLDER")
        folders.setdefault(parts[1] or "vllm", {})[parts[2]] = Path(parts[3])
    text = build(folders)
    Path(__file__).parent.parent.joinpath("vllm_hotfix", LOCK).write_text(text, "utf-8")
    for target, marks in Lock(text).targets.items():
        print(f"{len(marks):3d} {target}")


if __name__ == "__main__":
    main(sys.argv[1:])
