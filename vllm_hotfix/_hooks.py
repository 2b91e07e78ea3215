"""Wrapping at the right moment, names bound elsewhere, undoing."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import sys
import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import FunctionType, MethodType, ModuleType
from typing import Any

import wrapt

from _vllm_hotfix import FINDER, call, describe, strict

from ._judge import judge, parse_version
from ._patch import (
    ACTIVE,
    DRIFTED,
    FAILED,
    FAULTS,
    NOT_NEEDED,
    OFF,
    STALE_GRAPHS,
    STRICT,
    Gate,
    HotfixError,
    Patch,
    Problem,
    Target,
    own_variables,
)
from ._proxy import Proxy
from ._record import RECORD, Entry, logger
from ._upstream import VERSION, Lock, LockError, Source, Sources, compiled, package_of, same_code

#: One activation, wrap or undo at a time. Reentrant: an import made while it is held may call back.
LOCK = threading.RLock()


def _after_fork() -> None:
    """Another thread may have held the lock, and is not in the child."""
    global LOCK
    LOCK = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)

_ENVS = "vllm.envs"
#: What every engine start passes through, whatever ``VLLM_PLUGINS`` leaves out: in each process, and in each worker.
_STRICT_SEAMS = {"vllm.plugins": "load_general_plugins", "vllm.v1.worker.gpu_worker": "Worker.load_model"}

Wrapper = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]


#: What a wrapper of others can be.
_WRAPPERS = (FunctionType, MethodType, staticmethod, classmethod, functools.partial, wrapt.ObjectProxy)


class Drift(Exception):
    """The live object is not the function that its source says it is."""


class Wrap:
    """One function wrapped in place.

    Args:
        name: ``module:qualified.name``; the module is imported.
        wrapper: called as ``wrapper(wrapped, instance, args, kwargs)``.
        source: where its source was found, to see that the live object comes from there; None to not look.
        keep: modules whose own name for the function stays as it is.
        book: where it is entered by its name before anything is changed, so that an interrupt leaves it to who undoes.

    Raises:
        Drift: the live object is not the known function.
    """

    def __init__(
        self,
        name: str,
        wrapper: Wrapper,
        source: Source | None,
        keep: tuple[str, ...] = (),
        book: dict[str, Wrap] | None = None,
    ) -> None:
        self.name = name
        self.enabled = True
        self.parent, self.attribute = _resolve(name)
        if self.attribute not in getattr(self.parent, "__dict__", ()):
            raise Drift(f"{name} is not there")
        self.original = _living(vars(self.parent)[self.attribute])
        if source is not None:
            _check_live(name, self.original, source)

        def run(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return wrapper(wrapped, instance, args, kwargs) if self.enabled else wrapped(*args, **kwargs)

        self.proxy = Proxy(self.original, run)
        self.proxy._self_wrap = self
        #: What stands under it, as modules of vLLM may have taken it by name before, each with the wrapper for these.
        #: Names elsewhere may be what others call, under their wrapper: there it would run twice.
        self.taken: list[tuple[Any, Proxy]] = []
        for one in _beneath(self.original) if isinstance(self.parent, ModuleType) else ():
            self.taken.append((one, Proxy(one, run)))
            self.taken[-1][1]._self_wrap = self
        if book is not None:
            book[name] = self
        try:
            setattr(self.parent, self.attribute, self.proxy)
            if isinstance(self.parent, ModuleType):
                _rebind(self.original, self.proxy, keep)
                if self.taken:
                    package, loaded = package_of(name), list(sys.modules.items())  # a list: other threads import
                    others = {*keep, self.parent.__name__, *(key for key, _ in loaded if package_of(key) != package)}
                    for one, mine in self.taken:
                        _rebind(one, mine, others)
        except BaseException:
            self.undo()
            raise

    @property
    def alive(self) -> bool:
        """Whether calls reach the wrapper: it stands in its place, or under what others wrapped around it."""
        # The module may have been executed again, with other classes.
        parent, _ = _resolve(self.name)
        return self.enabled and parent is self.parent and _reaches(vars(parent).get(self.attribute), self.proxy)

    def undo(self) -> None:
        """Put the original back wherever the wrapper stands; where another library wrapped it, step aside inside."""
        self.enabled = False
        original = _living(self.original)
        found = vars(self.parent).get(self.attribute)
        if found is self.proxy:
            setattr(self.parent, self.attribute, original)
        else:
            while type(found) is Proxy and found is not self.proxy:  # of another patch, which puts the original back
                found = found.__wrapped__
            if found is not self.proxy and _reaches(found, self.proxy):
                logger.warning("vllm-hotfix: %s was wrapped again by others; the patch steps aside inside", self.name)
        if isinstance(self.parent, ModuleType):
            _rebind(self.proxy, original)
            for one, mine in self.taken:
                _rebind(mine, _living(one))


def _living(found: Any) -> Any:
    """What stands under proxies whose patch has stepped aside; another library may have put one back."""
    while type(found) is Proxy and not getattr(found._self_wrap, "enabled", True):
        found = found.__wrapped__
    return found


def _beneath(found: Any) -> list[Any]:
    """What stands under the wrappers around a function, and what patches below have put where that was taken."""
    below: list[Any] = []
    waiting = [found]
    while waiting and len(below) < 100:
        one = waiting.pop(0)
        wrap = one._self_wrap if type(one) is Proxy else None
        for inner in (getattr(one, "__wrapped__", None), *(mine for _, mine in (wrap.taken if wrap else ()))):
            if inner is not None and all(inner is not other for other in below):
                below.append(inner)
                waiting.append(inner)
    return below


def _resolve(name: str) -> tuple[Any, str]:
    """The object that holds ``module:qualified.name`` now, None if there is none, and the attribute's name."""
    module, _, qualname = name.partition(":")
    *path, attribute = qualname.split(".")
    parent: Any = sys.modules.get(module)
    for part in path:
        parent = getattr(parent, "__dict__", {}).get(part)
    return parent, attribute


def _reaches(found: Any, proxy: Any) -> bool:
    """Whether a proxy stands under the wrappers of others, by what these hold or use."""
    waiting, seen = [found], set[int]()
    while waiting and len(seen) < 100:
        one = waiting.pop(0)
        if one is proxy:
            return True
        if id(one) in seen:
            continue
        if not isinstance(one, _WRAPPERS):
            # Such as lru_cache's, by what functools leaves in them: others may do anything when asked for attributes.
            with contextlib.suppress(Exception):
                waiting.append(object.__getattribute__(one, "__dict__")["__wrapped__"])
                seen.add(id(one))
            continue
        seen.add(id(one))
        # A method that was read from its class is a bound proxy, whose parent is the one that stands there.
        waiting.append(getattr(one, "_self_parent", None))
        waiting += [getattr(one, "__wrapped__", None), getattr(one, "__func__", None)]
        if isinstance(one, functools.partial):
            waiting += [one.func, *one.args, *one.keywords.values()]
        for cell in getattr(one, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # an empty cell
                waiting.append(cell.cell_contents)
        if type(one) is FunctionType:
            waiting += [*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()]
            # Globals by their names, not what these use in turn: that need not be a wrapper.
            for value in map(one.__globals__.get, one.__code__.co_names):
                if value is proxy or (isinstance(value, _WRAPPERS) and getattr(value, "_self_parent", None) is proxy):
                    return True
    return False


def _check_live(name: str, live: Any, source: Source) -> None:
    """See that a live object is the function in the source file, under whatever wrappers others put around it."""
    if isinstance(live, (staticmethod, classmethod)):
        live = live.__func__
    around: list[Any] = []
    inner = inspect.unwrap(live, stop=lambda one: around.append(one))
    code = getattr(inner, "__code__", None)
    if code is None:
        raise Drift(f"{name} is not a function but {type(live).__name__}")
    if os.path.realpath(code.co_filename) == os.path.realpath(source.file):
        if code.co_firstlineno != source.first:
            raise Drift(f"{name} runs line {code.co_firstlineno} of its file, its source stands at {source.first}")
        if not same_code(code, compiled(source, code.co_name)):
            why = "the file was changed since it was imported, or its compiled file in __pycache__ is of other code"
            raise Drift(f"{name} is not what its file says: {why}; remove that and start again")
    else:
        raise Drift(f"{name} was replaced at run time by {code.co_name} of {code.co_filename}")
    for one in around if not source.decorated else ():
        # Others may wrap it; but if its own package does, and not by a decorator, the source does not say what runs.
        if type(one) is FunctionType and package_of(str(one.__globals__.get("__name__"))) == package_of(name):
            raise Drift(f"{name} is wrapped by {one.__code__.co_name} of {one.__code__.co_filename} on import")


def _rebind(old: Any, new: Any, keep: Collection[str] = ()) -> None:
    """Change what other modules took by ``from ... import``."""
    for key, module in list(sys.modules.items()):
        if key in keep or not isinstance(module, ModuleType):
            continue
        # As it is: asking a lazy module for anything would load it, and some refuse to be written to.
        names = object.__getattribute__(module, "__dict__")
        for name in [name for name, value in names.copy().items() if value is old]:
            names[name] = new


class _Watched(ModuleSpec):
    """The spec of a module that is being imported: it calls back when the import system says that it is done."""

    @property
    def _initializing(self) -> bool:
        return bool(self.__dict__.get("_initializing"))

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        try:
            if not value:
                self.finish()  # before anyone may use the module
        finally:  # also after an interrupt
            self.__dict__["_initializing"] = value

    def finish(self) -> None:
        """Call back, once, if the import has not failed; the finder waits for the next one if it has."""
        ready = self.__dict__.pop("_vllm_hotfix_ready", None)
        self.__class__ = ModuleSpec  # type: ignore[assignment]
        module = sys.modules.get(self.name)
        if ready is not None and getattr(module, "__spec__", None) is self:
            call(ready, self.name, module)


def when_ready(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Call back with a module as soon as it is fully imported: now, or when its import ends, and at each reload."""
    FINDER.after[name] = callback
    FINDER.install()
    module = sys.modules.get(name)
    if module is None:
        return
    spec = getattr(module, "__spec__", None)
    if not getattr(spec, "_initializing", False):
        call(callback, name, module)
    elif type(spec) is ModuleSpec:
        # Another thread, or this one further up, is half way through it.
        spec.__dict__["_vllm_hotfix_ready"] = callback
        spec.__class__ = _Watched
        if not spec.__dict__.get("_initializing"):  # its end has come meanwhile
            spec.finish()  # type: ignore[attr-defined]


class Activation:
    """The patches at work in this process."""

    def __init__(self, catalog: tuple[Patch, ...]) -> None:
        self.catalog = catalog
        self.gates: dict[str, Gate] = {}
        self._seams: dict[str, Wrap] = {}
        self._announced: dict[str, Any] = {}

    def activate(self, gates: dict[str, Gate], problems: list[Problem]) -> None:
        """Apply the patches whose gate is on and that were not judged yet. vLLM is imported, or being imported."""
        with LOCK:
            self.gates = gates
            RECORD.undone = False
            for problem in problems:
                RECORD.problem(problem)
            new = [patch for patch in self.catalog if gates[patch.name].on and patch.name not in RECORD.entries]
            try:
                for module in (_ENVS, *(_STRICT_SEAMS if strict() else ())):
                    when_ready(module, self._on_module)
                if new:
                    self._apply(new)
            except Exception as error:
                self._fail(new, error)
            except BaseException:  # an interrupt: the next activation begins anew
                for patch in reversed(new):
                    self._undo(patch)
                RECORD.save()
                if not RECORD.entries:
                    RECORD.remove()
                raise
            RECORD.save()

    def _apply(self, patches: list[Patch]) -> None:
        sources = Sources()
        RECORD.vllm = sources.version
        lock = load_lock()
        if sources.package("vllm") is not None and parse_version(sources.version) is None:
            variables = dict.fromkeys(self.gates[patch.name].variable for patch in patches)
            why = sources.errors.get(VERSION, f"{sources.version!r} is not understood")
            reason = f"vLLM's version {why}; its code alone decides"
            RECORD.problem(Problem(", ".join(variables), reason))
        for patch in patches:
            verdict = judge(patch, sources, lock)
            hooked = verdict.state != NOT_NEEDED and bool(verdict.wanted(patch))
            RECORD.entries[patch.name] = Entry(verdict.state, verdict.reason, verdict, hooked)
        self._say([patch for patch in patches if RECORD.entries[patch.name].state in FAULTS])
        for patch in patches:
            entry = RECORD.entries[patch.name]
            if entry.hooked and entry.verdict is not None:
                for module in dict.fromkeys(target.name.partition(":")[0] for target in entry.verdict.wanted(patch)):
                    when_ready(module, self._on_module)

    def _on_module(self, module: ModuleType) -> None:
        """Wrap what the enabled patches want of a module that is now imported (again)."""
        with LOCK:
            if RECORD.undone:  # meanwhile
                return
            try:
                if module.__name__ == _ENVS:
                    self._announce(module)
                if module.__name__ in _STRICT_SEAMS and strict():
                    self._seam(f"{module.__name__}:{_STRICT_SEAMS[module.__name__]}", self._check_after)
            except Exception as error:
                RECORD.problem(Problem(module.__name__, f"could not be made to know this package: {describe(error)}"))
            for patch in self.catalog:
                entry = RECORD.entries.get(patch.name)
                if entry is not None and entry.hooked:
                    try:
                        self._wrap(patch, entry, module.__name__)
                    except Exception as error:
                        self._fail([patch], error)
            RECORD.save()

    def _wrap(self, patch: Patch, entry: Entry, module: str) -> None:
        assert entry.verdict is not None
        wanted = entry.verdict.wanted(patch)
        mine = [target for target in wanted if target.name.partition(":")[0] == module]
        if not mine:
            return
        for target in mine:
            wrap = entry.wraps.get(target.name)
            if wrap is None or not wrap.alive:
                if wrap is not None:  # its module was executed again; others may still hold it
                    entry.retired.append(wrap)
                self._wrap_target(patch, target, entry)
        missing = [one.name for one in wanted if one.name not in entry.wraps and not one.optional]
        dead = [target.name for target in mine if not entry.wraps[target.name].alive]
        if dead:
            raise Drift(f"wrapped, but its place holds something else: {', '.join(dead)}")
        if entry.verdict.state in FAULTS:
            return  # the patch is not at work, only its settings are understood
        if missing:
            entry.reason = f"waits for the import of {', '.join(missing)}"
        elif entry.state != STALE_GRAPHS:
            if entry.state != ACTIVE:
                logger.info("vllm-hotfix: %s is active (%s)", patch.name, self.gates[patch.name].reason)
            waiting = len(wanted) - len(entry.wraps)
            more = f", {waiting} more if vLLM imports their modules" if waiting else ""
            entry.state, entry.reason = ACTIVE, f"{len(entry.wraps)} functions wrapped{more}"

    @staticmethod
    def _wrap_target(patch: Patch, target: Target, entry: Entry) -> None:
        assert entry.verdict is not None
        wrapper = getattr(importlib.import_module(f"vllm_hotfix._patches.{patch.name}"), target.wrapper)
        Wrap(target.name, wrapper, entry.verdict.source(target.name), target.keep, entry.wraps)

    def _fail(self, patches: list[Patch], error: Exception) -> None:
        """All or nothing: a patch that is half there is not one. Only what understands its settings stays."""
        for patch in patches:
            entry = RECORD.entries.setdefault(patch.name, Entry())
            stays: list[Target] = []
            if entry.verdict is not None and entry.verdict.state not in FAULTS:
                entry.verdict = replace(entry.verdict, state=FAILED)
                stays = entry.verdict.wanted(patch)
            entry.hooked = bool(stays)
            entry.state, entry.reason = (DRIFTED, str(error)) if isinstance(error, Drift) else (FAILED, describe(error))
            try:
                entry.undo(keep=[target.name for target in stays])
            except Exception as another:  # its wrappers step aside
                entry.reason += f"; and could not be undone: {describe(another)}"
        self._say(patches)

    def _say(self, patches: list[Patch]) -> None:
        """Warn of patches that are not at work: what is one reason is one warning."""
        named: dict[tuple[str, str], list[str]] = {}
        for patch in patches:
            entry = RECORD.entries[patch.name]
            name = f"{patch.name} ({self.gates[patch.name].variable})"
            named.setdefault((entry.state, entry.reason), []).append(name)
        for (state, reason), names in named.items():
            are = "is" if len(names) == 1 else "are"
            RECORD.warn(f"{', '.join(names)} {are} {state}, stock vLLM runs: {reason}")

    # Seams: what vLLM must know, and where strictness is checked. They add or take out this package's own names,
    # or look after stock has run, so they go by the shape of what they see, not by a fingerprint.

    def _seam(self, name: str, wrapper: Wrapper) -> None:
        seam = self._seams.get(name)
        if seam is None or not seam.alive:
            Wrap(name, wrapper, None, book=self._seams)

    def _check_after(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = wrapped(*args, **kwargs)
        self.check_strict()
        return result

    def _announce(self, envs: ModuleType) -> None:
        """Make this package's variables known to vLLM, without a change of its torch.compile cache key."""
        known = getattr(envs, "environment_variables", None)
        if isinstance(known, dict):
            for name in own_variables(self.catalog, os.environ):
                if name not in known:
                    known[name] = self._announced[name] = functools.partial(os.environ.get, name)
            if hasattr(envs, "compile_factors"):
                self._seam("vllm.envs:compile_factors", self._drop_own_names)

    def _drop_own_names(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        factors = wrapped(*args, **kwargs)
        if isinstance(factors, dict):
            traced = {name for patch in self.catalog if patch.traced for name in (patch.env, *patch.aliases)}
            for name in self._announced.keys() - traced:
                factors.pop(name, None)
        return factors

    def check_strict(self) -> None:
        """Raise under ``VLLM_HOTFIX_STRICT`` if a patch that was asked for cannot be active.

        Raises:
            HotfixError: with the name, the variable and the reason of each.
        """
        if not strict():
            return
        states = {patch.name: state_of(patch) for patch in self.catalog if patch.name in RECORD.entries}
        faults = [
            f"{name} ({self.gates[name].variable}) is {state}: {reason}"
            for name, (state, reason) in states.items()
            if state in FAULTS
        ]
        faults += [str(problem) for problem in RECORD.problems.values()]
        if faults:
            raise HotfixError(f"vllm-hotfix: {STRICT} is set and " + "; ".join(faults))

    def deactivate(self) -> None:
        """Undo everything, last wrapped first. What could not be undone is one warning; it can be tried again."""
        with LOCK:
            undone = [self._undo(patch) for patch in reversed(self.catalog)]
            for name, seam in list(self._seams.items()):
                try:
                    seam.undo()
                    del self._seams[name]
                except Exception as error:
                    undone.append(False)
                    RECORD.warn(f"{name} cannot be given back: {describe(error)}")
            known = getattr(sys.modules.get("vllm.envs"), "environment_variables", {})
            for name, getter in self._announced.items():
                if known.get(name) is getter:
                    del known[name]
            self._announced.clear()
            FINDER.after.clear()
            RECORD.problems.clear()
            RECORD.undone = all(undone)
            RECORD.remove()

    @staticmethod
    def _undo(patch: Patch) -> bool:
        """Undo a patch, and forget it when that is done. Return whether it is."""
        entry = RECORD.entries.get(patch.name)
        if entry is None:
            return True
        implementation = sys.modules.get(f"vllm_hotfix._patches.{patch.name}")
        undo = getattr(implementation, "undo", None)
        entry.hooked = False
        try:
            if entry.wraps and undo is not None:
                undo()
        except Exception as error:
            RECORD.warn(f"{patch.name} was at work and could not end it: {describe(error)}")
        try:
            entry.undo()
        except Exception as error:
            entry.state, entry.reason = FAILED, f"stands aside, but could not be undone: {describe(error)}"
            RECORD.warn(f"{patch.name} {entry.reason}")
            return False
        del RECORD.entries[patch.name]
        return True


def load_lock() -> Lock | LockError:
    """The lock, or what is wrong with it."""
    try:
        return Lock.load()
    except LockError as error:
        return error


def state_of(patch: Patch) -> tuple[str, str]:
    """A patch's state in this process, by its live objects: what was wrapped and is not any more is not active."""
    entry = RECORD.entries.get(patch.name)
    if entry is None:
        return OFF, ""
    return entry.live()
