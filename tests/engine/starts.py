"""Starts of real engines, for `test_strict.py` and `test_live.py`.

Many starts are cheap, each in a fork: ``starts.py FOLDER MODEL`` imports what vLLM imports, torch above all, but
neither vLLM nor the package. For each stage that comes on stdin it forks a child, which imports vLLM as an interpreter
with that stage's environment does, and which forks again for each start. Engines with processes of their own fork those
too, which is vLLM's way wherever the platform is not a CPU.

Some are whole: ``starts.py PLAN`` starts one engine in an interpreter of its own, and vLLM spawns the others, which is
its way on a CPU and in ``vllm serve``.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "upstream"))

import frame

HERE = Path(__file__).resolve().parent
WORKER = "VllmWorker"  # how vLLM's worker processes are named
LAYERWISE = f"{frame.RELOAD}.layerwise"
#: An engine is the same wherever these tests start one.
ENGINE = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 16 << 20,
    "max_model_len": 64,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "seed": 0,
}
PROMPTS = [[1, 5, 9, 13, 17 + number] for number in range(3)]


@dataclass
class Start:
    """One start of an engine.

    Attributes:
        processes: whether the engine has processes of its own.
        plugins: ``VLLM_PLUGINS``; None leaves it unset.
        inject: name of a function of this file that the API process calls first.
        lenient: whether ``VLLM_HOTFIX_STRICT`` is taken away first, if the stage has it.
    """

    processes: bool = False
    plugins: str | None = None
    inject: str = ""
    lenient: bool = False


@dataclass
class Stage:
    """An environment, and the starts in it by their names; ``path`` comes first on PYTHONPATH."""

    path: list[str]
    environ: dict[str, str]
    starts: dict[str, Start] = field(default_factory=dict)


@dataclass
class Outcome:
    """How a start went.

    Attributes:
        error: what the API process raised, with its type's name; None if the engine started.
        tokens: greedy tokens of the engine that started.
        live: the processes that ``--live`` listed then.
        left: ids of the processes that outlived the API process.
        files: names of the state files that they have left.
        output: what all its processes wrote.
        before: what was written before by the process that imported vLLM.
    """

    error: str | None
    tokens: list[list[int]] | None
    live: list[dict[str, Any]]
    left: list[int]
    files: list[str]
    output: str
    before: str

    @property
    def warnings(self) -> list[str]:
        """The lines in which the package warned."""
        return warnings(self.before + self.output)


def warnings(output: str) -> list[str]:
    """The lines of a log in which the package warned, without what comes before its own words."""
    lines = [line for line in output.splitlines() if "vllm-hotfix: " in line and "Error: vllm-hotfix: " not in line]
    return [line.partition("vllm-hotfix: ")[2] for line in lines if " INFO " not in line]


def generate(llm: Any) -> list[list[int]]:
    """Greedy tokens for the prompts."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=16, detokenize=False, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


# What is done to an engine, called in its API process.


def under() -> None:
    """Have the process that loads the model replace a function before the package sees it, by an import hook."""
    _replace_when_imported()
    hook = sys.meta_path.pop(0)
    sys.meta_path.insert(sys.meta_path.index(sys.modules["_vllm_hotfix"].FINDER) + 1, hook)


def over() -> None:
    """Have the process that loads the model replace a function that the package has wrapped."""
    _replace_when_imported()


def _replace_when_imported() -> None:
    import wrapt

    def replace(module: Any) -> None:
        if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" or _name().startswith(WORKER):
            module._layerwise_process = lambda layer, info: None

    assert LAYERWISE not in sys.modules
    sys.meta_path[:] = [one for one in sys.meta_path if type(one).__name__ != "ImportHookFinder"]
    sys.meta_path.insert(0, wrapt.importer.ImportHookFinder())
    wrapt.register_post_import_hook(replace, LAYERWISE)


def _name() -> str:
    return multiprocessing.current_process().name


def drift_later() -> None:
    """Have processes that are spawned from now on find another vLLM, as if it were changed while an engine starts."""
    sys.path.insert(0, os.environ["DRIFTED"])  # which spawned processes take over


# One engine.


def run(plan: dict[str, Any]) -> None:
    """Start an engine, answer on stdout, then do what comes on stdin: ``reload``, until the end of it."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import vllm

    if plan["inject"]:
        globals()[plan["inject"]]()
    try:
        llm = vllm.LLM(**{**ENGINE, **plan["options"]})
    except Exception as error:
        traceback.print_exc()
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers, flush=True)
        return
    print(json.dumps({"tokens": generate(llm)}), file=answers, flush=True)
    for word in sys.stdin:
        assert word == "reload\n"
        llm.collective_rpc("reload_weights")
        print(json.dumps({"tokens": generate(llm)}), file=answers, flush=True)
    llm.llm_engine.engine_core.shutdown()


# The process that forks.


def serve(folder: Path, model: str) -> None:
    """Fork a child for each stage, as many at once as there are cores."""
    stages = {name: Stage(**stage) for name, stage in json.load(sys.stdin).items()}
    for module in frame._PRELOADED:
        importlib.import_module(module)
    assert not {"vllm", "vllm_hotfix"} & sys.modules.keys()
    # A collection in a child would copy all this memory.
    gc.disable()
    gc.freeze()
    running = 0
    for name, stage in stages.items():
        if running >= max(2, os.cpu_count() or 1):
            os.wait()
            running -= 1
        (folder / name).mkdir()
        if os.fork() == 0:
            _end(lambda name=name, stage=stage: _stage(folder / name, stage, model))
        running += 1
    for _ in range(running):
        os.wait()


def _end(work: Callable[[], None]) -> NoReturn:
    """Work, and end as an interpreter does, but without taking thousands of modules apart."""
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _stage(folder: Path, stage: Stage, model: str) -> None:
    _write_into(folder / "output")
    environ = environment(stage.path, stage.environ)
    os.environ.clear()
    os.environ.update(environ | {"TMPDIR": str(folder)})
    tempfile.tempdir = None  # found before
    sys.path[:0] = stage.path
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()
    sys.modules.pop("sitecustomize", None)
    frame.site.execsitecustomize()
    sys.modules["torch"].set_num_threads(1)  # its thread pool has not come along
    import vllm.entrypoints.llm
    import vllm.v1.engine.utils
    import vllm.v1.executor.multiproc_executor

    context = multiprocessing.get_context("fork")
    for module in (vllm.v1.engine.utils, vllm.v1.executor.multiproc_executor):
        module.get_mp_context = lambda: context
    for name, start in stage.starts.items():
        (folder / name).mkdir()
        one = Start(**start) if isinstance(start, dict) else start
        pid = os.fork()
        if pid == 0:
            _end(lambda name=name, one=one: _start(folder / name, one, model))
        (folder / name / "pid").write_text(str(pid))
        os.waitpid(pid, 0)
        left = {"left": end_session(pid), "files": []}
        for file in folder.glob("vllm-hotfix-*/*"):
            if not file.name.endswith(f"-{os.getpid()}.json"):
                left["files"].append(file.name)
                file.unlink()
        (folder / name / "draft").write_text(json.dumps(left))
        (folder / name / "draft").rename(folder / name / "left")


def _start(folder: Path, start: Start, model: str) -> None:
    os.setsid()
    _write_into(folder / "output")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(start.processes))
    if start.lenient:
        del os.environ[frame.STRICT]
    if start.plugins is not None:
        os.environ["VLLM_PLUGINS"] = start.plugins
    if start.inject:
        globals()[start.inject]()
    from vllm import LLM

    found: dict[str, Any] = {"error": None, "tokens": None, "live": []}
    try:
        llm = LLM(model=model, **ENGINE)
        found["tokens"] = generate(llm)
        if "vllm_hotfix._hooks" in sys.modules:
            from vllm_hotfix.status import live_report

            found["live"] = live_report()["processes"]
        llm.llm_engine.engine_core.shutdown()
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    (folder / "draft").write_text(json.dumps(found))
    (folder / "draft").rename(folder / "result")


def end_session(leader: int, patience: float = 3) -> list[int]:
    """The processes of a session whose leader has ended, after a while for them to end too; then they are killed."""
    deadline = time.monotonic() + patience
    while found := _session(leader):
        if time.monotonic() > deadline:
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            break
        time.sleep(0.05)
    return found


def _session(leader: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(session) == leader and state != "Z":
            found.append(int(path.parent.name))
    return found


def _write_into(file: Path) -> None:
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(handle, 1)
    os.dup2(handle, 2)


# The test's side.


def environment(path: list[str], environ: Mapping[str, str]) -> dict[str, str]:
    """What an interpreter finds around it: these folders first on PYTHONPATH, these variables, none else of vLLM."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "RUNAI_"))}
    settings = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",  # the model is tiny, and engines run side by side
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
    inherited = os.environ.get("PYTHONPATH")
    return clean | settings | {"PYTHONPATH": os.pathsep.join([*path, *filter(None, [inherited])])} | environ


class Whole:
    """An engine in an interpreter of its own, with spawned processes, in a session of its own.

    Args:
        folder: made for its log and its temporary files.
        path: folders that come first on PYTHONPATH.
        environ: variables.
        inject: name of a function of this file that its API process calls first.
        options: what ``vllm.LLM`` gets beside `ENGINE`.
    """

    def __init__(
        self, folder: Path, path: list[str], environ: Mapping[str, str], inject: str = "", **options: Any
    ) -> None:
        folder.mkdir()
        self.folder = folder
        (folder / "plan").write_text(json.dumps({"inject": inject, "options": options}))
        self.environ = environment(path, {"TMPDIR": str(folder), "VLLM_LOGGING_COLOR": "0", **environ})
        with open(folder / "log", "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(folder / "plan")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self.environ,
                start_new_session=True,
            )

    def __enter__(self) -> Whole:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.wait()
        end_session(self.process.pid, patience=0)

    @property
    def log(self) -> str:
        """What all its processes have written so far."""
        return (self.folder / "log").read_text("utf-8", "replace")

    def answer(self, word: str = "") -> dict[str, Any]:
        """Say a word to its API process, if there is one to say, and wait for the answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if word:
            print(word, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        assert line, self.log
        return dict(json.loads(line))

    def end(self) -> list[int]:
        """Have it end; returns the processes that outlived it, which are ended too."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(120)
        return end_session(self.process.pid)


class Starts:
    """The process that forks, and the outcomes of its starts."""

    def __init__(self, stages: Mapping[str, Stage], folder: Path, model: Path) -> None:
        self.folder = folder
        with open(folder / "log", "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(folder), str(model)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                env=environment([], {}),
                start_new_session=True,
            )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({name: asdict(stage) for name, stage in stages.items()}))
        self.process.stdin.close()

    def outcome(self, stage: str, name: str, patience: float = 300) -> Outcome:
        """Wait for a start to end."""
        home = self.folder / stage
        deadline = time.monotonic() + patience
        while not (home / name / "left").exists():
            if self.process.poll() is not None and not (home / name / "left").exists():
                break
            assert time.monotonic() < deadline, f"{stage}, {name} does not end"
            time.sleep(0.05)
        if not (home / name / "result").exists():
            files = [self.folder / "log", home / "output", home / name / "output"]
            raise RuntimeError("\n".join(file.read_text("utf-8", "replace") for file in files if file.exists()))
        found = json.loads((home / name / "result").read_text())
        left = json.loads((home / name / "left").read_text())
        texts = [(file / "output").read_text("utf-8", "replace") for file in (home / name, home)]
        return Outcome(**found, **left, output=texts[0], before=texts[1])


@contextmanager
def starting(stages: Mapping[str, Stage], folder: Path, model: Path) -> Iterator[Starts]:
    """Start the process that forks, and end it and what it has begun."""
    starts = Starts(stages, folder, model)
    try:
        yield starts
    finally:
        with suppress(ProcessLookupError):
            os.killpg(starts.process.pid, signal.SIGKILL)
        starts.process.wait()
        for file in folder.glob("*/*/pid"):
            if not (file.parent / "left").exists():
                end_session(int(file.read_text()), patience=0)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        run(json.loads(Path(sys.argv[1]).read_text()))
    else:
        serve(Path(sys.argv[1]), sys.argv[2])
