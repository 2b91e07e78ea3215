"""Wrapping, undoing, and the moment at which a module is ready for it."""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
import logging
import multiprocessing.util
import os
import pickle
import py_compile
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from py_compile import PycInvalidationMode
from textwrap import dedent
from types import FunctionType, ModuleType
from typing import Any

import pytest
import wrapt

import _vllm_hotfix
from vllm_hotfix import HotfixError, _hooks, _record
from vllm_hotfix._hooks import Activation, Drift, Wrap, state_of, when_ready
from vllm_hotfix._patch import ACTIVE, DRIFTED, FAILED, OFF, READY, STALE_GRAPHS, UNSUPPORTED, Patch, Target, read_gates
from vllm_hotfix._record import RECORD, live
from vllm_hotfix._upstream import ABSENT, Lock, Sources, fingerprint

Load = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("lock_free")

SAMPLE = """
import functools

def plain(a=0):
    return ["stock", a]

def decorate(f):
    @functools.wraps(f)
    def inner(*args):
        return ["decorated", *f(*args)]
    return inner

@decorate
def decorated(a=0):
    return ["stock", a]

class A:
    def method(self, a=0):
        return ["stock", a]

    @staticmethod
    def static(a=0):
        return ["stock", a]

    @classmethod
    def klass(cls, a=0):
        return ["stock", a]

    @functools.wraps(plain)
    def wraps(self, a=0):
        return ["stock", a]

    class B:
        def inner(self, a=0):
            return ["stock", a]

class Child(A):
    def method(self, a=0):
        return ["child", *super().method(a)]

number = 1
"""

CALLS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda m: m.plain(7),
    "decorated": lambda m: m.decorated(7),
    "A.method": lambda m: m.A().method(7),
    "A.static": lambda m: m.A.static(7),
    "A.klass": lambda m: m.A.klass(7),
    "A.B.inner": lambda m: m.A.B().inner(7),
}


def mark(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """The wrapper of these tests: one mark at the end of what stock returns."""
    return [*wrapped(*args, **kwargs), "patched"]


def marks(result: list[Any]) -> int:
    """How often the wrapper ran."""
    return result.count("patched")


@pytest.fixture
def sample(load: Load) -> Any:
    """A module with every kind of function."""
    return load("sample", SAMPLE)


@pytest.fixture
def source(sample: Any) -> Any:
    """Where a name of the sample stands in its file."""
    sources = Sources(Path(sample.__file__).parent)

    def find(name: str) -> Any:
        sources._packages["sample"] = Path(sample.__file__).parent
        sources.module = lambda _: Path(sample.__file__)  # type: ignore[method-assign]
        return sources.find(f"sample:{name}")

    return find


def place(module: Any, name: str) -> Any:
    """What stands in the place of a name, as stored."""
    *path, last = name.split(".")
    for part in path:
        module = vars(module)[part]
    return vars(module)[last]


@pytest.mark.parametrize("name", CALLS)
def test_wraps_and_undoes(sample: Any, source: Any, name: str) -> None:
    """Each kind of function runs once more with the wrapper, and is the identical object when undone."""
    stock, before = CALLS[name](sample), place(sample, name)
    wrap = Wrap(f"sample:{name}", mark, source(name))
    assert CALLS[name](sample) == [*stock, "patched"]
    assert wrap.alive
    wrap.undo()
    assert CALLS[name](sample) == stock
    assert place(sample, name) is before
    assert not wrap.alive


def test_the_wrapper_gets_what_wrapt_gives(sample: Any) -> None:
    """The wrapped function is bound, the instance is the object, or the class of a classmethod."""
    seen: list[Any] = []

    def look(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        seen.append((instance, args, kwargs))
        return wrapped(*args, **kwargs)

    for name in ("plain", "A.method", "A.klass"):
        Wrap(f"sample:{name}", look, None)
    one = sample.A()
    sample.plain(1)
    one.method(a=2)
    sample.A.klass(3)
    assert seen == [(None, (1,), {}), (one, (), {"a": 2}), (sample.A, (3,), {})]


def test_subclasses_reach_the_wrapper_through_super(sample: Any) -> None:
    """A subclass that overrides the method and calls ``super`` runs the wrapper once."""
    Wrap("sample:A.method", mark, None)
    assert sample.Child().method(7) == ["child", "stock", 7, "patched"]


def test_a_wrapped_function_looks_like_the_stock_one(sample: Any) -> None:
    """Name, module, documentation and signature are the stock function's."""
    import inspect

    before = sample.plain
    Wrap("sample:plain", mark, None)
    assert sample.plain.__name__ == "plain"
    assert sample.plain.__module__ == "sample"
    assert inspect.signature(sample.plain) == inspect.signature(before)
    assert inspect.isfunction(sample.plain)


def test_a_wrapped_function_can_be_copied_and_pickled(sample: Any) -> None:
    """A function is copied as itself and pickled by its name; configurations that hold one are copied all the time."""
    Wrap("sample:plain", mark, None)
    assert copy.copy(sample.plain) is sample.plain
    assert copy.deepcopy({"f": sample.plain})["f"] is sample.plain
    assert pickle.loads(pickle.dumps(sample.plain)) is sample.plain


# Names that others took.


def test_names_taken_elsewhere_are_rebound_and_undone(sample: Any, load: Load) -> None:
    """``from sample import plain [as p]`` and a second name in the module itself: wrapper, then stock."""
    stock = sample.plain
    taker = load("taker", "from sample import plain, plain as p\n")
    sample.again = stock
    wrap = Wrap("sample:plain", mark, None)
    assert [marks(f()) for f in (taker.plain, taker.p, sample.again, sample.plain)] == [1, 1, 1, 1]
    wrap.undo()
    assert all(f is stock for f in (taker.plain, taker.p, sample.again, sample.plain))


def test_keep_leaves_a_modules_own_name_alone(sample: Any, load: Load) -> None:
    """A module named in ``keep`` goes on with the stock function; others do not."""
    keeper, taker = load("keeper", "from sample import plain\n"), load("taker", "from sample import plain\n")
    stock = sample.plain
    wrap = Wrap("sample:plain", mark, None, keep=("keeper",))
    assert keeper.plain is stock
    assert marks(taker.plain()) == 1
    wrap.undo()
    assert keeper.plain is taker.plain is stock


def test_a_name_taken_after_wrapping_is_undone_too(sample: Any, load: Load) -> None:
    """Who imports later takes the wrapper, and has the stock function again when it is undone."""
    stock = sample.plain
    wrap = Wrap("sample:plain", mark, None)
    taker = load("taker", "from sample import plain\n")
    assert marks(taker.plain()) == 1
    wrap.undo()
    assert taker.plain is stock


def test_what_is_no_module_in_sys_modules_is_passed_over(sample: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """None, lazy stand-ins and objects of any kind are there in real processes."""

    class Lazy:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("touched")

    monkeypatch.setitem(sys.modules, "nothing", None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "lazy", Lazy())  # type: ignore[arg-type]
    Wrap("sample:plain", mark, None).undo()


def test_a_lazy_module_is_not_loaded_for_it(sample: Any, write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of ``importlib.util.LazyLoader`` stays unloaded: its code may fail, or must not run yet."""
    from importlib.util import LazyLoader, find_spec, module_from_spec

    monkeypatch.syspath_prepend(write({"lazy_one.py": "raise ImportError('not here')\n"}))
    spec = find_spec("lazy_one")
    assert spec is not None
    assert spec.loader is not None
    spec.loader = LazyLoader(spec.loader)
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "lazy_one", module)
    spec.loader.exec_module(module)
    wrap = Wrap("sample:plain", mark, None)
    assert type(module) is not ModuleType, "it was loaded"
    wrap.undo()


def test_a_module_that_refuses_leaves_nothing_half_done(sample: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one module's name cannot be changed the function is either wrapped with a handle to undo it, or stock."""

    class Frozen(ModuleType):
        def __setattr__(self, name: str, value: Any) -> None:
            raise TypeError("frozen")

    frozen = Frozen("frozen")
    vars(frozen)["plain"] = stock = sample.plain
    monkeypatch.setitem(sys.modules, "frozen", frozen)
    try:
        wrap = Wrap("sample:plain", mark, None)
    except TypeError:
        assert sample.plain is stock
    else:
        wrap.undo()
        assert sample.plain is stock


# Other libraries' wrappers.


def closure(module: Any, name: str, counted: list[str]) -> None:
    """Wrap as most libraries do: by a closure with ``functools.wraps`` around what the attribute gives."""
    owner = module
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    below = getattr(owner, last)

    @functools.wraps(below)
    def other(*args: Any, **kwargs: Any) -> Any:
        counted.append("other")
        return below(*args, **kwargs)

    kind = type(inspected) if isinstance(inspected := vars(owner)[last], (staticmethod, classmethod)) else None
    setattr(owner, last, staticmethod(other) if kind else other)


def by_wrapt(module: Any, name: str, counted: list[str]) -> None:
    """Wrap as instrumentation libraries do: by wrapt."""

    def other(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        counted.append("other")
        return wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(module, name, other)


OTHERS = pytest.mark.parametrize("other", [closure, by_wrapt])
NAMES = pytest.mark.parametrize("name", ["plain", "A.method", "A.static", "A.klass"])


@OTHERS
@NAMES
def test_a_wrapper_of_others_below(sample: Any, source: Any, other: Any, name: str) -> None:
    """Others were first: the function under their wrapper is the known one, both run, and theirs stays when undone."""
    counted: list[str] = []
    other(sample, name, counted)
    theirs = place(sample, name)
    wrap = Wrap(f"sample:{name}", mark, source(name))
    assert marks(CALLS[name](sample)) == 1
    assert counted == ["other"]
    wrap.undo()
    assert place(sample, name) is theirs
    assert marks(CALLS[name](sample)) == 0
    assert counted == ["other", "other"]


@OTHERS
@NAMES
def test_a_wrapper_of_others_on_top(sample: Any, source: Any, other: Any, name: str) -> None:
    """Others came later: the patch is at work under them, is seen to be, and steps aside inside when undone."""
    counted: list[str] = []
    stock = CALLS[name](sample)
    wrap = Wrap(f"sample:{name}", mark, source(name))
    other(sample, name, counted)
    theirs = place(sample, name)
    assert CALLS[name](sample) == [*stock, "patched"]
    assert wrap.alive, "calls reach the wrapper, so it is alive"
    wrap.undo()
    assert place(sample, name) is theirs
    assert CALLS[name](sample) == stock
    assert not wrap.alive
    assert counted == ["other", "other"]


def by_partial(module: Any, name: str, counted: list[str]) -> Any:
    """Wrap by a partial object: it knows what it calls as ``func``, and is no function."""
    return functools.partial(getattr(module, name))


def by_partial_argument(module: Any, name: str, counted: list[str]) -> Any:
    """Wrap by a partial object of a function that is given what it calls."""
    return functools.partial(call_counted, counted, getattr(module, name))


def call_counted(counted: list[str], below: Any, *args: Any) -> Any:
    """Call what is given."""
    counted.append("other")
    return below(*args)


def by_default(module: Any, name: str, counted: list[str]) -> Any:
    """Wrap by a function that keeps what it calls as a default."""
    found = getattr(module, name)

    def other(*args: Any, below: Any = found) -> Any:
        return below(*args)

    return other


def by_bare_closure(module: Any, name: str, counted: list[str]) -> Any:
    """Wrap by a closure that says nothing of what it calls."""
    below = getattr(module, name)
    return lambda *args: below(*args)


def by_global(module: Any, name: str, counted: list[str]) -> Any:
    """Wrap as monkeypatches do: by a function that finds what it calls among its module's names."""
    names: dict[str, Any] = {"below": getattr(module, name)}
    exec("def other(*args):\n    return below(*args)", names)
    return names["other"]


@pytest.mark.parametrize("name", ["plain", "A.method", "A.static", "A.klass"])
@pytest.mark.parametrize("other", [by_partial, by_partial_argument, by_default, by_bare_closure, by_global])
def test_a_wrapper_that_does_not_say_what_it_wraps(
    sample: Any, source: Any, other: Any, name: str, logged: Any
) -> None:
    """It is seen that calls reach the patch; undone, theirs stays, stock runs in it, and a warning names the place."""
    stock = CALLS[name](sample)
    wrap = Wrap(f"sample:{name}", mark, source(name))
    owner, last = (sample.A, name[2:]) if "." in name else (sample, name)
    theirs = other(owner, last, [])
    if isinstance(theirs, functools.partial) and name == "A.method":
        pytest.skip("a partial object is not bound to the instance, so it is no method")
    setattr(owner, last, theirs if name in ("plain", "A.method") else staticmethod(theirs))
    theirs = place(sample, name)
    assert CALLS[name](sample) == [*stock, "patched"]
    assert wrap.alive
    wrap.undo()
    assert place(sample, name) is theirs
    assert CALLS[name](sample) == stock
    (warning,) = logged()
    assert warning == f"vllm-hotfix: sample:{name} was wrapped again by others; the patch steps aside inside"


@NAMES
@pytest.mark.parametrize("order", [*itertools.permutations("abc")], ids="".join)
def test_wraps_of_one_function_are_undone_in_any_order(
    sample: Any, source: Any, name: str, order: tuple[str, ...], load: Load, logged: Any
) -> None:
    """The stock object is back when the last is undone, here and where the name was taken; nobody is said to wrap."""
    stock, taken = place(sample, name), load("taken", "from sample import plain")
    bound = taken.plain
    wraps = {key: Wrap(f"sample:{name}", mark, source(name)) for key in "abc"}
    for undone, key in enumerate(order):
        assert marks(CALLS[name](sample)) == 3 - undone
        wraps[key].undo()
    assert place(sample, name) is stock
    assert taken.plain is bound
    assert logged() == []


@OTHERS
@NAMES
def test_when_others_unwrap_the_stock_function_is_left(sample: Any, source: Any, other: Any, name: str) -> None:
    """What they put back is a wrapper that has stepped aside; the next one is put in its place, and undone to stock."""
    stock, result = place(sample, name), CALLS[name](sample)
    wrap = Wrap(f"sample:{name}", mark, source(name))
    before = place(sample, name)
    other(sample, name, [])
    wrap.undo()
    owner, last = (sample.A, name[2:]) if "." in name else (sample, name)
    setattr(owner, last, before)
    assert CALLS[name](sample) == result
    again = Wrap(f"sample:{name}", mark, source(name))
    assert CALLS[name](sample) == [*result, "patched"]
    assert again.original is stock
    again.undo()
    assert place(sample, name) is stock


@OTHERS
@NAMES
def test_wrapped_again_on_top_of_others(sample: Any, source: Any, other: Any, name: str) -> None:
    """With the old wrapper aside within theirs, the new one is at work, once."""
    wrap = Wrap(f"sample:{name}", mark, source(name))
    other(sample, name, [])
    theirs = place(sample, name)
    wrap.undo()
    again = Wrap(f"sample:{name}", mark, source(name))
    assert again.alive
    assert marks(CALLS[name](sample)) == 1
    again.undo()
    assert place(sample, name) is theirs


def test_two_patches_around_a_wrapper_of_others(sample: Any, source: Any, logged: Any) -> None:
    """One under theirs and one on top: each is undone by itself, and only the inner one steps aside."""
    inner = Wrap("sample:plain", mark, source("plain"))
    closure(sample, "plain", [])
    theirs = sample.plain
    outer = Wrap("sample:plain", mark, source("plain"))
    inner.undo()
    assert len(logged()) == 1
    assert marks(sample.plain()) == 1
    outer.undo()
    assert sample.plain is theirs
    assert marks(sample.plain()) == 0
    assert len(logged()) == 1


def test_a_replaced_function_is_not_alive(sample: Any) -> None:
    """Something else in its place, that does not call it: the wrapper is not at work."""
    wrap = Wrap("sample:plain", mark, None)
    sample.plain = lambda: []
    assert not wrap.alive
    del sample.plain
    assert not wrap.alive


# The live object is the known function.


@pytest.mark.parametrize("name", ["plain", "A.method", "A.static", "A.klass"])
def test_a_function_that_was_replaced_at_run_time_is_drift(sample: Any, source: Any, name: str) -> None:
    """Another plugin's function in the place: its code is not the file's, and nothing is changed."""
    owner = sample.A if "." in name else sample
    last = name.rpartition(".")[2]
    replacement = staticmethod(lambda *args: []) if name == "A.static" else lambda *args: []
    setattr(owner, last, replacement)
    with pytest.raises(Drift, match=rf"sample:{name} was replaced at run time by <lambda> of .*test_hooks\.py"):
        Wrap(f"sample:{name}", mark, source(name))
    assert place(sample, name) is replacement


def test_another_function_of_the_same_file_is_drift(sample: Any, source: Any) -> None:
    """The line tells one definition of a file from another."""
    sample.plain = sample.decorate
    with pytest.raises(Drift, match=r"sample:plain runs line \d+ of its file, its source stands at 4"):
        Wrap("sample:plain", mark, source("plain"))


TRACED = """
def traced(f):
    @functools.wraps(f)
    def inner(*args):
        return f(*args)
    return inner
"""


@pytest.mark.parametrize(
    ("end", "other"),
    [
        ("globals()['plain'] = traced(plain)", ""),
        ("import sample.other", "import sample\nsample.plain = sample.traced(sample.plain)"),
        ("import sample.other", f"import functools, sample\n{TRACED}\nsample.plain = traced(sample.plain)"),
    ],
)
def test_a_wrapper_of_the_functions_own_package_is_drift(
    end: str, other: str, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put on where no definition or assignment of the module says so: what runs is not what the source says."""
    folder = write({"sample/__init__.py": f"{SAMPLE}{TRACED}{end}\n", "sample/other.py": other})
    monkeypatch.syspath_prepend(folder)
    sample = importlib.import_module("sample")
    try:
        source, theirs = Sources(folder).find("sample:plain"), sample.plain
        assert source is not None
        assert source.fingerprint == fingerprint(SAMPLE, "plain")
        with pytest.raises(Drift, match=r"sample:plain is wrapped by inner of .*sample.*\.py on import"):
            Wrap("sample:plain", mark, source)
        assert sample.plain is theirs
    finally:
        del sys.modules["sample"]


def imported_as(folder: Path, text: str, runs: str, mode: PycInvalidationMode) -> Any:
    """Import a module whose compiled file is of other text than its file."""
    file = folder / "stale.py"
    file.write_text(runs)
    py_compile.compile(str(file), invalidation_mode=mode)
    times = file.stat()
    file.write_text(text)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    importlib.invalidate_caches()
    return importlib.import_module("stale")


@pytest.mark.parametrize("mode", [PycInvalidationMode.UNCHECKED_HASH, PycInvalidationMode.TIMESTAMP])
@pytest.mark.parametrize(("known", "runs"), [("a + 1", "a - 1"), ("a + 1", "a + 2"), ("a.real", "a.imag"), ("a", "b")])
def test_a_compiled_file_of_other_code_is_drift(
    mode: PycInvalidationMode, known: str, runs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python runs what is in ``__pycache__`` if it is not to check it, or if size and time are the source's."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    text = "class A:\n    def f(self, a, b=3):\n        return {}\n"
    stale = imported_as(tmp_path, text.format(known), text.format(runs), mode)
    stock = stale.A.f
    (tmp_path / "__init__.py").touch()
    source = Sources(tmp_path.parent).find(f"{tmp_path.name}.stale:A.f")
    with pytest.raises(Drift, match=r"stale:A\.f is not what its file says: .*__pycache__"):
        Wrap("stale:A.f", mark, source)
    assert stale.A.f is stock
    del sys.modules["stale"]


def test_a_file_that_changes_before_it_is_imported_is_drift(sample: Any, source: Any) -> None:
    """Judged as it was, imported as it is: the code that runs is not the one that was judged."""
    file = Path(sample.__file__)
    judged = source("plain")
    file.write_text(file.read_text().replace('return ["stock", a]', 'return ["other", a]'))
    importlib.reload(sample)
    with pytest.raises(Drift, match="is not what its file says: the file was changed"):
        Wrap("sample:plain", mark, judged)
    assert sample.plain(7) == ["other", 7]


@pytest.mark.parametrize("name", CALLS)
def test_a_traced_function_is_the_known_one(sample: Any, source: Any, name: str) -> None:
    """A debugger or a coverage tool at work, and code that has become hot, are no other code."""
    for _ in range(300):
        CALLS[name](sample)
    sys.settrace(lambda *_: None)
    try:
        CALLS[name](sample)
        wrap = Wrap(f"sample:{name}", mark, source(name))
    finally:
        sys.settrace(None)
    assert marks(CALLS[name](sample)) == 1
    wrap.undo()


@pytest.mark.parametrize("name", ["number", "A"])
def test_what_is_no_function_is_drift(sample: Any, source: Any, name: str) -> None:
    """A value or a class in the place of the function is not wrapped."""
    with pytest.raises(Drift, match="is not a function"):
        Wrap(f"sample:{name}", mark, source("plain"))


@pytest.mark.parametrize("name", ["missing", "A.missing", "Missing.method", "Child.static"])
def test_what_is_not_there_is_drift(sample: Any, name: str) -> None:
    """A name that was deleted, a class that is not there, or what a class only inherits."""
    with pytest.raises(Drift, match="is not there"):
        Wrap(f"sample:{name}", mark, None)


# The moment.


class Gate:
    """Lets a module's code wait, in a thread, for the test to go on."""

    def __init__(self) -> None:
        self.entered, self.go = threading.Event(), threading.Event()

    def stop(self) -> None:
        """Called by the module."""
        self.entered.set()
        assert self.go.wait(10)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A gate that the module finds as ``gates.GATE``."""
    gates: Any = ModuleType("gates")
    gates.GATE = Gate()
    monkeypatch.setitem(sys.modules, "gates", gates)
    yield gates.GATE
    gates.GATE.go.set()


HALF = "from gates import GATE\nfirst = 1\nGATE.stop()\nlast = 1\n"


def test_a_module_that_is_not_imported_is_waited_for(load: Load) -> None:
    """Nothing is imported for it, and the callback has come when the import statement returns."""
    seen: list[Any] = []
    load("later", "x = 1\n", imported=False)
    when_ready("later", seen.append)
    assert seen == []
    assert "later" not in sys.modules
    module = importlib.import_module("later")
    assert seen == [module]


def test_an_imported_module_is_ready_now(sample: Any) -> None:
    """The callback comes at once."""
    seen: list[Any] = []
    when_ready("sample", seen.append)
    assert seen == [sample]


def test_a_module_half_imported_by_another_thread_is_waited_for(load: Load, gate: Gate) -> None:
    """The callback sees the whole module, and comes before the other thread's import statement returns."""
    events: list[Any] = []
    load("half", HALF, imported=False)

    def work() -> None:
        module = importlib.import_module("half")
        events.append(("imported", module.last))

    thread = threading.Thread(target=work)
    thread.start()
    assert gate.entered.wait(10)
    when_ready("half", lambda module: events.append(("ready", module.last, threading.current_thread() is thread)))
    assert events == []
    gate.go.set()
    thread.join(10)
    assert events == [("ready", 1, True), ("imported", 1)]
    assert type(sys.modules["half"].__spec__) is ModuleSpec, "the spec is as it was"
    assert not [name for name in vars(sys.modules["half"].__spec__) if "hotfix" in name]


def test_no_thread_sees_the_module_before_the_callback(load: Load, gate: Gate) -> None:
    """A third thread that imports the module while it is half there waits until the callback has ended, too."""
    events: list[str] = []
    in_callback, third_tried = threading.Event(), threading.Event()
    load("half", HALF, imported=False)
    first = threading.Thread(target=lambda: importlib.import_module("half"))
    first.start()
    assert gate.entered.wait(10)

    def ready(module: Any) -> None:
        in_callback.set()
        third_tried.wait(0.2)  # a third thread that does not wait sets it at once
        events.append("ready")

    def work() -> None:
        assert in_callback.wait(10)
        import half  # type: ignore[import-not-found]  # noqa: F401

        events.append("third")
        third_tried.set()

    when_ready("half", ready)
    third = threading.Thread(target=work)
    third.start()
    gate.go.set()
    first.join(10)
    third.join(10)
    assert events == ["ready", "third"]


def test_an_import_that_ends_just_now_is_not_missed(load: Load, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other thread ends its import between the look at the spec and the request to be called: still one call."""
    seen: list[Any] = []
    load("half", HALF, imported=False)
    thread = threading.Thread(target=lambda: importlib.import_module("half"))
    thread.start()
    assert gate.entered.wait(10)

    def type_and_end(value: Any) -> type:
        gate.go.set()
        thread.join(10)
        return type(value)

    monkeypatch.setattr(_hooks, "type", type_and_end, raising=False)
    when_ready("half", seen.append)
    gate.go.set()
    thread.join(10)
    assert seen == [sys.modules["half"]]


def test_a_module_half_imported_by_this_thread_is_waited_for(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Activation from within the module's own imports: the callback comes when the whole module is there."""
    seen: list[Any] = []
    hooks: Any = ModuleType("asking")
    hooks.ask = lambda: when_ready("own", lambda module: seen.append(module.last))
    monkeypatch.setitem(sys.modules, "asking", hooks)
    load("own", "from asking import ask\nask()\nask()\nimport asking\nassert not hasattr(asking, 'x')\nlast = 1\n")
    assert seen == [1]


def test_a_half_imported_module_that_fails_is_tried_again(load: Load, gate: Gate) -> None:
    """The import fails: no callback, and the exception is the module's own. The retry calls back."""
    seen: list[Any] = []
    errors: list[BaseException] = []
    load("half", "from gates import GATE\nGATE.stop()\nassert hasattr(GATE, 'fixed')\nlast = 1\n", imported=False)

    def work() -> None:
        try:
            importlib.import_module("half")
        except AssertionError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert gate.entered.wait(10)
    when_ready("half", lambda module: seen.append(module.last))
    gate.go.set()
    thread.join(10)
    assert len(errors) == 1
    assert seen == []
    gate.fixed = True  # type: ignore[attr-defined]
    importlib.import_module("half")
    assert seen == [1]


def test_a_half_imported_module_that_replaces_itself_can_be_imported(load: Load, gate: Gate) -> None:
    """A module may put any object in its place; without a spec it is not ours, and not an error."""
    text = "import sys\nfrom gates import GATE\nGATE.stop()\nclass Lazy: pass\nsys.modules[__name__] = Lazy()\n"
    load("half", text, imported=False)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(importlib.import_module("half")))
    thread.start()
    assert gate.entered.wait(10)
    when_ready("half", lambda module: None)
    gate.go.set()
    thread.join(10)
    assert [type(one).__name__ for one in found] == ["Lazy"]


def test_a_reload_calls_back_again(sample: Any) -> None:
    """What the reload has put in place is stock code, to be wrapped again."""
    seen: list[Any] = []
    when_ready("sample", seen.append)
    importlib.reload(sample)
    assert seen == [sample, sample]


@pytest.mark.parametrize("half", [False, True])
def test_a_callback_that_raises_is_one_warning(
    load: Load, gate: Gate, half: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The import succeeds, the next import of another module too, and one line says what happened."""
    load("half", HALF, imported=False)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(importlib.import_module("half").last))
    if half:
        thread.start()
        assert gate.entered.wait(10)
    when_ready("half", lambda module: 1 / 0)
    gate.go.set()
    if not half:
        thread.start()
    thread.join(10)
    assert found == [1]
    assert capsys.readouterr().err == "vllm-hotfix: while half was imported: ZeroDivisionError: division by zero\n"


def test_an_interrupt_in_a_callback_passes(sample: Any) -> None:
    """Ctrl-C ends what the user wants to end."""

    def interrupt(module: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        when_ready("sample", interrupt)
    with pytest.raises(KeyboardInterrupt):
        importlib.reload(sample)


# Activation: patches at work in a small vLLM.

FILES = {
    "vllm/__init__.py": "",
    "vllm/_version.py": "version = '1.0'\n",
    "vllm/envs.py": """\
        environment_variables = {"VLLM_KNOWN": lambda: "stock"}

        def compile_factors():
            return {name: getter() for name, getter in environment_variables.items()}
    """,
    "vllm/plugins.py": "def load_general_plugins():\n    return 'plugins'\n",
    "vllm/a.py": "def f():\n    return ['stock']\n",
    "vllm/b.py": "from vllm.a import f\n\nclass C:\n    def g(self):\n        return ['stock']\n",
}
ONE = Patch("one", "VLLM_HOTFIX_ONE", "fault", "x#1", (Target("vllm.a:f", "mark"), Target("vllm.b:C.g", "mark")))
TWO = Patch("two", "VLLM_HOTFIX_TWO", "fault", "x#2", (Target("vllm.b:C.g", "mark"),), aliases=("VLLM_TWO",))
ON = {"VLLM_HOTFIX_ONE": "1"}


@pytest.fixture
def vllm(write: Any, monkeypatch: pytest.MonkeyPatch, logged: Any, caplog: pytest.LogCaptureFixture) -> Any:
    """The small vLLM on the path, imported by name; the lock knows it and the wrappers leave marks."""
    caplog.set_level(logging.INFO)
    monkeypatch.syspath_prepend(write(FILES))
    importlib.invalidate_caches()
    names = {"vllm.a:f": "vllm/a.py", "vllm.b:C.g": "vllm/b.py"}
    known = {name: {fingerprint(dedent(FILES[file]), name.rpartition(":")[2]): ["1.0"]} for name, file in names.items()}
    monkeypatch.setattr(Lock, "load", classmethod(lambda cls: Lock(Lock.dump(["1.0"], known))))
    for patch in (ONE, TWO):
        module: Any = ModuleType(f"vllm_hotfix._patches.{patch.name}")
        module.mark = mark
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return lambda name: importlib.import_module(f"vllm.{name}" if name else "vllm")


@pytest.fixture
def activation(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The activation of the two patches; called with the variables that are set, it activates."""
    active = Activation((ONE, TWO))

    def activate(**environ: str) -> Activation:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        active.activate(*read_gates(active.catalog, os.environ))
        return active

    yield activate
    active.deactivate()


def test_a_patch_is_ready_then_waits_then_active(vllm: Any, activation: Any) -> None:
    """The state follows the imports: none, one of two, all; and each function is wrapped once."""
    activation(**ON)
    assert state_of(ONE)[0] == READY
    a = vllm("a")
    assert state_of(ONE) == (READY, "waits for the import of vllm.b:C.g")
    b = vllm("b")
    assert state_of(ONE) == (ACTIVE, "2 functions wrapped")
    assert a.f() == b.f() == b.C().g() == ["stock", "patched"]
    assert state_of(TWO) == (OFF, "")


def test_an_optional_target_is_not_waited_for(vllm: Any, activation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The patch is active without it and says so; it is wrapped when its module is imported."""
    some = replace(ONE, targets=(ONE.targets[0], replace(ONE.targets[1], optional=True)))
    active = Activation((some,))
    monkeypatch.setenv(some.env, "1")
    active.activate(*read_gates(active.catalog, os.environ))
    assert state_of(some)[0] == READY
    assert vllm("a").f() == ["stock", "patched"]
    assert state_of(some) == (ACTIVE, "1 functions wrapped, 1 more if vLLM imports their modules")
    assert vllm("b").C().g() == ["stock", "patched"]
    assert state_of(some) == (ACTIVE, "2 functions wrapped")
    active.deactivate()
    assert vllm("a").f() == vllm("b").C().g() == ["stock"]


def test_activation_after_the_imports(vllm: Any, activation: Any, logged: Any) -> None:
    """Modules that are there already are patched all the same, names that others took included; without a warning."""
    b = vllm("b")
    activation(**ON)
    assert state_of(ONE)[0] == ACTIVE
    assert b.f() == b.C().g() == ["stock", "patched"]
    assert logged() == []


def test_activation_again_changes_nothing(vllm: Any, activation: Any) -> None:
    """The second channel finds the patch applied."""
    b = vllm("b")
    for _ in range(3):
        activation(**ON)
    assert b.f() == b.C().g() == ["stock", "patched"]


def test_activation_again_under_a_closure_of_others_changes_nothing(vllm: Any, activation: Any) -> None:
    """Another library has wrapped the method since, as most do, and the second channel comes: still once."""
    counted: list[str] = []
    a, b = vllm("a"), vllm("b")
    activation(**ON)
    closure(b, "C.g", counted)
    closure(a, "f", counted)
    activation(**ON)
    assert state_of(ONE)[0] == ACTIVE
    assert a.f() == b.C().g() == ["stock", "patched"]


def test_a_gate_that_turned_on_since_is_honoured(vllm: Any, activation: Any) -> None:
    """Ray sets variables late: the next activation applies what is new, on top of what is there."""
    b = vllm("b")
    activation(**ON)
    activation(VLLM_HOTFIX_TWO="1")
    assert b.C().g() == ["stock", "patched", "patched"]
    assert state_of(TWO)[0] == ACTIVE


def test_two_patches_of_one_function_are_undone_in_any_case(vllm: Any, activation: Any) -> None:
    """The second patch wraps the first one's wrapper; the stock function is back when both are undone."""
    b = vllm("b")
    before = vars(b.C)["g"]
    activation(**ON, VLLM_HOTFIX_TWO="1").deactivate()
    assert vars(b.C)["g"] is before


@pytest.mark.parametrize("first", [0, 1])
def test_two_wraps_of_one_function_are_undone_in_any_order(sample: Any, first: int) -> None:
    """The one below is undone first, or last: the identical function is back, where it was taken as well."""
    stock, name = sample.plain, "sample:plain"
    wraps = [Wrap(name, mark, None), Wrap(name, mark, None)]
    sample.taken = sample.plain
    wraps[first].undo()
    assert sample.plain() == sample.taken() == [*stock(), "patched"]
    wraps[1 - first].undo()
    assert sample.plain is sample.taken is stock


@pytest.mark.parametrize("decorated", [False, True])
@pytest.mark.parametrize("between", [False, True])
def test_each_of_two_wraps_reaches_a_name_that_was_taken_before_others_wrapped(
    load: Load, decorated: bool, between: bool
) -> None:
    """Each runs once there, as in the function's own place, also under stock's own decorator; undone, it is stock."""
    text = "import functools\n\ndef by(f):\n    return functools.wraps(f)(lambda: f())\n\n"
    load("house.own", text + "@by\n" * decorated + "def f():\n    return ['stock']\n")
    taker = load("house.taker", "from house.own import f\n")
    own = sys.modules["house.own"]
    stock = own.f
    lower = Wrap("house.own:f", mark, None) if between else None
    held = own.f
    own.f = theirs = functools.wraps(held)(lambda: held())
    wraps = [lower or Wrap("house.own:f", mark, None), Wrap("house.own:f", mark, None)]
    assert [marks(own.f()), marks(taker.f())] == [2, 2]
    for wrap in wraps:
        wrap.undo()
    assert taker.f is stock
    assert own.f is theirs
    assert theirs() == ["stock"]


def test_other_threads_may_import_while_a_function_is_wrapped(sample: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that comes while the imported ones are listed is no matter."""
    package_of = _hooks.package_of

    def slow(name: str) -> str:
        sys.modules.setdefault(f"came_beside_{name}", ModuleType("beside"))
        return package_of(name)

    stock = sample.plain
    sample.plain = functools.wraps(stock)(lambda: stock())
    monkeypatch.setattr(_hooks, "package_of", slow)
    assert Wrap("sample:plain", mark, None).alive


def test_a_wrapper_of_others_need_not_be_a_function(sample: Any) -> None:
    """``lru_cache`` and a callable object that says what it wraps: the patch is at work beneath them."""

    class Caller:
        def __init__(self, function: Any) -> None:
            functools.update_wrapper(self, function)

        def __call__(self) -> Any:
            return self.__wrapped__()  # type: ignore[attr-defined]

    wrap = Wrap("sample:plain", mark, None)
    sample.plain = Caller(functools.lru_cache(sample.plain))
    assert marks(sample.plain()) == 1
    assert wrap.alive


def test_an_interrupt_leaves_no_state_file(
    vllm: Any, activation: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A patch that was written down as at work and then taken back is not listed."""
    vllm("a"), vllm("b")
    rebind = _hooks._rebind

    def interrupted(old: Any, new: Any, *others: Any) -> None:
        monkeypatch.setattr(_hooks, "_rebind", rebind)
        raise KeyboardInterrupt

    RECORD.entries["other"] = _record.Entry()
    RECORD.save()
    del RECORD.entries["other"]
    assert list(tmp_path.rglob("*.json"))
    monkeypatch.setattr(_hooks, "_rebind", interrupted)
    with pytest.raises(KeyboardInterrupt):
        activation(**ON)
    assert not list(tmp_path.rglob("*.json"))


def test_after_an_interrupt_at_its_end_an_import_is_over(sample: Any) -> None:
    """Ctrl-C in the callback of a module that was half imported: later callbacks do not wait for its end again."""

    def interrupt(module: Any) -> None:
        raise KeyboardInterrupt

    spec = sample.__spec__
    spec._initializing = True
    when_ready("sample", interrupt)
    with pytest.raises(KeyboardInterrupt):
        spec._initializing = False
    found: list[Any] = []
    when_ready("sample", found.append)
    assert found == [sample]


def test_one_reason_is_one_warning(vllm: Any, activation: Any, logged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What keeps several patches from working is said once, with the name and variable of each."""
    monkeypatch.setattr(Lock, "load", classmethod(lambda cls: Lock("")))
    activation(**ON, VLLM_HOTFIX_TWO="1")
    (warning,) = logged()
    assert "one (VLLM_HOTFIX_ONE), two (VLLM_HOTFIX_TWO) are failed, stock vLLM runs: upstream.lock" in warning


def test_an_interrupt_leaves_nothing_half_done(
    vllm: Any, activation: Any, monkeypatch: pytest.MonkeyPatch, logged: Any
) -> None:
    """Ctrl-C in the midst of an activation reaches the caller, stock is back, and the next activation is whole."""
    a, b = vllm("a"), vllm("b")
    before = a.f, vars(b.C)["g"]
    original = Wrap.__init__

    def interrupted(self: Any, name: str, *args: Any) -> None:
        original(self, name, *args)
        if name == "vllm.b:C.g":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Wrap, "__init__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            activation(**ON)
    assert (a.f, vars(b.C)["g"]) == before
    assert a.f is b.f is before[0]
    activation(**ON)
    assert state_of(ONE)[0] == ACTIVE
    assert a.f() == b.C().g() == ["stock", "patched"]
    assert logged() == []


def test_what_cannot_be_undone_steps_aside(
    vllm: Any, activation: Any, monkeypatch: pytest.MonkeyPatch, logged: Any
) -> None:
    """One attribute cannot be given back: all wrappers step aside, status says so, and the next try undoes the rest."""
    a, b = vllm("a"), vllm("b")
    before = a.f, vars(b.C)["g"]
    active = activation(**ON)
    undo = Wrap.undo

    def broken(self: Any) -> None:
        if self.name == "vllm.b:C.g":
            raise OSError("not today")
        undo(self)

    with monkeypatch.context() as patch:
        patch.setattr(Wrap, "undo", broken)
        active.deactivate()
    assert a.f is b.f is before[0]
    assert b.C().g() == ["stock"]
    assert state_of(ONE) == (FAILED, "stands aside, but could not be undone: OSError: not today")
    assert len(logged()) == 1
    active.deactivate()
    assert vars(b.C)["g"] is before[1]
    assert state_of(ONE) == (OFF, "")


@pytest.mark.parametrize("order", [("ONE", "TWO"), ("TWO", "ONE")])
def test_two_patches_turned_on_one_after_the_other_are_undone(
    order: tuple[str, str], vllm: Any, activation: Any, monkeypatch: pytest.MonkeyPatch, logged: Any
) -> None:
    """Whichever wrapped the function first, the stock function is back; the patches are no others to each other."""
    b = vllm("b")
    before = vars(b.C)["g"]
    for name in order:
        active = activation(**{f"VLLM_HOTFIX_{name}": "1"})
    assert marks(b.C().g()) == 2
    active.deactivate()
    assert vars(b.C)["g"] is before
    assert logged() == []


def test_a_patch_that_fails_under_another_leaves_nothing(vllm: Any, activation: Any) -> None:
    """Undone under the other one's wrapper, it is not what that one puts back."""
    b = vllm("b")
    before = vars(b.C)["g"]
    active = activation(**ON)
    activation(VLLM_HOTFIX_TWO="1")
    active._fail([ONE], RuntimeError("injected"))
    assert b.C().g() == ["stock", "patched"]
    active.deactivate()
    assert vars(b.C)["g"] is before


def test_a_deactivation_leaves_nothing_for_the_exit(
    vllm: Any, activation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a state file nor a handler that would remove one, however often it is done."""
    before = len(multiprocessing.util._finalizer_registry)
    handlers: list[Any] = []
    monkeypatch.setattr(_record.atexit, "register", handlers.append)
    monkeypatch.setattr(_record.atexit, "unregister", handlers.remove)
    vllm("b")
    for _ in range(3):
        active = activation(**ON)
        assert handlers == [RECORD.remove]
        assert len(list(live())) == 1
        active.deactivate()
        assert handlers == []
        assert len(multiprocessing.util._finalizer_registry) == before
        assert list(live()) == []


def test_a_module_that_is_imported_after_deactivation_is_stock(vllm: Any, activation: Any, write: Any) -> None:
    """Also one that was half imported when it came: vLLM's settings are not made known any more."""
    write({"vllm/envs.py": dedent(FILES["vllm/envs.py"]) + "\nimport sys; sys.modules['between'].run()\n"})
    between: Any = ModuleType("between")
    between.run = lambda: activation(**ON).deactivate()
    sys.modules["between"] = between
    try:
        envs = vllm("envs")
    finally:
        del sys.modules["between"]
    assert list(envs.environment_variables) == ["VLLM_KNOWN"]
    assert not hasattr(envs.compile_factors, "__wrapped__")


def test_deactivation_brings_the_stock_objects_back(vllm: Any, activation: Any) -> None:
    """Every attribute and every rebound name is the identical stock object, vLLM's settings are as before."""
    a, b, envs = vllm("a"), vllm("b"), vllm("envs")
    before = (a.f, b.f, vars(b.C)["g"], envs.compile_factors, dict(envs.environment_variables))
    active = activation(**ON, VLLM_HOTFIX_STRICT="1")
    assert a.f is not before[0]
    active.deactivate()
    after = (a.f, b.f, vars(b.C)["g"], envs.compile_factors, dict(envs.environment_variables))
    assert all(one is other for one, other in zip(before[:4], after[:4], strict=True))
    assert before[4] == after[4]
    assert state_of(ONE) == (OFF, "")
    assert not _vllm_hotfix.FINDER.after


def test_activation_after_deactivation_works(vllm: Any, activation: Any) -> None:
    """On, off and on again is on, once."""
    b = vllm("b")
    activation(**ON).deactivate()
    activation(**ON)
    assert b.f() == b.C().g() == ["stock", "patched"]


def test_a_reloaded_module_is_patched_again(vllm: Any, activation: Any) -> None:
    """A reload brings stock functions; they are wrapped, once."""
    a, b = vllm("a"), vllm("b")
    activation(**ON)
    importlib.reload(a)
    importlib.reload(b)
    assert a.f() == b.f() == b.C().g() == ["stock", "patched"]
    assert state_of(ONE)[0] == ACTIVE


def test_stale_graphs_stay_stale(vllm: Any, activation: Any) -> None:
    """A module that is executed again is wrapped again; what graphs captured does not come back by that."""
    a, _ = vllm("a"), vllm("b")
    activation(**ON)
    RECORD.stale("one", "a kernel is gone")
    importlib.reload(a)
    assert a.f() == ["stock", "patched"]
    assert state_of(ONE) == (STALE_GRAPHS, "a kernel is gone")


def test_a_module_that_is_imported_anew_is_patched_again(vllm: Any, activation: Any) -> None:
    """Taken out of ``sys.modules`` and imported again, as test runners and plugin managers do."""
    vllm("b")
    activation(**ON)
    del sys.modules["vllm.a"], sys.modules["vllm.b"]
    b = vllm("b")
    assert b.f() == b.C().g() == ["stock", "patched"]


def test_what_was_taken_before_a_reload_is_undone_too(vllm: Any, activation: Any) -> None:
    """A name that still holds the function from before the reload has no wrapper in it after deactivation."""
    a, b = vllm("a"), vllm("b")
    old_class = b.C
    active = activation(**ON)
    importlib.reload(a)
    old = b.f
    importlib.reload(b)
    assert marks(old()) == marks(old_class().g()) == 1
    active.deactivate()
    assert old() == old_class().g() == ["stock"]


def test_a_failed_import_is_patched_at_the_retry(vllm: Any, activation: Any, tmp_path: Path) -> None:
    """Half a module has come and gone; the whole one is patched."""
    activation(**ON)
    text = (tmp_path / "vllm/b.py").read_text()
    (tmp_path / "vllm/b.py").write_text(text + "1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        vllm("b")
    (tmp_path / "vllm/b.py").write_text(text)
    assert vllm("b").C().g() == ["stock", "patched"]
    assert state_of(ONE)[0] == ACTIVE


def test_drift_undoes_the_whole_patch(vllm: Any, activation: Any, logged: Any) -> None:
    """One target was replaced at run time: the other one is stock again, and one warning says which and why."""
    a, b = vllm("a"), vllm("b")
    before = a.f
    b.C.g = lambda self: ["replaced"]
    activation(**ON)
    assert a.f is b.f is before
    state, reason = state_of(ONE)
    assert state == DRIFTED
    assert "vllm.b:C.g was replaced at run time" in reason
    (warning,) = logged()
    assert "one (VLLM_HOTFIX_ONE) is drifted, stock vLLM runs: vllm.b:C.g was replaced" in warning


def test_unknown_source_is_drifted_without_a_hook(vllm: Any, activation: Any, tmp_path: Path, logged: Any) -> None:
    """A changed file is drifted before anything is imported; its modules are left alone and one warning says so."""
    (tmp_path / "vllm/a.py").write_text("def f():\n    return ['changed']\n")
    activation(**ON)
    activation(**ON)
    assert state_of(ONE)[0] == DRIFTED
    assert vllm("b").f() == ["changed"]
    assert vllm("b").C().g() == ["stock"]
    assert len(logged()) == 1


def test_a_hook_that_raises_is_failed(
    vllm: Any, activation: Any, logged: Any, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """Whatever goes wrong while wrapping: the import succeeds, stock runs, one warning has the exception."""
    original = Wrap.__init__

    def broken(self: Any, name: str, *args: Any) -> None:
        if name == "vllm.b:C.g":
            raise RuntimeError("injected")
        original(self, name, *args)

    monkeypatch.setattr(Wrap, "__init__", broken)
    activation(**ON)
    assert vllm("b").f() == vllm("b").C().g() == ["stock"]
    assert state_of(ONE) == (FAILED, "RuntimeError: injected")
    (warning,) = logged()
    assert "one (VLLM_HOTFIX_ONE) is failed, stock vLLM runs: RuntimeError: injected" in warning


def test_one_patch_that_fails_is_no_matter_to_another(
    vllm: Any, activation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each patch stands for itself, also where both want the same function."""
    monkeypatch.delattr(sys.modules["vllm_hotfix._patches.one"], "mark")
    activation(**ON, VLLM_HOTFIX_TWO="1")
    assert vllm("b").C().g() == ["stock", "patched"]
    assert (state_of(ONE)[0], state_of(TWO)[0]) == (FAILED, ACTIVE)


def test_a_patch_that_others_replaced_is_failed(vllm: Any, activation: Any) -> None:
    """The state is that of the live object, not of what was done once."""
    activation(**ON)
    vllm("b").C.g = lambda self: ["replaced"]
    state, reason = state_of(ONE)
    assert state == FAILED
    assert "vllm.b:C.g" in reason


# Strictness.


def test_strict_names_patch_variable_and_reason(vllm: Any, activation: Any, tmp_path: Path) -> None:
    """The message is what a person needs who finds the engine stopped."""
    (tmp_path / "vllm/a.py").write_text("def f():\n    return ['changed']\n")
    active = activation(**ON)
    active.check_strict()
    active = activation(VLLM_HOTFIX_STRICT="1")
    with pytest.raises(HotfixError, match=r"VLLM_HOTFIX_STRICT is set and one \(VLLM_HOTFIX_ONE\) is drifted: .*a:f"):
        active.check_strict()


@pytest.mark.parametrize(
    ("name", "value"),
    [("VLLM_HOTFIX_TWO", "maybe"), ("VLLM_HOTFIX_ENABLE", "three"), ("VLLM_HOTFIX_THREE", "1")],
)
def test_strict_stops_at_a_wrong_setting(vllm: Any, activation: Any, name: str, value: str, logged: Any) -> None:
    """A setting that is not understood is a patch that is not at work; without STRICT it is one warning."""
    activation(**{name: value})
    active = activation(**{name: value})
    active.check_strict()
    assert len(logged()) == 1
    activation(VLLM_HOTFIX_STRICT="1")
    with pytest.raises(HotfixError, match=name):
        active.check_strict()


def test_strict_has_nothing_against_what_is_active_or_waits(vllm: Any, activation: Any) -> None:
    """A target that is not imported yet is no fault, nor is a patch that is off."""
    active = activation(**ON, VLLM_HOTFIX_STRICT="1")
    active.check_strict()
    vllm("b")
    active.check_strict()


def test_the_state_file_says_what_the_live_object_is(
    vllm: Any, activation: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A patch whose wrapper was replaced since is not listed as active by ``status --live`` either."""
    monkeypatch.setenv("VLLM_HOTFIX_STATE_DIR", str(tmp_path))
    b = vllm("b")
    activation(**ON)
    b.C.g = lambda self: ["replaced"]
    RECORD.save()
    (state,) = live()
    assert isinstance(state, dict)
    assert state["patches"]["one"]["state"] == "failed"
    assert "vllm.b:C.g" in state["patches"]["one"]["reason"]


def test_an_undo_that_raises_undoes_all_the_same(vllm: Any, activation: Any, logged: Any) -> None:
    """What a patch does when it ends can fail; its wrappers and the others' go, with one warning."""
    a, b = vllm("a"), vllm("b")
    active = activation(**ON)

    def undo() -> None:
        raise RuntimeError("no end")

    sys.modules["vllm_hotfix._patches.one"].undo = undo  # type: ignore[attr-defined]
    active.deactivate()
    assert a.f() == b.f() == b.C().g() == ["stock"]
    assert [message for message in logged() if "no end" in message]


def test_strict_looks_at_the_live_objects(vllm: Any, activation: Any) -> None:
    """A patch whose wrapper was replaced since is not at work, whatever was recorded when it was applied."""
    active = activation(**ON, VLLM_HOTFIX_STRICT="1")
    vllm("b").C.g = lambda self: ["replaced"]
    with pytest.raises(HotfixError, match="one"):
        active.check_strict()


@pytest.mark.parametrize("early", [True, False])
def test_strict_does_not_depend_on_the_plugin(vllm: Any, activation: Any, tmp_path: Path, early: bool) -> None:
    """``load_general_plugins`` runs and then raises, whatever ``VLLM_PLUGINS`` leaves out, imported early or late."""
    (tmp_path / "vllm/a.py").write_text("def f():\n    return ['changed']\n")
    if early:
        vllm("plugins")
    active = activation(**ON, VLLM_HOTFIX_STRICT="1")
    with pytest.raises(HotfixError, match="VLLM_HOTFIX_ONE"):
        vllm("plugins").load_general_plugins()
    active.deactivate()
    assert vllm("plugins").load_general_plugins() == "plugins"


# What vLLM is told.


@pytest.mark.parametrize("early", [True, False])
def test_set_variables_are_made_known_to_vllm(vllm: Any, activation: Any, early: bool) -> None:
    """Every variable of this package that is set has a getter, set late ones too; the cache key does not change."""
    envs = vllm("envs") if early else None
    factors = {"VLLM_KNOWN": "stock"}
    activation(**ON, VLLM_HOTFIX_STATE_DIR="/nowhere", VLLM_HOTFIX_DISABLE="two")
    envs = vllm("envs")
    assert envs.environment_variables["VLLM_HOTFIX_ONE"]() == "1"
    assert {"VLLM_HOTFIX_STATE_DIR", "VLLM_HOTFIX_DISABLE"} < set(envs.environment_variables)
    assert envs.compile_factors() == factors
    activation(VLLM_TWO="0")
    assert "VLLM_TWO" in envs.environment_variables
    assert envs.compile_factors() == factors


def test_a_variable_that_vllm_knows_itself_stays_its_own(vllm: Any, activation: Any) -> None:
    """Once upstream has the gate, its getter counts, and so does its place in the cache key."""
    envs = vllm("envs")
    envs.environment_variables["VLLM_TWO"] = getter = lambda: "upstream"
    active = activation(VLLM_TWO="1", **ON)
    assert envs.environment_variables["VLLM_TWO"] is getter
    assert envs.compile_factors() == {"VLLM_KNOWN": "stock", "VLLM_TWO": "upstream"}
    active.deactivate()
    assert envs.environment_variables["VLLM_TWO"] is getter


def test_the_gate_of_a_traced_patch_belongs_into_the_cache_key(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that is traced is compiled differently with the patch, so vLLM's key must differ."""
    from dataclasses import replace

    active = Activation((replace(ONE, traced=True), TWO))
    environ = {**ON, "VLLM_HOTFIX_TWO": "1"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    active.activate(*read_gates(active.catalog, environ))
    assert vllm("envs").compile_factors() == {"VLLM_KNOWN": "stock", "VLLM_HOTFIX_ONE": "1"}
    active.deactivate()


def test_a_vllm_without_these_settings_is_patched_all_the_same(vllm: Any, activation: Any, tmp_path: Path) -> None:
    """Neither table nor function: nothing to tell, and no warning."""
    (tmp_path / "vllm/envs.py").write_text("")
    activation(**ON)
    vllm("envs")
    assert vllm("b").C().g() == ["stock", "patched"]


def test_counters_and_entries_go_with_deactivation(vllm: Any, activation: Any) -> None:
    """After deactivation nothing is recorded as asked for, and the state file is gone."""
    active = activation(**ON, VLLM_HOTFIX_ENABLE="nonsense")
    assert RECORD.entries
    assert RECORD.problems
    active.deactivate()
    assert not RECORD.entries
    assert not RECORD.problems


# A package beside vLLM.


BESIDE = Patch(
    "beside",
    "VLLM_HOTFIX_BESIDE",
    "fault",
    "x#3",
    (
        Target("vllm.a:f", "mark", always=True),
        Target("vllm.b:C.g", "mark"),
        Target("vllm.b:gone", "mark", always=True),
    ),
    relies=("beside.m:f",),
)


@pytest.fixture
def beside(vllm: Any, write: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Write a package beside vLLM, whose code the lock knows or not, and activate a patch that relies on it."""
    active = Activation((BESIDE,))
    module: Any = ModuleType("vllm_hotfix._patches.beside")
    module.mark = mark
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def activate(*, known: bool, **environ: str) -> Activation:
        text = "def f():\n    return []\n"
        targets = {name: {one: list(some) for one, some in old.items()} for name, old in Lock.load().targets.items()}
        targets["vllm.b:gone"] = {ABSENT: ["1.0"]}
        targets["beside.m:f"] = {fingerprint(text, "f"): ["2.0"]}
        lock = Lock(Lock.dump(["1.0"], targets, {"beside": ["2.0"]}))
        monkeypatch.setattr(Lock, "load", classmethod(lambda cls: lock))
        write({"beside/__init__.py": "", "beside/m.py": text if known else text.replace("[]", "[1]")})
        importlib.invalidate_caches()
        for name, value in {"VLLM_HOTFIX_BESIDE": "1", **environ}.items():
            monkeypatch.setenv(name, value)
        active.activate(*read_gates(active.catalog, os.environ))
        return active

    yield activate
    active.deactivate()


@pytest.mark.parametrize("early", [True, False])
def test_beside_an_unknown_package_only_the_settings_are_kept(vllm: Any, beside: Any, logged: Any, early: bool) -> None:
    """The ``always`` targets are wrapped, the others are stock; the state stays, with one warning; all is undone."""
    if early:
        vllm("b")
    active = beside(known=False)
    a, b = vllm("a"), vllm("b")
    assert a.f() == b.f() == ["stock", "patched"]
    assert type(vars(b.C)["g"]) is FunctionType
    assert b.C().g() == ["stock"]
    state, reason = state_of(BESIDE)
    assert state == UNSUPPORTED
    assert "beside.m:f" in reason
    assert [wrap.name for wrap in RECORD.entries["beside"].wraps.values()] == ["vllm.a:f"]
    (warning,) = logged()
    assert "beside (VLLM_HOTFIX_BESIDE) is unsupported, stock vLLM runs: beside of unknown version" in warning
    active.deactivate()
    assert a.f() == b.f() == ["stock"]
    assert type(a.f) is type(b.f) is FunctionType


def test_beside_a_known_package_all_is_wrapped(vllm: Any, beside: Any) -> None:
    """``always`` makes no difference there."""
    beside(known=True)
    assert vllm("a").f() == vllm("b").C().g() == ["stock", "patched"]
    assert state_of(BESIDE) == (ACTIVE, "2 functions wrapped")


@pytest.mark.parametrize("known", [True, False])
def test_in_an_unknown_vllm_only_known_settings_are_kept(
    vllm: Any, beside: Any, tmp_path: Path, logged: Any, known: bool
) -> None:
    """Where other code of the patch is not known, the known ones of its ``always`` targets are wrapped."""
    if known:
        (tmp_path / "vllm/b.py").write_text("from vllm.a import f\nclass C:\n    def g(self):\n        return []\n")
    else:
        (tmp_path / "vllm/a.py").write_text("def f():\n    return ['other']\n")
    active = beside(known=True)
    assert vllm("a").f() == vllm("b").f() == (["stock", "patched"] if known else ["other"])
    assert vllm("b").C().g() == ([] if known else ["stock"])
    assert state_of(BESIDE)[0] == DRIFTED
    assert len(logged()) == 1
    active.deactivate()
    assert vllm("a").f() == (["stock"] if known else ["other"])


def test_a_target_that_cannot_be_wrapped_leaves_the_settings(vllm: Any, beside: Any, logged: Any) -> None:
    """The patch is a fault with one warning, what understands its settings stays, and is undone with the rest."""
    active = beside(known=True)
    assert vllm("a").f() == ["stock", "patched"]
    sys.modules.pop("vllm.b", None)
    module: Any = sys.modules["vllm_hotfix._patches.beside"]
    del module.mark
    b = vllm("b")
    assert b.C().g() == ["stock"]
    assert b.f() == ["stock", "patched"]
    assert state_of(BESIDE)[0] == FAILED
    assert len(logged()) == 1
    active.deactivate()
    assert vllm("a").f() == ["stock"]


def test_strict_refuses_beside_an_unknown_package(vllm: Any, beside: Any) -> None:
    """Settings that are understood are not a patch that is at work."""
    active = beside(known=False, VLLM_HOTFIX_STRICT="1")
    vllm("b")
    with pytest.raises(HotfixError, match=r"beside \(VLLM_HOTFIX_BESIDE\) is unsupported: .*beside\.m:f"):
        active.check_strict()


def test_a_reloaded_module_keeps_its_settings(vllm: Any, beside: Any) -> None:
    """As with an active patch, a reload is wrapped again, and the state stays."""
    beside(known=False)
    importlib.reload(vllm("a"))
    assert vllm("a").f() == ["stock", "patched"]
    assert state_of(BESIDE)[0] == UNSUPPORTED


@pytest.mark.parametrize(("fault", "state"), [("replaced", DRIFTED), ("broken", FAILED)])
def test_settings_that_cannot_be_kept_are_a_fault_of_their_own(
    vllm: Any, beside: Any, monkeypatch: pytest.MonkeyPatch, logged: Any, fault: str, state: str
) -> None:
    """It is said with its reason, and nothing more is tried when the module comes again."""
    if fault == "replaced":
        vllm("a").f = lambda: ["replaced"]
    else:
        monkeypatch.delattr(sys.modules["vllm_hotfix._patches.beside"], "mark")
    beside(known=False)
    a = vllm("a")
    assert state_of(BESIDE)[0] == state
    assert fault in state_of(BESIDE)[1] or "mark" in state_of(BESIDE)[1]
    assert not RECORD.entries["beside"].wraps
    monkeypatch.setattr(sys.modules["vllm_hotfix._patches.beside"], "mark", mark, raising=False)
    importlib.reload(a)
    assert a.f() == ["stock"]
    assert state_of(BESIDE)[0] == state
    assert len(logged()) == 2
