"""What happened in this process, and the state file by which other processes can know it.

A process that applied something writes ``NAMESPACE-PID.json`` into a folder of mode 0700 that belongs to the user:
``vllm-hotfix-UID`` in ``VLLM_HOTFIX_STATE_DIR`` or else in the temporary folder. So does each process that
``multiprocessing`` forks from it. The file is removed at exit; a reader drops what killed processes left.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _vllm_hotfix import describe

from ._patch import ACTIVE, FAILED, OFF, STALE_GRAPHS, STATE_DIR, Problem

if TYPE_CHECKING:
    from ._hooks import Wrap
    from ._judge import Verdict

#: A child of vLLM's logger: its lines look like vLLM's once that is configured.
logger = logging.getLogger("vllm.hotfix")
_FORMAT = 1
_LARGEST = 1 << 20  # bytes of a state file that are read at most
_DRAFT = 60  # seconds after which a file that is being written is one that was left


@dataclass
class Entry:
    """One patch in this process."""

    state: str = OFF
    reason: str = ""
    verdict: Verdict | None = None
    #: Whether its targets are wrapped as they are imported.
    hooked: bool = False
    wraps: dict[str, Wrap] = field(default_factory=dict)
    #: Wraps of modules that have been executed again since.
    retired: list[Wrap] = field(default_factory=list)

    def live(self) -> tuple[str, str]:
        """The state and its reason by the live objects: what was wrapped and is not any more is not active."""
        lost = [wrap.name for wrap in self.wraps.values() if not wrap.alive]
        if self.state == ACTIVE and lost:
            return FAILED, f"no longer wrapped, replaced by others: {', '.join(lost)}"
        return self.state, self.reason

    def undo(self, keep: Collection[str] = ()) -> None:
        """Undo what was wrapped, the last first, but for the names to keep.

        Raises:
            Exception: the first of what was raised. What could not be undone stays here, and its wrapper steps aside.
        """
        first: Exception | None = None
        left: list[Wrap] = []
        wraps = [one for one in (*reversed(self.wraps.values()), *reversed(self.retired)) if one.name not in keep]
        for wrap in wraps:  # all at once: half a patch is none, also if what follows is interrupted
            wrap.enabled = False
        for wrap in wraps:
            try:
                wrap.undo()
            except Exception as error:
                first = first or error
                left.append(wrap)
        self.wraps = {name: wrap for name, wrap in self.wraps.items() if name in keep or wrap in left}
        self.retired = [wrap for wrap in self.retired if wrap.name in keep or wrap in left]
        if first is not None:
            raise first


class Record:
    """This process: the patches' entries, their counters, the settings' problems."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.counters: dict[str, dict[str, int]] = {}
        self.problems: dict[str, Problem] = {}
        self.vllm: str | None = None
        self.undone = False
        self._warned: set[str] = set()
        self._lock = threading.Lock()
        self._written: tuple[int, Path] | None = None
        self._at_end: Any = None
        self._follows = False

    def count(self, patch: str, counter: str, number: int = 1) -> None:
        """Add to a patch's counter."""
        with self._lock:
            counters = self.counters.setdefault(patch, {})
            counters[counter] = counters.get(counter, 0) + number

    def warn(self, message: str) -> None:
        """Log a warning, once per process."""
        if message not in self._warned:
            self._warned.add(message)
            logger.warning("vllm-hotfix: %s", message)

    def problem(self, problem: Problem) -> None:
        """Keep what is wrong with a setting and warn of it once."""
        if str(problem) not in self.problems:
            self.problems[str(problem)] = problem
            self.warn(str(problem))

    def stale(self, patch: str, reason: str) -> None:
        """Log an error, once, and have the patch in the state ``stale-graphs`` for as long as it is on."""
        entry = self.entries.get(patch)
        if entry is not None and entry.state != STALE_GRAPHS:
            entry.state, entry.reason = STALE_GRAPHS, reason
            logger.error("vllm-hotfix: %s: %s", patch, reason)
            self.save()

    def save(self) -> None:
        """Write this process's state file if anything was asked of it; a failure is one warning."""
        try:
            if self.entries:
                self._save()
        except Exception as error:
            reason = f"no state file, so status --live will not show this process: {describe(error)}"
            if configured := os.environ.get(STATE_DIR):
                self.problem(Problem(STATE_DIR, f"{configured}: {reason}"))
            else:
                self.warn(reason)

    def _save(self) -> None:
        with self._lock:
            counters = {name: dict(one) for name, one in self.counters.items()}
        state = {
            "format": _FORMAT,
            "pid": os.getpid(),
            "started": _started(os.getpid()),
            "namespace": _namespace(),
            "command": " ".join(sys.orig_argv)[:500],
            "vllm": self.vllm,
            "time": time.time(),
            "patches": {
                name: dict(zip(("state", "reason"), one.live(), strict=True)) for name, one in self.entries.items()
            },
            "counters": counters,
        }
        folder = own_folder(create=True)
        path = folder / f"{_namespace()}-{os.getpid()}.json"
        draft = path.with_suffix(f".{threading.get_ident()}")
        with suppress(FileNotFoundError):
            draft.unlink()
        try:
            handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with open(handle, "w", encoding="utf-8") as file:
                json.dump(state, file)
            os.replace(draft, path)
        except BaseException:
            with suppress(OSError):
                draft.unlink()
            raise
        if self._written is None or self._written[0] != os.getpid():
            self._written = os.getpid(), path
            self._remove_at_exit()

    def _remove_at_exit(self) -> None:
        # vLLM has imported it long since; the status command does without.
        from multiprocessing import util

        atexit.register(self.remove)
        # What multiprocessing has forked, as vLLM does its core and workers, ends without atexit, and it may never
        # have a reason of its own to write.
        self._at_end = util.Finalize(None, self.remove, exitpriority=-1)
        if not self._follows:
            self._follows = True
            util.register_after_fork(self, Record.save)

    def remove(self) -> None:
        """Remove this process's state file, and what would at exit; a failure is one warning, and it is tried there."""
        if self._written is None or self._written[0] != os.getpid():
            return
        path = self._written[1]
        try:
            path.unlink(missing_ok=True)
            self._written = None
            atexit.unregister(self.remove)
            if self._at_end is not None:
                self._at_end.cancel()
        except Exception as error:
            self.warn(f"{path} cannot be removed: {describe(error)}")

    def after_fork(self) -> None:
        """Begin anew in a forked child: the patches are at work there too, what they did was the parent's."""
        self._lock = threading.Lock()
        self.counters = {}


RECORD = Record()
os.register_at_fork(after_in_child=RECORD.after_fork)


def folder_path() -> Path:
    """Where the state files of this user's processes are, as this process's environment has it.

    Raises:
        OSError: there is no temporary folder.
    """
    # Absolute: the process may change its folder before it removes its file.
    return Path(os.environ.get(STATE_DIR) or tempfile.gettempdir()).absolute() / f"vllm-hotfix-{os.getuid()}"


def own_folder(*, create: bool = False) -> Path:
    """The folder of the state files, checked: a real folder of this user that nobody else can enter.

    Raises:
        OSError: it is not there, cannot be made, or is not like that.
    """
    folder = folder_path()
    if create:
        with suppress(FileExistsError):
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700)
    found = folder.lstat()  # a link is not followed
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{folder} is not a folder")
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} must belong to user {os.getuid()} with mode 0700")
    return folder


def live() -> Iterator[dict[str, Any] | str]:
    """Read the state files: a dict for each running process, a line of text for each file that is skipped.

    A dict has what the process wrote, and its ``title``: what ``ps`` shows of it now, which is how vLLM tells its
    processes apart. Files of processes that are gone are removed.

    Raises:
        OSError: the folder is there but cannot be used.
    """
    try:
        folder = own_folder()
    except FileNotFoundError:
        return
    for path in sorted(folder.iterdir()):
        try:
            found = path.lstat()
            if path.suffix[1:].isdigit() and time.time() - found.st_mtime < _DRAFT:
                continue  # being written
            if path.suffix != ".json" or not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
                yield f"{path}: skipped, not a state file of this user"
                continue
            if found.st_size > _LARGEST:
                yield f"{path}: skipped, larger than a state file can be"
                continue
            state = _checked(json.loads(path.read_text("utf-8")))
        except FileNotFoundError:
            continue  # removed meanwhile
        except Exception as error:
            yield f"{path}: skipped, not readable as a state file ({describe(error)})"
            continue
        if state["namespace"] != _namespace():
            yield f"{path}: skipped, of another container (PID namespace)"
        elif state["started"] is None or _started(state["pid"]) != state["started"]:
            with suppress(OSError):
                path.unlink()
        else:
            yield state | {"title": _title(state["pid"]) or state["command"]}


def _checked(state: Any) -> dict[str, Any]:
    """The parts of a state file that are shown, with the types that they must have."""
    if state["format"] != _FORMAT:
        raise ValueError(f"format {state['format']!r}")
    return {
        "pid": int(state["pid"]),
        "started": state["started"],
        "namespace": state["namespace"],
        "command": str(state["command"]),
        "vllm": None if state["vllm"] is None else str(state["vllm"]),
        "time": float(state["time"]),
        "patches": {
            str(name): {"state": str(one["state"]), "reason": str(one["reason"])}
            for name, one in state["patches"].items()
        },
        "counters": {
            str(name): {str(counter): int(value) for counter, value in counters.items()}
            for name, counters in state["counters"].items()
        },
    }


def _started(pid: int) -> int | None:
    """When a process started, in clock ticks after boot: with the PID it names one process. None if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
        state, *fields = text.rpartition(")")[2].split()
        return None if state == "Z" else int(fields[18])
    except (OSError, ValueError, IndexError):
        return None


def _title(pid: int) -> str:
    """The command line of a process, or the title that it has given itself; empty if that cannot be read."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""
    return " ".join(text.replace("\0", " ").split())[:500]


def _namespace() -> int:
    """The PID namespace, by its inode; 0 where the system has none."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
