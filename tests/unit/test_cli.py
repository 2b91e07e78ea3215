"""``vllm-hotfix run -- COMMAND`` and the sitecustomize that it puts on the path."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

RUN = ("-m", "vllm_hotfix", "run")
ON = {"VLLM_HOTFIX_MARKS": "1"}
SHOW = "import os, json; print(json.dumps([os.environ['PYTHONPATH'], os.getpid()]))"


@pytest.mark.parametrize("dashes", [["--"], []])
def test_run_puts_the_bootstrap_first_and_becomes_the_command(house: Any, dashes: list[str]) -> None:
    """What was on PYTHONPATH stays behind it, and arguments arrive as they are."""
    code = "import os, sys; print(os.environ['PYTHONPATH']); print(sys.argv[1:])"
    arguments = ["--", "-x", "run", "", "two words"]
    done = house.run(*RUN, *dashes, house.bare, "-c", code, *arguments, **ON)
    assert done.stdout.splitlines() == [f"{house.bootstrap}{os.pathsep}{house.folder}", str(arguments)]
    assert done.stderr == ""


def test_run_is_an_exec(house: Any) -> None:
    """Same process: signals and waits of whoever started it reach the command."""
    code = f"import os, sys; print(os.getpid(), flush=True); sys.argv[0] = 'x'; {run_main()}"
    done = house.run("-c", code, "run", "--", str(house.bare), "-c", "import os; print(os.getpid())", **ON)
    first, second = done.stdout.split()
    assert first == second


def run_main() -> str:
    """Code that runs the command line with what is in ``sys.argv``."""
    return "from vllm_hotfix.__main__ import main; sys.exit(main())"


@pytest.mark.parametrize("code", [0, 3, 137])
def test_the_exit_code_is_the_commands(house: Any, code: int) -> None:
    """It passes through."""
    house.run(*RUN, "--", house.bare, "-c", f"raise SystemExit({code})", code=code, **ON)


def test_a_second_run_adds_nothing(house: Any) -> None:
    """``run -- vllm-hotfix run -- command`` has the bootstrap once."""
    done = house.run(*RUN, "--", house.bare, *RUN, "--", house.bare, "-c", SHOW, **ON)
    assert json.loads(done.stdout)[0] == f"{house.bootstrap}{os.pathsep}{house.folder}"


@pytest.mark.parametrize("inherited", ["{folder}:", ":{folder}", "{folder}::/x"])
def test_an_empty_item_of_the_path_stays(house: Any, tmp_path: Path, inherited: str) -> None:
    """``PYTHONPATH=$PYTHONPATH:/x`` with the first unset: Python reads the empty item as the current folder."""
    inherited = inherited.format(folder=house.folder)
    (tmp_path / "only_in_cwd.py").write_text("")
    (tmp_path / "script").mkdir()
    (tmp_path / "script/main.py").write_text("import only_in_cwd\n")
    house.run("script/main.py", cwd=tmp_path, PYTHONPATH=inherited)  # as stock has it
    house.run(*RUN, "--", house.bare, "script/main.py", cwd=tmp_path, PYTHONPATH=inherited, **ON)


def test_a_command_that_is_not_found_is_127(house: Any) -> None:
    """With one line that names it, as a shell does."""
    done = house.run(*RUN, "--", "no-such-command", code=127, **ON)
    assert done.stderr == "vllm-hotfix: no-such-command: No such file or directory\n"


def test_a_command_that_cannot_be_run_is_126(house: Any, tmp_path: Path) -> None:
    """A file without permission to run, or a folder."""
    (tmp_path / "file").write_text("")
    for command in (tmp_path / "file", tmp_path):
        assert "Permission denied" in house.run(*RUN, "--", command, code=126, **ON).stderr


@pytest.mark.parametrize(
    "arguments", [[], ["run"], ["run", "--"], ["run", "--help"], ["run", "--", "--"], ["no-such"], ["--no-such"]]
)
def test_no_command_is_2(house: Any, arguments: list[str]) -> None:
    """With the usage on stderr and nothing on stdout."""
    done = house.run("-m", "vllm_hotfix", *arguments, code=2, **ON)
    assert done.stderr.startswith("usage: vllm-hotfix run -- COMMAND")
    assert done.stdout == ""


def test_help_is_0(house: Any) -> None:
    """On stdout."""
    for option in ("-h", "--help"):
        assert house.run("-m", "vllm_hotfix", option).stdout.startswith("usage: vllm-hotfix run -- COMMAND")


def test_status_is_the_status_command(house: Any, own_house: Any) -> None:
    """``vllm-hotfix status`` takes the same arguments and gives the same exit code."""
    done = house.run("-m", "vllm_hotfix", "status", "--json", **ON)
    assert json.loads(done.stdout)["patches"][0]["state"] == "ready"
    (own_house.folder / "vllm_hotfix/upstream.lock").unlink()
    own_house.run("-m", "vllm_hotfix", "status", "--check", code=1, **ON)


def test_run_says_when_nothing_is_asked_for(house: Any) -> None:
    """A forgotten variable would look like success; the command runs all the same."""
    done = house.run(*RUN, "--", house.bare, "-c", "print(1)")
    assert done.stdout == "1\n"
    assert done.stderr == "vllm-hotfix: no VLLM_HOTFIX variable is set, so nothing will be patched\n"


# The sitecustomize.


@pytest.fixture
def site(tmp_path: Path) -> Any:
    """Write the user's own sitecustomize; returns its folder."""

    def site(text: str) -> Path:
        folder = tmp_path / "user"
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(text)
        return folder

    return site


def test_without_a_sitecustomize_of_the_users(house: Any) -> None:
    """Nothing is said, and the module of that name is this package's."""
    done = house.run("-c", "import sitecustomize; print(sitecustomize.__file__)", path=(house.bootstrap,))
    assert done.stdout == f"{house.bootstrap / 'sitecustomize.py'}\n"
    assert done.stderr == ""


def test_the_users_own_one_runs_once(house: Any, site: Any) -> None:
    """After the start, as the module of that name, with nothing of this package in sight."""
    folder = site("print('user', __name__, __file__)\nvalue = 1\n")
    code = "import sitecustomize, sys; print(sitecustomize.value, sys.modules['sitecustomize'].__file__)"
    done = house.run("-c", code, path=(house.bootstrap, folder), **ON)
    file = folder / "sitecustomize.py"
    assert done.stdout.splitlines() == [f"user sitecustomize {file}", f"1 {file}"]
    assert done.stderr == ""


@pytest.mark.parametrize(
    "text",
    ["1 / 0\n", "import not_there_at_all\n", "def (\n", "raise SystemExit(5)\n", "raise KeyboardInterrupt\n"],
)
def test_what_the_users_own_one_raises_is_shown_as_without_this_one(house: Any, site: Any, text: str) -> None:
    """Exit code, output and the line that ``site`` prints are stock's."""
    folder = site(text)
    code = "import sys; print('sitecustomize' in sys.modules)"
    stock = house.run("-c", code, path=(folder,), code=None)
    ours = house.run("-c", code, path=(house.bootstrap, folder), code=None, **ON)
    assert (ours.returncode, ours.stdout) == (stock.returncode, stock.stdout)
    assert ours.stderr.splitlines()[-1:] == stock.stderr.splitlines()[-1:]
    assert ours.stderr.splitlines()[:1] == stock.stderr.splitlines()[:1]


def test_one_that_stands_before_is_pythons_choice(house: Any, site: Any) -> None:
    """The user's folder comes first on the path: only theirs runs, and nothing runs twice."""
    folder = site("print('user')\n")
    assert house.run("-c", "", path=(folder, house.bootstrap)).stdout == "user\n"


@pytest.mark.parametrize("kind", ["copy", "link"])
def test_two_bootstraps_on_the_path_end(house: Any, site: Any, tmp_path: Path, kind: str) -> None:
    """One mounted and one installed, or one folder under two names (``lib64``): no endless loop, the user's runs."""
    other = tmp_path / "other"
    if kind == "copy":
        shutil.copytree(house.folder, other)
    else:
        other.symlink_to(house.folder)
    folder = site("print('user')\n")
    path = (house.bootstrap, other / "vllm_hotfix/bootstrap", folder)
    done = house.run("-c", "import vllm.model; print(vllm.model.Model().load())", path=path, **ON)
    assert done.stdout.splitlines() == ["user", "['stock', 'patched']"]
    assert done.stderr == ""


def test_a_package_that_is_broken_is_no_matter_to_the_users_own_one(own_house: Any, site: Any) -> None:
    """A file of this package that cannot be read: said, and the user's own one runs."""
    (own_house.folder / "_vllm_hotfix.py").write_text("def (\n")
    done = own_house.run("-c", "print('on')", path=(own_house.bootstrap, site("print('user')\n")), **ON)
    assert done.stdout.split() == ["user", "on"]


def test_the_mounted_folder_comes_last(house: Any, tmp_path: Path) -> None:
    """What the image has of the same name is not overridden by the mounted folder."""
    image = tmp_path / "image"
    (image / "packaging").mkdir(parents=True)
    (image / "packaging/__init__.py").write_text("here = 1\n")
    code = "import sys, packaging; print(packaging.here, sys.path[-1])"
    assert house.run("-c", code, path=(house.bootstrap, image)).stdout == f"1 {house.folder}\n"


def test_isolated_interpreters_start(house: Any) -> None:
    """With ``-I``, ``-E`` and ``-S`` the bootstrap does not run, and nothing is said."""
    for option in ("-I", "-E", "-S"):
        done = house.run(option, "-c", "print(1)", path=(house.bootstrap,), **ON)
        assert (done.stdout, done.stderr) == ("1\n", "")
