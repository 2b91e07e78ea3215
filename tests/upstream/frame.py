"""Processes for `test_frame.py`: what happens in an interpreter before, while and after it imports vLLM.

Run as a program this file imports what vLLM itself imports, torch above all, but neither vLLM nor the package, and
forks one child per case that comes on stdin: in a child, importing vLLM takes a third of its time.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import logging
import multiprocessing
import os
import re
import shutil
import site
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

RELOAD = "vllm.model_executor.model_loader.reload"
QUANTIZATION = "vllm.model_executor.layers.quantization"
COMPRESSED = f"{QUANTIZATION}.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe"
TARGET_MODULES = (
    f"{RELOAD}.layerwise",
    f"{RELOAD}.meta",
    "vllm.model_executor.model_loader.base_loader",
    "vllm.model_executor.layers.attention.mla_attention",
    f"{QUANTIZATION}.utils.flashinfer_fp4_moe",
    f"{QUANTIZATION}.modelopt",
    f"{QUANTIZATION}.fp8",
    f"{QUANTIZATION}.quark.quark_moe",
    f"{QUANTIZATION}.online.fp8",
    f"{QUANTIZATION}.online.nvfp4",
    f"{COMPRESSED}_w8a8_fp8",
    f"{COMPRESSED}_w4a4_nvfp4",
    f"{COMPRESSED}_w4a8_fp8",
    "vllm.model_executor.kernels.linear.mixed_precision.marlin",
    "vllm.device_allocator.cumem",
    "vllm.device_allocator.xpumem",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.model_runner",
)
GATE = "VLLM_HOTFIX_MEASURED_TOTALS"
STRICT = "VLLM_HOTFIX_STRICT"
ALIAS = "VLLM_LAYERWISE_RELOAD_MEASURED_TOTALS"

# Outcomes.


@dataclass
class Outcome:
    """What a process said, returned and exited with."""

    code: int
    result: Any
    output: str

    @property
    def warnings(self) -> list[str]:
        """The lines in which the package warned; vLLM's own and the news of an active patch are left out."""
        lines = [line for line in self.output.splitlines() if "vllm-hotfix: " in line]
        return [line.partition("vllm-hotfix: ")[2] for line in lines if not re.match(r".*\b(INFO|DEBUG)\b", line)]

    def ok(self) -> Any:
        """Return what the probe returned; the process must have ended well."""
        assert self.code == 0, self.output
        return self.result


@dataclass
class Case:
    """One process: the function of this file that it calls, and what it finds around it."""

    probe: str
    options: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    path: list[str] = field(default_factory=list)


def clean_environment() -> dict[str, str]:
    """Return the environment without a gate, and without a setting of vLLM but that its plugins are left alone."""
    return {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}


class Zygote:
    """The process that forks the cases; it starts at once, so that they run while other tests do."""

    def __init__(self, cases: Mapping[str, Case], folder: Path) -> None:
        self.folder = folder
        self.started = time.monotonic()
        command = [sys.executable, __file__, str(folder)]
        with open(folder / "log", "w") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True, env=clean_environment()
            )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({name: asdict(case) for name, case in cases.items()}))
        self.process.stdin.close()

    def outcome(self, name: str, patience: float = 900) -> Outcome:
        """Wait for a case to end."""
        while not (self.folder / name / "code").exists():
            ended = self.process.poll() is not None and not (self.folder / name / "code").exists()
            if ended or time.monotonic() - self.started > patience:
                raise RuntimeError(f"no outcome of {name}: {(self.folder / 'log').read_text()}")
            time.sleep(0.05)
        return read_outcome(self.folder / name, int((self.folder / name / "code").read_text()))

    def close(self) -> None:
        """End the process, and with it what it has not begun."""
        self.process.terminate()
        self.process.wait()


def read_outcome(folder: Path, code: int) -> Outcome:
    """Read what a child has left in its folder."""
    result = folder / "result"
    output = (folder / "output").read_text("utf-8", "replace")
    return Outcome(code, json.loads(result.read_text()) if result.exists() else None, output)


def forked(folder: Path, function: Callable[[], Any], **environ: str) -> Outcome:
    """Call a function in a fork of this process: vLLM is imported there already, and nothing is changed here."""
    pid = os.fork()
    if pid == 0:
        code = 1
        gc.freeze()  # a collection would copy all this memory
        try:
            _enter(folder, environ)
            _leave(folder, function())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return read_outcome(folder, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _enter(folder: Path, environ: Mapping[str, str]) -> None:
    """Write into a file and start with a clean environment."""
    handle = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    # pytest has put its own in place, which logging handlers made by vLLM may hold.
    sys.stdout, sys.stderr = open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
    kept = clean_environment()
    os.environ.clear()
    os.environ.update(kept | {"VLLM_HOTFIX_STATE_DIR": str(folder)} | dict(environ))
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # its thread pool has not come along


def _leave(folder: Path, result: Any) -> None:
    (folder / "result").write_text(json.dumps(result))


# Folders.


def linked_tree(folder: Path, source: Path, changes: Mapping[str, str | None]) -> Path:
    """Make a copy of a package through links, with some files changed, and with others (None) left out."""
    _link(source, folder / source.name)
    for name, text in changes.items():
        path = folder / source.name
        for part in Path(name).parts[:-1]:
            path = path / part
            if path.is_symlink():
                original = path.resolve()
                path.unlink()
                _link(original, path)
        path = path / Path(name).name
        path.unlink()
        if text is not None:
            path.write_text(text, "utf-8")
    return folder


def _link(source: Path, folder: Path) -> None:
    folder.mkdir(parents=True)
    for child in source.iterdir():
        if child.name != "__pycache__":
            (folder / child.name).symlink_to(child)


def copied_package(folder: Path, lock: str) -> Path:
    """Make a copy of this package with another lock file."""
    home = package_home()
    shutil.copytree(home / "vllm_hotfix", folder / "vllm_hotfix", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(home / "_vllm_hotfix.py", folder)
    (folder / "vllm_hotfix/upstream.lock").write_text(lock)
    return folder


def package_home() -> Path:
    """The folder that holds the package."""
    (found,) = {
        Path(entry) for entry in map(os.path.abspath, sys.path) if Path(entry, "vllm_hotfix/__init__.py").is_file()
    }
    return found


def distribution(folder: Path) -> Path:
    """Make the metadata of an installed vllm-hotfix, by which vLLM finds its plugin."""
    info = folder / "vllm_hotfix-0.0.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-hotfix\nVersion: 0.0.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nvllm_hotfix = _vllm_hotfix:plugin\n")
    return folder


# Probes: called in a child by their name.


def import_targets() -> None:
    """Import the modules of the targets, and see the CPU as vLLM's platform as a CPU build does."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()
    import_all(TARGET_MODULES)


def import_all(modules: Iterable[str]) -> None:
    """Import modules, those that this release has."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise


def layers(target: str) -> int:
    """Count the wrapt wrappers around a live target."""
    from wrapt import FunctionWrapper

    module, _, qualname = target.partition(":")
    found = sys.modules[module]
    for part in qualname.split("."):
        found = vars(found)[part]
    count = 0
    while isinstance(found, FunctionWrapper):
        count, found = count + 1, found.__wrapped__
    return count


def live() -> dict[str, Any]:
    """Describe every target of this release, and every patch, as they are in this process."""
    from vllm_hotfix import patches
    from vllm_hotfix._catalog import CATALOG
    from vllm_hotfix._upstream import Sources

    sources = Sources()
    names = [target.name for patch in CATALOG for target in patch.targets]
    return {
        "layers": {name: layers(name) for name in names if sources.find(name)},
        "states": {patch["name"]: patch["state"] for patch in patches()},
        "reasons": {patch["name"]: patch["reason"] for patch in patches()},
    }


def small_reload() -> list[float]:
    """Reload one parameter through the release's own layerwise functions."""
    import torch
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    torch.accelerator.empty_cache = lambda: None
    model = torch.nn.Linear(2, 1, bias=False).requires_grad_(False)
    model.weight.weight_loader = default_weight_loader
    layerwise.record_metadata_for_reloading(model)
    layerwise.initialize_layerwise_reload(model)
    model.weight.weight_loader(model.weight, torch.tensor([[3.0, 4.0]]))
    layerwise.finalize_layerwise_reload(model, None)
    return [float(value) for value in model.weight.flatten()]


def load_plugins(calls: int = 1) -> None:
    """Load vLLM's plugins by its own function, as each of its processes does, often more than once."""
    import vllm.plugins

    for _ in range(calls):
        vllm.plugins.load_general_plugins()


def run_site() -> None:
    """Do what an interpreter does last at its start: run the sitecustomize that PYTHONPATH leads to."""
    sys.modules.pop("sitecustomize", None)
    assert "vllm_hotfix" not in sys.modules
    site.execsitecustomize()
    assert Path(sys.modules["sitecustomize"].__file__ or "").parent.name == "bootstrap"


def channel(name: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Activate by one channel, or by all of them, and import the targets."""
    os.environ.update(environ)
    if name == "sitecustomize":
        run_site()
    if name in ("import", "all"):
        import vllm_hotfix  # noqa: F401
    if name in ("plugin", "all"):
        load_plugins(calls=2)
    # With no channel named, what the interpreter's start has done is all there is.
    import_targets()
    return live()


def channel_in_child(name: str, environ: Mapping[str, str]) -> Any:
    """Do the same in a spawned child, a whole new interpreter, while this one imports nothing of vLLM."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        result = pool.apply(channel, (name, environ))
    assert "vllm" not in sys.modules
    return result


def channel_half_imported() -> dict[str, Any]:
    """Activate while the layerwise module is half imported, by a module that it imports."""
    import builtins

    real = builtins.__import__
    seen = []

    def importing(name: str, *args: Any, **kwargs: Any) -> Any:
        module = sys.modules.get(TARGET_MODULES[0])
        if module is not None and not seen:
            seen.append(not hasattr(module, "finalize_layerwise_reload"))
            os.environ["VLLM_HOTFIX_ENABLE"] = "all"
            real("vllm_hotfix")
        return real(name, *args, **kwargs)

    builtins.__import__ = importing
    import_targets()
    builtins.__import__ = real
    assert seen == [True]
    return live()


def bad(inject: str = "") -> dict[str, Any]:
    """Import the targets with something wrong about, and reload."""
    if inject:
        globals()[f"break_{inject}"]()
    import vllm_hotfix

    import_targets()
    vllm_hotfix.activate()
    return live() | {"reload": small_reload()}


def hear_warnings() -> None:
    """Let the package's warnings reach stderr, whatever this process has set for vLLM's loggers."""
    logger = logging.getLogger("vllm.hotfix")
    logger.setLevel(logging.WARNING)
    logger.addHandler(logging.StreamHandler(sys.stderr))
    logger.propagate = False


def boom(*args: Any, **kwargs: Any) -> Any:
    """Raise what nobody expects."""
    raise ZeroDivisionError("injected")


def break_hook() -> None:
    """Let what the post-import hook does for a patch raise."""
    import vllm_hotfix._hooks

    vllm_hotfix._hooks.Activation._wrap = boom


def break_wrap() -> None:
    """Let wrapping raise."""
    import vllm_hotfix._hooks

    vllm_hotfix._hooks.Activation._wrap_target = staticmethod(boom)


def break_rebind() -> None:
    """Let it raise after a function was wrapped, while the names bound elsewhere are changed."""
    import vllm_hotfix._hooks

    vllm_hotfix._hooks._rebind = boom


def break_apply() -> None:
    """Let the first step after reading the gates raise."""
    import vllm_hotfix._hooks

    vllm_hotfix._hooks.Sources = boom


def strict_plugins(inject: str = "") -> dict[str, Any]:
    """Load vLLM's plugins, first with a list that leaves this package out, then with all; return what stopped it."""
    if inject:
        globals()[f"break_{inject}"]()
    import vllm.plugins

    import vllm_hotfix

    vllm_hotfix.activate()
    found: dict[str, Any] = {}
    for allowed in ("another", None):
        os.environ.pop("VLLM_PLUGINS", None)
        if allowed is not None:
            os.environ["VLLM_PLUGINS"] = allowed
        vllm.plugins.plugins_loaded = False
        found[str(allowed)] = None
        try:
            load_plugins()
        except RuntimeError as error:
            found[str(allowed)] = f"{type(error).__name__}: {error}"
    return found | {"targets": [module for module in TARGET_MODULES if module in sys.modules]}


# The zygote.

_PRELOADED = (
    "torch._inductor.lowering",
    "torch._inductor.standalone_compile",
    "transformers",
    "transformers.models.gemma",
    "openai.types.responses",
    "torch.distributed",
)


def serve(home: Path) -> None:
    """Fork a child for each case, as many at once as there are cores."""
    cases = {name: Case(**case) for name, case in json.load(sys.stdin).items()}
    for module in _PRELOADED:
        importlib.import_module(module)
    assert not {"vllm", "vllm_hotfix"} & sys.modules.keys()
    # A collection in a child would copy all this memory.
    gc.disable()
    gc.freeze()
    running: dict[int, str] = {}

    def reap() -> None:
        pid, status = os.wait()
        done = home / running.pop(pid)
        (done / "draft").write_text(str(os.waitstatus_to_exitcode(status)))
        (done / "draft").rename(done / "code")

    for name, case in cases.items():
        if len(running) >= max(2, os.cpu_count() or 1):
            reap()
        (home / name).mkdir()
        pid = os.fork()
        if pid == 0:
            _become(case, home / name)
        running[pid] = name
    while running:
        reap()


def _become(case: Case, folder: Path) -> NoReturn:
    code = 1
    try:
        _run(case, folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    # As an interpreter ends, without taking thousands of modules apart.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(case: Case, folder: Path) -> None:
    _enter(folder, case.environ)
    sys.path[:0] = case.path
    os.environ["PYTHONPATH"] = os.pathsep.join([*case.path, os.environ.get("PYTHONPATH", "")])
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()
    _leave(folder, globals()[case.probe](**case.options))


@contextlib.contextmanager
def zygote(cases: Mapping[str, Case], folder: Path) -> Iterator[Zygote]:
    """Start the process that forks the cases, and end it."""
    process = Zygote(cases, folder)
    try:
        yield process
    finally:
        process.close()


if __name__ == "__main__":
    if len(sys.argv) > 2:  # a single case that is about the start of its own interpreter
        _leave(Path(sys.argv[1]), channel_in_child(sys.argv[2], {}))
    else:
        serve(Path(sys.argv[1]))
