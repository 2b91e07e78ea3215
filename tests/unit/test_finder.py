"""The finder that waits for vLLM: called at execution, invisible otherwise, harmless always."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import _vllm_hotfix
from _vllm_hotfix import Finder, Loader

Load = Callable[..., ModuleType]


@pytest.fixture
def finder() -> Finder:
    """A finder of the test's own, first on the meta path."""
    finder = Finder()
    finder.install()
    return finder


def test_calls_before_and_after_the_code_of_the_module(finder: Finder, load: Load) -> None:
    """``before`` sees an empty module and ``after`` a full one, once each, and the module is the imported one."""
    calls: list[Any] = []
    finder.before["sample"] = lambda module: calls.append(("before", hasattr(module, "value")))
    finder.after["sample"] = lambda module: calls.append(("after", module.value, module))
    module = load("sample", "value = 1\n")
    assert calls == [("before", False), ("after", 1, module)]


def test_looking_a_module_up_calls_nobody(finder: Finder, load: Load) -> None:
    """``find_spec`` is asked by many who never import: it must not activate anything."""
    finder.before["sample"] = finder.after["sample"] = lambda module: pytest.fail("called back")
    load("sample", "", imported=False)
    spec = importlib.util.find_spec("sample")
    assert spec is not None
    assert "sample" not in sys.modules
    importlib.util.module_from_spec(spec)


def test_other_modules_are_left_alone(finder: Finder, load: Load) -> None:
    """A module that nobody waits for gets its own loader, untouched."""
    finder.after["something_else"] = lambda module: pytest.fail("called back")
    load("sample", "", imported=False)
    spec = importlib.util.find_spec("sample")
    assert spec is not None
    assert type(spec.loader) is SourceFileLoader


def test_an_imported_module_has_its_own_loader_again(finder: Finder, load: Load) -> None:
    """What inspects modules (``inspect``, ``pickle``, ``importlib.resources``) finds stock loaders."""
    finder.after["sample"] = lambda module: None
    module = load("sample", "seen = type(__loader__).__name__, type(__spec__.loader).__name__\ndef f(): return 1\n")
    assert type(module.__loader__) is SourceFileLoader
    assert module.__spec__ is not None
    assert type(module.__spec__.loader) is SourceFileLoader
    assert module.seen == ("SourceFileLoader", "SourceFileLoader"), "the module's own code sees them as well"
    assert inspect.getsource(module.f) == "def f(): return 1\n"


def test_the_loader_passes_on_what_it_is_asked(finder: Finder, load: Load) -> None:
    """Between lookup and import the loader answers for the real one, as ``runpy`` and ``pkgutil`` ask it to."""
    finder.before["sample"] = lambda module: None
    load("sample", "value = 1\n", imported=False)
    spec = importlib.util.find_spec("sample")
    assert spec is not None
    loader: Any = spec.loader
    assert type(loader) is Loader
    assert loader.get_source("sample") == "value = 1\n"
    assert loader.is_package("sample") is False
    assert not hasattr(loader, "no_such_thing")
    assert copy.copy(loader).get_source("sample") == "value = 1\n"


def test_a_failed_import_is_seen_again(finder: Finder, load: Load, write: Any) -> None:
    """An import that raised calls ``before`` only; the retry calls both."""
    calls: list[str] = []
    finder.before["sample"] = lambda module: calls.append("before")
    finder.after["sample"] = lambda module: calls.append("after")
    with pytest.raises(ZeroDivisionError):
        load("sample", "1 / 0\n")
    assert calls == ["before"]
    load("sample", "# another length\nvalue = 1\n")
    assert calls == ["before", "before", "after"]


def test_a_reload_is_seen(finder: Finder, load: Load) -> None:
    """``importlib.reload`` executes the module again, and what was wrapped in it is gone."""
    calls: list[Any] = []
    finder.after["sample"] = calls.append
    module = load("sample", "")
    importlib.reload(module)
    assert calls == [module, module]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_callback_that_raises_does_not_fail_the_import(
    finder: Finder, load: Load, when: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The host imports its module whatever happens here; one line says what did."""

    def boom(module: Any) -> None:
        raise ValueError("boom")

    getattr(finder, when)["sample"] = boom
    assert load("sample", "value = 1\n").value == 1
    assert capsys.readouterr().err == "vllm-hotfix: while sample was imported: ValueError: boom\n"


def test_an_error_that_cannot_be_printed_does_not_fail_the_import(finder: Finder, load: Load) -> None:
    """Even the text of an error can raise; the host is no party to that."""

    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    def boom(module: Any) -> None:
        raise Mute

    finder.after["sample"] = boom
    assert load("sample", "value = 1\n").value == 1


def test_a_module_that_changes_its_name_can_be_imported(finder: Finder, load: Load) -> None:
    """The module's code may do with ``__name__`` what it likes, and is still seen by the name it was found by."""
    calls: list[Any] = []
    finder.after["sample"] = calls.append
    module = load("sample", "del __name__\n")
    assert calls == [module]


def test_interrupts_pass(finder: Finder, load: Load) -> None:
    """Whoever presses Ctrl-C in a callback's time wants out."""

    def interrupt(module: Any) -> None:
        raise KeyboardInterrupt

    finder.before["sample"] = interrupt
    with pytest.raises(KeyboardInterrupt):
        load("sample", "")


def test_missing_modules_are_missing(finder: Finder) -> None:
    """Waiting for a module does not make it exist."""
    finder.before["no_such_module"] = finder.after["no_such_module"] = lambda module: pytest.fail("called back")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        importlib.import_module("no_such_module")


class Asking:
    """A finder that, like wrapt's, asks the whole meta path again for a module; it has no loader of its own."""

    def __init__(self) -> None:
        self.asking = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "sample" or self.asking:
            return None
        self.asking = True
        try:
            return importlib.util.find_spec(name)
        finally:
            self.asking = False


@pytest.mark.parametrize("place", [0, 1])
def test_finders_that_ask_each_other_end(finder: Finder, load: Load, place: int) -> None:
    """Before or after another finder that asks the whole meta path: no endless loop, one callback."""
    calls: list[Any] = []
    finder.after["sample"] = calls.append
    sys.meta_path.insert(place, Asking())
    assert calls == [load("sample", "value = 1\n")]


def test_loaders_without_exec_module_are_left_alone(finder: Finder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader of the old kind goes through as it is."""

    class Old:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
            return ModuleSpec(name, loader) if name == "sample" else None

    loader: Any = object()
    finder.before["sample"] = lambda module: pytest.fail("called back")
    monkeypatch.setattr(sys, "meta_path", [finder, Old(), *sys.meta_path])
    spec = importlib.util.find_spec("sample")
    assert spec is not None
    assert spec.loader is loader


def test_a_finder_that_raises_raises_as_without_this_one(finder: Finder, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of another finder is the host's own, and a second attempt is not taken for a loop."""

    class Broken:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
            raise LookupError(name)

    finder.before["sample"] = lambda module: pytest.fail("called back")
    monkeypatch.setattr(sys, "meta_path", [finder, Broken(), *sys.meta_path])
    for _ in range(2):
        with pytest.raises(LookupError, match="sample"):
            importlib.util.find_spec("sample")


def test_two_threads_import_one_module(finder: Finder, load: Load) -> None:
    """The second thread waits for the first as ever, and the callback comes once."""
    calls: list[Any] = []
    finder.after["sample"] = calls.append
    load("sample", "import time\ntime.sleep(0.05)\nvalue = 1\n", imported=False)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(importlib.import_module("sample"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert [module.value for module in found] == [1] * 4
    assert len(calls) == 1


def test_install_is_done_once(finder: Finder) -> None:
    """Several channels install the same finder."""
    finder.install()
    assert sys.meta_path.count(finder) == 1


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("VLLM_HOTFIX_MEASURED_TOTALS", True),
        ("VLLM_HOTFIX_ENABLE", True),
        ("VLLM_LAYERWISE_RELOAD_MEASURED_TOTALS", True),
        ("VLLM_RELOAD_KEEP_MOE_KERNEL", True),
        ("VLLM_HOTFIXES", False),
        ("VLLM_USE_V1", False),
        ("vllm_hotfix_enable", False),
    ],
)
def test_asked_looks_at_names_only(monkeypatch: pytest.MonkeyPatch, name: str, asked: bool) -> None:
    """A variable of this package, or upstream's name for one, asks for it, whatever its value is."""
    assert not _vllm_hotfix.asked()
    monkeypatch.setenv(name, "0")
    assert _vllm_hotfix.asked() is asked


def test_every_alias_is_known_to_the_start() -> None:
    """The start knows the patches' aliases by heart, since it cannot afford to import the catalog."""
    from vllm_hotfix._catalog import CATALOG

    assert {alias for patch in CATALOG for alias in patch.aliases} <= set(_vllm_hotfix.ALIASES)
    assert all(patch.env.startswith("VLLM_HOTFIX_") for patch in CATALOG)


def test_start_waits_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no gate set nothing is hooked; with one, exactly one finder is, however often the start is called."""
    before = list(sys.meta_path)
    _vllm_hotfix.start()
    assert sys.meta_path == before
    assert not _vllm_hotfix.FINDER.before
    monkeypatch.setenv("VLLM_HOTFIX_ENABLE", "all")
    _vllm_hotfix.start()
    _vllm_hotfix.start()
    assert sys.meta_path == [_vllm_hotfix.FINDER, *before]


def test_start_never_raises(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An exception in a .pth line would be a traceback at every start of Python; this is one line."""
    monkeypatch.setattr(_vllm_hotfix, "asked", lambda: 1 / 0)
    _vllm_hotfix.start()
    assert capsys.readouterr().err == "vllm-hotfix: not active in this process: ZeroDivisionError: division by zero\n"


def test_warn_survives_a_process_without_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon may have closed stderr or set it to None."""
    for stderr in (None, object()):
        monkeypatch.setattr(sys, "stderr", stderr)
        _vllm_hotfix.warn("nobody hears this")


def test_the_start_module_imports_nothing_else(bare: Path) -> None:
    """What runs at every start of Python costs one small module."""
    home = Path(_vllm_hotfix.__file__).parent
    code = (
        "import sys; before = set(sys.modules); sys.path.append(sys.argv[1]); import _vllm_hotfix; "
        "_vllm_hotfix.start(); print(sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([bare, "-I", "-c", code, home], capture_output=True, text=True, check=True)
    assert done.stdout == "['_vllm_hotfix']\n"
