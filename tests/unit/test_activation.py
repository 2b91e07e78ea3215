"""Every way in, each in a fresh interpreter and in a child that it spawns, with a small vLLM and a patch of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ON = {"VLLM_HOTFIX_MARKS": "1"}
PATCHED = ["stock", "patched"]

#: A program that looks at the two patched functions, and at the name that a module took, here and in a child.
PROGRAM = """
import json, multiprocessing, sys
{first}

def look():
    import vllm.model, vllm.steps
    return [vllm.steps.step(), vllm.model.Model().load(), vllm.model.Model().run()]

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(json.dumps([look(), pool.apply(look)]))
"""
PLUGIN = "import vllm.plugins; vllm.plugins.load_general_plugins()"


@pytest.fixture
def program(tmp_path: Path) -> Any:
    """Write the program, with what it does first; returns its file."""

    def program(first: str = "") -> Path:
        path = tmp_path / "program.py"
        path.write_text(PROGRAM.format(first=first))
        return path

    return program


def how(house: Any, channel: str) -> tuple[str, dict[str, Any], tuple[Any, ...]]:
    """What a program does first, where its path leads and by what it is started, for a channel."""
    nowhere = {"path": (house.folder,)}
    return {
        "pth": ("", {"python": house.installed, "path": ()}, ()),
        "import": ("import vllm_hotfix", nowhere, ()),
        "import after vLLM": ("import vllm.model, vllm_hotfix", nowhere, ()),
        "sitecustomize": ("", {"path": (house.bootstrap,)}, ()),
        "plugin": (PLUGIN, nowhere, ()),
        "plugin after vLLM": (f"import vllm.model; {PLUGIN}", nowhere, ()),
        "run": ("", nowhere, ("-m", "vllm_hotfix", "run", "--", str(house.bare))),
        "several": (
            f"import vllm_hotfix; {PLUGIN}; vllm_hotfix.activate(); {PLUGIN}",
            {"python": house.installed, "path": (house.bootstrap,)},
            ("-m", "vllm_hotfix", "run", "--", str(house.installed)),
        ),
    }[channel]


CHANNELS = ["pth", "import", "import after vLLM", "sitecustomize", "plugin", "plugin after vLLM", "run", "several"]


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_channel_applies_each_patch_once_here_and_in_a_child(house: Any, program: Any, channel: str) -> None:
    """Both functions and the name that was taken carry one mark in the process and in its spawned child."""
    first, where, starter = how(house, channel)
    done = house.run(*starter, program(first), **where, **ON)
    assert json.loads(done.stdout) == [[PATCHED] * 3] * 2
    assert done.stderr == ""


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_channel_does_nothing_with_no_gate_set(house: Any, program: Any, channel: str) -> None:
    """Stock results, here and in the child."""
    first, where, starter = how(house, channel)
    done = house.run(*starter, program(first), **where)
    assert json.loads(done.stdout) == [[["stock"]] * 3] * 2


MODULES = """
import json, sys
print(json.dumps([
    sorted(name for name in sys.modules if name.split(".")[0] in ("vllm_hotfix", "_vllm_hotfix", "wrapt", "packaging")),
    [type(finder).__module__ for finder in sys.meta_path].count("_vllm_hotfix"),
]))
"""


@pytest.mark.parametrize("channel", ["pth", "sitecustomize", "run"])
def test_off_is_off(house: Any, channel: str) -> None:
    """With no gate set no more than the start module is imported, also after vLLM is, and no finder stands."""
    _, where, starter = how(house, channel)
    done = house.run(*starter, "-c", f"import vllm.model{MODULES}", **where)
    assert json.loads(done.stdout) in ([[], 0], [["_vllm_hotfix"], 0])


@pytest.mark.parametrize("channel", ["pth", "sitecustomize", "run"])
@pytest.mark.parametrize("look", ["", "import importlib.util; importlib.util.find_spec('vllm')"])
def test_on_waits_until_vllm_is_executed(house: Any, channel: str, look: str) -> None:
    """With a gate set one finder stands and nothing else is imported, also when vLLM is merely looked up."""
    _, where, starter = how(house, channel)
    done = house.run(*starter, "-c", f"{look}{MODULES}", **where, **ON)
    assert json.loads(done.stdout) == [["_vllm_hotfix"], 1]


def test_importing_the_package_without_vllm_imports_no_wrapt(house: Any) -> None:
    """``import vllm_hotfix`` waits as well."""
    modules, finders = json.loads(house.run("-c", f"import vllm_hotfix{MODULES}", **ON).stdout)
    assert "wrapt" not in modules
    assert "vllm_hotfix._hooks" not in modules
    assert finders == 1


def test_names_taken_before_activation_are_patched(house: Any) -> None:
    """``from vllm.steps import step`` in the main program and in vLLM itself, both before."""
    code = "from vllm.steps import step\nimport vllm.model, vllm_hotfix\nprint(step(), vllm.model.step())"
    assert house.run("-c", code, **ON).stdout == f"{PATCHED} {PATCHED}\n"


def test_activation_from_within_vllms_own_import(own_house: Any) -> None:
    """Whoever activates while a target is half imported gets it patched when it is whole."""
    path = own_house.folder / "vllm/steps.py"
    path.write_text("import vllm_hotfix\n\n\n" + path.read_text())
    assert own_house.run("-c", "import vllm.model; print(vllm.model.step())", **ON).stdout == f"{PATCHED}\n"


def test_threads_that_import_at_once(house: Any) -> None:
    """Threads race to import the targets, the package and to activate: no deadlock, each patch once, no warning."""
    code = """
import importlib, sys, threading
sys.setswitchinterval(1e-5)
names = ["vllm.model", "vllm.steps", "vllm_hotfix", "vllm.envs", "vllm.v1.worker.gpu_worker"] * 4
barrier = threading.Barrier(len(names))
def work(name):
    barrier.wait()
    importlib.import_module(name)
    sys.modules.get("vllm_hotfix") and importlib.import_module("vllm_hotfix").activate()
threads = [threading.Thread(target=work, args=(name,)) for name in names]
for thread in threads: thread.start()
for thread in threads: thread.join(20)
assert not any(thread.is_alive() for thread in threads)
import vllm.model, vllm.envs, vllm_hotfix
print(vllm.model.step(), vllm.model.Model().load())
vllm_hotfix.deactivate()
print(vllm.model.step(), vllm.model.Model().load())
print(type(vllm.envs.compile_factors).__name__, len(vllm.envs.environment_variables))
"""
    for how in ({"path": (house.folder,)}, {"python": house.installed, "path": ()}):
        for _ in range(3):
            done = house.run("-c", code, **how, **ON)
            assert done.stdout.splitlines() == [f"{PATCHED} {PATCHED}", STOCK.strip(), "function 1"]
            assert done.stderr == ""


def test_two_threads_that_activate_first_make_one_activation(house: Any) -> None:
    """Both find that nothing is active yet; what the one has done is not lost to ``deactivate``."""
    code = """
import threading, time
import vllm.envs, vllm.model, vllm_hotfix
from vllm_hotfix import _hooks
made = []
stock = _hooks.Activation.__init__
def slow(self, catalog):
    made.append(self)
    time.sleep(0.05)
    stock(self, catalog)
_hooks.Activation.__init__ = slow
import os
os.environ["VLLM_HOTFIX_MARKS"] = "1"
threads = [threading.Thread(target=vllm_hotfix.activate) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(made))
"""
    assert house.run("-c", code).stdout == "1\n"


def test_an_old_file_of_another_release_in_the_way_is_no_matter(own_house: Any) -> None:
    """Other versions in the environment, of vLLM's metadata say, are not looked at: ``_version.py`` counts."""
    (own_house.folder / "vllm-9.9.9.dist-info").mkdir()
    (own_house.folder / "vllm-9.9.9.dist-info/METADATA").write_text("Name: vllm\nVersion: 9.9.9\n")
    code = "import vllm_hotfix, vllm.model; print(vllm.model.step()); print(vllm_hotfix.patches()[0]['state'])"
    assert own_house.run("-c", code, **ON).stdout.splitlines() == [str(PATCHED), "active"]


# What can go wrong: one warning, and stock.


LOOK = "import vllm.model; print(vllm.model.step(), vllm.model.Model().load())"
STOCK = "['stock'] ['stock']\n"


def fails(house: Any, *words: str, code: str = LOOK, **environ: str) -> None:
    """Stock runs, exit 0, one line of warning with these words; under STRICT the engine's start is stopped by them."""
    for first in ("", "import vllm_hotfix\n", f"{PLUGIN}\n"):
        path = (house.bootstrap,) if not first else (house.folder,)
        done = house.run("-c", first + code, path=path, **(ON | environ))
        assert done.stdout == STOCK
        assert "Traceback" not in done.stderr
        assert done.stderr.count("\n") == 1, f"after {first!r}: {done.stderr}"
        assert all(word in done.stderr for word in words), done.stderr
    strict = {**ON, **environ, "VLLM_HOTFIX_STRICT": "1"}
    done = house.run("-c", code, path=(house.bootstrap,), **strict)
    assert done.stdout == STOCK, "never at import"
    start = f"{code}\n{PLUGIN}\nfrom vllm.v1.worker.gpu_worker import Worker; Worker().load_model()"
    done = house.run("-c", start, path=(house.folder,), code=1, **strict)
    last = done.stderr.strip().splitlines()[-1]
    assert "HotfixError" in last
    assert all(word in last for word in ("VLLM_HOTFIX_STRICT", *words)), last
    assert any(variable in last for variable in ON | environ), last
    # vLLM is told to leave the plugin out: its start meets the fault all the same.
    done = house.run("-c", f"{code}\n{PLUGIN}", path=(house.bootstrap,), code=1, **strict, VLLM_PLUGINS="another")
    last = done.stderr.strip().splitlines()[-1]
    assert "HotfixError" in last
    assert any(variable in last for variable in ON | environ), last


def test_wrapt_that_cannot_be_imported(own_house: Any) -> None:
    """A folder mounted without its dependencies."""
    (own_house.folder / "wrapt/__init__.py").write_text("raise ImportError('no wrapt here')\n")
    fails(own_house, "no wrapt here")


def test_a_patch_that_cannot_be_imported(own_house: Any) -> None:
    """An error in a patch's own module."""
    (own_house.folder / "vllm_hotfix/_patches/marks.py").write_text("1 / 0\n")
    fails(own_house, "ZeroDivisionError")


def test_a_hook_that_raises(own_house: Any) -> None:
    """The wrapper that the patch names is not there."""
    path = own_house.folder / "vllm_hotfix/_patches/marks.py"
    path.write_text(path.read_text().replace("def mark(", "def other("))
    fails(own_house, "marks", "VLLM_HOTFIX_MARKS", "AttributeError")


def test_a_damaged_lock(own_house: Any) -> None:
    """Cut in the middle."""
    path = own_house.folder / "vllm_hotfix/upstream.lock"
    path.write_text(path.read_text()[:100])
    fails(own_house, "marks", "VLLM_HOTFIX_MARKS", "upstream.lock is damaged")


def test_a_target_that_is_missing(own_house: Any) -> None:
    """Named as not there."""
    path = own_house.folder / "vllm/model.py"
    path.write_text(path.read_text().replace("def load(", "def load_renamed("))
    code = "import vllm.model; print(vllm.model.step(), vllm.model.Model().load_renamed())"
    worker = own_house.folder / "vllm/v1/worker/gpu_worker.py"
    worker.write_text(worker.read_text().replace(".load()", ".load_renamed()"))
    fails(own_house, "marks", "VLLM_HOTFIX_MARKS", "vllm.model:Model.load (not there)", code=code)


def test_a_version_that_is_not_understood(own_house: Any) -> None:
    """One warning; the code decides, so the patch is at work, and STRICT has its say."""
    (own_house.folder / "vllm/_version.py").write_text("version = 'custom build'\n")
    done = own_house.run("-c", LOOK, path=(own_house.bootstrap,), **ON)
    assert done.stdout == f"{PATCHED} {PATCHED}\n"
    assert done.stderr.count("\n") == 1
    assert "'custom build'" in done.stderr
    strict = {**ON, "VLLM_HOTFIX_STRICT": "1"}
    done = own_house.run("-c", f"{LOOK}\n{PLUGIN}", path=(own_house.bootstrap,), code=1, **strict)
    assert "VLLM_HOTFIX_MARKS" in done.stderr.splitlines()[-1]
    assert "'custom build'" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "value"),
    [("VLLM_HOTFIX_MARKS", "maybe"), ("VLLM_HOTFIX_ENABLE", "nonsense"), ("VLLM_HOTFIX_MARK", "1")],
)
def test_a_wrong_setting(house: Any, name: str, value: str) -> None:
    """One warning with the variable, and stock, since nothing valid was asked for."""
    off = {"VLLM_HOTFIX_DISABLE": "marks"} if name != "VLLM_HOTFIX_MARKS" else {}
    fails(house, name, **{**off, name: value})


def test_a_state_folder_that_cannot_be_written(house: Any) -> None:
    """The patch is at work all the same, with one warning."""
    done = house.run("-c", LOOK, path=(house.bootstrap,), **ON, VLLM_HOTFIX_STATE_DIR="/proc/nowhere")
    assert done.stdout == f"{PATCHED} {PATCHED}\n"
    assert done.stderr.count("\n") == 1
    assert "VLLM_HOTFIX_STATE_DIR" in done.stderr


def test_a_package_that_is_half_gone(own_house: Any) -> None:
    """The start module is there, the package is not: one line, and neither an import nor the plugin fails."""
    (own_house.folder / "vllm_hotfix").rename(own_house.folder / "gone")
    for code in (f"{LOOK}\n{PLUGIN}", f"{PLUGIN}\n{LOOK}"):
        done = own_house.run("-c", f"import _vllm_hotfix; _vllm_hotfix.start()\n{code}", **ON)
        assert done.stdout == STOCK
        assert (
            done.stderr
            == "vllm-hotfix: not active in this process: ModuleNotFoundError: No module named 'vllm_hotfix'\n"
        )


@pytest.mark.parametrize("damage", ["", "1 / 0\n"])
def test_strict_where_the_package_cannot_be_imported(own_house: Any, damage: str) -> None:
    """An engine's start is stopped with the variable and the reason, by the plugin or without it; an import is not."""
    module = own_house.folder / "vllm_hotfix/_patch.py"
    module.write_text(damage) if damage else module.unlink()
    how = {**ON, "VLLM_HOTFIX_STRICT": "1"}
    assert own_house.run("-c", LOOK, path=(own_house.bootstrap,), **how).stdout == STOCK
    for path, plugins in (
        (own_house.bootstrap, "another"),
        (own_house.bootstrap, "vllm_hotfix"),
        (own_house.folder, "vllm_hotfix"),
    ):
        allowed = {"VLLM_PLUGINS": plugins}
        done = own_house.run("-c", f"{LOOK}\n{PLUGIN}", path=(path,), code=1, **how, **allowed)
        last = done.stderr.strip().splitlines()[-1]
        words = ("RuntimeError: vllm-hotfix: VLLM_HOTFIX_STRICT is set", "VLLM_HOTFIX_MARKS=1", "Error: ")
        assert all(word in last for word in words), last


def test_strict_stops_each_worker(own_house: Any) -> None:
    """With the plugin left out the worker's ``load_model`` runs first, and then the exception names what is wrong."""
    (own_house.folder / "vllm/steps.py").write_text("def step():\n    return ['stock', 'changed']\n")
    code = "from vllm.v1.worker.gpu_worker import Worker\nWorker().load_model()"
    strict = {**ON, "VLLM_HOTFIX_STRICT": "1"}
    done = own_house.run("-c", code, path=(own_house.bootstrap,), code=1, **strict)
    assert "marks (VLLM_HOTFIX_MARKS) is drifted" in done.stderr.splitlines()[-1]


def test_strict_lets_a_sound_engine_start(house: Any) -> None:
    """Plugin, then the worker: nothing is raised and the patch is at work."""
    code = f"{PLUGIN}\nfrom vllm.v1.worker.gpu_worker import Worker\nprint(Worker().load_model())"
    for path in ((house.folder,), (house.bootstrap,)):
        done = house.run("-c", code, path=path, **ON, VLLM_HOTFIX_STRICT="1")
        assert (done.stdout, done.stderr) == (f"{PATCHED}\n", "")


def test_deactivate_gives_the_stock_objects_back(house: Any) -> None:
    """Identical objects, in vLLM and where they were taken, and the finder is gone; activated again, it is patched."""
    code = """
import sys
import vllm.steps, vllm.model
stock = vllm.steps.step, vars(vllm.model.Model)["load"]
import vllm_hotfix
vllm_hotfix.deactivate()
print(stock[0] is vllm.steps.step is vllm.model.step, stock[1] is vars(vllm.model.Model)["load"])
print([type(finder).__module__ for finder in sys.meta_path].count("_vllm_hotfix"))
vllm_hotfix.activate()
print(vllm.model.step())
"""
    assert house.run("-c", code, **ON).stdout.splitlines() == ["True True", "0", str(PATCHED)]


def test_ray_sets_variables_late(house: Any) -> None:
    """A worker starts with no gate, imports vLLM, gets the variable, and the plugin activates."""
    code = f"""
import os, vllm.model
os.environ["VLLM_HOTFIX_MARKS"] = "1"
{PLUGIN}
print(vllm.model.step(), vllm.model.Model().load())
"""
    for how in ({"path": (house.bootstrap,)}, {"python": house.installed, "path": ()}, {"path": (house.folder,)}):
        assert house.run("-c", code, **how).stdout == f"{PATCHED} {PATCHED}\n"
