"""``python -m vllm_hotfix.status`` as a person or a script runs it."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_hotfix import _record, status
from vllm_hotfix._patch import STATES

VLLM = {"version", "location"}
PATCH = {"name", "env", "gate", "state", "reason", "upstream", "releases", "targets"}
TARGET = {"name", "fingerprint", "known", "wrapped"}
ON = {"VLLM_HOTFIX_MARKS": "1"}


def ask(house: Any, *arguments: str, code: int = 0, **environ: str) -> Any:
    """Run the status command; returns its JSON where that was asked for, else its lines."""
    done = house.run("-m", "vllm_hotfix.status", *arguments, code=code, **environ)
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout) if "--json" in arguments else done.stdout.splitlines()


# Without vLLM.


def test_no_vllm_is_said_plainly(real_house: Any) -> None:
    """The first line says so, with the interpreter that was looked in; that is no failure."""
    lines = ask(real_house)
    assert lines[0].startswith("vLLM      not installed in the environment of ")
    assert any(line.startswith("measured_totals    off") for line in lines)


@pytest.mark.parametrize(("environ", "code"), [({}, 0), ({"VLLM_HOTFIX_MEASURED_TOTALS": "1"}, 1)])
@pytest.mark.parametrize("imported", [[], ["--import"]])
def test_check_without_vllm(real_house: Any, environ: dict[str, str], code: int, imported: list[str]) -> None:
    """A patch that was asked for and cannot be is a failure; where nothing was asked for there is none."""
    data = ask(real_house, "--json", "--check", *imported, code=code, **environ)
    assert data["vllm"] == {"version": None, "location": None}
    (patch,) = [one for one in data["patches"] if one["name"] == "measured_totals"]
    assert patch["state"] == ("unsupported" if environ else "off")


# With one.


def test_the_json_has_these_keys(house: Any) -> None:
    """Scripts read them; the values are those of the small vLLM."""
    data = ask(house, "--json", **ON)
    assert {"vllm", "channels", "patches"} <= set(data)
    assert set(data["vllm"]) == VLLM
    assert data["vllm"] == {"version": "1.2.0", "location": str(house.folder / "vllm")}
    (patch,) = data["patches"]
    assert set(patch) >= PATCH
    assert (patch["name"], patch["env"], patch["gate"]) == ("marks", "VLLM_HOTFIX_MARKS", "1")
    assert patch["state"] == "ready"
    assert [set(target) >= TARGET for target in patch["targets"]] == [True, True]
    assert [(target["name"], target["known"], target["wrapped"]) for target in patch["targets"]] == [
        ("vllm.steps:step", True, None),
        ("vllm.model:Model.load", True, None),
    ]
    assert all(len(target["fingerprint"]) == 64 for target in patch["targets"])


def test_import_looks_at_the_live_objects(house: Any) -> None:
    """The targets are imported and wrapped in this process; without the gate they are not imported."""
    data = ask(house, "--json", "--import", "--check", **ON)
    (patch,) = data["patches"]
    assert patch["state"] == "active"
    assert [target["wrapped"] for target in patch["targets"]] == [True, True]
    (patch,) = ask(house, "--json", "--import", "--check")["patches"]
    assert patch["state"] == "off"
    assert [target["wrapped"] for target in patch["targets"]] == [None, None]


def test_what_vllm_prints_is_not_on_stdout(own_house: Any) -> None:
    """VLLM logs to stdout while it is imported; the JSON stays JSON."""
    for name in ("__init__", "steps"):
        path = own_house.folder / f"vllm/{name}.py"
        path.write_text(path.read_text() + "print('INFO: hello')\n")
    (patch,) = ask(own_house, "--json", "--import", **ON)["patches"]
    assert patch["state"] == "active"


def test_a_target_that_cannot_be_imported_is_said(own_house: Any) -> None:
    """The error is a line of its own, the patch is not active, and the check fails."""
    path = own_house.folder / "vllm/model.py"
    path.write_text(path.read_text() + "import not_there_at_all\n")
    data = ask(own_house, "--json", "--import", "--check", code=1, **ON)
    assert any("vllm.model" in problem and "not_there_at_all" in problem for problem in data["problems"])
    assert data["patches"][0]["state"] != "active"


def test_drift_fails_the_check_only_where_the_gate_is_on(own_house: Any) -> None:
    """An unknown function is named; what nobody asked for is no failure."""
    (own_house.folder / "vllm/steps.py").write_text("def step():\n    return []\n")
    (patch,) = ask(own_house, "--json", "--check", code=1, **ON)["patches"]
    assert patch["state"] == "drifted"
    assert "vllm.steps:step" in patch["reason"]
    assert [target["known"] for target in patch["targets"]] == [False, True]
    assert ask(own_house, "--json", "--check")["patches"][0]["state"] == "off"


@pytest.mark.parametrize("text", [None, "", "{", "null", '{"format": 9}'])
def test_a_damaged_lock_is_said(own_house: Any, text: str | None) -> None:
    """One problem, the patch has failed, the check says so, and with the gate off nothing fails."""
    lock = own_house.folder / "vllm_hotfix/upstream.lock"
    lock.unlink() if text is None else lock.write_text(text)
    data = ask(own_house, "--json", "--check", code=1, **ON)
    assert data["patches"][0]["state"] == "failed"
    assert "upstream.lock" in data["patches"][0]["reason"]
    assert sum("upstream.lock" in problem for problem in data["problems"]) == 1
    ask(own_house, "--check")


def test_neither_vllm_nor_torch_is_imported(own_house: Any) -> None:
    """The sources are read, not run."""
    for name in ("vllm/__init__.py", "torch/__init__.py", "torch.py"):
        path = own_house.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("raise SystemExit('imported')\n")
    assert ask(own_house, "--json", **ON)["patches"][0]["state"] == "ready"


def test_its_own_time_is_below_0_3_s(house: Any) -> None:
    """Beyond the start of an interpreter: processor time, best of a few runs, since the machine may be busy."""

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    def best(*arguments: str) -> float:
        times = []
        for _ in range(4):
            start = spent()
            house.run(*arguments, **ON)
            times.append(spent() - start)
        return min(times)

    assert best("-m", "vllm_hotfix.status") - best("-c", "pass") < 0.3


def test_the_channels_are_listed(house: Any) -> None:
    """Each is installed or says why it is not."""

    def channels(**how: Any) -> dict[str, bool]:
        done = house.run("-m", "vllm_hotfix.status", "--json", **how)
        data = json.loads(done.stdout)
        assert all({"name", "installed", "detail"} <= set(one) for one in data["channels"])
        return {one["name"]: one["installed"] for one in data["channels"]}

    assert channels() == {".pth": False, ".start": False, "sitecustomize": False, "plugin": True}
    assert channels(python=house.installed, path=()) == {
        ".pth": True,
        ".start": False,
        "sitecustomize": False,
        "plugin": True,
    }
    assert channels(path=(house.bootstrap,))["sitecustomize"] is True
    assert channels(VLLM_PLUGINS="other")["plugin"] is False
    assert channels(VLLM_PLUGINS="other,vllm_hotfix")["plugin"] is True


# Lines.


@pytest.mark.parametrize(
    "environ",
    [
        {},
        ON,
        {"VLLM_HOTFIX_MARKS": "x" * 300},
        {"VLLM_HOTFIX_MARKS": "x " * 150},
        {"VLLM_HOTFIX_ENABLE": ",".join(["marks"] * 60)},
        {"VLLM_HOTFIX_ENABLE": "y" * 300},
        {f"VLLM_HOTFIX_{'Z' * 200}": "1"},
        {"VLLM_HOTFIX_MARKS": "may\nbe"},
        {"VLLM_HOTFIX_MARKS": "\u6f22" * 60},
    ],
    ids=range(9),
)
def test_no_line_is_longer_than_100_columns(house: Any, environ: dict[str, str]) -> None:
    """Whatever the variables hold, and whatever they hold stays on its line."""
    lines = ask(house, **environ)
    assert max(map(len, lines)) <= 100
    (row,) = [number for number, line in enumerate(lines) if line.startswith("marks")]
    assert "vllm#1" in lines[row] + lines[row + 1]


def test_the_place_of_vllm_is_shown_in_full(own_house: Any, tmp_path: Path) -> None:
    """A long path takes several lines: which of several vLLMs it is stands at its end."""
    deep = tmp_path / "/".join(["a_folder_with_a_long_name"] * 5)
    deep.mkdir(parents=True)
    (own_house.folder / "vllm").rename(deep / "vllm")
    done = own_house.run("-m", "vllm_hotfix.status", path=(own_house.folder, deep))
    assert str(deep / "vllm") in "".join(line.strip() for line in done.stdout.splitlines())
    assert max(map(len, done.stdout.splitlines())) <= 100


def row(**fields: Any) -> dict[str, Any]:
    """One patch as the table takes it."""
    defaults: dict[str, Any] = {
        "name": "keep_moe_kernel",
        "env": "VLLM_HOTFIX_KEEP_MOE_KERNEL",
        "variable": "VLLM_HOTFIX_KEEP_MOE_KERNEL",
        "gate": None,
        "state": "not-needed",
        "reason": "because",
        "fault": "a fault",
        "releases": ">=0.20.0,<0.33.0",
        "upstream": "vllm-project/vllm#61304",
    }
    return defaults | fields


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"gate": "1"},
        {"upstream": "run-ai/runai-model-streamer#1234"},
        {"name": "a_patch_with_a_very_long_name_indeed"},
        {"reason": "word" * 100},
        {"reason": "several words " * 30, "fault": "several words " * 30},
        {"reason": ""},
        {"gate": "1", "variable": "VLLM_LAYERWISE_RELOAD_MEASURED_TOTALS"},
    ],
    ids=range(8),
)
def test_every_row_fits(fields: dict[str, Any]) -> None:
    """Fixed in a release, long names and threads, long words: 100 columns, with releases and thread in full."""
    one = row(**fields)
    lines = status.table([one])
    assert max(map(len, lines)) <= 100
    text = " ".join(" ".join(lines).split())
    assert one["releases"] in text
    assert one["upstream"].rpartition("/")[2] in text


@pytest.mark.parametrize("environ", [{"VLLM_HOTFIX_MARKS": "a\udcffb"}, {"VLLM_HOTFIX_ENABLE": "\udcff"}])
@pytest.mark.parametrize("form", ["--json", "--check"])
def test_bytes_that_are_not_text_can_be_shown(house: Any, environ: dict[str, str], form: str) -> None:
    """A variable may hold any byte; it is shown, not a traceback."""
    # strict, as in most languages' locales; and a wrong variable is what --check is there for
    ask(house, form, code=int(form == "--check"), PYTHONIOENCODING="utf-8", **environ)


@pytest.mark.parametrize(
    "environ",
    [
        {"VLLM_HOTFIX_MARKS": "ture"},
        {"VLLM_HOTFIX_MARK": "1"},
        {"VLLM_HOTFIX_ENABLE": "mark"},
        {"VLLM_HOTFIX_STRICT": "y"},
    ],
)
def test_check_is_1_where_a_variable_is_wrong(house: Any, environ: dict[str, str]) -> None:
    """STRICT would refuse to start with it, and whoever set it believes that a patch is on."""
    ask(house, "--check", code=1, **environ)


def test_disable_in_a_hurry(house: Any) -> None:
    """``VLLM_HOTFIX_DISABLE=1`` turns everything off, as it is meant."""
    lines = ask(house, **ON, VLLM_HOTFIX_DISABLE="1")
    assert any(line.startswith("marks              off") for line in lines)


def test_no_channel_is_noted(house: Any, tmp_path: Path) -> None:
    """A folder on PYTHONPATH without its ``bootstrap``: known code, and nothing that would patch it."""
    (tmp_path / "lone").mkdir()
    for name in ("vllm", "vllm_hotfix", "wrapt", "packaging", "_vllm_hotfix.py"):
        (tmp_path / "lone" / name).symlink_to(house.folder / name)
    lines = ask(house, path=(tmp_path / "lone",), **ON)
    assert any(line.startswith("note      no channel brings the patches into vLLM") for line in lines)
    assert not any(line.startswith("note") for line in ask(house, path=(house.bootstrap,), **ON))


def test_an_ascii_terminal_is_enough(house: Any) -> None:
    """What the terminal cannot show is shown some other way."""
    ask(house, PYTHONIOENCODING="ascii", VLLM_HOTFIX_MARKS="\u6f22")


def test_a_closed_pipe_is_no_error(house: Any) -> None:
    """``status | head -1`` shows one line and no traceback."""
    for arguments in ("", "--json", "--live"):
        command = f"{house.bare} -m vllm_hotfix.status {arguments} | true"
        environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(house.folder), **house.environ}
        done = subprocess.run(
            ["bash", "-c", command], env=environ, cwd=house.folder, capture_output=True, text=True, timeout=60
        )
        assert done.stderr == ""


@pytest.mark.parametrize("arguments", [["--live", "--import"], ["--no-such"], ["word"]])
def test_wrong_arguments_are_2(house: Any, arguments: list[str]) -> None:
    """As argparse has it."""
    assert "usage: python -m vllm_hotfix.status" in house.run("-m", "vllm_hotfix.status", *arguments, code=2).stderr


def test_patches_gives_the_same(house: Any) -> None:
    """``vllm_hotfix.patches()`` lists what the JSON lists, for this process."""
    code = (
        "import json, vllm_hotfix, vllm.model; print(json.dumps([vllm_hotfix.patches(), vllm_hotfix.counters()])); "
        "vllm.model.Model().run(); print(json.dumps(vllm_hotfix.counters()))"
    )
    first, second = house.run("-c", code, **ON).stdout.splitlines()
    (patch,), counters = json.loads(first)
    assert set(patch) >= PATCH
    assert patch["state"] == "active"
    assert counters == {}
    assert json.loads(second) == {"marks": {"calls": 1}}


def test_vllm_imported_before_and_not_patched_is_said(house: Any) -> None:
    """A process in which the variable came too late and nothing activated again."""
    code = (
        "import os, vllm.model; import vllm_hotfix; os.environ['VLLM_HOTFIX_MARKS'] = '1'; "
        "print(vllm_hotfix.patches()[0]['state']); vllm_hotfix.activate(); print(vllm_hotfix.patches()[0]['state'])"
    )
    assert house.run("-c", code).stdout.split() == ["failed", "active"]


# A package beside vLLM.


@pytest.fixture
def beside_house(own_house: Any) -> Any:
    """The small house with a package beside vLLM that the patch relies on, and whose code the lock does not know."""
    patch = own_house.folder / "vllm_hotfix/_patches/marks.py"
    text = patch.read_text().replace('"mark"), Target', '"mark", always=True), Target')
    patch.write_text(text.replace('upstream="example/vllm#1",', 'upstream="example/vllm#1", relies=("beside.m:f",),'))
    lock = own_house.folder / "vllm_hotfix/upstream.lock"
    data = json.loads(lock.read_text())
    data["packages"]["beside"] = "2.0"
    data["targets"]["beside.m:f"] = {"aa": "2.0"}
    lock.write_text(json.dumps(data))
    for name in ("beside/__init__.py", "beside/m.py", "beside-2.0.dist-info/METADATA"):
        path = own_house.folder / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    return own_house


def test_an_unknown_package_beside_vllm_is_said(beside_house: Any) -> None:
    """State, package, version and name; with the gate on the check fails."""
    lines = " ".join(line.strip() for line in ask(beside_house, "--check", code=1, **ON))
    assert "marks              drifted" in lines
    assert "beside 2.0 has code here that is not its release's: beside.m:f (not there); install one of 2.0" in lines
    assert "its settings are understood and do nothing" in lines
    ask(beside_house, "--check")


def test_import_shows_what_is_wrapped_beside_an_unknown_package(beside_house: Any) -> None:
    """The target that keeps the settings is wrapped, the other is not, and the state is no better for it."""
    data = ask(beside_house, "--json", "--import", "--check", code=1, **ON)
    (patch,) = data["patches"]
    assert patch["state"] == "drifted"
    assert [(target["name"], target["known"], target["wrapped"]) for target in patch["targets"]] == [
        ("vllm.steps:step", True, True),
        ("vllm.model:Model.load", True, False),
        ("beside.m:f", False, None),
    ]
    assert data["problems"] == []


def test_a_package_beside_vllm_that_is_not_installed_is_no_problem(beside_house: Any) -> None:
    """Not needed, said with the package's name; nothing of it is imported, and the check succeeds."""
    shutil.rmtree(beside_house.folder / "beside")
    patch = beside_house.folder / "vllm_hotfix/_patches/marks.py"
    text = patch.read_text().replace("targets=(", 'targets=(Target("beside.m:f", "mark"), ')
    patch.write_text(text.replace('relies=("beside.m:f",),', ""))
    data = ask(beside_house, "--json", "--import", "--check", **ON)
    (patch,) = data["patches"]
    assert (patch["state"], patch["reason"]) == (
        "not-needed",
        "no beside is installed, so there is nothing to patch",
    )
    assert [target["wrapped"] for target in patch["targets"]] == [False, False, None]
    assert data["problems"] == []


# Live processes.


LIVE = """
import os, sys, vllm.model
from vllm.model import Model
Model().run()
import vllm_hotfix
from vllm_hotfix._record import RECORD
RECORD.save()
print("there", flush=True)
sys.stdin.read()
"""


def test_live_lists_running_processes(house: Any, tmp_path: Path) -> None:
    """A running process with its patches and counters; when it has ended it is not listed any more."""
    environ = {"PYTHONPATH": str(house.folder), "TMPDIR": str(tmp_path), **ON}
    command = [str(house.installed), "-c", LIVE]
    with subprocess.Popen(
        command, env=environ, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        lines = ask(house, "--live", TMPDIR=str(tmp_path))
        assert len(lines) == 2, "a command of several lines is shown on one"
        assert lines[0].startswith(f"{process.pid}  vLLM 1.2.0, ")
        assert lines[1].split() == ["marks", "active", "calls=1"]
        assert max(map(len, lines)) <= 100
        (found,) = ask(house, "--live", "--json", TMPDIR=str(tmp_path))["processes"]
        assert found["pid"] == process.pid
        assert found["patches"]["marks"]["state"] == "active"
        assert found["counters"] == {"marks": {"calls": 1}}
    (line, *_) = ask(house, "--live", TMPDIR=str(tmp_path))
    assert line.startswith("no running process has written to")


@pytest.mark.parametrize("readable", [True, False])
def test_live_shows_any_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], readable: bool
) -> None:
    """Bytes that are not text, terminal codes and tabs in a command line do no harm to the terminal or the table.

    It is the one that ``ps`` shows, and where that cannot be read the one by which the process was started.
    """
    strange = "b\udcffb \x1b[31mred\r\t\n"
    monkeypatch.setattr(sys, "orig_argv", ["started", strange])
    monkeypatch.setattr(_record, "_title", lambda pid: f"now {strange}" if readable else "")
    _record.RECORD.entries["one"] = _record.Entry("active", "")
    _record.RECORD.save()
    assert status.main(["--live"]) == 0
    shown = capsys.readouterr().out
    shown.encode()
    assert shown.count("\n") == 2
    assert "\x1b" not in shown
    assert "\r" not in shown
    assert f" s ago: {'now' if readable else 'started'} b" in shown


@pytest.mark.parametrize("state", STATES)
def test_live_check_is_for_probes(state: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 1 if a running process has a patch at fault or with stale graphs; what is not active says why."""
    _record.RECORD.entries["one"] = _record.Entry("active", "2 functions wrapped")
    _record.RECORD.entries["two"] = _record.Entry(state, "the reason")
    _record.RECORD.count("two", "kernels_kept", 3)
    _record.RECORD.save()
    assert status.main(["--live"]) == 0
    assert status.main(["--live", "--check"]) == (state in ("unsupported", "drifted", "failed", "stale-graphs"))
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= 100
    words = " ".join(shown[len(shown) // 2 :]).split()
    reason = [] if state == "active" else ["the", "reason"]
    assert words[words.index("two") :] == ["two", state, *reason, "kernels_kept=3"]


def test_live_in_a_folder_that_cannot_be_used(house: Any, tmp_path: Path) -> None:
    """The folder of someone else, or with wide permissions: said, and exit 1."""
    folder = tmp_path / f"vllm-hotfix-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    done = house.run("-m", "vllm_hotfix.status", "--live", code=1, TMPDIR=str(tmp_path))
    assert done.stderr.startswith("the state files cannot be read: ")
    assert done.stderr.count("\n") == 1
