"""Start `worker.py` and other commands in process groups of their own, log into files, leave nothing behind.

Standard library only: the demo uses it before anything is installed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("worker.py")
GATE = "VLLM_HOTFIX_MEASURED_TOTALS"


class Failed(Exception):
    """A command failed; the message ends with the last lines of its log."""


class Command:
    """A command that runs in a process group of its own, its output in a log file.

    Leaving the context ends every process of the group.
    """

    def __init__(self, command: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=None if env is None else dict(env),
                start_new_session=True,
            )

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End every process of the group, also one that does not end by itself."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                break
            deadline = time.monotonic() + 3
            while number == signal.SIGTERM and _group_lives(self.process) and time.monotonic() < deadline:
                time.sleep(0.05)
        self.process.wait()

    def ended(self, timeout: float) -> bool:
        """Return whether the command ends within ``timeout`` seconds."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def wait(self, timeout: float) -> None:
        """Wait for the end of the command.

        Raises:
            Failed: its exit status is not 0, or it did not end within ``timeout`` seconds.
        """
        ended = self.ended(timeout)
        if not ended or self.process.returncode:
            what = f"exit status {self.process.returncode}" if ended else "no end in time"
            raise Failed(f"{what}; the end of {self.log.name}:\n{self.tail()}")

    def tail(self, lines: int = 25) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def _group_lives(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a process of the group is left; its leader is collected if it has ended."""
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


class Engine(Command):
    """One engine in a process of its own: `worker.py` with a plan, in an environment with these gates and no other."""

    def __init__(
        self,
        plan: Mapping[str, Any],
        folder: Path,
        python: str | Path,
        gates: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir()
        (folder / "plan.json").write_text(json.dumps(plan))
        self.result_file = folder / "result.json"
        env = {
            **environment(gates or {}),
            "HF_HUB_OFFLINE": "1",
            # One thread each: the model is tiny, and engines run side by side.
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TMPDIR": str(folder),  # the package's state files too: each engine sees its own processes only
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
        }
        super().__init__([python, WORKER, folder / "plan.json", self.result_file], folder / "engine.log", env)

    def result(self, timeout: float = 300) -> dict[str, Any]:
        """Wait for the worker and return its result.

        Raises:
            Failed: the worker failed or did not end in time.
        """
        self.wait(timeout)
        return json.loads(self.result_file.read_text())


def environment(gates: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with these gates, and no other setting of vLLM or the streamer."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "RUNAI_"))}
    return {**kept, **gates}


def differences(step: Mapping[str, Any], cold: Mapping[str, Any]) -> list[str]:
    """Return the paths of all tensors that are not the same after two steps, in one of them only included."""
    here, there = step["digests"], cold["digests"]
    return sorted(path for path in here.keys() | there.keys() if here.get(path) != there.get(path))


def counters(result: Mapping[str, Any], patch: str = "measured_totals") -> dict[str, int]:
    """Return what a patch counted, summed over the live processes of an engine."""
    total: dict[str, int] = {}
    for process in result["live"]:
        for name, value in process["counters"].get(patch, {}).items():
            total[name] = total.get(name, 0) + value
    return total
