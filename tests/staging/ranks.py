"""Two processes of `rank.py`, which load together."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any


class Ranks:
    """Two processes that work together; they are started when they are first needed, and again after a hang."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[str]] = []
        self._answers: list[queue.Queue[str]] = []

    def start(self) -> None:
        """Start both."""
        path = os.pathsep.join([os.environ["PYTHONPATH"], str(Path(__file__).parent)])
        for rank in range(2):
            command = [sys.executable, str(Path(__file__).with_name("rank.py")), str(rank)]
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, "PYTHONPATH": path},
            )
            answers: queue.Queue[str] = queue.Queue()
            threading.Thread(target=self._receive, args=(process, answers), daemon=True).start()
            self._processes.append(process)
            self._answers.append(answers)

    @staticmethod
    def _receive(process: subprocess.Popen[str], answers: queue.Queue[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            answers.put(line)
        answers.put("")

    def work(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        """Give both the job; what they answer."""
        if not self._processes:
            self.start()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        try:
            lines = [answers.get(timeout=60) for answers in self._answers]
            assert all(lines), "a rank died"
        except BaseException:
            self.stop()
            raise
        return [json.loads(line) for line in lines]

    def stop(self) -> None:
        """End both."""
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
        self._processes.clear()
        self._answers.clear()
