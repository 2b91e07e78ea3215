"""Another library's wrapt hooks on the functions that the patches wrap, on a release's real source.

In forks of this process: what is wrapped there is not wrapped here.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import frame
import pytest
import wrapt
from packaging.version import Version

from vllm_hotfix._catalog import CATALOG
from vllm_hotfix._upstream import Sources

RELEASE = os.environ["HOTFIX_RELEASE"]
SOURCES = Sources()
#: How often each function is wrapped with every gate on, those of this release that have a fault.
WRAPPED = Counter(
    target.name
    for patch in CATALOG
    if patch.fixed_in is None or Version(RELEASE) < Version(patch.fixed_in)
    for target in patch.targets
    if SOURCES.find(target.name) and not (target.unless and SOURCES.find(target.unless))
)
LAYERWISE = f"{frame.RELOAD}.layerwise"
ALL_ON = {"VLLM_HOTFIX_ENABLE": "all"}
#: Of the layerwise module, and one patch alone: reading the files of all of them takes most of these tests' time.
LAYERWISE_TARGETS = [
    target.name
    for patch in CATALOG
    if patch.env == frame.GATE
    for target in patch.targets
    if target.name.startswith(f"{LAYERWISE}:") and target.name in WRAPPED
]


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import the modules of all targets, before anything is activated."""
    frame.import_all(dict.fromkeys(name.partition(":")[0] for name in WRAPPED))


class Theirs:
    """A library that counts the calls of functions."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def wrap(self, name: str) -> None:
        """Wrap a function of an imported module."""
        module, _, qualname = name.partition(":")

        def count(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            self.calls[name] += 1
            return wrapped(*args, **kwargs)

        wrapt.wrap_function_wrapper(module, qualname, count)

    def hook(self, name: str) -> None:
        """Wrap a function when its module is imported."""
        wrapt.register_post_import_hook(lambda module: self.wrap(name), name.partition(":")[0])


def layers(names: Any) -> dict[str, int]:
    """Count the wrappers around the live functions."""
    return {name: frame.layers(name) for name in names}


def activate(environ: dict[str, str]) -> Any:
    """Turn patches on; returns the package."""
    import vllm_hotfix

    os.environ.update(environ)
    vllm_hotfix.activate()
    return vllm_hotfix


def assert_active() -> None:
    """Every patch that is on and has something to do in this release is active."""
    from vllm_hotfix._record import RECORD

    live = {name: entry.live() for name, entry in RECORD.entries.items()}
    assert {state for state, _ in live.values()} <= {"active", "not-needed"}, live
    assert live["measured_totals"][0] == "active"


@pytest.mark.parametrize("order", ["theirs before", "theirs after"])
def test_functions_that_another_library_has_wrapped(order: str, tmp_path: Path) -> None:
    """All targets wrapped by both, in both orders: each is active, a reload calls both, and theirs stays at the end."""

    def child() -> Any:
        frame.hear_warnings()
        theirs = Theirs()
        if order == "theirs after":
            package = activate(ALL_ON)
        for name in WRAPPED:
            theirs.wrap(name)
        if order == "theirs before":
            package = activate(ALL_ON)
        assert layers(WRAPPED) == {name: count + 1 for name, count in WRAPPED.items()}
        assert_active()
        assert frame.small_reload() == [3, 4]
        called = dict(theirs.calls)
        counted = package.counters()
        package.deactivate()
        theirs.calls.clear()
        assert frame.small_reload() == [3, 4]
        assert dict(theirs.calls) == called
        assert package.counters() == counted, "a patch was at work after deactivate()"
        if order == "theirs before":
            assert layers(WRAPPED) == dict.fromkeys(WRAPPED, 1)
        return called, counted

    outcome = frame.forked(tmp_path, child)
    called, counted = outcome.ok()
    assert any(name.startswith(LAYERWISE) for name in called)
    assert counted.get("measured_totals"), counted
    aside = [line.partition(" ")[0] for line in outcome.warnings if "was wrapped again by others" in line]
    assert len(aside) == len(outcome.warnings)
    assert set(aside) == (set(WRAPPED) if order == "theirs after" else set())


@pytest.mark.parametrize("order", ["theirs before", "theirs after"])
def test_hooks_of_another_library_on_a_module_that_is_not_imported_yet(order: str, tmp_path: Path) -> None:
    """Both wait for the layerwise module, whoever was first: when it is there, both have wrapped it, once each."""

    def child() -> Any:
        frame.hear_warnings()
        package = sys.modules[frame.RELOAD]
        del sys.modules[LAYERWISE], vars(package)["layerwise"]
        theirs = Theirs()
        if order == "theirs after":
            activate({frame.GATE: "1"})
        for name in LAYERWISE_TARGETS:
            theirs.hook(name)
        if order == "theirs before":
            activate({frame.GATE: "1"})
        assert LAYERWISE not in sys.modules
        module = importlib.import_module(LAYERWISE)
        assert layers(LAYERWISE_TARGETS) == dict.fromkeys(LAYERWISE_TARGETS, 2)
        assert_active()
        assert frame.small_reload() == [3, 4]
        return dict(theirs.calls), type(module.__loader__).__module__

    outcome = frame.forked(tmp_path, child)
    called, loader = outcome.ok()
    assert called
    assert loader == "_frozen_importlib_external"
    assert outcome.warnings == []
