"""A clean environment for every test, synthetic packages, and interpreters that know only what a test gives them."""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import packaging
import pytest
import wrapt

import _vllm_hotfix
import vllm_hotfix
from vllm_hotfix import _hooks, _record
from vllm_hotfix._upstream import Lock, fingerprint

ROOT = Path(__file__).parents[2]
PACKAGE = Path(vllm_hotfix.__file__).parent

Write = Callable[[Mapping[str, str]], Path]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No gate of whoever runs the tests is seen, and what a test activates is undone after it."""
    for name in list(os.environ):
        if name.startswith("VLLM_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    modules, meta_path, finders = dict(sys.modules), sys.meta_path, list(sys.meta_path)
    record = vars(_record.RECORD).copy()
    vars(_record.RECORD).update(vars(_record.Record()))
    yield
    _record.RECORD.remove()
    vars(_record.RECORD).update(record)
    meta_path[:] = finders  # that list: a test may have put another one in its place
    for awaited in (_vllm_hotfix.FINDER.before, _vllm_hotfix.FINDER.after, _vllm_hotfix.FINDER.waiting):
        awaited.clear()
    _vllm_hotfix.WARNED.clear()
    for name in sys.modules.keys() - modules.keys():
        if not name.startswith(("vllm_hotfix", "_vllm_hotfix")):
            del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write files, by their path in the test's folder, and return that folder."""

    def write(files: Mapping[str, str]) -> Path:
        write_files(tmp_path, files)
        return tmp_path

    return write


@pytest.fixture
def load(write: Write, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Write a module of the given name and import it, unless told not to."""

    def load(name: str, text: str, *, imported: bool = True) -> Any:
        folder = write({f"{name.replace('.', '/')}.py": text})
        monkeypatch.syspath_prepend(folder)
        importlib.invalidate_caches()
        return importlib.import_module(name) if imported else None

    return load


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write files into a folder, each dedented."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text), "utf-8")


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The warnings and errors that the package has logged so far."""
    return lambda: [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING]


@dataclass
class House:
    """A folder with a copy of the package and of what it needs, and the interpreters that it is tried with."""

    folder: Path
    bare: Path  #: an interpreter with nothing installed
    installed: Path  #: one with the same files, and the .pth, in its site-packages
    environ: dict[str, str] = field(default_factory=dict)

    @property
    def bootstrap(self) -> Path:
        """The folder with the sitecustomize."""
        return self.folder / "vllm_hotfix/bootstrap"

    def run(
        self,
        *arguments: str | Path,
        path: tuple[Path, ...] | None = None,
        python: Path | None = None,
        code: int | None = 0,
        cwd: Path | None = None,
        **environ: str,
    ) -> subprocess.CompletedProcess[str]:
        """Run an interpreter with only the given variables set; ``path`` is its PYTHONPATH, the house by default."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLLM_"))}
        env |= {"PYTHONPATH": os.pathsep.join(map(str, path if path is not None else (self.folder,)))}
        env |= self.environ | environ
        command = [str(python or self.bare), *map(str, arguments)]
        # With -m and -c the current folder is on sys.path: it must not be the checkout.
        done = subprocess.run(
            command,
            env=env,
            cwd=cwd or self.environ["TMPDIR"],
            capture_output=True,
            text=True,
            errors="backslashreplace",
            timeout=60,
        )
        assert code is None or done.returncode == code, f"exit {done.returncode}: {done.stdout[-500:]}{done.stderr}"
        return done


def furnish(folder: Path) -> None:
    """Copy the package, its metadata and its dependencies into a folder."""
    ignored = shutil.ignore_patterns("__pycache__")
    for module in (vllm_hotfix, wrapt, packaging):
        home = Path(str(module.__file__)).parent
        shutil.copytree(home, folder / home.name, ignore=ignored)
    shutil.copy(str(_vllm_hotfix.__file__), folder)
    write_files(
        folder / "vllm_hotfix-0.1.0.dist-info",
        {
            "METADATA": "Metadata-Version: 2.1\nName: vllm-hotfix\nVersion: 0.1.0\n",
            "entry_points.txt": "[vllm.general_plugins]\nvllm_hotfix = _vllm_hotfix:plugin\n",
        },
    )


def environment(home: Path) -> tuple[Path, Path]:
    """Make a virtual environment with nothing in it; returns its interpreter and its site-packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    (packages,) = home.glob("lib/python3*/site-packages")
    return home / "bin/python", packages


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with nothing installed, not even this package."""
    return environment(tmp_path_factory.mktemp("bare"))[0]


@pytest.fixture(scope="session")
def real_house(tmp_path_factory: pytest.TempPathFactory, bare: Path) -> House:
    """The package as it is."""
    folder = tmp_path_factory.mktemp("house")
    furnish(folder)
    return House(folder, bare, bare, {"TMPDIR": str(tmp_path_factory.mktemp("tmp"))})


#: A small vLLM: what the package touches in every release, and two modules for a patch to change.
FAKE_VLLM = {
    "vllm/__init__.py": "",
    "vllm/_version.py": "__version__ = version = '1.2.0'\n",
    "vllm/envs.py": """\
        import os

        environment_variables = {"VLLM_KNOWN": lambda: os.environ.get("VLLM_KNOWN")}


        def compile_factors():
            return {name: getter() for name, getter in environment_variables.items()}
    """,
    "vllm/plugins.py": """\
        def load_general_plugins():
            import os
            from importlib.metadata import entry_points

            allowed = os.environ.get("VLLM_PLUGINS")
            for point in entry_points(group="vllm.general_plugins"):
                if allowed is None or point.name in allowed.split(","):
                    point.load()()
    """,
    "vllm/steps.py": """\
        def step():
            return ["stock"]
    """,
    "vllm/model.py": """\
        from vllm.steps import step


        class Model:
            def load(self):
                return ["stock"]

            def run(self):
                return step()
    """,
    "vllm/v1/__init__.py": "",
    "vllm/v1/worker/__init__.py": "",
    "vllm/v1/worker/gpu_worker.py": """\
        class Worker:
            def load_model(self):
                from vllm.model import Model

                return Model().load()
    """,
}

#: A catalog of one patch, whose two wrappers each leave one mark.
FAKE_PATCH = {
    "vllm_hotfix/_catalog.py": """\
        from ._patches import marks

        CATALOG = (marks.PATCH,)
    """,
    "vllm_hotfix/_patches/marks.py": """\
        from .._patch import Patch, Target
        from .._record import RECORD

        PATCH = Patch(
            name="marks",
            env="VLLM_HOTFIX_MARKS",
            fault="nothing is marked",
            upstream="example/vllm#1",
            targets=(Target("vllm.steps:step", "mark"), Target("vllm.model:Model.load", "mark")),
        )


        def mark(wrapped, instance, args, kwargs):
            RECORD.count("marks", "calls")
            return [*wrapped(*args, **kwargs), "patched"]
    """,
}


def fake_lock() -> str:
    """The lock file that knows the small vLLM."""
    targets = {"vllm.steps:step": "vllm/steps.py", "vllm.model:Model.load": "vllm/model.py"}
    marks = {name: fingerprint(dedent(FAKE_VLLM[file]), name.partition(":")[2]) for name, file in targets.items()}
    return Lock.dump(["1.0.0", "1.2.0"], {name: {mark: ["1.0.0", "1.2.0"]} for name, mark in marks.items()})


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory, bare: Path) -> House:
    """The package with the small catalog beside the small vLLM, as folder and installed. Not to be written to."""
    folder = tmp_path_factory.mktemp("fake")
    installed, packages = environment(tmp_path_factory.mktemp("installed"))
    for home in (folder, packages):
        furnish(home)
        write_files(home, {**FAKE_VLLM, **FAKE_PATCH, "vllm_hotfix/upstream.lock": fake_lock()})
    shutil.copy(ROOT / "vllm_hotfix.pth", packages)
    return House(folder, bare, installed, {"TMPDIR": str(tmp_path_factory.mktemp("tmp"))})


@pytest.fixture
def own_house(house: House, tmp_path: Path) -> House:
    """A copy of the small house that a test can damage."""
    folder = tmp_path / "own"
    shutil.copytree(house.folder, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return House(folder, house.bare, house.installed, {"TMPDIR": str(tmp_path)})


@pytest.fixture
def lock_free() -> Iterator[None]:
    """The lock of the hooks is free before and after the test, or no other thread could go on."""
    yield
    assert _hooks.LOCK.acquire(timeout=5), "a lock was left held"
    _hooks.LOCK.release()
