"""What a step can raise that is made to fail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Nasty(Exception):
    """An exception that cannot even be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


#: By name: what makes one, and what of it a line in the log has.
ERRORS: dict[str, tuple[Callable[[], BaseException], str]] = {
    "OSError": (lambda: OSError(28, "injected"), "injected"),
    "MemoryError": (lambda: MemoryError("injected"), "injected"),
    "Exception": (Nasty, "Nasty"),
    "KeyboardInterrupt": (KeyboardInterrupt, ""),
}


def interrupted(function: Callable[[], Any]) -> Any:
    """Return what a function returns, or KeyboardInterrupt if that is what it raised."""
    try:
        return function()
    except KeyboardInterrupt:
        return KeyboardInterrupt


def is_free(lock: Any) -> bool:
    """Say whether another thread can take a lock."""
    taken: list[bool] = []

    def take() -> None:
        taken.append(lock.acquire(blocking=False))
        if taken[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return taken[0]
