"""Where an operator may put it: odd interpreters, folders, users, limits and neighbours, each in real processes.

All of it with the small vLLM of `conftest.py`, whose two targets are wrapped by one patch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

ON = {"VLLM_HOTFIX_MARKS": "1"}
STOCK, PATCHED = ["stock"], ["stock", "patched"]

#: Looks at both targets and at the name that a module took, at the state and at this process's state file.
LOOK = """
import json, os, sys
import vllm.model, vllm.steps, vllm_hotfix
from vllm_hotfix import _record
RESULTS = [vllm.steps.step(), vllm.model.Model().load(), vllm.model.Model().run()]
FILE = _record.RECORD._written and str(_record.RECORD._written[1])
print(json.dumps([RESULTS, vllm_hotfix.patches()[0]["state"], vllm_hotfix.counters(), FILE]))
"""
#: The same without a word of this package.
RESULTS = """
import json, vllm.model, vllm.steps
print(json.dumps([vllm.steps.step(), vllm.model.Model().load(), vllm.model.Model().run()]))
"""
NO_FILE = "no state file, so status --live will not show this process"


def at_work(done: subprocess.CompletedProcess[str], *, file: bool = True) -> str | None:
    """See that the patch was at work in a process that looked; returns its state file, which must be gone."""
    assert done.returncode == 0, done.stderr
    results, state, counters, path = json.loads(done.stdout)
    assert results == [PATCHED] * 3, done.stderr
    assert state == "active"
    assert counters == {"marks": {"calls": 3}}
    assert (path is not None) == file
    assert path is None or not Path(path).exists()
    return path


def warnings(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What a process said on stderr: each line must be one warning of the package."""
    lines = done.stderr.splitlines()
    assert [line for line in lines if not line.startswith("vllm-hotfix: ")] == []
    return [line.removeprefix("vllm-hotfix: ") for line in lines]


# The interpreter.


INTERPRETERS: dict[str, tuple[list[str], dict[str, str]]] = {
    "-I": (["-I"], {}),
    "-E": (["-E"], {}),
    "-s": (["-s"], {}),
    "safe path": ([], {"PYTHONSAFEPATH": "1"}),
    "no bytecode": ([], {"PYTHONDONTWRITEBYTECODE": "1"}),
    "bytecode elsewhere": ([], {"PYTHONPYCACHEPREFIX": "cache"}),
    "no asserts, no docstrings": ([], {"PYTHONOPTIMIZE": "2"}),
    "nothing frozen": (["-X", "frozen_modules=off"], {}),
    "warnings are errors": ([], {"PYTHONWARNINGS": "error", "PYTHONWARNDEFAULTENCODING": "1"}),
    "development mode": (["-X", "dev", "-W", "error", "-bb"], {}),
    "C locale": ([], {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    "no home": ([], {"HOME": "/proc/nowhere"}),
    "no temporary folder": ([], {"TMPDIR": "/proc/nowhere"}),
}


@pytest.mark.parametrize("kind", INTERPRETERS)
def test_an_interpreters_settings_are_no_matter(house: Any, tmp_path: Path, kind: str) -> None:
    """The patch is at work by way of the .pth, nothing is said, and no state file is left."""
    options, environ = INTERPRETERS[kind]
    environ = {"TMPDIR": str(tmp_path), **ON, **environ}
    done = house.run(*options, "-c", LOOK, python=house.installed, path=(), cwd=tmp_path, **environ)
    assert done.stderr == ""
    path = at_work(done)
    assert path is not None
    assert path.startswith("/tmp/" if kind == "no temporary folder" else str(tmp_path))


def test_the_gate_alone_is_environment_enough(house: Any) -> None:
    """``env -i``: no home, no path, no language, no temporary folder; the same for the status."""
    run = partial(subprocess.run, env=ON, cwd="/", capture_output=True, text=True, timeout=60)
    done = run([house.installed, "-c", LOOK])
    assert done.stderr == ""
    at_work(done)
    done = run([house.installed, "-m", "vllm_hotfix.status", "--import", "--check"])
    assert (done.returncode, done.stderr) == (0, "")


def test_without_site_whoever_wants_it_imports_it(house: Any) -> None:
    """Under ``-S`` neither .pth nor sitecustomize is run; the plugin and the import do the same as ever."""
    run = partial(house.run, "-S", "-c", path=(house.bootstrap, house.folder), **ON)
    done = run(RESULTS)
    assert json.loads(done.stdout) == [STOCK] * 3
    assert done.stderr == ""
    for first in ("import vllm_hotfix\n", "import vllm.plugins; vllm.plugins.load_general_plugins()\n"):
        done = run(first + LOOK)
        assert done.stderr == ""
        at_work(done)


def test_a_lib64_link_activates_once(house: Any, tmp_path: Path) -> None:
    """A Python whose libraries are in ``lib64``, and a venv where that is a link: site reads the .pth several times."""
    base, home = tmp_path / "base", tmp_path / "venv"
    base.mkdir()
    for name in ("bin", "lib"):
        (base / name).symlink_to(Path(sys.base_prefix) / name)
    (base / "lib64").symlink_to("lib")
    shutil.copytree(house.installed.parents[1], home, symlinks=True)
    lines = (home / "pyvenv.cfg").read_text().splitlines()
    lines = [f"home = {base}/bin" if line.startswith("home") else line for line in lines]
    (home / "pyvenv.cfg").write_text("\n".join(lines))
    if not (home / "lib64").exists():
        (home / "lib64").symlink_to("lib")
    (packages,) = home.glob("lib/python3*/site-packages")
    (packages / "vllm_hotfix_seen.pth").write_text("import sys; sys.__dict__.setdefault('seen', []).append(1)\n")
    code = LOOK + (
        "print(len(sys.seen), sum(type(one).__module__ == '_vllm_hotfix' for one in sys.meta_path))\n"
        "print(sum(path.endswith('site-packages') for path in sys.path))\n"
    )
    # Python 3.10 does not look for its own library there; a venv's site-packages are read twice there, too.
    newer = sys.version_info >= (3, 11)
    platlibdir = {"PYTHONPLATLIBDIR": "lib64"} if newer else {}
    done = house.run("-c", code, python=home / "bin/python", path=(), **platlibdir, **ON)
    first, second, folders = done.stdout.splitlines()
    read, finders = map(int, second.split())
    assert read > 1, "it was read once only"
    assert finders == 1
    assert folders == ("2" if newer else "1")
    assert json.loads(first)[:3] == [[PATCHED] * 3, "active", {"marks": {"calls": 3}}]
    assert done.stderr == ""


# The files.


@pytest.fixture(scope="module")
def zipped(house: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The package and what it needs in a zip archive, and a folder with the small vLLM alone."""
    folder = tmp_path_factory.mktemp("zipped")
    shutil.copytree(house.folder / "vllm", folder / "vllm", ignore=shutil.ignore_patterns("__pycache__"))
    archive = folder / "package.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted(house.folder.rglob("*")):
            name = path.relative_to(house.folder)
            if path.is_file() and name.parts[0] != "vllm" and "__pycache__" not in name.parts:
                file.write(path, name)
    return archive, folder


@pytest.mark.parametrize("channel", ["import", "bootstrap", "plugin", "run"])
def test_a_zip_archive_is_folder_enough(house: Any, zipped: tuple[Path, Path], channel: str) -> None:
    """Every channel but the .pth works out of it: the lock file, wrapt, the bootstrap, the metadata."""
    archive, folder = zipped
    path = (archive / "vllm_hotfix/bootstrap" if channel == "bootstrap" else archive, folder)
    first = {"import": "import vllm_hotfix\n", "plugin": "import vllm.plugins as p; p.load_general_plugins()\n"}
    starter = ("-m", "vllm_hotfix", "run", "--", str(house.bare)) if channel == "run" else ()
    where = "\nprint(vllm_hotfix.__file__, sys.modules['wrapt'].__file__, file=sys.stderr)"
    done = house.run(*starter, "-c", first.get(channel, "") + LOOK + where, path=path, VLLM_HOTFIX_STRICT="1", **ON)
    at_work(done)
    assert done.stderr == f"{archive}/vllm_hotfix/__init__.py {archive}/wrapt/__init__.py\n"


def test_status_out_of_a_zip_archive(house: Any, zipped: tuple[Path, Path]) -> None:
    """Channels and states are those of a folder, and the live functions are looked at."""
    archive, folder = zipped
    path = (archive / "vllm_hotfix/bootstrap", archive, folder)
    data = json.loads(house.run("-m", "vllm_hotfix.status", "--json", "--import", "--check", path=path, **ON).stdout)
    assert {one["name"]: one["installed"] for one in data["channels"]} == {
        ".pth": False,
        ".start": False,
        "sitecustomize": True,
        "plugin": True,
    }
    assert data["vllm"] == {"version": "1.2.0", "location": str(folder / "vllm")}
    assert data["patches"][0]["state"] == "active"
    assert data["problems"] == []


def test_a_folder_whose_name_is_no_text(own_house: Any, tmp_path: Path) -> None:
    """Bytes that are not UTF-8, and a language that knows ASCII only: patched, and the status can be shown."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    try:
        own_house.folder.rename(folder)
    except OSError as error:
        pytest.skip(f"this file system has no such name: {error}")
    own_house.folder = folder
    for extension in folder.glob("wrapt/*.so"):  # Python 3.13 loads none from there, and wrapt does without
        extension.unlink()
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "TMPDIR": str(folder)}
    done = own_house.run("-c", LOOK, path=(own_house.bootstrap,), **ON, **plain)
    assert done.stderr == ""
    path = at_work(done)
    assert path is not None
    assert path.startswith(str(folder))
    for form in ("--check", "--json"):
        done = own_house.run("-m", "vllm_hotfix.status", "--import", form, **ON, **plain)
        assert done.stderr == ""
        assert "active" in done.stdout


def test_a_vllm_without_sources_is_left_alone(own_house: Any) -> None:
    """Bytecode only: what cannot be read cannot be known. Stock; version and code each have a warning."""
    code = "import compileall, sys; sys.exit(not compileall.compile_dir('vllm', quiet=1, legacy=True))"
    own_house.run("-c", code, cwd=own_house.folder)
    for path in (own_house.folder / "vllm").rglob("*.py"):
        path.unlink()
    done = own_house.run("-c", RESULTS, path=(own_house.bootstrap,), **ON)
    assert json.loads(done.stdout) == [STOCK] * 3
    version, code = warnings(done)
    assert "VLLM_HOTFIX_MARKS: vLLM's version cannot be read (FileNotFoundError: " in version
    assert "vllm.steps:step (not there)" in code


# File systems: in a mount namespace of its own, so that nothing of the machine is changed.


@cache
def no_namespace() -> str:
    """Why this machine gives no mount namespace; empty if it does."""
    try:
        done = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True)
    except OSError as error:
        return f"unshare: {error}"
    return done.stderr.strip() if done.returncode else ""


@pytest.fixture
def mounted(house: Any, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a program of the installed house after some mounts, ``$T`` being an empty folder and ``$S`` site-packages."""
    if reason := no_namespace():
        pytest.skip(f"needs to mount, as root: {reason}")
    (packages,) = house.installed.parents[1].glob("lib/python3*/site-packages")

    def mounted(mounts: str, code: str, **environ: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": os.environ["PATH"], "T": str(tmp_path), "S": str(packages), "TMPDIR": str(tmp_path)}
        return subprocess.run(
            ["unshare", "-m", "sh", "-ec", f'{mounts}; exec "$@"', "sh", str(house.installed), "-c", code],
            env=env | ON | environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return mounted


def read_only(*folders: str) -> str:
    """The commands that make folders read-only, those that are there."""
    one = '[ ! -d "{0}" ] || {{ mount --bind "{0}" "{0}"; mount -o remount,bind,ro "{0}"; }}'
    return "; ".join(one.format(folder) for folder in folders)


def test_site_packages_that_cannot_be_written(mounted: Any) -> None:
    """A layer that is mounted read-only: nothing is written there."""
    code = LOOK + "try: open(os.path.join(os.environ['S'], 'x'), 'w')\nexcept OSError as error: print(error.errno)"
    done = mounted(read_only("$S"), code)
    first, second = done.stdout.splitlines()
    assert second == "30", "it was not read-only"
    assert json.loads(first)[0] == [PATCHED] * 3
    assert done.stderr == ""


def test_no_folder_at_all_that_can_be_written(mounted: Any) -> None:
    """A read-only container without a volume for temporary files: at work, with one warning that names the cause."""
    everywhere = read_only("/tmp", "/var/tmp", "/usr/tmp", "/dev/shm", "$S", "$T")
    done = mounted(f'{everywhere}; cd "$T"', LOOK)
    at_work(done, file=False)
    (warning,) = warnings(done)
    assert warning.startswith(NO_FILE)
    assert "No usable temporary directory" in warning


@pytest.mark.parametrize("options", ["noexec,nosuid,nodev", "size=64k"])
def test_a_temporary_folder_with_limits(mounted: Any, options: str) -> None:
    """One where nothing can be executed, and a small one."""
    done = mounted(f'mount -t tmpfs -o {options} none "$T"', LOOK)
    assert done.stderr == ""
    at_work(done)


def test_a_full_disk(mounted: Any, tmp_path: Path) -> None:
    """No room for the state file: one warning, which names the variable that led there, and no draft is left."""
    fill = 'mount -t tmpfs -o size=16k none "$T"; mkdir -m 700 "$T/vllm-hotfix-$(id -u)"'
    fill += '; yes >"$T/full" 2>"$T/full" || true'
    code = LOOK + "print(os.listdir(_record.folder_path()))"
    done = mounted(fill, code, VLLM_HOTFIX_STATE_DIR=str(tmp_path))
    first, second = done.stdout.splitlines()
    assert json.loads(first)[0] == [PATCHED] * 3
    assert second == "[]"
    (warning,) = warnings(done)
    assert "VLLM_HOTFIX_STATE_DIR" in warning
    assert "No space left on device" in warning


def test_a_machine_without_proc(mounted: Any) -> None:
    """As in a plain chroot: nobody can see which process wrote a state file, so none is shown; else all is as ever."""
    done = mounted("mount -t tmpfs none /proc", LOOK)
    assert done.stderr == ""
    at_work(done)


# Users: as another one, with root's permission to read all but not to write anything.


@pytest.fixture
def users(house: Any, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a program of the installed house as the user of a number; everyone may write to ``tmp_path``."""
    keep = "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"
    tmp_path.chmod(0o1777)

    def run(user: int, code: str, *options: str, **environ: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)} | ON | environ
        command = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *keep]
        arguments = [*options, "-c", code] if code else options
        return subprocess.run(
            [*command, str(house.installed), *arguments],
            env=env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )

    try:
        done = run(4321, "import os; print(os.getuid(), os.geteuid())")
    except OSError as error:
        pytest.skip(f"setpriv: {error}")
    if done.stdout != "4321 4321\n":
        pytest.skip(f"only root becomes another user: {done.stderr.strip()}")
    return run


def test_another_user_uses_what_root_installed(users: Any, house: Any, tmp_path: Path) -> None:
    """Site-packages of root, which this user cannot write to, with a file of this user's own that only it can read."""
    (packages,) = house.installed.parents[1].glob("lib/python3*/site-packages")
    code = LOOK + f"print(oct(os.stat(FILE).st_mode), os.stat(FILE).st_uid)\nopen({str(packages / 'x')!r}, 'w')"
    done = users(4321, code)
    first, second = done.stdout.splitlines()
    assert json.loads(first)[0] == [PATCHED] * 3
    assert second == "0o100600 4321"
    assert done.stderr.splitlines()[-1].startswith("PermissionError"), "it could write to site-packages"
    assert [path.name for path in tmp_path.iterdir()] == ["vllm-hotfix-4321"]


@pytest.mark.parametrize("planted", ["folder", "link to a folder of one's own", "link to nowhere", "file"])
def test_what_another_user_planted_is_not_used(users: Any, tmp_path: Path, planted: str) -> None:
    """In a folder that all can write to, someone else took the name: nothing goes there, and one warning says so."""
    mine, theirs = tmp_path / "mine", tmp_path / "vllm-hotfix-4321"
    mine.mkdir(mode=0o700)
    os.chown(mine, 4321, 4321)
    if planted == "folder":
        theirs.mkdir(mode=0o700)
    elif planted == "file":
        theirs.touch(mode=0o600)
    else:
        theirs.symlink_to(mine if "own" in planted else tmp_path / "made")
    os.chown(theirs, 1234, 1234, follow_symlinks=False)
    done = users(4321, LOOK)
    at_work(done, file=False)
    (warning,) = warnings(done)
    assert warning.startswith(NO_FILE)
    assert str(theirs) in warning
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "vllm-hotfix-4321"]
    assert list(mine.iterdir()) == []
    if planted == "folder":
        assert list(theirs.iterdir()) == []
    done = users(4321, "", "-m", "vllm_hotfix.status", "--live")
    assert (done.stdout, done.returncode) == ("", 1)
    assert done.stderr.startswith("the state files cannot be read: ")
    assert done.stderr.count("\n") == 1


def test_two_users_share_a_temporary_folder(users: Any, tmp_path: Path) -> None:
    """Each has a folder, sees its own processes alone, and takes no file away that is not its own."""
    theirs = tmp_path / "vllm-hotfix-1234"
    theirs.mkdir(mode=0o700)
    (theirs / "1-1.json").write_text("{}")
    for path in (theirs, theirs / "1-1.json"):
        os.chown(path, 1234, 1234)
    code = LOOK + (
        "import subprocess; command = [sys.executable, '-m', 'vllm_hotfix.status', '--live', '--json']\n"
        "print(subprocess.run(command, capture_output=True, text=True, check=True).stdout.replace('\\n', ' '))\n"
        "print(os.getpid())"
    )
    done = users(4321, code)
    _, shown, pid = done.stdout.splitlines()
    assert [one["pid"] for one in json.loads(shown)["processes"]] == [int(pid)]
    assert json.loads(shown)["skipped"] == []
    assert (theirs / "1-1.json").exists()


# Many and related processes.


def test_200_short_processes_at_once(house: Any, tmp_path: Path, record_property: Any) -> None:
    """Helpers that never import vLLM, and some that do: all end well, say nothing, and leave no state file."""
    look = "import importlib.util as util; print(util.find_spec('vllm') is not None)"
    codes = (["print(True)"] * 5 + [look] * 2 + [RESULTS]) * 25
    env = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path), **ON}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = time.monotonic()
    running = [subprocess.Popen([house.installed, "-c", code], env=env, cwd=tmp_path, **pipes) for code in codes]
    said = [process.communicate(timeout=120) for process in running]
    record_property("seconds for 200 processes at once", round(time.monotonic() - started, 1))
    assert {process.returncode for process in running} == {0}
    assert {error for _, error in said} == {""}
    patched = json.dumps([PATCHED] * 3) + "\n"
    assert [out for out, _ in said] == [patched if code == RESULTS else "True\n" for code in codes]
    assert [str(path) for path in tmp_path.glob("vllm-hotfix-*/*")] == []


CHILD = """
import json, multiprocessing, os, sys

def look():
    import vllm.model, vllm.steps, vllm_hotfix
    from vllm_hotfix import _record
    before = vllm_hotfix.counters()
    results = [vllm.steps.step(), vllm.model.Model().load(), vllm.model.Model().run()]
    _record.RECORD.save()
    files = {path.name.rpartition("-")[2]: json.loads(path.read_text()) for path in _record.own_folder().iterdir()}
    mine = files[f"{os.getpid()}.json"]
    return [results, vllm_hotfix.patches()[0]["state"], before, mine["counters"], mine["pid"], sorted(files)]

def work(pipe):
    pipe.send(look())

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    pipe, other = context.Pipe()
    first = look() if sys.argv[2] == "after" else None
    child = context.Process(target=work, args=(other,))
    child.start()
    theirs = pipe.recv()
    child.join()
    print(json.dumps([os.getpid(), child.pid, first, theirs, look()]))
"""


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_child_counts_for_itself(house: Any, tmp_path: Path, method: str, moment: str) -> None:
    """A child started before or after its parent imports vLLM: patched once, and its counters and file are its own.

    The file is gone when the child has ended, also where multiprocessing ends it without `atexit`.
    """
    (tmp_path / "program.py").write_text(CHILD)
    done = house.run(
        tmp_path / "program.py", method, moment, python=house.installed, path=(), TMPDIR=str(tmp_path), **ON
    )
    assert done.stderr == ""
    pid, child, first, theirs, again = json.loads(done.stdout)
    counted = {"marks": {"calls": 3}}
    files = sorted([f"{child}.json", *([f"{pid}.json"] if first else [])])
    assert theirs == [[PATCHED] * 3, "active", {}, counted, child, files]
    if first:
        assert first == [[PATCHED] * 3, "active", {}, counted, pid, [f"{pid}.json"]]
        assert again == [[PATCHED] * 3, "active", counted, {"marks": {"calls": 6}}, pid, [f"{pid}.json"]]
    else:
        assert again == [[PATCHED] * 3, "active", {}, counted, pid, [f"{pid}.json"]]
    assert [str(path) for path in tmp_path.glob("vllm-hotfix-*/*")] == []


# Threads, and libraries that look vLLM up.


HALF = """
import os, sys, threading
entered, go = threading.Event(), threading.Event()
sys.gate = lambda: (entered.set(), go.wait(20))
seen = []
def first():
    import vllm.steps
    seen.append(vllm.steps.step())
def second():
    from vllm.steps import step
    seen.append(step())
threads = [threading.Thread(target=one) for one in (first, second)]
threads[0].start()
assert entered.wait(20)
threads[1].start()
os.environ["VLLM_HOTFIX_MARKS"] = "1"
assert not hasattr(sys.modules["vllm.steps"], "step")
import vllm_hotfix
vllm_hotfix.activate()
go.set()
for thread in threads:
    thread.join(20)
assert seen == [["stock", "patched"]] * 2, seen
vllm_hotfix._record.RECORD.counters.clear()
"""


def test_a_target_that_another_thread_is_half_way_through(own_house: Any) -> None:
    """Activated then, it waits for the end of that import; neither thread gets to see the stock function."""
    path = own_house.folder / "vllm/steps.py"
    path.write_text("import sys\nsys.gate()\n" + path.read_text())
    done = own_house.run("-c", HALF + LOOK)
    assert done.stderr == ""
    at_work(done)


def test_threads_that_import_vllm_at_once(house: Any) -> None:
    """Many threads import the targets, call them at once and take names; each sees the patched function, once."""
    code = """
import sys, threading
sys.setswitchinterval(1e-6)
barrier, seen = threading.Barrier(12), []
def work(number):
    barrier.wait()
    if number % 3 == 0:
        import vllm.model
        seen.append(vllm.model.Model().load())
    elif number % 3 == 1:
        from vllm.steps import step
        seen.append(step())
    else:
        from vllm.model import Model
        seen.append(Model().run())
threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
for thread in threads: thread.start()
for thread in threads: thread.join(20)
assert seen == [["stock", "patched"]] * 12, seen
import vllm_hotfix
vllm_hotfix._record.RECORD.counters.clear()
"""
    done = house.run("-c", code + LOOK, python=house.installed, path=(), **ON)
    assert done.stderr == ""
    at_work(done)


def test_no_thread_gets_ahead_of_the_activation(own_house: Any) -> None:
    """Python lets a thread import `vllm.steps` while another has only begun with `vllm`: it waits for the patches."""
    path = own_house.folder / "vllm_hotfix/_judge.py"
    path.write_text(path.read_text() + "import sys, time\nsys.activating.set()\ntime.sleep(0.3)\n")
    code = """
import sys, threading
sys.activating = threading.Event()
thread = threading.Thread(target=__import__, args=("vllm",))
thread.start()
assert sys.activating.wait(20)
from vllm.steps import step
step = step()
assert step == ["stock", "patched"], step
thread.join(20)
import vllm_hotfix
vllm_hotfix._record.RECORD.counters.clear()
"""
    done = own_house.run("-c", code + LOOK, path=(own_house.bootstrap,), **ON)
    assert done.stderr == ""
    at_work(done)


LOOKED_UP = {
    "find_spec": "util.find_spec('vllm')",
    "its metadata": "import importlib.metadata as m; [*m.distributions()]; m.packages_distributions()",
    "its modules listed": "import pkgutil; [*pkgutil.iter_modules()]",
    "a module never run": "util.module_from_spec(util.find_spec('vllm'))",
    "its source": "spec = util.find_spec('vllm'); spec.loader.get_source('vllm'); spec.loader.get_data(spec.origin)",
    "status": "import vllm_hotfix.status as s; s.main(['--json'])",
}


def test_looking_vllm_up_is_not_importing_it(house: Any) -> None:
    """Whatever libraries do to see whether it is there, nothing is activated until it is imported, and then it is."""
    code = "import contextlib, io, sys\nfrom importlib import util\nwith contextlib.redirect_stdout(io.StringIO()):\n"
    for name, look in LOOKED_UP.items():
        no = {"vllm", "vllm_hotfix._hooks" if name == "status" else "vllm_hotfix"}
        code += f" {look}\n assert not {no} & sys.modules.keys(), {name!r}\n"
    done = house.run("-c", code + LOOK, python=house.installed, path=(), **ON)
    assert done.stderr == ""
    at_work(done)


@pytest.mark.parametrize(
    "importing",
    [
        "util.find_spec('vllm.steps')",  # looks inside, so Python imports the package
        "spec = util.find_spec('vllm'); module = util.module_from_spec(spec); sys.modules['vllm'] = module; "
        "spec.loader.exec_module(module)",
        "spec = util.find_spec('vllm'); spec.loader = util.LazyLoader(spec.loader); "
        "module = util.module_from_spec(spec); sys.modules['vllm'] = module; spec.loader.exec_module(module); "
        "module.__doc__",
        "import runpy; runpy.run_module('vllm.model', run_name='__main__', alter_sys=True)",
        "import vllm; del sys.modules['vllm']; import vllm.model; importlib.reload(vllm); importlib.reload(vllm.model)",
    ],
    ids=["find_spec of a module", "by its spec", "lazily", "as a program", "twice"],
)
def test_unusual_ways_to_import_vllm(house: Any, importing: str) -> None:
    """However its code comes to run, the patch is at work, once, when the targets are there."""
    code = f"import importlib, sys\nfrom importlib import util\n{importing}\n"
    done = house.run("-c", code + LOOK, python=house.installed, path=(), **ON)
    assert done.stderr == ""
    at_work(done)


def test_the_patched_function_can_still_be_read(house: Any) -> None:
    """Source, signature, documentation, pickle and traceback of a patched function are what people expect of it."""
    code = """
import inspect, pickle, traceback, vllm.model, vllm.steps
assert "return [\\"stock\\"]" in inspect.getsource(vllm.steps.step)
assert inspect.getsourcefile(vllm.model.Model.load).endswith("vllm/model.py")
assert "def load" in inspect.getsource(vllm.model)
assert str(inspect.signature(vllm.model.Model.load)) == "(self)"
assert pickle.loads(pickle.dumps(vllm.model.Model().load))() == ["stock", "patched"]
assert vllm.steps.__loader__ is vllm.steps.__spec__.loader and "SourceFile" in type(vllm.steps.__loader__).__name__
"""
    assert house.run("-c", code, python=house.installed, path=(), **ON).stderr == ""


# Neighbours: a sitecustomize and hooks of the user's own, on the same functions.


#: Four ways to wrap with wrapt, of which each adds one mark, on both targets.
THEIRS = """
import sys, wrapt
def adding(mark):
    return lambda wrapped, instance, args, kwargs: [*wrapped(*args, **kwargs), mark]
TARGETS = {"vllm.steps": "step", "vllm.model": "Model.load"}
def hooked():
    for name, target in TARGETS.items():
        @wrapt.when_imported(name)
        def decorated(module, target=target):
            wrapt.wrap_function_wrapper(module, target, adding("when_imported"))
        hook = lambda module, target=target: wrapt.wrap_function_wrapper(module, target, adding("registered"))
        wrapt.register_post_import_hook(hook, name)
def applied():
    for name, target in TARGETS.items():
        wrapt.patch_function_wrapper(name, target)(adding("patched_by_name"))
"""
MARKS = {"hooked": ["registered", "when_imported"], "applied": ["patched_by_name"]}

BOTH = """
import json, vllm.model, vllm.steps, vllm_hotfix
def results():
    return [sorted(one) for one in (vllm.steps.step(), vllm.model.Model().load(), vllm.model.Model().run())]
before = results(), vllm_hotfix.patches()[0]["state"]
vllm_hotfix.deactivate()
print(json.dumps([*before, results()]))
"""

ORDERS = {
    "hooked before": "hooked(); import vllm_hotfix",
    "hooked after": "import vllm_hotfix; hooked()",
    "hooked before, vLLM imported": "import vllm.model; hooked(); import vllm_hotfix",
    "hooked after, vLLM imported": "import vllm.model, vllm_hotfix; hooked()",
    "applied before": "applied(); import vllm_hotfix",
    "applied after": "import vllm_hotfix; applied()",
    "both ways": "hooked(); import vllm_hotfix; applied()",
}


@pytest.mark.parametrize("order", ORDERS)
def test_wrappers_of_the_users_own_on_the_same_functions(house: Any, order: str) -> None:
    """Theirs and ours run once each, whoever is first; ours is active, and taken away it leaves theirs at work."""
    done = house.run("-c", THEIRS + ORDERS[order] + BOTH, path=(house.folder,), **ON)
    assert asides(done) == (["vllm.model:Model.load", "vllm.steps:step"] if "after" in order or "ways" in order else [])
    results, state, undone = json.loads(done.stdout)
    theirs = [mark for kind, marks in MARKS.items() if kind in order or order == "both ways" for mark in marks]
    assert state == "active"
    both = sorted(["stock", *theirs])
    # Names that others took are not theirs to change, and are ours: vllm.model has taken `step`.
    taken = ["stock"] if order.endswith("imported") else both
    assert undone == [both, both, taken]
    assert results == [sorted([*one, "patched"]) for one in undone]


def asides(done: Any) -> list[str]:
    """Return what was wrapped again by others, as the package says it when it is undone; it says nothing else."""
    found = [
        re.fullmatch(r"vllm-hotfix: (\S+) was wrapped again by others; the patch steps aside inside", line)
        for line in done.stderr.splitlines()
    ]
    assert all(found), done.stderr
    return sorted(one[1] for one in found if one)


@pytest.mark.parametrize("place", ["an earlier .pth", "a later .pth", "sitecustomize", "usercustomize"])
def test_hooks_of_the_users_own_from_the_start_of_the_interpreter(house: Any, tmp_path: Path, place: str) -> None:
    """An agent's hooks, registered by a file of its own before or after this package's; theirs and ours both work."""
    home = tmp_path / "venv"
    shutil.copytree(house.installed.parents[1], home, symlinks=True)
    (packages,) = home.glob("lib/python3*/site-packages")
    (packages / "agent.py").write_text(THEIRS + "hooked()\n")
    if place.endswith(".pth"):
        (packages / ("a_agent.pth" if "earlier" in place else "z_agent.pth")).write_text("import agent\n")
    else:
        (packages / f"{place}.py").write_text("import agent\n")
    if place == "usercustomize":
        config = home / "pyvenv.cfg"
        config.write_text(config.read_text().replace("packages = false", "packages = true"))
    user = {"PYTHONUSERBASE": str(tmp_path / "user")}
    done = house.run("-c", f"import agent\n{BOTH}", python=home / "bin/python", path=(), **user, **ON)
    assert asides(done) == ([] if "earlier" in place else ["vllm.model:Model.load", "vllm.steps:step"])
    results, state, undone = json.loads(done.stdout)
    assert state == "active"
    assert undone == [sorted(["stock", "registered", "when_imported"])] * 3
    assert results == [sorted([*one, "patched"]) for one in undone]


# Streams and limits.


@pytest.fixture
def damaged(own_house: Any) -> Any:
    """A house whose package cannot be imported."""
    (own_house.folder / "vllm_hotfix/_hooks.py").write_text("raise ImportError('damaged')\n")
    return own_house


@pytest.mark.parametrize("streams", ["2>&-", "1>&- 2>&-", "0<&- 1>&- 2>&-", "2>/dev/full", "1>/dev/full 2>/dev/full"])
@pytest.mark.parametrize("channel", ["bootstrap", "installed"])
def test_streams_that_are_closed_or_full(house: Any, tmp_path: Path, streams: str, channel: str) -> None:
    """A daemon's: the patch is at work all the same, and its state file is not mistaken for a stream."""
    path = house.bootstrap if channel == "bootstrap" else ""
    code = LOOK.replace("print(", "open('seen', 'w').write(")
    done = shell(house.installed, code, streams, tmp_path, PYTHONPATH=str(path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    seen = json.loads((tmp_path / "seen").read_text())
    assert seen[:2] == [[PATCHED] * 3, "active"]
    assert not Path(seen[3]).exists()


@pytest.mark.parametrize("streams", ["2>&-", "1>&- 2>&-", "2>/dev/full"])
def test_a_warning_that_nobody_can_hear(damaged: Any, tmp_path: Path, streams: str) -> None:
    """Where something is wrong and stderr is closed or full, stock runs, ends well, and stdout is the program's own."""
    code = RESULTS + "open('seen', 'w').write('whole')"
    done = shell(damaged.bare, code, streams, tmp_path, PYTHONPATH=str(damaged.bootstrap))
    # 120 is what Python ends with, whoever wrote the words that are still in stderr's buffer.
    assert (done.returncode, done.stderr) == (120 if "full" in streams else 0, "")
    assert done.stdout == ("" if "1>" in streams else json.dumps([STOCK] * 3) + "\n")
    assert (tmp_path / "seen").read_text() == "whole"


def shell(python: Path, code: str, streams: str, folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a folder with its streams redirected by a shell."""
    env = {"PATH": os.environ["PATH"], "TMPDIR": str(folder), **ON, **environ}
    command = ["sh", "-c", f'"$1" -c "$2" {streams}', "sh", str(python), code]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=60)


def test_no_file_may_grow(house: Any, tmp_path: Path) -> None:
    """`RLIMIT_FSIZE` of 0 while the state file is written: no signal, one warning, and nothing half-written."""
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))" + LOOK
    done = house.run("-c", code, python=house.installed, path=(), VLLM_HOTFIX_STATE_DIR=str(tmp_path), **ON)
    at_work(done, file=False)
    (warning,) = warnings(done)
    assert warning.startswith(f"VLLM_HOTFIX_STATE_DIR: {tmp_path}: {NO_FILE}: OSError")
    assert [str(path) for path in tmp_path.glob("*/*")] == []


@pytest.mark.parametrize("free", [0, 1, 2, 3])
def test_few_open_files_are_allowed(house: Any, tmp_path: Path, free: int) -> None:
    """With so few free file descriptors when vLLM is imported: where stock can, so it can; at most one warning."""
    limit = f"import os, resource\nuse = len(os.listdir('/proc/self/fd')) - 1 + {free}\n"
    limit += "resource.setrlimit(resource.RLIMIT_NOFILE, (use, use))\n"
    how = {"python": house.installed, "path": (), "TMPDIR": str(tmp_path), "code": None}
    stock, done = (house.run("-c", limit + RESULTS, **how, **environ) for environ in ({}, ON))
    assert (stock.returncode == 0) == (free > 0)
    assert done.returncode == stock.returncode
    said = [line for line in done.stderr.splitlines() if line.startswith("vllm-hotfix: ")]
    assert len(said) <= 1
    if free:
        assert json.loads(done.stdout) in ([PATCHED] * 3, [STOCK] * 3)
        assert done.stderr.splitlines() == said
        assert said or json.loads(done.stdout) == [PATCHED] * 3
    else:
        assert done.stderr.splitlines()[-1] == stock.stderr.splitlines()[-1]


@pytest.mark.parametrize("allowed", [4, 5, 6])
def test_an_interpreter_that_may_open_hardly_a_file_starts(house: Any, allowed: int) -> None:
    """An interpreter that starts without this package starts with it: the .pth line takes no file that it needs."""
    command = ["sh", "-c", f'ulimit -n {allowed}; exec "$0" -c "print(1)"', str(house.installed)]
    stock, done = (
        subprocess.run(command, env=house.environ | environ, cwd="/", capture_output=True, text=True)
        for environ in ({}, ON)
    )
    assert (stock.returncode, stock.stdout) == (0, "1\n")
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert done.stderr.count("\n") <= 1


@pytest.mark.parametrize("damage", ["1 / 0\n", "def\n", "raise SystemError\n", None])
def test_a_start_module_that_is_damaged(house: Any, tmp_path: Path, damage: str | None) -> None:
    """Whatever is wrong with `_vllm_hotfix.py` itself, or it is a folder: one line, and the interpreter starts."""
    home = tmp_path / "venv"
    shutil.copytree(house.installed.parents[1], home, symlinks=True)
    (start,) = home.glob("lib/python3*/site-packages/_vllm_hotfix.py")
    if damage is None:
        start.write_bytes(b"\0\0")
    else:
        start.write_text(damage)
    done = house.run("-c", RESULTS, python=home / "bin/python", path=(), **ON)
    assert json.loads(done.stdout) == [STOCK] * 3
    (warning,) = warnings(done)
    assert warning.startswith("not active in this process: ")
    done = house.run("-c", RESULTS, python=home / "bin/python", path=())
    assert (json.loads(done.stdout), done.stderr) == ([STOCK] * 3, "")
