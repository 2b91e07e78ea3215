"""``tools/upstream_tests.py`` on a made-up folder of tests and the small vLLM: what it tells apart, what it refuses."""

from __future__ import annotations

import compileall
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "tools/upstream_tests.py"
PYTEST = Path(pytest.__file__).parents[1]
LOADER = "tests/model_executor/model_loader"

#: vLLM's source tree, as it were. That its vllm is not the one to test is what a test of it says.
TREE = {
    "pyproject.toml": "[tool.pytest.ini_options]\nmarkers = ['slow_test']\naddopts = '--strict-markers'\n",
    "PKG-INFO": "Metadata-Version: 2.4\nName: vllm\nVersion: 1.2.0\n",
    "vllm/__init__.py": "raise ImportError('not the one that is installed')\n",
    "examples/template.jinja": "hello\n",
    "tests/__init__.py": "",
    "tests/conftest.py": "import pytest\nfrom tests.helpers import ONE\n\none = pytest.fixture(lambda: ONE)\n",
    "tests/helpers.py": "ONE = 1\n",
    "tests/model_executor/__init__.py": "",
    f"{LOADER}/__init__.py": "",
}

MANY = """\
    import os
    from pathlib import Path
    from unittest import mock

    import pytest

    import vllm
    from vllm import model

    patched = "VLLM_HOTFIX_ENABLE" in os.environ
    runs = Path(os.environ["RUNS"])
    with runs.open("a") as file:
        file.write("p" if patched else "s")
    turn = runs.read_text().count("p" if patched else "s")


    @pytest.mark.slow_test
    def test_passes(one):
        assert one == 1 and vllm.__version__ == "1.2.0"
        assert Path("examples/template.jinja").is_file()
        assert "stock" in model.Model().load()


    def test_mocks():
        with mock.patch("vllm.model.step", return_value=[]) as step:
            assert model.Model().run() == []
        step.assert_called_once_with()


    def test_no_variable_is_left():
        assert patched or not [name for name in os.environ if name.startswith(("VLLM_HOTFIX_", "VLLM_RELOAD_"))]


    def test_fails():
        raise ValueError(f"at {id(object())} of {os.getpid()}")


    @pytest.mark.skip(reason="no such device")
    def test_skipped():
        pass


    @pytest.mark.xfail(reason="known")
    def test_xfailed():
        assert 0


    def test_broken():
        assert model.Model().load() == ["stock"]


    def test_skipped_if_patched():
        if patched:
            pytest.skip("a patch is there")


    @pytest.fixture
    def late():
        yield
        assert not patched


    def test_broken_at_its_end(late):
        pass


    def test_fails_otherwise():
        raise ValueError("patched" if patched else "stock")


    def test_fixed():
        assert model.Model().load() == ["stock", "patched"]


    def test_fails_once_patched():
        assert not (patched and turn == 1)


    def test_stock_is_not_steady():
        assert not patched and turn != 2


    if not patched:

        def test_vanishes():
            pass
"""

CRASH = """\
    import os, signal

    import pytest


    def test_before():
        pass


    def test_crashes():
        if "VLLM_HOTFIX_ENABLE" in os.environ:
            os.kill(os.getpid(), signal.SIGSEGV)


    def test_after():
        pass
"""

#: A test that never ends, with a process that is in no group of pytest's.
HANG = """\
    import os, subprocess, time
    from pathlib import Path


    def test_hangs():
        if "VLLM_HOTFIX_ENABLE" in os.environ:
            sleeper = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            Path(os.environ["RUNS"]).write_text(f"{sleeper.pid} {os.getpid()} ")
            time.sleep(1000)
"""

ACTIVE = "import vllm.model\n\ndef test_passes():\n    pass\n"


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Write files into a folder, each dedented."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text), "utf-8")


class Bench:
    """The small vLLM, the tests, and the script to run them.

    Args:
        house: an interpreter.
        folder: the small vLLM and the package.
        tree: vLLM's source tree with the tests.
    """

    def __init__(self, house: Any, folder: Path, tree: Path) -> None:
        self.house = house
        self.folder = folder
        self.tree = tree
        self.json = tree.with_name("results.json")
        self.runs = tree.with_name("runs")

    @property
    def environ(self) -> dict[str, str]:
        """What stands in the environment of whoever calls the script."""
        return {"RUNS": str(self.runs), "VLLM_HOTFIX_STRICT": "1", "VLLM_RELOAD_KEEP_MOE_KERNEL": "1"}

    def write(self, files: dict[str, str]) -> None:
        """Write the tree, with files of tests where vLLM has those of its loaders."""
        write(self.tree, TREE | {f"{LOADER}/{name}": text for name, text in files.items()})

    def run(self, *arguments: str | Path, code: int, path: tuple[Path, ...] | None = None) -> Any:
        """Run the script, on the whole tree unless told otherwise."""
        words = arguments or (self.tree, "--json", self.json)
        path = (self.folder, PYTEST) if path is None else path
        return self.house.run(SCRIPT, *words, path=path, code=code, **self.environ)

    def verdicts(self) -> dict[str, str]:
        """The verdict of each test, by its name."""
        files = json.loads(self.json.read_text())["files"]
        return {name.rpartition("::")[2]: verdict for one in files for name, verdict in one["verdicts"].items()}

    def files(self) -> list[tuple[str, int, int]]:
        """All that is in the tree, with sizes and times."""
        found = [(one, one.stat()) for one in sorted(self.tree.rglob("*"))]
        return [(str(one), stat.st_size, stat.st_mtime_ns) for one, stat in found]


@pytest.fixture(scope="module")
def folder(house: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small vLLM, which tells its version, and the package; as bytecode too, for the script has none written."""
    folder = tmp_path_factory.mktemp("small") / "vllm"
    shutil.copytree(house.folder, folder)
    write(folder, {"vllm/__init__.py": "__version__ = '1.2.0'\n"})
    compileall.compile_dir(folder, quiet=1)
    return folder


@pytest.fixture
def bench(house: Any, folder: Path, tmp_path: Path) -> Bench:
    """A tree without tests, and the script."""
    bench = Bench(house, folder, tmp_path / "tree")
    bench.write({})
    return bench


def test_what_it_tells_apart(bench: Bench) -> None:
    """Each outcome once; a difference counts if it is seen twice beside a steady stock; a crash hides no other file."""
    bench.write({"test_crash.py": CRASH, "test_many.py": MANY})
    before = bench.files()
    done = bench.run(code=1)
    assert bench.files() == before
    assert bench.verdicts() == {
        "test_before": "same",
        "test_crashes": "broken",
        "test_after": "broken",
        "test_passes": "same",
        "test_mocks": "same",
        "test_no_variable_is_left": "same",
        "test_fails": "same",
        "test_skipped": "same",
        "test_xfailed": "same",
        "test_broken": "broken",
        "test_skipped_if_patched": "broken",
        "test_broken_at_its_end": "broken",
        "test_fails_otherwise": "fails otherwise",
        "test_fixed": "passes only patched",
        "test_fails_once_patched": "flaky",
        "test_stock_is_not_steady": "flaky",
        "test_vanishes": "broken",
    }
    report = done.stdout
    assert "compared: 7 same, 6 broken, 1 fails otherwise, 1 passes only patched, 2 flaky" in report
    assert (
        "| model_executor/model_loader/test_crash.py | 3 passed | 1 crashed, 1 not run, 1 passed | 2 | stock |"
        in report
    )
    assert "| 1 | failed | ValueError: at " in report
    assert "| 1 | skipped | Skipped: no such device |" in report
    assert "ended by SIGSEGV" in report
    assert "AssertionError: assert ['stock', 'patched'] == ['stock']" in report
    assert "- patched: failed, passed, passed" in report
    assert "- patched: error after, error after, error after" in report
    assert "| marks | 1 | active | calls=3 |" in report


def test_all_the_same(bench: Bench) -> None:
    """Where patched does what stock does it ends with 0, and each file has run once on a side; which first, in turn."""
    bench.write({"test_one.py": ACTIVE, "test_two.py": "def test_passes():\n    pass\n"})
    done = bench.run(code=0)
    assert [line.split(" | ")[4:5] for line in done.stdout.splitlines() if ".py |" in line] == [["stock"], ["patched"]]
    files = json.loads(bench.json.read_text())["files"]
    assert [len(runs) for one in files for runs in one["runs"].values()] == [1, 1, 1, 1]
    assert "vLLM 1.2.0, vllm-hotfix 0.1.0" in done.stdout


def test_a_test_that_hangs(bench: Bench) -> None:
    """It ends at the limit, with all that it has started, and counts as broken if it ends in stock."""
    bench.write({"test_active.py": ACTIVE, "test_hang.py": HANG})
    done = bench.run(bench.tree, "--json", bench.json, "--timeout", "5", "--again", "0", code=1)
    assert bench.verdicts() == {"test_passes": "same", "test_hangs": "broken"}
    assert "after 5 s" in done.stdout
    assert list(running(bench.runs)) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_is_interrupted(bench: Bench, number: int) -> None:
    """One line, and nothing stays behind: neither pytest nor what a test has started, nor the links."""
    bench.write({"test_hang.py": HANG})
    environ = {**os.environ, **bench.environ, "TMPDIR": bench.house.environ["TMPDIR"]}
    environ["PYTHONPATH"] = os.pathsep.join([str(bench.folder), str(PYTEST)])
    process = subprocess.Popen(
        [bench.house.bare, SCRIPT, bench.tree],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Whoever runs the tests in the background ignores it, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        limit = time.monotonic() + 30
        while not (bench.runs.is_file() and bench.runs.read_text().count(" ") == 2) and time.monotonic() < limit:
            time.sleep(0.05)
        assert len(list(running(bench.runs))) == 2
        process.send_signal(number)
        assert process.communicate(timeout=20) == ("", "upstream_tests: interrupted\n")
    finally:
        process.kill()
    assert process.returncode == 2
    assert list(running(bench.runs)) == []
    assert not list(Path(environ["TMPDIR"]).glob("upstream-tests-*"))


def running(file: Path) -> Iterator[int]:
    """Those of the processes named in a file that are there."""
    for pid in map(int, file.read_text().split()):
        if Path(f"/proc/{pid}").exists():
            yield pid


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def test_passes():\n    pass\n", "no patch was active in any of these tests: the package was not imported"),
        ("import vllm_hotfix, vllm.model\n" + ACTIVE, "the package was active in the run that should be stock's"),
        ("import nothing\n", "stock passes none of these tests: ModuleNotFoundError: No module named 'nothing'"),
        ("import os\nos._exit(9)\n", "stock passes none of these tests: ended with 9"),
    ],
)
def test_a_comparison_that_says_nothing(bench: Bench, text: str, words: str) -> None:
    """What has not been compared is no success: it ends with 2 and the reason."""
    bench.write({"test_one.py": text})
    done = bench.run(bench.tree, "--again", "0", code=2)
    assert words in done.stderr.splitlines()[-1]
    assert done.stdout == ""


def test_a_patch_that_is_not_at_work(bench: Bench) -> None:
    """Tests that stock code passes twice say nothing of a patch that has drifted: it ends with 1 and the reason."""
    bench.folder = Path(shutil.copytree(bench.folder, bench.tree.with_name("drifted")))
    model = bench.folder / "vllm/model.py"
    model.write_text(model.read_text().replace('["stock"]', '["other"]'))
    catalog = """\
        from dataclasses import replace

        from ._patches.marks import PATCH

        OTHER = replace(PATCH, name="other", env="VLLM_HOTFIX_OTHER", targets=PATCH.targets[:1])
        CATALOG = (PATCH, OTHER)
    """
    write(bench.folder / "vllm_hotfix", {"_catalog.py": catalog, "_patches/other.py": "from .marks import mark\n"})
    bench.write({"test_one.py": ACTIVE})
    done = bench.run(code=1)
    assert "| marks | 0 | drifted: " in done.stdout
    assert "| other | 1 | active | - |" in done.stdout


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        (("nowhere",), "there is no nowhere"),
        (("tree",), "there are no tests in "),
        (("tree/examples",), "tree/examples is not in a folder `tests` with a conftest.py, as vLLM's tests are"),
        (("tree/tests/some", "tree/tests/some/test_one.py"), "some/test_one.py is given twice"),
        (("tree/tests/some", "other"), "other is of another folder of tests than "),
    ],
)
def test_a_folder_that_does_not_do(bench: Bench, paths: tuple[str, ...], words: str) -> None:
    """One line says what is wrong with it, before anything runs."""
    write(bench.tree, {"tests/some/test_one.py": ACTIVE})
    write(bench.tree.parent / "other/tests", {"__init__.py": "", "conftest.py": "", "test_one.py": ""})
    done = bench.house.run(SCRIPT, *paths, path=(), code=2, cwd=bench.tree.parent)
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_environment_that_does_not_do(bench: Bench, tmp_path: Path) -> None:
    """No vLLM, one that cannot be imported, one of another release, no pytest: one line each."""
    bench.write({"test_one.py": ACTIVE})
    write(tmp_path / "broken", {"vllm/__init__.py": "raise ImportError('no libcudart')\n"})
    for path, words in {
        (tmp_path / "broken", PYTEST): "ImportError: no libcudart",
        (bench.folder,): "pytest is not installed",
        (): "No module named 'vllm'",
    }.items():
        done = bench.run(code=2, path=path)
        assert words in done.stderr
        assert done.stderr.count("\n") == 1
    (bench.tree / "PKG-INFO").write_text("Version: 1.3.0\n")
    assert "the tests are those of vLLM 1.3.0, and 1.2.0 is installed" in bench.run(code=2).stderr
