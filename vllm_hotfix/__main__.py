"""``vllm-hotfix run -- COMMAND``: start a command with the patches at hand, also where the package is only a folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import _vllm_hotfix

USAGE = """\
usage: vllm-hotfix run -- COMMAND [ARGUMENT ...]   start COMMAND with the patches that the environment turns on
       vllm-hotfix status [--help]                 what is active (the same as python -m vllm_hotfix.status)
       vllm-hotfix drill [--help]                  is a reload right (the same as python -m vllm_hotfix.drill)"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; ``run`` replaces this process and returns only when the command cannot be started."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["status"]:
        from .status import main as status

        return status(words[1:])
    if words[:1] == ["drill"]:
        from .drill import main as drill

        return drill(words[1:])
    if words[:1] == ["run"]:
        command = words[2:] if words[1:2] == ["--"] else words[1:]
        if command and not command[0].startswith("-"):
            return run(command)
    if words[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    print(USAGE, file=sys.stderr)
    return 2


def run(command: list[str]) -> int:
    """Put the bootstrap folder first on PYTHONPATH and become the command.

    Returns:
        127 if the command is not found, 126 if it cannot be run, as a shell says it.
    """
    os.environ["PYTHONPATH"] = with_bootstrap(os.environ.get("PYTHONPATH"))
    if not _vllm_hotfix.asked():
        _vllm_hotfix.warn("no VLLM_HOTFIX variable is set, so nothing will be patched")
    sys.stdout.flush()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        _vllm_hotfix.warn(f"{command[0]}: {error.strerror}")
        return 127 if isinstance(error, FileNotFoundError) else 126


def with_bootstrap(inherited: str | None) -> str:
    """A PYTHONPATH with the bootstrap folder first."""
    bootstrap = str(Path(__file__).with_name("bootstrap"))
    # An empty item is the current folder to Python, and stays.
    rest = [path for path in inherited.split(os.pathsep) if path != bootstrap] if inherited else []
    return os.pathsep.join([bootstrap, *rest])


if __name__ == "__main__":
    sys.exit(main())
