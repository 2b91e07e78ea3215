"""What the scripts here share that compare engines with a patch and without: a process for each, and the checks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any


def run(script: str, gate: str, side: str, arguments: list[str]) -> dict[str, Any]:
    """Run a script's `child` in a process of its own, with the gate on if the side is `patched`."""
    environ = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", gate: "1" if side == "patched" else "0"}
    command = [sys.executable, "-m", "vllm_hotfix", "run", "--", sys.executable, script, "--child", side]
    done = subprocess.run([*command, *arguments], env=environ, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def show(checks: dict[str, bool]) -> int:
    """Print what passed and what did not, and return the exit code."""
    for check, passed in checks.items():
        print(f"{'ok  ' if passed else 'FAIL'} {check}")
    return int(not all(checks.values()))


def start(child: Callable[..., dict[str, Any]], main: Callable[..., int], models: int) -> None:
    """Be the script, or a child of it, for a number of models and what follows them as `key=value`."""
    if sys.argv[1] != "--child":
        sys.exit(main(sys.argv[1 : models + 1], sys.argv[models + 1 :]))
    # vLLM prints to stdout, where only the result belongs.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    arguments = sys.argv[3:]
    options = dict(argument.split("=", 1) for argument in arguments[models:])
    out.write(json.dumps(child(sys.argv[2], arguments[:models], options)) + "\n")
