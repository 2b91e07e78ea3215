"""``tools/lock.py``: what it writes, and what it refuses."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from vllm_hotfix._patch import Patch, Target
from vllm_hotfix._upstream import ABSENT, Lock, fingerprint

OLD, NEW = "def f():\n    return 1\n", "def f():\n    return 2\n"
MARKS = fingerprint(OLD, "f"), fingerprint(NEW, "f")
PATCH = Patch("p", "VLLM_HOTFIX_P", "a fault", "x#1", (Target("vllm.m:f", "f"),), relies=("beside.m:f",))

Folders = dict[str, dict[str, Path]]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module, with a catalog of one patch, which relies on a package beside vLLM."""
    spec = importlib.util.spec_from_file_location("tool", Path(__file__).parents[2] / "tools/lock.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "CATALOG", (PATCH,))
    return module


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    """Two unpacked releases of vLLM and three of the other package, the last of which has no ``f``."""
    found: Folders = {"beside": {}, "vllm": {}}
    releases = [("vllm", "1.10", NEW), ("vllm", "1.9", OLD)]
    releases += [("beside", "2.0", OLD), ("beside", "2.1", OLD), ("beside", "2.2", "")]
    for package, release, text in releases:
        folder = found[package][release] = tmp_path / f"{package}-{release}"
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").touch()
        (folder / package / "m.py").write_text(text)
        if package == "vllm":
            (folder / "vllm/_version.py").write_text(f"version = {release!r}\n")
        else:
            (folder / f"{package}-{release}.dist-info").mkdir()
    return found


def test_each_name_has_the_releases_of_its_package(tool: Any, folders: Folders) -> None:
    """Releases come in their order, whatever order they are given in, and what is absent counts."""
    lock = Lock(tool.build(folders))
    assert lock.packages == {"vllm": ("1.9", "1.10"), "beside": ("2.0", "2.1", "2.2")}
    assert lock.targets == {
        "vllm.m:f": {MARKS[0]: ("1.9",), MARKS[1]: ("1.10",)},
        "beside.m:f": {MARKS[0]: ("2.0", "2.1"), ABSENT: ("2.2",)},
    }


def test_a_package_without_names_is_listed(tool: Any, folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its releases were looked at, though no patch needs it now."""
    monkeypatch.setattr(tool, "CATALOG", ())
    lock = Lock(tool.build(folders))
    assert lock.packages["beside"] == ("2.0", "2.1", "2.2")
    assert lock.targets == {}


@pytest.mark.parametrize("package", ["vllm", "beside"])
def test_a_package_that_is_not_given_is_an_error(tool: Any, folders: Folders, package: str) -> None:
    """A patch's name without any release would be one that is never known."""
    del folders[package]
    with pytest.raises(ValueError, match=f"no release of {package} is given"):
        tool.build(folders)


@pytest.mark.parametrize(("package", "release"), [("vllm", "1.9"), ("beside", "2.0")])
def test_a_folder_of_another_release_is_an_error(tool: Any, folders: Folders, package: str, release: str) -> None:
    """The message has the folder, what it holds and what it was said to hold."""
    other = folders[package][release] = next(path for one, path in folders[package].items() if one != release)
    with pytest.raises(ValueError, match=rf"{other} holds {package} [\d.]+, not {release}"):
        tool.build(folders)


def test_the_command_line(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release without a package is vLLM's; a folder may have any name."""
    given: list[Mapping[str, Mapping[str, Path]]] = []
    text = Lock.dump(["1.0"], {"vllm.m:f": {"aa": ["1.0"]}})
    monkeypatch.setattr(tool, "build", lambda folders: given.append(folders) or text)
    monkeypatch.setattr(tool, "__file__", str(tmp_path / "tools/lock.py"))
    (tmp_path / "vllm_hotfix").mkdir()
    tool.main(["1.0=/a==b", "beside==2.0=/c", "1.1=d", "beside==2.1=/e=f"])
    assert given == [
        {"vllm": {"1.0": Path("/a==b"), "1.1": Path("d")}, "beside": {"2.0": Path("/c"), "2.1": Path("/e=f")}}
    ]
    assert (tmp_path / "vllm_hotfix/upstream.lock").read_text() == text


@pytest.mark.parametrize("argument", ["1.0", "=folder", "1.0=", "beside==1.0", "beside===folder"])
def test_arguments_that_are_not_understood(tool: Any, argument: str) -> None:
    """The message has the argument and the form that it should have."""
    with pytest.raises(SystemExit, match=r"is not \[PACKAGE==\]VERSION=FOLDER"):
        tool.main([argument])
