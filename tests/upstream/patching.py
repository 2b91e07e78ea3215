"""A patch at work for one test, and what it says of itself."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

import vllm_hotfix
from vllm_hotfix._catalog import CATALOG
from vllm_hotfix._record import RECORD, logger


@contextlib.contextmanager
def switched_on(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str) -> Iterator[None]:
    """Apply a patch and undo it afterwards; counters begin at nothing, and every warning is new."""
    (gate,) = (patch.env for patch in CATALOG if patch.name == name)
    monkeypatch.setenv(gate, "1")
    monkeypatch.setenv("VLLM_HOTFIX_STATE_DIR", str(folder / "state"))
    monkeypatch.setattr(RECORD, "counters", {})
    monkeypatch.setattr(RECORD, "_warned", set())
    vllm_hotfix.activate()
    try:
        yield
    finally:
        vllm_hotfix.deactivate()


def state_of(name: str) -> tuple[str, str]:
    """Return a patch's state in this process, and the reason."""
    entry = RECORD.entries.get(name)
    return entry.live() if entry else ("off", "")


def counters(name: str) -> dict[str, int]:
    """Return a patch's counters."""
    return RECORD.counters.get(name, {})


def written_counters(folder: Path, name: str) -> dict[str, int]:
    """Return a patch's counters as another process reads them, of a patch that is switched on with this folder."""
    (path,) = (folder / "state").rglob("*.json")
    found: dict[str, int] = json.loads(path.read_text("utf-8"))["counters"].get(name, {})
    return found


@contextlib.contextmanager
def hearing(level: int = logging.WARNING) -> Iterator[list[str]]:
    """Collect what the package logs, from a level on; the tests have vLLM's own logger at ERROR."""
    heard: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level
    logger.setLevel(min(level, logging.WARNING))
    logger.addHandler(handler)
    try:
        yield heard
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
