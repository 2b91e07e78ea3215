"""The state files: who may write them, who may read them, and what is done with what is wrong."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from vllm_hotfix import _record
from vllm_hotfix._patch import ACTIVE, STALE_GRAPHS, Problem
from vllm_hotfix._record import RECORD, Entry, live

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the state files need Linux's /proc")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the state files of this user are, in the temporary folder of the test; not made yet."""
    return tmp_path / f"vllm-hotfix-{os.getuid()}"


def save(state: str = ACTIVE) -> None:
    """Record one patch and write the state file."""
    RECORD.entries["one"] = Entry(state, "2 functions wrapped")
    RECORD.save()


def files(folder: Path) -> list[Path]:
    """The state files."""
    return sorted(folder.iterdir())


def mode(path: Path) -> int:
    """A file's permissions."""
    return stat.S_IMODE(path.lstat().st_mode)


def states() -> list[dict[str, Any]]:
    """The processes that are listed."""
    return [one for one in live() if not isinstance(one, str)]


def words() -> list[str]:
    """What is said of files that are skipped."""
    return [one for one in live() if isinstance(one, str)]


@pytest.fixture
def planted(folder: Path) -> Any:
    """Plant a file with this process's state, changed by the fields given."""
    save()
    (own,) = files(folder)
    good = json.loads(own.read_text())
    own.unlink()

    def planted(name: str = "planted.json", **fields: Any) -> Path:
        path = folder / name
        path.write_text(json.dumps(good | fields))
        return path

    return planted


def test_a_process_is_listed_with_what_it_recorded(folder: Path) -> None:
    """Patches with state and reason, counters, vLLM's version, the command and the time."""
    RECORD.vllm = "0.20.2"
    RECORD.count("one", "layers", 3)
    RECORD.count("one", "layers")
    before = time.time()
    save()
    (state,) = states()
    assert state["pid"] == os.getpid()
    assert state["patches"] == {"one": {"state": ACTIVE, "reason": "2 functions wrapped"}}
    assert state["counters"] == {"one": {"layers": 4}}
    assert state["vllm"] == "0.20.2"
    assert before <= state["time"] <= time.time()
    assert Path(sys.executable).name in state["command"]
    assert state["title"] == " ".join(Path("/proc/self/cmdline").read_text().replace("\0", " ").split())
    assert words() == []


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_nobody_else_can_read_or_enter(folder: Path, umask: int) -> None:
    """The folder has mode 0700 and the file 0600, whatever the umask is."""
    before = os.umask(umask)
    try:
        save()
    finally:
        os.umask(before)
    assert mode(folder) == 0o700
    assert [mode(path) for path in files(folder)] == [0o600]


def test_a_process_that_was_asked_for_nothing_writes_nothing(folder: Path) -> None:
    """Neither a file nor a folder."""
    RECORD.save()
    assert not folder.exists()
    assert list(live()) == []


def test_saving_again_replaces_the_file(folder: Path) -> None:
    """One process, one file, with the latest state, and no draft left beside it."""
    save("ready")
    save("active")
    assert len(files(folder)) == 1
    assert states()[0]["patches"]["one"]["state"] == "active"


def test_the_folder_can_be_moved(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``VLLM_HOTFIX_STATE_DIR`` holds it instead; what is missing above it is made."""
    monkeypatch.setenv("VLLM_HOTFIX_STATE_DIR", str(tmp_path / "some/where"))
    save()
    assert not folder.exists()
    (moved,) = (tmp_path / "some/where").iterdir()
    assert moved.name == folder.name
    assert mode(moved) == 0o700
    assert len(states()) == 1


def test_a_moved_folder_may_be_named_relatively(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that changes its folder meanwhile still removes its own file."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    monkeypatch.setenv("VLLM_HOTFIX_STATE_DIR", "states")
    save()
    monkeypatch.chdir(tmp_path / "b")
    RECORD.remove()
    assert list((tmp_path / "a").rglob("*.json")) == []


# What is refused.


def test_a_link_planted_as_the_folder_is_not_followed(folder: Path, tmp_path: Path, logged: Any) -> None:
    """In a temporary folder that all can write to, the name may be taken: nothing is written through the link."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(0o700)
    folder.symlink_to(elsewhere)
    save()
    assert list(elsewhere.iterdir()) == []
    (warning,) = logged()
    assert "no state file" in warning
    with pytest.raises(NotADirectoryError):
        list(live())


def test_a_file_planted_as_the_folder_is_refused(folder: Path, logged: Any) -> None:
    """A file of that name stays as it is."""
    folder.write_text("mine")
    save()
    assert folder.read_text() == "mine"
    assert len(logged()) == 1


def test_a_link_planted_as_the_file_is_not_followed(folder: Path, tmp_path: Path) -> None:
    """The state file's and the draft's name may be links: both are replaced, what they point to is untouched."""
    save()
    (own,) = files(folder)
    victim = tmp_path / "victim"
    victim.write_text("mine")
    own.unlink()
    own.symlink_to(victim)
    own.with_suffix(f".{threading.get_ident()}").symlink_to(victim)
    save()
    assert victim.read_text() == "mine"
    assert not own.is_symlink()
    assert len(files(folder)) == 1


def test_a_link_is_not_read(planted: Any, folder: Path, tmp_path: Path) -> None:
    """A link or a pipe in place of a state file is skipped, not opened."""
    planted().rename(tmp_path / "target.json")
    (folder / "link.json").symlink_to(tmp_path / "target.json")
    os.mkfifo(folder / "pipe.json", 0o600)
    (folder / "folder.json").mkdir()
    assert states() == []
    assert [word.partition(": ")[2] for word in words()] == ["skipped, not a state file of this user"] * 3


@pytest.mark.parametrize("bits", [0o755, 0o770, 0o707, 0o701])
def test_a_folder_that_others_can_enter_is_refused(folder: Path, bits: int, logged: Any) -> None:
    """A folder with wider permissions is not this package's; they are not changed for it."""
    folder.mkdir()
    folder.chmod(bits)
    save()
    save()
    assert mode(folder) == bits
    assert files(folder) == []
    (warning,) = logged()
    assert "must belong to user" in warning
    with pytest.raises(PermissionError):
        list(live())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_the_folder_of_another_user_is_refused(folder: Path, logged: Any) -> None:
    """Who owns the folder can change every file in it, so nothing is written there and nothing believed."""
    folder.mkdir(0o700)
    os.chown(folder, 12345, 12345)
    save()
    assert files(folder) == []
    assert len(logged()) == 1
    with pytest.raises(PermissionError):
        list(live())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_the_file_of_another_user_is_skipped(planted: Any) -> None:
    """With a word, and it is not removed."""
    path = planted(pid=0)
    os.chown(path, 12345, 12345)
    assert list(live()) == [f"{path}: skipped, not a state file of this user"]
    assert path.exists()


@pytest.mark.parametrize("moved", [False, True])
def test_a_folder_that_cannot_be_made_is_one_warning(monkeypatch: pytest.MonkeyPatch, logged: Any, moved: bool) -> None:
    """A read-only file system: one warning however often the state changes; a setting that is wrong is named."""
    monkeypatch.setattr(tempfile, "tempdir", "/proc/no-such-folder")
    if moved:
        monkeypatch.setenv("VLLM_HOTFIX_STATE_DIR", "/proc/no-such-folder")
    for state in ("ready", "active", "failed"):
        save(state)
    (warning,) = logged()
    assert "no state file" in warning
    assert ("VLLM_HOTFIX_STATE_DIR" in warning) is moved
    assert bool(RECORD.problems) is moved, "under STRICT a setting that is wrong stops the engine"


def test_a_write_that_fails_leaves_no_draft(folder: Path, monkeypatch: pytest.MonkeyPatch, logged: Any) -> None:
    """A full disk: one warning, the last good file stays, and nothing half-written lies about."""
    save("ready")
    before = files(folder)

    def full(state: Any, file: Any) -> None:
        file.write("{")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(json, "dump", full)
        save("active")
        save("active")
    assert files(folder) == before
    assert states()[0]["patches"]["one"]["state"] == "ready"
    assert len(logged()) == 1


# What is dropped.


def test_files_of_dead_processes_are_dropped(planted: Any) -> None:
    """A killed process cannot remove its file; the next reader does, without a word."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    path = planted(pid=child.pid)
    assert list(live()) == []
    assert not path.exists()


def test_files_of_zombies_are_dropped(planted: Any) -> None:
    """A process that has ended and whose parent has not looked is dead."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it has ended, and stays a zombie
    started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    path = planted(pid=pid, started=started)
    try:
        assert list(live()) == []
        assert not path.exists()
    finally:
        os.waitpid(pid, 0)


def test_a_recycled_pid_is_another_process(planted: Any) -> None:
    """The PID runs, but the process started at another time: the file's process is gone."""
    path = planted(started=1)
    assert list(live()) == []
    assert not path.exists()


def test_a_file_without_a_start_time_is_no_running_process(planted: Any) -> None:
    """Nothing says that the process of that PID is the one that wrote the file, least of all when there is none."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    planted(pid=child.pid, started=None)
    assert states() == []


def test_files_of_other_containers_are_skipped(planted: Any) -> None:
    """A shared folder holds files of other PID namespaces: their processes cannot be looked for here, so they stay."""
    path = planted(namespace=1, pid=999999)
    (word,) = live()
    assert "another container" in word
    assert path.exists()


GARBAGE: list[bytes] = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"{}",
    b'"text"',
    b"\xff\xfe\x00",
    b"\x00" * 100,
    b"[" * 100_000,
    b'{"format": 1}',
    b'{"format": 2}',
]


@pytest.mark.parametrize("data", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_skipped_with_a_word(planted: Any, data: bytes) -> None:
    """Whatever the file holds: the others are read, and it stays for a person to look at."""
    planted("z.json")
    path = planted("a.json")
    path.write_bytes(data)
    word, state = live()
    assert isinstance(word, str)
    assert word.startswith(f"{path}: skipped, not readable as a state file")
    assert isinstance(state, dict)
    assert path.exists()


@pytest.mark.parametrize(
    "fields",
    [
        {"pid": "x"},
        {"pid": None},
        {"pid": 1e400},
        {"pid": []},
        {"time": "now"},
        {"time": 10**400},
        {"patches": []},
        {"patches": {"one": "active"}},
        {"patches": {"one": {}}},
        {"counters": {"one": {"n": "many"}}},
        {"counters": {"one": {"n": 1e400}}},
        {"counters": {"one": []}},
        {"counters": None},
        {"format": "1"},
    ],
    ids=range(14),
)
def test_wrong_fields_are_skipped_with_a_word(planted: Any, fields: dict[str, Any]) -> None:
    """A file with the right shape and a wrong value is no state file, and no traceback."""
    planted(**fields)
    (word,) = live()
    assert isinstance(word, str)
    assert "skipped, not readable as a state file" in word


def test_huge_files_are_not_read(planted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file too large for a state file is skipped before it is read into memory."""
    path = planted()
    with path.open("a") as file:
        file.truncate(1 << 40)  # sparse
    (word,) = live()
    assert word == f"{path}: skipped, larger than a state file can be"


def test_other_files_are_skipped_with_a_word(planted: Any, folder: Path) -> None:
    """A file that someone left in the folder is named and stays."""
    (folder / "notes.txt").write_text("mine")
    assert words() == [f"{folder / 'notes.txt'}: skipped, not a state file of this user"]


def test_a_file_that_is_being_written_is_no_matter(planted: Any, folder: Path) -> None:
    """The draft of a process that writes at this moment is not spoken of as foreign."""
    draft = planted(f"{_record._namespace()}-{os.getpid()}.140737353")
    assert list(live()) == []
    assert draft.exists()


def test_a_file_that_goes_away_meanwhile_is_no_matter(planted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may end, and remove its file, while the folder is read."""
    planted()
    read = Path.read_text

    def gone(self: Path, *args: Any) -> str:
        if self.name == "planted.json":
            self.unlink()
        return read(self, *args)

    monkeypatch.setattr(Path, "read_text", gone)
    assert list(live()) == []


# Processes.


SCRIPT = """
import json, os, sys
from vllm_hotfix._record import RECORD, Entry, own_folder
RECORD.entries["one"] = Entry("active", "")
RECORD.save()
folder = own_folder()
names = lambda: sorted(path.name.rpartition("-")[2] for path in folder.iterdir())
mine = f"{os.getpid()}.json"
read, write = os.pipe()
pid = os.fork()
if pid == 0:
    before = names()
    RECORD.save()
    os.write(write, json.dumps([before == [mine], names() == sorted([mine, f"{os.getpid()}.json"])]).encode())
    sys.exit(0)
os.waitpid(pid, 0)
silent = os.fork()
if silent == 0:
    sys.exit(0)
os.waitpid(silent, 0)
print(json.dumps([json.loads(os.read(read, 1000)), names() == [mine]]))
"""


def test_a_forked_child_writes_and_removes_its_own_file(real_house: Any, tmp_path: Path) -> None:
    """The child's file stands beside its parent's; each removes its own at exit, and a silent child removes none."""
    done = real_house.run("-c", SCRIPT, TMPDIR=str(tmp_path))
    assert json.loads(done.stdout) == [[True, True], True]
    (folder,) = tmp_path.iterdir()
    assert list(folder.iterdir()) == []
    assert done.stderr == ""


MULTIPROCESSING = """
import json, multiprocessing, os
from vllm_hotfix._record import RECORD, Entry, own_folder

def pids():
    return sorted(int(path.stem.rpartition("-")[2]) for path in own_folder().iterdir())

def child(queue, deeper):
    expected = sorted([os.getpid(), os.getppid(), *deeper])
    queue.put(pids() == expected)
    if not deeper:
        grandchild = context.Process(target=child, args=(queue, [int(os.environ["FIRST"])]))
        grandchild.start()
        grandchild.join()

if __name__ == "__main__":
    os.environ["FIRST"] = str(os.getpid())
    context = multiprocessing.get_context("fork")
    RECORD.entries["one"] = Entry("active", "")
    RECORD.save()
    queue = context.SimpleQueue()
    one = context.Process(target=child, args=(queue, []))
    one.start()
    found = [queue.get(), queue.get()]
    one.join()
    print(json.dumps([*found, pids() == [os.getpid()]]))
"""


def test_a_process_of_multiprocessing_is_listed_from_its_fork_to_its_end(real_house: Any, tmp_path: Path) -> None:
    """Its file is there from the first, also a grandchild's, and gone when it has ended.

    The engine core and the workers are forked so by vLLM, except on a CPU: such a process need never import a target,
    and ends without what ``atexit`` knows.
    """
    done = real_house.run("-c", MULTIPROCESSING, TMPDIR=str(tmp_path))
    assert json.loads(done.stdout) == [True, True, True]
    (folder,) = tmp_path.glob("vllm-hotfix-*")
    assert list(folder.iterdir()) == []
    assert done.stderr == ""


def test_a_killed_process_is_dropped_by_the_next_reader(real_house: Any, tmp_path: Path) -> None:
    """SIGKILL leaves the file; ``status --live`` lists nothing and removes it."""
    code = SCRIPT.partition("read, write")[0] + "os.kill(os.getpid(), 9)"
    real_house.run("-c", code, code=-9, TMPDIR=str(tmp_path))
    (folder,) = tmp_path.iterdir()
    assert len(list(folder.iterdir())) == 1
    done = real_house.run("-m", "vllm_hotfix.status", "--live", TMPDIR=str(tmp_path))
    assert " ".join(done.stdout.split()).startswith(f"no running process has written to {folder}: ")
    assert list(folder.iterdir()) == []


def test_a_process_is_shown_by_the_title_that_it_has_given_itself(real_house: Any, tmp_path: Path) -> None:
    """One command starts vLLM's engine core and its workers: they set titles, which ``ps`` shows."""
    code = SCRIPT.partition("folder = ")[0] + "os.execv('/bin/cat', ['VLLM::Worker_TP0'])"
    environ = {"PYTHONPATH": str(real_house.folder), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [real_house.bare, "-c", code], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"!")
        process.stdin.flush()
        assert process.stdout.read(1) == b"!"  # it is cat by now
        done = real_house.run("-m", "vllm_hotfix.status", "--live", "--json", TMPDIR=str(tmp_path))
        process.stdin.close()
    (found,) = json.loads(done.stdout)["processes"]
    assert found["title"] == "VLLM::Worker_TP0"
    assert found["command"].startswith(f"{real_house.bare} -c ")


# Counters and warnings.


def test_counters_of_many_threads_add_up() -> None:
    """Nothing is lost when several threads count."""
    threads = [threading.Thread(target=lambda: [RECORD.count("one", "calls") for _ in range(2000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert RECORD.counters["one"]["calls"] == 8000


def test_what_is_written_is_a_snapshot(folder: Path, monkeypatch: pytest.MonkeyPatch, logged: Any) -> None:
    """Others count while the state is written: a dictionary that grows then could not be written."""
    dump = json.dump

    def count_and_dump(state: Any, file: Any) -> None:
        RECORD.count("one", "late")
        RECORD.count("another", "late")
        dump(state, file)

    RECORD.count("one", "early")
    monkeypatch.setattr(json, "dump", count_and_dump)
    save()
    assert states()[0]["counters"] == {"one": {"early": 1}}
    assert logged() == []


def test_a_warning_is_said_once(logged: Any) -> None:
    """Per process and text; a problem as well."""
    for _ in range(3):
        RECORD.warn("one thing")
        RECORD.problem(Problem("VLLM_HOTFIX_X", "another thing"))
    assert logged() == ["vllm-hotfix: one thing", "vllm-hotfix: VLLM_HOTFIX_X: another thing"]


def test_stale_graphs_stay_and_are_said_once(folder: Path, logged: Any) -> None:
    """The first reason stays, with one error and word to other processes at once; without an entry it is nothing."""
    RECORD.stale("one", "nobody asked for it")
    assert logged() == []
    save()
    for reason in ("the first layer", "the second layer"):
        RECORD.stale("one", reason)
    assert logged() == ["vllm-hotfix: one: the first layer"]
    (state,) = states()
    assert state["patches"] == {"one": {"state": STALE_GRAPHS, "reason": "the first layer"}}
