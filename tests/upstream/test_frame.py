"""Activation, `vllm.envs`, fingerprints and bad input, on a release's real source.

What depends on the order of imports runs in processes of its own, which `frame.py` makes.
"""

from __future__ import annotations

import ast
import importlib
import io
import json
import logging
import os
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import frame
import pytest
import vllm
import vllm.envs
from frame import ALIAS, GATE, RELOAD, STRICT, Case, Outcome, Zygote
from packaging.version import Version
from release_names import (
    FUNCTIONS,
    NAMES,
    NEEDED,
    NVFP4,
    PATCHES,
    RELEASE,
    SOURCE,
    SOURCES,
    TARGETS,
    WRAPPED,
    cut,
    docstrings,
    found,
    holders,
    import_worker_modules,
    judged,
    mutants,
    parsed_once,
    patches_of,
    relative,
    snapshot,
)
from vllm.model_executor.model_loader import base_loader
from vllm.model_executor.model_loader.reload import layerwise

from vllm_hotfix._catalog import CATALOG
from vllm_hotfix._judge import judge
from vllm_hotfix._patch import Patch
from vllm_hotfix._upstream import ABSENT, Lock, LockError, Source, fingerprint, package_of

HOME = frame.package_home()
BOOTSTRAP = str(HOME / "vllm_hotfix/bootstrap")
ON = {GATE: "1"}
ALL_ON = {"VLLM_HOTFIX_ENABLE": "all"}


# Processes.


def make_cases(folder: Path) -> dict[str, Case]:
    """Return every case for the zygote, by name; the slow ones first."""
    target = found(f"{RELOAD}.layerwise:finalize_layerwise_processing")
    changed = target.file.read_text().replace('"%s: Delayed processing"', '"%s: delayed processing"')
    assert changed != target.file.read_text()
    # The function goes by another name, at its uses too: the release works as before.
    moved = {
        str(file.relative_to(SOURCE)): file.read_text().replace("finalize_layerwise_processing", "finish_layerwise")
        for file in (SOURCE / "model_executor/model_loader").rglob("*.py")
        if "finalize_layerwise_processing" in file.read_text()
    }
    drifted = frame.linked_tree(folder / "drifted", SOURCE, {relative(target): changed})
    missing = frame.linked_tree(folder / "missing", SOURCE, moved)
    strange = frame.linked_tree(folder / "strange", SOURCE, {"_version.py": "__version__ = version = 'our-fork!'\n"})
    damaged = frame.copied_package(folder / "damaged", (HOME / "vllm_hotfix/upstream.lock").read_text()[:-40])
    plugin = frame.distribution(folder / "plugin")
    strict = [str(plugin)]
    return {
        "sitecustomize spawned": Case("channel_in_child", {"name": "", "environ": {}}, ALL_ON, [BOOTSTRAP]),
        "import spawned": Case("channel_in_child", {"name": "import", "environ": ALL_ON}),
        "plugin spawned": Case("channel_in_child", {"name": "plugin", "environ": ALL_ON}, {}, strict),
        "sitecustomize fresh": Case("channel", {"name": "sitecustomize", "environ": {}}, ALL_ON, [BOOTSTRAP]),
        "import fresh": Case("channel", {"name": "import", "environ": {}}, ALL_ON),
        "plugin fresh": Case("channel", {"name": "plugin", "environ": {}}, ALL_ON, strict),
        "half imported": Case("channel_half_imported"),
        "drifted": Case("bad", {}, ON, [str(drifted)]),
        "missing": Case("bad", {}, ON, [str(missing)]),
        "lock": Case("bad", {}, ON, [str(damaged)]),
        "version": Case("bad", {}, ON, [str(strange)]),
        "hook": Case("bad", {"inject": "hook"}, ON),
        "strict good": Case("strict_plugins", {}, ON | {STRICT: "1"}, strict),
        "strict drifted": Case("strict_plugins", {}, ON | {STRICT: "1"}, [*strict, str(drifted)]),
        "strict missing": Case("strict_plugins", {}, ON | {STRICT: "1"}, [*strict, str(missing)]),
        "strict lock": Case("strict_plugins", {}, ON | {STRICT: "1"}, [*strict, str(damaged)]),
        "strict version": Case("strict_plugins", {}, ON | {STRICT: "1"}, [*strict, str(strange)]),
    }


@pytest.fixture(scope="module", autouse=True)
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Start the cases now: they run beside the tests that need no process."""
    folder = tmp_path_factory.mktemp("frame")
    (folder / "cases").mkdir()
    with frame.zygote(make_cases(folder), folder / "cases") as process:
        yield process


@pytest.fixture(scope="module")
def run_command(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> tuple[Path, subprocess.Popen[str]]:
    """Start `vllm-hotfix run --` with every gate on."""
    folder = tmp_path_factory.mktemp("run")
    python = [sys.executable, "-m", "vllm_hotfix", "run", "--", sys.executable]
    with open(folder / "output", "w") as output:
        process = subprocess.Popen(
            [*python, frame.__file__, str(folder), "all"],
            env=frame.clean_environment() | ALL_ON | {"VLLM_HOTFIX_STATE_DIR": str(folder)},
            stdout=output,
            stderr=output,
            text=True,
        )
    return folder, process


@pytest.fixture(scope="module", autouse=True)
def worker_modules(run_command: Any) -> list[str]:
    """Import what an engine's worker imports, before any activation."""
    return import_worker_modules()


@pytest.fixture(scope="module", autouse=True)
def parse_once() -> Iterator[None]:
    """Parse a text once for all tests."""
    with parsed_once():
        yield


# 4. Fingerprints: what can be said without importing anything.


def test_the_lock_knows_every_name_of_this_release(tmp_path: Path) -> None:
    """Each target and each helper of every patch has a fingerprint that the lock ascribes to this very release."""
    lock = Lock.load()
    for patch in CATALOG:
        for name in patch.known_names:
            if package_of(name) != "vllm":
                continue
            assert RELEASE in lock.releases_of(name, SOURCES.fingerprint(name)), name
    assert {verdict.state for verdict in judged(tmp_path).values()} <= {"ready", "not-needed"}


@pytest.mark.parametrize("name", NAMES)
def test_one_changed_token_is_drift(name: str, tmp_path: Path) -> None:
    """With any one token of a target or helper changed, its patches are drifted and say which name it is."""
    texts = list(mutants(found(name)))
    assert len(texts) > 3
    lock = Lock.load()
    qualname = name.partition(":")[2]
    for text in texts[:: max(1, len(texts) // 8)]:
        mark = fingerprint(text, qualname)
        assert mark == ABSENT or not lock.releases_of(name, mark)
    # The last: not the function's own name, so that it is there and changed.
    verdicts = judged(tmp_path, {relative(found(name)): texts[-1]}, of=name)
    for patch in patches_of(name):
        assert verdicts[patch].state == "drifted"
        assert name in verdicts[patch].reason
        assert "not there" not in verdicts[patch].reason


@pytest.mark.parametrize("name", NAMES)
def test_words_for_people_are_no_drift(name: str, tmp_path: Path) -> None:
    """Other comments, docstrings, blank lines and trailing blanks all over a function leave its patches ready."""
    text = reworded(found(name))
    assert text != found(name).file.read_text("utf-8")
    verdicts = judged(tmp_path, {relative(found(name)): text}, of=name)
    assert {verdict.state for verdict in verdicts.values()} <= {"ready", "not-needed"}


def reworded(source: Source) -> str:
    """Return the file's text with a comment and blank lines after every line of code, and other docstrings."""
    text = source.file.read_text("utf-8")
    lines = text.split("\n")
    ends = {
        token.start[0]: token.start[1]
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type in (tokenize.NEWLINE, tokenize.NL) and source.first <= token.start[0] <= source.last
    }
    docs = {doc.lineno: doc for doc in docstrings(text)}
    for row in sorted(ends, reverse=True):
        added = "" if "#" in lines[row - 1] else "  # said otherwise   "
        lines[row - 1 : row] = [lines[row - 1] + added, "# at the left", "  \t", ""]
    # From here on rows within the source have moved: docstrings are found anew.
    text = "\n".join(lines)
    lines = text.split("\n")
    for doc in sorted(docstrings(text), key=lambda doc: -doc.lineno):
        lines[doc.lineno - 1 : doc.end_lineno] = [" " * doc.col_offset + '"""Other words.', "", '  as "said".  """']
    assert docs or "Other words" not in "\n".join(lines)
    return "\n".join(lines)


def renamed(lines: list[str], source: Source, at: int) -> list[str]:
    """Give a function or class another name."""
    mark = "(" if "(" in lines[at] else ":"
    return [*lines[:at], lines[at].replace(mark, "_" + mark, 1), *lines[at + 1 :]]


def removed(lines: list[str], source: Source, at: int) -> list[str]:
    """Leave it out."""
    return cut(lines, source)


def made_async(lines: list[str], source: Source, at: int) -> list[str]:
    """Make a coroutine function of it."""
    return [*lines[:at], lines[at].replace("def ", "async def ", 1), *lines[at + 1 :]]


def decorated(lines: list[str], source: Source, at: int) -> list[str]:
    """Put a decorator on it."""
    blank = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    return [*lines[: source.first - 1], f"{blank}@staticmethod", *lines[source.first - 1 :]]


def made_property(lines: list[str], source: Source, at: int) -> list[str]:
    """Make a property of it."""
    blank = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    return [*lines[: source.first - 1], f"{blank}@property", *lines[source.first - 1 :]]


def assigned(lines: list[str], source: Source, at: int) -> list[str]:
    """Put something that is no definition in its place."""
    blank = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    name = lines[at].split("(")[0].split()[-1].rstrip(":")
    return [*lines[: source.first - 1], f"{blank}{name} = print", *lines[source.last :]]


CHANGES = [renamed, removed, made_async, decorated, made_property, assigned]


# Each change for a third of the names, in turn.
@pytest.mark.parametrize(
    ("name", "change"), [(name, CHANGES[(at + turn) % 6]) for at, name in enumerate(NAMES) for turn in (0, 3)]
)
def test_another_kind_of_thing_is_drift(name: str, change: Callable[..., list[str]], tmp_path: Path) -> None:
    """A name that is gone, or is a coroutine function, decorated, a property or a value: drifted, and named."""
    source = found(name)
    lines = source.file.read_text("utf-8").split("\n")
    last = name.rpartition(".")[2].rpartition(":")[2]
    at = next(
        i for i in range(source.first - 1, source.last) if lines[i].split("(")[0].rstrip(":").endswith(" " + last)
    )
    if change is made_async and "class " in lines[at]:
        pytest.skip("a class cannot be async")
    text = "\n".join(change(lines, source, at))
    ast.parse(text)
    verdicts = judged(tmp_path, {relative(source): text}, of=name)
    for patch in patches_of(name):
        assert verdicts[patch].state == "drifted", verdicts[patch].reason
        assert name in verdicts[patch].reason


@pytest.mark.parametrize("broken", ["def f(:\n", "x = '\n", "\0", "if x:\n", None])
@pytest.mark.parametrize(
    "name", [next(target.name for target in patch.targets if target.name in NAMES) for patch in NEEDED]
)
def test_a_file_that_is_no_code_is_a_state(broken: str | None, name: str, tmp_path: Path) -> None:
    """A target's file that cannot be parsed, or is not there, is a fault with a reason; nothing is raised.

    It is one of the patches that have a target there, and of no other.
    """
    file = found(name).file
    verdicts = judged(tmp_path, {relative(found(name)): broken})
    concerned = {
        patch.name
        for patch in CATALOG
        for name in patch.known_names
        if (source := SOURCES.find(name)) is not None and source.file == file
    }
    assert patches_of(name) <= concerned
    for patch, verdict in verdicts.items():
        state = "drifted" if broken is None else "failed"
        if patch not in concerned:
            assert verdict.state in ("ready", "not-needed")
            continue
        # Of a patch that this release does not need, the version says so where the file says nothing.
        assert verdict.state == state or (verdict.state == "not-needed" and PATCHES[patch] not in NEEDED)
        assert verdict.reason


@pytest.mark.parametrize(
    ("version", "changed", "state"),
    [
        ("0.99.0", False, "ready"),
        ("0.99.0", True, "unsupported"),
        ("0.1.0", False, "ready"),
        ("0.1.0", True, "unsupported"),
        ("0.33.1.dev12+g0123456", False, "ready"),
        ("0.33.1.dev12+g0123456", True, "drifted"),
        ("0.99.0+vendor", False, "ready"),
        ("0.99.0+vendor", True, "drifted"),
        ("our-fork!", False, "ready"),
        ("our-fork!", True, "drifted"),
        (RELEASE, True, "drifted"),
    ],
)
def test_the_code_decides_and_the_version_explains(version: str, changed: bool, state: str, tmp_path: Path) -> None:
    """Known code is ready under any version; other code is unsupported outside the known releases, else drifted."""
    source = found(f"{RELOAD}.layerwise:_layerwise_process")
    changes: dict[str, str | None] = {relative(source): list(mutants(source))[-1]} if changed else {}
    verdict = judged(tmp_path, changes, version)["measured_totals"]
    assert verdict.state == state
    assert not changed or (version in verdict.reason and "_layerwise_process" in verdict.reason)


@pytest.mark.parametrize("patch", [patch for patch in CATALOG if patch.fixed_in], ids=lambda patch: patch.name)
@pytest.mark.parametrize("version", [RELEASE, "0.20.1.dev3+g0123456", "0.99.0.dev1", "0.20.0+vendor", "our-fork!"])
def test_a_fix_is_known_by_its_code(version: str, patch: Patch, tmp_path: Path) -> None:
    """Of a fork or a development build the code decides: the fixed body is not-needed, the one with the fault ready.

    With one token changed it is drifted, but in a release that has the fix by its version, where it is not looked at.
    """
    needed = patch in NEEDED
    verdict = judged(tmp_path / "as it is", {}, version)[patch.name]
    assert verdict.state == ("ready" if needed else "not-needed"), verdict.reason
    assert needed or str(patch.fixed_in) in verdict.reason
    source = found(patch.targets[0].name)
    verdict = judged(tmp_path / "changed", {relative(source): list(mutants(source))[-1]}, version)[patch.name]
    assert verdict.state == ("not-needed" if version == RELEASE and not needed else "drifted"), verdict.reason


def test_a_vllm_without_version_is_judged_by_its_code(tmp_path: Path) -> None:
    """With `_version.py` missing, or with nothing in it, known code is ready."""
    assert judged(tmp_path / "a", {"_version.py": None})["measured_totals"].state == "ready"
    assert judged(tmp_path / "b", {"_version.py": "# nothing\n"})["measured_totals"].state == "ready"


def test_a_known_release_with_the_body_of_another_is_drift(tmp_path: Path) -> None:
    """A release that is known and has the code of another one is not what it says it is."""
    name = f"{RELOAD}.layerwise:_wrap_parameters_weight_loader"
    lock = Lock.load()
    other = "0.20.2" if Version(RELEASE) >= Version("0.25") else "0.33.0"
    assert other not in lock.releases_of(name, SOURCES.fingerprint(name))
    verdict = judged(tmp_path, version=other)["measured_totals"]
    assert verdict.state == "drifted", verdict.reason


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        "\x00\x01",
        '{"format": 1}',
        '{"format": 2, "releases": "0.20.2", "packages": {}, "targets": {}}',
        '{"format": 1, "releases": "", "packages": {}, "targets": {}}',
        '{"format": 1, "releases": "x y", "packages": {}, "targets": {}}',
        '{"format": 1, "releases": "0.20.2", "packages": {}, "targets": {"vllm:b": ["x"]}}',
        '{"format": 1, "releases": "0.20.2", "packages": {}, "targets": {"vllm:b": {"x": 1}}}',
        '{"format": 1, "releases": 3, "packages": {}, "targets": {}}',
        "[" * 100_000,
    ],
)
def test_any_damage_to_the_lock_is_named(text: str) -> None:
    """Whatever the lock file holds, a patch fails with a reason that names the file, and nothing is raised."""
    try:
        lock: Lock | LockError = Lock(text)
    except LockError as error:
        lock = error
    for patch in CATALOG:
        verdict = judge(patch, SOURCES, lock)
        assert verdict.state == "failed"
        assert "upstream.lock" in verdict.reason


# 4. The same on the command line.


def status(path: Path | None, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the status command with a folder first on PYTHONPATH."""
    inherited = os.environ.get("PYTHONPATH", "")
    return subprocess.run(
        [sys.executable, "-m", "vllm_hotfix.status", *arguments],
        env=frame.clean_environment()
        | {"PYTHONPATH": os.pathsep.join([*([str(path)] if path else []), inherited])}
        | environ,
        capture_output=True,
        text=True,
        check=False,
    )


def test_status_says_ready(tmp_path: Path) -> None:
    """Without importing vLLM, status finds this release and every target of it, known and ready; `--check` is 0."""
    done = status(None, "--json", "--check", **ALL_ON)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["vllm"] == {"version": RELEASE, "location": str(SOURCE)}
    for patch in data["patches"]:
        assert patch["state"] in ("ready", "not-needed"), patch
        assert all(target["known"] and target["wrapped"] is None for target in patch["targets"])


def test_status_says_drifted(tmp_path: Path) -> None:
    """With one token changed, status says drifted and which name it is, and `--check` is 1; with the gate off, 0."""
    name = f"{RELOAD}.layerwise:_layerwise_process"
    tree = frame.linked_tree(tmp_path, SOURCE, {relative(found(name)): list(mutants(found(name)))[-1]})
    done = status(tree, "--json", "--check", **ON)
    assert done.returncode == 1
    data = json.loads(done.stdout)
    (patch,) = (patch for patch in data["patches"] if patch["name"] == "measured_totals")
    assert patch["state"] == "drifted"
    assert name in patch["reason"]
    assert [target["name"] for target in patch["targets"] if not target["known"]] == [name]
    assert status(tree, "--check").returncode == 0


def test_status_says_that_a_version_is_strange(tmp_path: Path) -> None:
    """A version that is not understood is said plainly, and is no reason to leave known code unpatched."""
    tree = frame.linked_tree(tmp_path, SOURCE, {"_version.py": "__version__ = 'our-fork!'\n"})
    done = status(tree, "--json", "--check", **ON)
    data = json.loads(done.stdout)
    assert data["vllm"]["version"] == "our-fork!"
    assert any("our-fork!" in problem for problem in data["problems"])
    assert done.returncode == 0


# 2. vLLM imported before activation.


def test_names_taken_before_activation_are_wrapped_and_given_back(worker_modules: list[str], tmp_path: Path) -> None:
    """Wherever a target was imported by name, activation puts the live object and deactivation the original.

    Nothing else changes: every other attribute of every module of vLLM stays the object that it was, and after
    `deactivate()` all of them are.
    """

    def child() -> dict[str, Any]:
        import vllm_hotfix

        held, before = holders(), snapshot()
        os.environ.update(ALL_ON | {STRICT: "1"})
        counts: list[Any] = []
        for _ in range(2):
            vllm_hotfix.activate()
            vllm_hotfix.activate()
            counts.append(frame.live())
            missed = []
            for target, places in held.items():
                module, _, name = target.partition(":")
                live = vars(sys.modules[module])[name]
                missed += [place for place in places if vars(sys.modules[place[0]])[place[1]] is not live]
            after = snapshot()
            changed = {key for key in before if before[key] is not after.get(key)}
            vllm_hotfix.deactivate()
            restored = snapshot()
            different = [key for key in before | restored if before.get(key) is not restored.get(key)]
            counts.append([sorted(map(str, held.items())), missed, sorted(changed), different])
        return {"counts": counts, "held": held, "finder": any("hotfix" in str(type(f)) for f in sys.meta_path)}

    result = frame.forked(tmp_path, child).ok()
    held = {target: [tuple(place) for place in places] for target, places in result["held"].items()}
    begin, end = (
        f"{RELOAD}.layerwise:{name}" for name in ("initialize_layerwise_reload", "finalize_layerwise_processing")
    )
    importer = "vllm.v1.worker.gpu_model_runner" if Version(RELEASE) < Version("0.32") else f"{RELOAD}.inplace"
    assert {(RELOAD, "initialize_layerwise_reload"), (importer, "initialize_layerwise_reload")} <= set(held[begin])
    assert {(RELOAD, "finalize_layerwise_processing")} <= set(held[end])
    streamed = set(held["vllm.model_executor.model_loader.weight_utils:runai_safetensors_weights_iterator"])
    loaders = ("runai_streamer_loader", "sharded_state_loader")
    assert {
        (f"vllm.model_executor.model_loader.{one}", "runai_safetensors_weights_iterator") for one in loaders
    } <= streamed
    for target in TARGETS:
        if "flashinfer_fp4_moe:" in target:
            assert (NVFP4, target.partition(":")[2]) in set(held[target])
    allowed = {place for places in held.values() for place in places} | {
        *(tuple(name.partition(":")[2].split(".")) for name in TARGETS if name not in FUNCTIONS),
        ("Worker", "load_model"),
        ("vllm.plugins", "load_general_plugins"),
        ("vllm.envs", "compile_factors"),
        ("environment_variables", "compile_factors"),
    }
    allowed |= {(key, "load_general_plugins") for key in sys.modules}
    for live, (_, missed, changed, different) in zip(result["counts"][::2], result["counts"][1::2], strict=True):
        assert live["layers"] == WRAPPED
        assert set(live["states"].values()) <= {"active", "not-needed"}
        assert missed == []
        assert {tuple(one) for one in changed} <= allowed
        assert different == []
    assert not result["finder"]


def test_what_is_not_a_target_keeps_its_copies(worker_modules: list[str], tmp_path: Path) -> None:
    """`get_layer_size` and the reload helpers stay stock, with the copies that 0.33's `sharded_rdt_engine` takes."""
    stock = {name: getattr(layerwise, name) for name in ("get_layer_size", "get_numel_loaded")}

    def child() -> list[str]:
        import vllm_hotfix

        os.environ.update(ALL_ON)
        vllm_hotfix.activate()
        reload_utils = importlib.import_module(f"{RELOAD}.utils")
        assert frame.live()["states"]["measured_totals"] == "active"
        assert reload_utils.get_layer_size is stock["get_layer_size"]
        return [name for name, value in stock.items() if getattr(layerwise, name) is not value]

    assert frame.forked(tmp_path, child).ok() == []


# 3. vllm.envs.

SETTINGS = {
    "gate": ON,
    "gate off": {GATE: "0"},
    "alias": {ALIAS: "1"},
    "strict alone": {STRICT: "1"},
    "lists": {"VLLM_HOTFIX_ENABLE": "all", "VLLM_HOTFIX_DISABLE": "measured_totals"},
    "value": {"VLLM_HOTFIX_PINNED_STAGING": "force"},
    "every gate": {patch.env: "1" for patch in CATALOG} | {a: "1" for patch in CATALOG for a in patch.aliases},
}


def validate(*, hard: bool) -> list[str]:
    """Run the release's check for unknown variables; return what it warned of, or raised."""
    from vllm.platforms import current_platform

    check = getattr(vllm.envs, "validate_environ", None) or current_platform.validate_environ
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    for name in ("vllm.envs", "vllm.platforms.interface"):
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        check(hard)
    except ValueError as error:
        return [str(error)]
    return [record.getMessage() for record in records]


def check_envs(environ: dict[str, str]) -> dict[str, Any]:
    """Ask `vllm.envs` all that the package touches: before, with it, and after."""
    import vllm_hotfix

    del os.environ["VLLM_HOTFIX_STATE_DIR"]
    plain = vllm.envs.compile_factors()
    os.environ.update(environ)
    result: dict[str, Any] = {"stock": [validate(hard=hard) for hard in (False, True)]}
    vllm_hotfix.activate()
    result["patched"] = [validate(hard=hard) for hard in (False, True)]
    result["same key"] = vllm.envs.compile_factors() == plain
    os.environ["VLLM_USE_AOT_COMPILE"] = "0" if plain["VLLM_USE_AOT_COMPILE"] else "1"
    result["other key"] = vllm.envs.compile_factors() != plain
    result["values"] = {name: getattr(vllm.envs, name) for name in environ}
    result["set"] = [vllm.envs.is_set(name) for name in environ]
    result["stock value"] = vllm.envs.VLLM_PORT
    vllm.envs.enable_envs_cache()
    result["cached"] = {name: getattr(vllm.envs, name) for name in environ}
    result["port cached"] = vllm.envs.VLLM_PORT
    del os.environ["VLLM_USE_AOT_COMPILE"]
    getattr(vllm.envs, "disable_envs_cache", vars(vllm.envs)["__getattr__"].cache_clear)()
    result["same key cached"] = vllm.envs.compile_factors() == plain
    os.environ["VLLM_HOTFIX_NOT_YET"] = "1"
    result["unknown"] = validate(hard=True)
    vllm_hotfix.deactivate()
    result["undone"] = validate(hard=True)
    result["key undone"] = vllm.envs.compile_factors() == plain
    return result


@pytest.mark.parametrize("name", SETTINGS)
def test_vllm_knows_the_variables_and_its_cache_key_stays(name: str, tmp_path: Path) -> None:
    """The release's check neither warns nor raises with the package, does without it, and the compile key is equal.

    The names can be asked of `vllm.envs` as any other, with its cache on too, and `deactivate()` forgets them.
    """
    environ = SETTINGS[name]
    result = frame.forked(tmp_path, lambda: check_envs(environ)).ok()
    soft, hard = result["stock"]
    assert all(any(variable in line for line in soft) for variable in environ)
    assert len(hard) == 1
    assert any(variable in hard[0] for variable in environ)
    assert result["patched"] == [[], []]
    assert result["same key"]
    assert result["other key"]
    assert result["values"] == result["cached"] == environ
    assert all(result["set"])
    assert result["stock value"] is result["port cached"] is None
    assert result["same key cached"]
    assert result["unknown"] == ["Unknown vLLM environment variable detected: VLLM_HOTFIX_NOT_YET"]
    assert len(result["undone"]) == 1
    assert result["key undone"]


# 5. Strict: the second check, after a worker has loaded its model.


def load_in_worker(config: Any, between: Callable[[], None] = lambda: None) -> str | None:
    """Load with the release's real `Worker.load_model` and a runner that loads nothing; return what stopped it."""
    from contextlib import nullcontext
    from types import SimpleNamespace

    from vllm.v1.worker.gpu_worker import Worker

    class Runner:
        loaded = 0

        def load_model(self, **options: Any) -> None:
            self.loaded += 1
            between()

    worker = Worker.__new__(Worker)
    worker.vllm_config, worker.model_runner, worker.device = config, Runner(), None
    worker._maybe_get_memory_pool_context = lambda tag: nullcontext()
    worker._scoped_allocator_max_split = lambda **options: nullcontext()
    worker.parallel_config = SimpleNamespace()
    try:
        Worker.load_model(worker)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        assert worker.model_runner.loaded == 1
    return None


def strict_worker(config: Any, inject: str = "", between: Callable[[], None] = lambda: None, **environ: str) -> Any:
    """Activate late with something wrong about, then load a model in a worker."""
    if inject:
        vars(frame)[f"break_{inject}"]()
    import vllm_hotfix

    os.environ.update(ON | environ)
    vllm_hotfix.activate()
    return load_in_worker(config, between), frame.small_reload()


@pytest.mark.parametrize("inject", ["hook", "wrap", "rebind", "apply"])
def test_a_worker_stops_where_a_hook_raised(config: Any, inject: str, tmp_path: Path) -> None:
    """Under STRICT an error in a hook stops a worker after it has loaded, with the variable and the reason."""
    outcome = frame.forked(tmp_path, lambda: strict_worker(config, inject, **{STRICT: "1"}))
    message, reloaded = outcome.ok()
    assert message is not None
    assert STRICT in message
    assert "injected" in message
    assert reloaded == [3, 4]


@pytest.mark.parametrize("inject", ["hook", "wrap", "rebind", "apply"])
def test_a_hook_that_raises_leaves_stock(config: Any, inject: str, tmp_path: Path) -> None:
    """Without STRICT it is one warning: every name of vLLM is the stock object, and a reload works."""
    before = snapshot()

    def child() -> Any:
        frame.hear_warnings()
        result = strict_worker(config, inject)
        after = snapshot()
        touched = [key for key in before if before[key] is not after.get(key) and key[1] != "compile_factors"]
        return result, touched

    outcome = frame.forked(tmp_path, child)
    (message, reloaded), touched = outcome.ok()
    assert message is None
    assert reloaded == [3, 4]
    assert touched == []
    assert outcome.warnings
    assert all("injected" in line for line in outcome.warnings)


def test_a_worker_with_everything_right_goes_on(config: Any, tmp_path: Path) -> None:
    """Under STRICT a worker whose patches are active loads and goes on."""
    message, reloaded = frame.forked(tmp_path, lambda: strict_worker(config, **{STRICT: "1"})).ok()
    assert message is None
    assert reloaded == [3, 4]


def replace_live(name: str, value: Any = None) -> None:
    """Replace a live function by one from elsewhere."""
    original = getattr(layerwise, name)
    setattr(layerwise, name, value or (lambda *args, **kwargs: original(*args, **kwargs)))


def test_a_worker_stops_where_a_function_was_replaced_before(config: Any, tmp_path: Path) -> None:
    """A live function that is not the one in the source is drift, and under STRICT a worker says so and stops."""

    def child() -> Any:
        replace_live("_layerwise_process")
        return strict_worker(config, **{STRICT: "1"}), frame.live()

    (message, reloaded), live = frame.forked(tmp_path, child).ok()
    assert live["states"]["measured_totals"] == "drifted"
    assert set(live["layers"].values()) == {0}
    assert message is not None
    assert all(word in message for word in (STRICT, GATE, "measured_totals", "_layerwise_process", "drifted"))
    assert reloaded == [3, 4]


def test_a_worker_stops_where_a_wrapper_was_lost(config: Any, tmp_path: Path) -> None:
    """Replaced after it was wrapped, while the model was loaded: not active any more, and under STRICT no start."""
    stock = layerwise._layerwise_process

    def child() -> Any:
        return strict_worker(config, "", lambda: replace_live("_layerwise_process", stock), **{STRICT: "1"})

    message, _ = frame.forked(tmp_path, child).ok()
    assert message is not None
    assert all(word in message for word in (STRICT, GATE, "measured_totals", "_layerwise_process"))


def test_a_lost_class_is_drift(config: Any, tmp_path: Path) -> None:
    """A class taken out of its module at run time is drift with the target's name, not a bare KeyError."""

    def child() -> Any:
        import vllm_hotfix

        del base_loader.BaseModelLoader
        os.environ.update(ON)
        vllm_hotfix.activate()
        (patch,) = (patch for patch in vllm_hotfix.patches() if patch["name"] == "measured_totals")
        return patch["state"], patch["reason"]

    state, reason = frame.forked(tmp_path, child).ok()
    assert state == "drifted"
    assert "BaseModelLoader.load_model" in reason


@pytest.mark.parametrize("place", ["a file", "proc"])
def test_a_state_folder_that_cannot_be_is_one_warning(config: Any, place: str, tmp_path: Path) -> None:
    """The patches are active all the same; under STRICT a worker stops and names the variable and the folder."""
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file") if place == "a file" else "/proc/no/such/folder"
    for strict in ("0", "1"):
        home = tmp_path / strict
        home.mkdir()

        def child(strict: str = strict) -> Any:
            frame.hear_warnings()
            return strict_worker(config, **{STRICT: strict, "VLLM_HOTFIX_STATE_DIR": folder}), frame.live()

        outcome = frame.forked(home, child)
        (message, reloaded), live = outcome.ok()
        assert live["states"]["measured_totals"] == "active"
        assert reloaded == [3, 4]
        assert len(outcome.warnings) == 1
        assert "VLLM_HOTFIX_STATE_DIR" in outcome.warnings[0]
        assert folder[:8] in outcome.warnings[0]
        if strict == "0":
            assert message is None
        else:
            assert message is not None
            assert "VLLM_HOTFIX_STATE_DIR" in message
            assert folder[:8] in message


# 1. Channels. From here on the outcomes of processes that have run meanwhile.


def assert_all_active(live: dict[str, Any]) -> None:
    """Every target with a fault is wrapped, once, no other is, and every patch that has something to do is active."""
    assert live["layers"] == WRAPPED
    assert set(live["states"].values()) <= {"active", "not-needed"}, live["reasons"]
    assert "active" in live["states"].values()


@pytest.mark.parametrize("kind", ["fresh", "spawned"])
@pytest.mark.parametrize("channel", ["sitecustomize", "import", "plugin"])
def test_a_channel_wraps_every_target_once(zygote: Zygote, channel: str, kind: str) -> None:
    """Each channel alone makes the real targets wrapped, in the first interpreter and in a spawned child."""
    outcome = zygote.outcome(f"{channel} {kind}")
    assert_all_active(outcome.ok())
    assert outcome.warnings == []


def test_run_and_all_channels_at_once_wrap_every_target_once(run_command: tuple[Path, Any]) -> None:
    """Under `vllm-hotfix run --`, a spawned child in which every other channel activates too wraps each once."""
    folder, process = run_command
    outcome = frame.read_outcome(folder, process.wait(timeout=300))
    assert_all_active(outcome.ok())
    assert outcome.warnings == []


def test_a_module_that_is_half_imported_is_waited_for(zygote: Zygote) -> None:
    """Activated in the midst of the import of the layerwise module, its functions are wrapped when it is done."""
    assert_all_active(zygote.outcome("half imported").ok())


# 5. Bad input.

#: For each: its environment if vLLM is imported before, the state of measured_totals, what its warnings must name.
BAD: dict[str, tuple[dict[str, str], str, list[tuple[str, ...]]]] = {
    "settings": (
        {"VLLM_HOTFIX_ENABLE": "measured_totals,no_such_patch", "VLLM_HOTFIX_DISABLE": "nor_this_one"},
        "active",
        [("VLLM_HOTFIX_ENABLE", "no_such_patch"), ("VLLM_HOTFIX_DISABLE", "nor_this_one")],
    ),
    "maybe": ({GATE: "maybe"}, "off", [(GATE, "maybe")]),
    "misspelt": ({"VLLM_HOTFIX_MESURED_TOTALS": "1"}, "off", [("VLLM_HOTFIX_MESURED_TOTALS", "misspelt")]),
    "drifted": ({}, "drifted", [(GATE, "finalize_layerwise_processing")]),
    "missing": ({}, "drifted", [(GATE, "finalize_layerwise_processing (not there)")]),
    "lock": ({}, "failed", [(GATE, "upstream.lock")]),
    "version": ({}, "active", [(GATE, "our-fork!")]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_warning_and_stock_runs(zygote: Zygote, name: str, tmp_path: Path) -> None:
    """The real modules import, a reload works, the process ends well, and one clear line says what is wrong."""
    environ, state, expected = BAD[name]

    def child() -> dict[str, Any]:
        frame.hear_warnings()
        return frame.bad()

    outcome = frame.forked(tmp_path, child, **environ) if environ else zygote.outcome(name)
    result = outcome.ok()
    assert result["states"]["measured_totals"] == state
    wrapped = {target.name for target in PATCHES["measured_totals"].targets} if state == "active" else set()
    assert result["layers"] == {name: int(name in wrapped) for name in result["layers"]}
    assert wrapped & {*TARGETS} <= result["layers"].keys()
    assert result["reload"] == [3, 4]
    assert len(outcome.warnings) == len(expected), outcome.output
    for words in expected:
        assert any(all(word in line for word in words) for line in outcome.warnings), outcome.warnings


def test_a_hook_that_raises_while_vllm_is_imported(zygote: Zygote) -> None:
    """Importing goes on to a stock vLLM that works, warnings say what was raised, and no patch claims to be ready."""
    outcome = zygote.outcome("hook")
    result = outcome.ok()
    assert set(result["layers"].values()) == {0}
    assert result["reload"] == [3, 4]
    assert outcome.warnings
    assert all("injected" in line for line in outcome.warnings)
    assert result["states"]["measured_totals"] == "failed"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("drifted", (GATE, "measured_totals", "drifted", "finalize_layerwise_processing")),
        ("missing", (GATE, "measured_totals", "drifted", "finalize_layerwise_processing (not there)")),
        ("lock", (GATE, "measured_totals", "failed", "upstream.lock")),
        ("version", (GATE, "our-fork!")),
    ],
)
def test_strict_stops_the_engine_when_plugins_are_loaded(zygote: Zygote, name: str, words: tuple[str, ...]) -> None:
    """The release's own `load_general_plugins` raises with the variable and the reason, before a target is imported.

    It does so as the plugin of an installed distribution, and where `VLLM_PLUGINS` leaves the plugin out.
    """
    result = zygote.outcome(f"strict {name}").ok()
    assert result["targets"] == []
    assert_stopped(result, words)


@pytest.mark.parametrize(
    ("inject", "environ", "words"),
    [
        ("", {"VLLM_HOTFIX_ENABLE": "no_such_patch"}, ("VLLM_HOTFIX_ENABLE", "no_such_patch")),
        ("", {GATE: "maybe"}, (GATE, "maybe")),
        ("", ON | {"VLLM_HOTFIX_STATE_DIR": "/proc/no/such/folder"}, ("VLLM_HOTFIX_STATE_DIR", "/proc/no")),
        ("apply", ON, ("injected",)),
        ("wrap", ON, (GATE, "measured_totals", "failed", "injected")),
    ],
    ids=["unknown patch", "maybe", "state folder", "apply", "wrap"],
)
def test_strict_stops_an_engine_with_a_wrong_setting(
    inject: str, environ: dict[str, str], words: tuple[str, ...], tmp_path: Path
) -> None:
    """It does so for a setting that is wrong, and for an error of the package's own, vLLM imported before."""
    plugin = frame.distribution(tmp_path / "plugin")

    def child() -> dict[str, Any]:
        sys.path.insert(0, str(plugin))
        return frame.strict_plugins(inject)

    assert_stopped(frame.forked(tmp_path, child, **environ, **{STRICT: "1"}).ok(), words)
    (tmp_path / "result").unlink()
    calm = frame.forked(tmp_path, child, **environ).ok()
    assert calm["another"] is calm["None"] is None


def assert_stopped(result: dict[str, Any], words: tuple[str, ...]) -> None:
    """Loading the plugins was stopped, with the plugin allowed and without, in words that say why."""
    for message in (result["another"], result["None"]):
        assert message is not None
        assert message.startswith("HotfixError: ")
        assert all(word in message for word in (STRICT, *words)), message


def test_strict_lets_a_target_be_imported_later(zygote: Zygote) -> None:
    """When plugins are loaded no target is imported yet, which is no fault."""
    outcome: Outcome = zygote.outcome("strict good")
    assert outcome.ok() == {"another": None, "None": None, "targets": []}
    assert outcome.warnings == []


def test_status_imports_the_targets_of_one_patch(tmp_path: Path) -> None:
    """Alone, in an order in which they import each other: all that this release has is wrapped, nothing is wrong."""
    environ = frame.clean_environment() | {"VLLM_HOTFIX_KEEP_MOE_KERNEL": "1", "VLLM_HOTFIX_STATE_DIR": str(tmp_path)}
    command = [sys.executable, "-P", "-m", "vllm_hotfix.status", "--import", "--check", "--json"]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    data = json.loads(done.stdout)
    assert data["problems"] == []
    (patch,) = (one for one in data["patches"] if one["name"] == "keep_moe_kernel")
    assert patch["state"] == "active"
    targets = [target.name for target in PATCHES["keep_moe_kernel"].targets]
    assert patch["reason"] == f"{sum(name in TARGETS for name in targets)} functions wrapped"
