"""Every step that can fail, made to fail while a real load and a real reload run on a release's own functions.

`STEPS` and `UNDOING` are the tables. Whatever a step raises, the load's result is stock's, there is one warning,
nothing stays locked or open, and the package can be turned off, and on again; an interrupt reaches the caller besides.
pinned_staging's own steps are in `tests/staging`, what the patches ask of vLLM and torch in `test_faults_at_work.py`.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import json
import os
import sys
import tempfile
import threading
import tokenize
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import frame
import pytest
import release_names
import vllm.envs
from faults import ERRORS, interrupted, is_free
from layers import Host, Layer, Piece, Probe, pieces
from patching import hearing, state_of

import _vllm_hotfix
import vllm_hotfix
from vllm_hotfix import _hooks, _judge, _proxy, _record, _upstream
from vllm_hotfix._catalog import CATALOG
from vllm_hotfix._record import RECORD

RELEASE = os.environ["HOTFIX_RELEASE"]
OURS = ("vllm_hotfix", "_vllm_hotfix")
ONE = {"VLLM_HOTFIX_MEASURED_TOTALS": "1"}
ALL = {"VLLM_HOTFIX_ENABLE": "all"}


class Step:
    """A function that the package calls, as its modules find it.

    Args:
        owner: the object that has it.
        name: its name there.
        only: whether a call with these arguments is the one that fails; all of them if it is None.
        after: whether the step has done its work when it fails.
    """

    def __init__(self, owner: Any, name: str, only: Callable[..., bool] | None = None, *, after: bool = False) -> None:
        self.owner, self.name, self.only, self.after = owner, name, only, after

    def fail(self, patch: pytest.MonkeyPatch, make: Callable[[], BaseException], *, once: bool) -> list[str]:
        """Let it fail when the package calls it, at the first call or always; return the list of failed calls."""
        real = getattr(self.owner, self.name, None) or getattr(builtins, self.name)
        failed: list[str] = []

        def call(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            ours = caller.partition(".")[0] in OURS and (self.only is None or self.only(*args, **kwargs))
            if not ours or (once and failed):
                return real(*args, **kwargs)
            if self.after:
                real(*args, **kwargs)
            failed.append(caller)
            raise make()

        # A class stays one: others ask for it.
        patch.setattr(self.owner, self.name, staticmethod(call) if inspect.isclass(real) else call, raising=False)
        return failed


def wraps(*args: Any) -> bool:
    """Say whether a target is to be wrapped, and not given back."""
    return any(isinstance(one, _proxy.Proxy) and one.__module__ != "vllm.envs" for one in args[1:])


def tells(*args: Any) -> bool:
    """Say whether vLLM is to be told of variables."""
    return any(isinstance(one, _proxy.Proxy) and one.__module__ == "vllm.envs" for one in args[1:])


def of_vllm(name: str, *args: Any) -> bool:
    """Say whether vLLM is looked for."""
    return name == "vllm"


#: What activation asks of Python, the file system and wrapt.
STEPS = {
    "read the gates": Step(vllm_hotfix, "read_gates"),
    "find vLLM": Step(importlib.util, "find_spec", of_vllm),
    "read its version": Step(Path, "read_text", lambda path, *_: path.name == "_version.py"),
    "find a module": Step(Path, "is_file"),
    "open a source": Step(tokenize, "open"),
    "parse a source": Step(ast, "parse"),
    "find comments": Step(tokenize, "generate_tokens"),
    "make a fingerprint": Step(hashlib, "sha256"),
    "read the lock": Step(importlib.machinery.SourceFileLoader, "get_data"),
    "parse the lock": Step(json, "loads"),
    "compare versions": Step(_judge, "parse_version"),
    "judge": Step(_hooks, "judge"),
    "hook": Step(_hooks, "when_ready"),
    "put the finder in": Step(_vllm_hotfix.Finder, "install"),
    "tell vLLM the variables": Step(_hooks, "own_variables"),
    "import a patch": Step(importlib, "import_module"),
    "look at the live object": Step(inspect, "unwrap"),
    "compare files": Step(os.path, "realpath"),
    "make a wrapper": Step(_hooks, "Proxy", lambda function, _: function.__module__ != "vllm.envs"),
    "make a wrapper for the variables": Step(_hooks, "Proxy", lambda function, _: function.__module__ == "vllm.envs"),
    "wrap": Step(_hooks, "setattr", wraps),
    "wrap, and fail": Step(_hooks, "setattr", wraps, after=True),
    "rebind": Step(_hooks, "_rebind", wraps),
    "rebind, and fail": Step(_hooks, "_rebind", wraps, after=True),
    "wrap for the variables": Step(_hooks, "setattr", tells),
    "rebind for the variables, and fail": Step(_hooks, "_rebind", tells, after=True),
    "verify": Step(_hooks, "_reaches"),
    "look for the state folder": Step(tempfile, "gettempdir"),
    "make the state folder": Step(Path, "mkdir"),
    "look at the state folder": Step(Path, "lstat"),
    "open a record": Step(os, "open"),
    "write a record": Step(json, "dump"),
    "put a record in place": Step(os, "replace"),
    "look at the process": Step(_record, "_started"),
    "register the end": Step(atexit, "register"),
}
#: What turning it off does.
UNDOING = {
    "undo a patch": Step(importlib.import_module("vllm_hotfix._patches.measured_totals"), "undo"),
    "give an attribute back": Step(_hooks, "setattr", lambda *args: not wraps(*args)),
    "give names back": Step(_hooks, "_rebind", lambda *args: isinstance(args[0], _proxy.Proxy)),
    "remove the record": Step(Path, "unlink"),
}


@pytest.fixture(scope="module", autouse=True)
def parse_once() -> Iterator[None]:
    """Parse a file once for all cases, but for those in which that fails."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_upstream, "_parse", lru_cache(64)(_upstream._parse))
        yield


def build(model: Probe, config: Any) -> None:
    """Fill a model with a layer that stock reloads right."""
    model.layer = Layer({"weight": (2,), "scale": (1,)})


def stream(first: float) -> list[Piece]:
    """Return a checkpoint."""
    return [*pieces("layer.weight", [first, first + 1]), *pieces("layer.scale", [first + 2])]


def work(host: Host) -> list[list[float]]:
    """Load and reload, and return all values after each."""
    model = host.load(build, stream(1))
    found = [[float(value) for tensor in model.parameters() for value in tensor.flatten()]]
    host.reload(model, stream(5))
    return [*found, [float(value) for tensor in model.parameters() for value in tensor.flatten()]]


EXPECTED = [[1.0, 2.0, 3.0, 1.0, 2.0, 3.0], [5.0, 6.0, 7.0, 5.0, 6.0, 7.0]]


def snapshot() -> dict[Any, Any]:
    """Return every object that the package could have replaced: names of vLLM's modules and of targets' classes."""
    found: dict[Any, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "vllm" and module is not None:
            found |= {(name, key): value for key, value in vars(module).items()}
    for patch in CATALOG:
        for target in patch.targets:
            module, _, qualname = target.name.partition(":")
            owner, _, attribute = qualname.rpartition(".")
            holder = vars(sys.modules[module]).get(owner) if owner and module in sys.modules else None
            if holder is not None and attribute in vars(holder):
                found[target.name] = vars(holder)[attribute]
    return found | dict(vllm.envs.environment_variables)


def changed(before: dict[Any, Any]) -> list[Any]:
    """Return what is not the object that it was."""
    after = snapshot()
    return [key for key in before | after if before.get(key) is not after.get(key)]


class Process:
    """This process before a case: what must be as it was after it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = snapshot()
        self.threads = threading.active_count()
        self.files = len(os.listdir("/proc/self/fd"))

    def assert_nothing_held(self) -> None:
        """No lock, no thread, no open file and no draft of a record is left; looking a module up works."""
        for lock in (_hooks.LOCK, vllm_hotfix._lock, RECORD._lock):
            assert is_free(lock)
        assert not _vllm_hotfix.FINDER._looking
        assert threading.active_count() == self.threads
        assert len(os.listdir("/proc/self/fd")) == self.files
        assert [path for path in self.folder.rglob("*") if path.is_file() and path.suffix != ".json"] == []

    def assert_stock(self) -> None:
        """Every name is the stock object, no finder waits, and no record is left."""
        assert changed(self.names) == []
        assert _vllm_hotfix.FINDER not in sys.meta_path
        assert not _vllm_hotfix.FINDER.before and not _vllm_hotfix.FINDER.after
        assert list(self.folder.rglob("*.json")) == []


@pytest.fixture(scope="module")
def imported(config: Any) -> None:
    """Import all that has targets, and what a load and a reload import when they first run."""
    frame.import_all(["vllm.v1.worker.gpu_worker", "vllm.plugins", *frame.TARGET_MODULES])
    assert work(Host(config)) == EXPECTED


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, imported: None) -> Iterator[Process]:
    """This process with the package at nothing, and a folder for its records."""
    for name in ("VLLM_HOTFIX_STATE_DIR", *(patch.env for patch in CATALOG)):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(RECORD, "counters", {})
    monkeypatch.setattr(RECORD, "_warned", set())
    monkeypatch.setattr(_vllm_hotfix, "WARNED", set())
    monkeypatch.setattr(_hooks, "sys", _hooks.sys)
    release_names.look_at_vllm_alone()
    monkeypatch.setattr(vllm_hotfix, "_failure", None)
    monkeypatch.setattr(vllm_hotfix, "_activation", None)
    yield Process(tmp_path)
    vllm_hotfix.deactivate()


def cases(steps: dict[str, Step]) -> list[Any]:
    """Return every step with everything that it can raise: at every call for one patch, at the first call for all.

    What wraps and gives back is not of a release, and takes its time: all patches at once are tried in one of them.
    """
    found = []
    for step in steps:
        for error in ERRORS:
            found.append(pytest.param(step, error, ONE, False, id=f"{step}-{error}-always"))
            if RELEASE == "0.20.2" and error in ("MemoryError", "KeyboardInterrupt"):
                found.append(pytest.param(step, error, ALL, True, id=f"{step}-{error}-once"))
    return found


def lines(heard: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the package's warnings, wherever they went."""
    return heard + [line for line in capsys.readouterr().err.splitlines() if line.startswith("vllm-hotfix: ")]


@pytest.mark.parametrize(("step", "error", "gates", "once"), cases(STEPS))
def test_a_step_of_activation_fails(
    step: str,
    error: str,
    gates: dict[str, str],
    once: bool,
    process: Process,
    host: Host,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A load and a reload give stock's result, with one warning; when all is well again, so is the package."""
    make, words = ERRORS[error]
    for name, value in gates.items():
        monkeypatch.setenv(name, value)
    if step == "parse a source":
        _upstream._parse.cache_clear()  # type: ignore[attr-defined]
    with hearing() as heard:
        with monkeypatch.context() as patch:
            failed = STEPS[step].fail(patch, make, once=once)
            results = interrupted(vllm_hotfix.activate), interrupted(lambda: work(host))
        assert failed, "this release, or this package, has no such step"
        if error == "KeyboardInterrupt":
            assert KeyboardInterrupt in results
            assert results[1] in (EXPECTED, KeyboardInterrupt)
            assert lines(heard, capsys) == []
            vllm_hotfix.activate()
            assert state_of("measured_totals")[0] == "active"
        else:
            assert results == (None, EXPECTED)
            (warning,) = lines(heard, capsys)
            assert words in warning
        process.assert_nothing_held()
        assert work(host) == EXPECTED
    vllm_hotfix.deactivate()
    process.assert_stock()
    monkeypatch.delenv("VLLM_HOTFIX_ENABLE", raising=False)
    monkeypatch.setenv(*next(iter(ONE.items())))
    vllm_hotfix.activate()
    assert state_of("measured_totals")[0] == "active"
    assert work(host) == EXPECTED
    process.assert_nothing_held()
    vllm_hotfix.deactivate()
    process.assert_stock()


@pytest.mark.parametrize(("step", "error", "gates", "once"), cases(UNDOING))
def test_a_step_of_undoing_fails(
    step: str,
    error: str,
    gates: dict[str, str],
    once: bool,
    process: Process,
    host: Host,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`deactivate` goes on, with a warning, and leaves a load that is stock's; called again, it leaves nothing.

    Where an attribute cannot be given back, the wrapper in it steps aside, and status says so.
    """
    make, words = ERRORS[error]
    for name, value in gates.items():
        monkeypatch.setenv(name, value)
    vllm_hotfix.activate()
    with hearing() as heard:
        with monkeypatch.context() as patch:
            failed = UNDOING[step].fail(patch, make, once=once)
            result = interrupted(vllm_hotfix.deactivate)
        assert failed
        warnings = lines(heard, capsys)
        if error == "KeyboardInterrupt":
            assert result is KeyboardInterrupt and warnings == []
        else:
            assert result is None
            assert warnings and all(words in warning for warning in warnings)
            assert len(warnings) == 1 or not once
            kept = [one for one in RECORD.entries.values() if one.wraps or one.retired]
            assert bool(kept) == ("back" in step)
            assert all(one.state == "failed" and words in one.reason for one in kept)
        assert work(host) == EXPECTED
        process.assert_nothing_held()
    vllm_hotfix.deactivate()
    process.assert_stock()
    process.assert_nothing_held()
