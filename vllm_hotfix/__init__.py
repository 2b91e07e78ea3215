"""Fixes that vLLM has not released, for the vLLM that is installed. Importing this package activates them.

Each patch has its own variable (``VLLM_HOTFIX_...``) and is applied only to code that it knows.
``python -m vllm_hotfix.status`` lists what is active.
"""

from __future__ import annotations

import os
import sys
from _thread import RLock
from typing import TYPE_CHECKING, Any

import _vllm_hotfix

from ._patch import STRICT, HotfixError, read_gates

if TYPE_CHECKING:
    from ._hooks import Activation

__version__ = "0.1.0"
__all__ = ["HotfixError", "activate", "check_strict", "counters", "deactivate", "patches"]

_activation: Activation | None = None
_failure: str | None = None
_lock = RLock()


def _after_fork() -> None:
    global _lock
    _lock = RLock()


os.register_at_fork(after_in_child=_after_fork)


def activate() -> None:
    """Read the gates and apply the patches that they turn on; called again, only what is new.

    Where vLLM is not imported yet, this waits for it and imports nothing; where it is, its modules are patched
    all the same. Never raises an Exception: whatever goes wrong is a warning, and stock vLLM runs.
    """
    global _activation, _failure
    try:
        if not _vllm_hotfix.asked():
            return
        if "vllm" not in sys.modules:
            _vllm_hotfix.wait_for_vllm()
            return
        from ._catalog import CATALOG
        from ._hooks import Activation

        with _lock:
            if _activation is None:
                _activation = Activation(CATALOG)
        _activation.activate(*read_gates(CATALOG, os.environ))
        _failure = None
    except Exception as error:
        words = _vllm_hotfix.describe(error)
        if words != _failure:
            _failure = words
            _vllm_hotfix.warn(f"not active in this process: {words}")
            if _vllm_hotfix.strict():
                # Without wrapt, which may be what failed.
                _vllm_hotfix.check_at_start(check_strict)


def deactivate() -> None:
    """Undo everything: every attribute and every rebound name is the original object again.

    Where another library has wrapped a patched function since, the patch steps aside inside it, and a warning names it.
    """
    global _failure
    if _vllm_hotfix.FINDER in sys.meta_path:
        sys.meta_path.remove(_vllm_hotfix.FINDER)
    _vllm_hotfix.FINDER.before.clear()
    _vllm_hotfix.FINDER.after.clear()
    _failure = None
    _vllm_hotfix.uncheck()
    if _activation is not None:
        _activation.deactivate()


def check_strict() -> None:
    """Stop the start of an engine in which a patch that was asked for cannot be active.

    Raises:
        HotfixError: if ``VLLM_HOTFIX_STRICT`` is set and an enabled patch is drifted, unsupported or failed, or a
            setting is wrong; its message has the name, the variable and the reason.
    """
    if _failure is not None and _vllm_hotfix.strict():
        raise HotfixError(f"vllm-hotfix: {STRICT} is set, but not active: {_vllm_hotfix.settings()}; {_failure}")
    if _activation is not None:
        _activation.check_strict()


def patches() -> list[dict[str, Any]]:
    """The patches and their states in this process, as ``python -m vllm_hotfix.status --json`` lists them."""
    from .status import report

    return list(report()["patches"])


def counters() -> dict[str, dict[str, int]]:
    """What the patches did in this process: for each patch, its counters by name."""
    from ._record import RECORD

    return {name: dict(counters) for name, counters in RECORD.counters.items()}


activate()
