"""The built wheel in real environments: what lands where, what a start does, and what stays behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import PathDistribution, distributions
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

import _vllm_hotfix

ROOT = Path(__file__).parents[2]
GATE = {"VLLM_HOTFIX_MEASURED_TOTALS": "1"}
PROBE = """
import json, sys
print(json.dumps({
    "modules": sorted(name for name in sys.modules if name.split(".")[0].endswith("vllm_hotfix")),
    "finders": sum(type(finder).__module__ == "_vllm_hotfix" for finder in sys.meta_path),
}))
"""
WAITING = {"modules": ["_vllm_hotfix"], "finders": 1}
UNTOUCHED: dict[str, Any] = {"modules": [], "finders": 0}


class Environment:
    """A virtual environment; pip works on it from outside, so it holds what was installed and no more."""

    def __init__(self, home: Path) -> None:
        run(sys.executable, "-m", "venv", "--without-pip", home)
        self.python = home / "bin/python"
        (self.packages,) = home.glob("lib/python3*/site-packages")

    def pip(self, *arguments: str | Path) -> None:
        run(sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.python, *arguments)

    def probe(self, *arguments: str | Path, **environ: str) -> Any:
        """What an interpreter holds right after its start; it must have had nothing to say on stderr."""
        done = run(self.python, *(arguments or ("-c", PROBE)), **environ)
        assert done.stderr == ""
        return json.loads(done.stdout)

    def listing(self) -> set[str]:
        return {str(path.relative_to(self.packages)) for path in self.packages.rglob("*")}


def run(*command: str | Path, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs a command without the gates and Python settings of whoever runs the tests."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VLLM_"))}
    done = subprocess.run(command, cwd=cwd, env=clean | environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command} gave {done.returncode}:\n{done.stdout}{done.stderr}"
    return done


def build(kind: str, source: Path, folder: Path) -> Path:
    """Builds the project in `source` as its metadata says."""
    run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", folder, cwd=source)
    (made,) = folder.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return made


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, in a folder with the wheels of what it depends on."""
    house = tmp_path_factory.mktemp("house")
    made = build("wheel", ROOT, house)
    run(sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--dest", house, made)
    return made


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the wheel, for tests that change nothing in it."""
    return install(wheel, tmp_path_factory.mktemp("installed"))


def install(wheel: Path, home: Path) -> Environment:
    """Makes an environment with the wheel and what it asks for."""
    environment = Environment(home)
    environment.pip("install", "--quiet", "--no-index", "--find-links", wheel.parent, "vllm-hotfix")
    return environment


def test_the_wheel_puts_the_start_files_into_site_packages(installed: Environment) -> None:
    """The package, the module beside it, and both start files are where `site` looks for them."""
    for name in (
        "_vllm_hotfix.py",
        "vllm_hotfix.pth",
        "vllm_hotfix.start",
        "vllm_hotfix/__init__.py",
        "vllm_hotfix/bootstrap/sitecustomize.py",
        "vllm_hotfix/py.typed",
        "vllm_hotfix/upstream.lock",
    ):
        assert (installed.packages / name).is_file(), name


def test_the_wheel_brings_nothing_else(wheel: Path, installed: Environment) -> None:
    """No test, tool or build file reaches site-packages, and no dependency but wrapt and packaging."""
    top = {name.split("/")[0] for name in contents(wheel)}
    assert {name for name in top if not name.endswith(".dist-info")} == {
        "_vllm_hotfix.py",
        "vllm_hotfix",
        "vllm_hotfix.pth",
        "vllm_hotfix.start",
    }
    names = {found.name for found in distributions(path=[str(installed.packages)])}
    assert names == {"vllm-hotfix", "wrapt", "packaging"}


def test_the_metadata_declares_plugin_script_and_dependencies(installed: Environment) -> None:
    """VLLM finds the plugin, a shell finds the command, and pip is asked for wrapt 2 and packaging only."""
    (info,) = installed.packages.glob("vllm_hotfix-*.dist-info")
    found = PathDistribution(info)
    points = {(point.group, point.name): point.value for point in found.entry_points}
    assert points == {
        ("vllm.general_plugins", "vllm_hotfix"): "_vllm_hotfix:plugin",
        ("console_scripts", "vllm-hotfix"): "vllm_hotfix.__main__:main",
    }
    assert installed.python.with_name("vllm-hotfix").is_file()
    assert sorted(found.requires or []) == ["packaging", "wrapt<3,>=2"]
    assert found.metadata["License-Expression"] == "Apache-2.0"


def test_the_pth_is_one_line_that_site_executes(installed: Environment) -> None:
    """`site` executes lines that begin with `import`, one by one, and takes any other for a folder."""
    (line,) = (installed.packages / "vllm_hotfix.pth").read_text().splitlines()
    assert line.startswith("import ")


def test_the_start_file_names_the_function_that_the_pth_calls(installed: Environment) -> None:
    """PEP 829's `module:callable` line resolves to `_vllm_hotfix.start`."""
    (line,) = (installed.packages / "vllm_hotfix.start").read_text().splitlines()
    code = f"import json, pkgutil; print(json.dumps(pkgutil.resolve_name({line!r}).__qualname__))"
    assert line.startswith("_vllm_hotfix:")
    assert installed.probe("-c", code) == "start"


def test_the_pth_leaves_no_name_behind(installed: Environment) -> None:
    """Neither `site` nor the program's own module gets a name from the line."""
    code = "import json, site; print(json.dumps([n for n in {**vars(site), **globals()} if 'hotfix' in n]))"
    assert installed.probe("-c", code, **GATE) == []


@pytest.mark.parametrize("options", [[], ["-I"], ["-E"], ["-s"]], ids=["plain", "-I", "-E", "-s"])
def test_a_gate_makes_an_interpreter_wait_for_vllm(installed: Environment, options: list[str]) -> None:
    """With a gate set, one finder waits, and the package itself is not imported yet."""
    assert installed.probe(*options, "-c", PROBE, **GATE) == WAITING


@pytest.mark.parametrize("options", [[], ["-I"], ["-E"], ["-s"]], ids=["plain", "-I", "-E", "-s"])
def test_without_a_gate_nothing_is_hooked(installed: Environment, options: list[str]) -> None:
    """With no variable set, nothing of the package is imported, and no finder waits."""
    assert installed.probe(*options, "-c", PROBE) == UNTOUCHED


@pytest.mark.parametrize(
    "name", ["VLLM_HOTFIX_ENABLE", "VLLM_HOTFIX_DISABLE", "VLLM_HOTFIX_NOT_YET_KNOWN", *_vllm_hotfix.ALIASES]
)
@pytest.mark.parametrize("value", ["1", "0"])
def test_the_pth_knows_every_variable(installed: Environment, name: str, value: str) -> None:
    """The names in the .pth line cover every variable that `_vllm_hotfix` looks for, whatever its value."""
    assert installed.probe(**{name: value}) == WAITING


@pytest.mark.parametrize("name", ["VLLM_LOGGING_LEVEL", "VLLM_HOTFIXES", "HOTFIX_RELEASE"])
def test_a_variable_of_someone_else_is_no_gate(installed: Environment, name: str) -> None:
    """VLLM's own variables, and names that only look like a gate, import nothing."""
    assert installed.probe(**{name: "1"}) == UNTOUCHED


def test_an_interpreter_without_site_is_left_alone(installed: Environment) -> None:
    """Under -S no .pth is read, whatever the environment asks for."""
    assert installed.probe("-S", "-c", PROBE, **GATE) == UNTOUCHED


@pytest.mark.parametrize(("environ", "expected"), [(GATE, WAITING), ({}, UNTOUCHED)], ids=["gate", "no gate"])
def test_a_spawned_child_starts_as_its_parent(
    installed: Environment, tmp_path: Path, environ: dict[str, str], expected: dict[str, Any]
) -> None:
    """A multiprocessing child made by spawn, as vLLM makes its workers, decides by the environment too."""
    assert installed.probe(spawning(tmp_path, {}), **environ) == expected


def test_a_gate_set_by_the_parent_reaches_a_spawned_child(installed: Environment, tmp_path: Path) -> None:
    """A program that sets the gate itself, after its own start, has it at work in what it spawns."""
    assert installed.probe(spawning(tmp_path, GATE)) == WAITING


def spawning(folder: Path, environ: dict[str, str]) -> Path:
    """Writes a program that sets variables and then lets a spawned child print the probe."""
    script = folder / "parent.py"
    script.write_text(
        "import multiprocessing, os\n"
        f"def probe():\n{indent(PROBE, '    ')}"
        "if __name__ == '__main__':\n"
        f"    os.environ.update({environ})\n"
        "    child = multiprocessing.get_context('spawn').Process(target=probe)\n"
        "    child.start()\n"
        "    child.join()\n"
    )
    return script


def test_reading_the_pth_twice_installs_one_finder(installed: Environment) -> None:
    """A site-packages that is reached through a lib64 link too has its .pth read twice; one finder waits."""
    through = installed.packages.parents[1].with_name("lib64")
    if not through.exists():
        through.symlink_to("lib")
    again = through / installed.packages.relative_to(installed.packages.parents[1])
    assert again != installed.packages
    assert again.samefile(installed.packages)
    count = (
        "import site, _vllm_hotfix as module\n"
        "calls, start = [], module.start\n"
        "module.start = lambda: calls.append(start())\n"
        f"site.addsitedir({str(again)!r})\n"
        "assert len(calls) == 1, calls\n"
    )
    assert installed.probe("-c", count + PROBE, **GATE) == WAITING


def test_uninstalling_leaves_nothing(wheel: Path, tmp_path: Path) -> None:
    """After install, use and uninstall, site-packages lists what it listed before."""
    environment = Environment(tmp_path / "home")
    source = ("--quiet", "--no-index", "--find-links", wheel.parent)
    environment.pip("install", *source, "wrapt", "packaging")
    before = environment.listing()
    environment.pip("install", *source, "vllm-hotfix")
    assert environment.listing() != before
    assert environment.probe(**GATE) == WAITING
    environment.probe("-c", "import vllm_hotfix\n" + PROBE)
    environment.pip("uninstall", "--quiet", "--yes", "vllm-hotfix")
    assert environment.listing() == before
    assert environment.probe(**GATE) == UNTOUCHED


@pytest.mark.parametrize("environ", [GATE, {}], ids=["gate", "no gate"])
def test_a_pth_that_outlives_the_package_is_silent(wheel: Path, tmp_path: Path, environ: dict[str, str]) -> None:
    """With the package deleted by hand and the .pth still there, an interpreter starts without a word."""
    environment = install(wheel, tmp_path / "home")
    shutil.rmtree(environment.packages / "vllm_hotfix")
    assert environment.probe(**environ) == (WAITING if environ else UNTOUCHED)  # also half deleted
    (environment.packages / "_vllm_hotfix.py").unlink()
    assert (environment.packages / "vllm_hotfix.pth").is_file()
    assert environment.probe(**environ) == UNTOUCHED


def test_an_editable_install_starts_too(tmp_path: Path) -> None:
    """An editable install has both start files, waits for vLLM from the checkout, and uninstalls cleanly."""
    environment = Environment(tmp_path / "home")
    before = environment.listing()
    environment.pip("install", "--quiet", "--no-deps", "--editable", ROOT)
    for name in ("vllm_hotfix.pth", "vllm_hotfix.start"):
        assert (environment.packages / name).read_text() == (ROOT / name).read_text()
    assert not (environment.packages / "_vllm_hotfix.py").exists()
    assert environment.probe() == UNTOUCHED
    assert environment.probe("-I", "-c", PROBE, **GATE) == WAITING
    where = "import json, _vllm_hotfix; print(json.dumps(_vllm_hotfix.__file__))"
    assert environment.probe("-c", where) == str(ROOT / "_vllm_hotfix.py")
    environment.pip("uninstall", "--quiet", "--yes", "vllm-hotfix")
    assert environment.listing() == before
    assert environment.probe(**GATE) == UNTOUCHED


def test_the_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    """Each file of the wheel is the same whether it is built from the checkout or from the sdist."""
    with tarfile.open(build("sdist", ROOT, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    assert contents(build("wheel", source, tmp_path / "wheel")) == contents(wheel)


def contents(wheel: Path) -> dict[str, int]:
    """The name and checksum of every file in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {item.filename: item.CRC for item in archive.infolist()}
