"""``python -m vllm_hotfix.drill`` as a command: verdicts, refusals, and that no process stays behind.

vLLM is a stand-in here that has the drill's methods and no tensors; a real engine is in ``tests/engine``, and digests
of real tensors in ``tests/upstream``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_hotfix import drill
from vllm_hotfix._drill import report
from vllm_hotfix._drill.report import Difference, Digest, Round

#: What `LLM` does is told by the environment: SCENE names a function of ``scenes``.
VLLM = {
    "vllm/_version.py": "__version__ = version = '0.20.2'\n",
    "vllm/utils/__init__.py": "",
    "vllm/utils/argparse_utils.py": "from argparse import ArgumentParser as FlexibleArgumentParser\n",
    "vllm/scenes.py": """\
        import json, os, sys

        class EngineDeadError(Exception):
            pass

        def stock(llm, what, number):
            pass

        def differs(llm, what, number):
            if what == "reload" and number >= 2:
                llm.tensors["layers.0.attn.W_UV"][0] = f"other {number}"
                llm.tensors["layers.1.attn.W_UV"][0] = f"other {number}"

        def moves(llm, what, number):
            if what == "reload":
                llm.tensors["layers.0.experts.quant_method.moe_kernel.strides"][1] += 64

        def talks_garbage(llm, what, number):
            if what == "reload":
                llm.answer = [7]

        def varies(llm, what, number):
            if what == "generate":
                llm.answer = [llm.count("answers")]

        def varies_later(llm, what, number):
            # Of five runs one goes another way, but for the first three.
            if what == "generate":
                number = llm.count("answers")
                llm.answer = [1, 2, 4] if number > 12 and number // 4 % 5 == 3 else [1, 2, 3]

        def raves(llm, what, number):
            if what == "generate" and llm.counts.get("reloads"):
                llm.answer = [llm.count("answers")]

        def no_tensors(llm, what, number):
            llm.tensors = {}

        def torn(llm, what, number):
            if what == "reload":
                os.write(int(sys.argv[1]), b'{"round": {"num')
                os.kill(os.getpid(), 9)

        def long_error(llm, what, number):
            if what == "start":
                print("pydantic_core.ValidationError: 1 validation error for ModelConfig", flush=True)
                raise ValueError("1 validation error for ModelConfig\\n  Value error, no such thing")

        def makes_lazily(llm, what, number):
            name = "layers.0.made_by_a_pass"
            if what == "generate":
                llm.tensors[name] = ["made", 8192, "4 float32 on cuda:0"]
            if what == "reload":
                llm.tensors.pop(name)

        def raises(llm, what, number):
            if what == "reload" and number == 2:
                raise NotImplementedError("Model reloading with `runai_streamer` format\\nis not there")

        def dies(llm, what, number):
            if what == "reload" and number == 3:
                os.kill(os.getpid(), 9)

        def core_dies(llm, what, number):
            if what == "generate" and llm.count("answers") == 21:
                print("(EngineCore pid=7) ERROR 11-30 04:00:00 [core.py:1] Traceback")
                print("(EngineCore pid=7) torch.AcceleratorError: CUDA error: an illegal memory access")
                print("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue")
                raise EngineDeadError("EngineCore encountered an issue. See stack trace (above) for the root cause.")

        def fork(llm):
            import multiprocessing, time
            llm.core = multiprocessing.get_context("fork").Process(
                target=time.sleep, args=(600,), name="EngineCore", daemon=True)
            llm.core.start()

        def dies_beside_a_fork(llm, what, number):
            if what == "start":
                fork(llm)
            dies(llm, what, number)

        def dead_in_reload(llm, what, number):
            if what == "reload":
                raise EngineDeadError("EngineCore is dead")

        def silent_death(llm, what, number):
            if what == "start":
                fork(llm)
            if what == "reload" and number == 2:
                import time
                llm.core.kill()
                time.sleep(600)

        def cannot_sleep(llm, what, number):
            if what == "start" and llm.options["enable_sleep_mode"]:
                raise ValueError("Sleep mode is not supported on current platform.")

        def full(llm, what, number):
            if what == "start":
                core = "(EngineCore pid=7) ERROR 11-30 04:00:00 [core.py:1136]"
                print(core, "ValueError: Free memory on device (1.0/139.8 GiB) is less than desired")
                print("(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.")
                raise RuntimeError("Engine core initialization failed. See root cause above.")

        def writes(llm, what, number):
            if what == "generate":
                llm.tensors["layers.0.buffer"][0] = str(llm.count("answers"))

        def hangs(llm, what, number):
            if what == "reload":
                import time

                time.sleep(600)
    """,
    "vllm/__init__.py": """\
        import json, os, subprocess, sys
        from types import SimpleNamespace as Namespace

        from . import scenes


        class EngineArgs:
            @staticmethod
            def add_cli_args(parser):
                for name in ("--model", "--load-format", "--worker-extension-cls", "--tokenizer", "--runner"):
                    parser.add_argument(name)
                for name in ("--enable-sleep-mode", "--skip-tokenizer-init", "--enforce-eager"):
                    parser.add_argument(name, action="store_true")
                return parser


        def SamplingParams(**options):
            return options


        class LLM:
            def __init__(self, **options):
                print(json.dumps(options))
                with open(os.environ["TMPDIR"] + "/options.json", "w") as file:
                    json.dump(options, file)
                # As an engine core: a process of its own, which does not look after whoever started it.
                child = subprocess.Popen(["sleep", "600"])
                with open(os.environ["TMPDIR"] + "/pids", "w") as file:
                    print(os.getpid(), child.pid, file=file)
                self.options, self.answer, self.counts = options, [1, 2, 3], {}
                self.awake, self.cached = {"weights", "kv_cache"}, set()
                self.scene = getattr(scenes, os.environ.get("SCENE", "stock"), scenes.stock)
                layers = ("layers.0.attn.W_UV", "layers.1.attn.W_UV", "layers.0.buffer")
                names = (*layers, "layers.0.experts.quant_method.moe_kernel.strides")
                self.tensors = {name: ["fresh", 4096 + 64 * n, "4 float32 on cuda:0"] for n, name in enumerate(names)}
                mode = Namespace(name="FULL_DECODE_ONLY")
                self.llm_engine = Namespace(vllm_config=Namespace(
                    load_config=Namespace(load_format=options["load_format"] or "auto"),
                    model_config=Namespace(
                        runner_type=options["runner"] or "generate", get_vocab_size=lambda: 100, max_model_len=64,
                        enforce_eager=options["enforce_eager"]),
                    compilation_config=Namespace(cudagraph_mode=mode)))
                self.scene(self, "start", 0)

            def count(self, name):
                self.counts[name] = self.counts.get(name, 0) + 1
                return self.counts[name]

            def reset_prefix_cache(self):
                self.cached = set()
                return True

            def generate(self, prompts, sampling, use_tqdm):
                assert self.awake == {"weights", "kv_cache"}
                assert sampling == {"temperature": 0, "max_tokens": 16, "ignore_eos": True, "detokenize": False}
                (prompt,) = [tuple(prompt["prompt_token_ids"]) for prompt in prompts]
                assert len(prompt) + 16 <= 64 and max(prompt) < 100 and prompt not in self.cached
                self.cached.add(prompt)
                self.scene(self, "generate", 0)
                # As a model would: it answers to what it is asked.
                return [Namespace(outputs=[Namespace(token_ids=[*self.answer, *prompt])])]

            def lose(self):
                for one in self.tensors.values():
                    one[0] = "lost"

            def sleep(self, level):
                assert level == 2 and self.options["enable_sleep_mode"]
                self.awake = set()
                if os.environ.get("SCENE") != "loses_nothing":
                    self.lose()

            def wake_up(self, tags):
                assert tags in (["weights"], ["kv_cache"])
                self.awake |= set(tags)

            def collective_rpc(self, method, args=()):
                if method == "hotfix_digests":
                    left_out = {"layers.0.kv_cache": "the KV cache"}
                    return [json.dumps({"tensors": self.tensors, "scratch": left_out, "seconds": 0.01})]
                if method == "hotfix_describe":
                    return [json.dumps(dict.fromkeys(args[0], "other values"))]
                if method == "hotfix_state":
                    states = [{"name": "keep_moe_kernel", "state": "active"}]
                    return [json.dumps({"device": "cuda", "used": 1 << 30, "patches": states})]
                if method == "hotfix_poison":
                    self.lose()
                if method == "reload_weights":
                    assert "weights" in self.awake
                    if os.environ.get("SCENE") != "forgets":
                        for one in self.tensors.values():
                            one[0] = "fresh"
                    self.scene(self, "reload", self.count("reloads"))
                return [None]
    """,
}


@pytest.fixture
def run(real_house: Any, write: Callable[..., Path], tmp_path: Path) -> Callable[..., Any]:
    """Run the drill against the stand-in, with a model that is a folder."""
    write(VLLM)
    write({"model/config.json": "{}", "model/tokenizer.json": "{}"})

    def run(*arguments: str, model: str | None = None, code: int | None = None, **environ: str) -> Any:
        first = [str(tmp_path / "model") if model is None else model]
        return real_house.run(
            *("-m", "vllm_hotfix.drill", *first, *arguments),
            path=(real_house.folder, tmp_path),
            code=code,
            TMPDIR=str(tmp_path),
            **environ,
        )

    return run


@pytest.fixture
def started(real_house: Any, write: Callable[..., Path], tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Start the drill against the stand-in and wait until its engine is at work."""
    write({**VLLM, "model/config.json": "{}"})
    processes = []

    def start(**environ: str) -> subprocess.Popen[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLLM_"))}
        env |= {"PYTHONPATH": f"{real_house.folder}{os.pathsep}{tmp_path}", "TMPDIR": str(tmp_path), **environ}
        command = [str(real_house.bare), "-m", "vllm_hotfix.drill", str(tmp_path / "model")]
        process = subprocess.Popen(
            command,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # In the background of a shell the tests inherit that Ctrl-C is ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        processes.append(process)
        for line in process.stderr:
            if "ready" in line:
                return process
        raise AssertionError("the drill has ended")

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def nothing_left(folder: Path) -> bool:
    """Whether the stand-in's processes have ended within two seconds."""
    pids = [int(word) for word in (folder / "pids").read_text().split()]
    deadline = time.monotonic() + 2
    while alive := [pid for pid in pids if Path(f"/proc/{pid}/cmdline").exists() and _cmdline(pid)]:
        if time.monotonic() > deadline:
            raise AssertionError(f"{alive} are left")
        time.sleep(0.05)
    return True


def _cmdline(pid: int) -> bytes:
    """The command of a process, nothing if it has ended and nobody has asked for its status."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_identical_rounds_are_success(run: Callable[..., Any], tmp_path: Path) -> None:
    """The table and the verdict are on stdout, progress on stderr, the status is 0, and no process is left."""
    done = run("--rounds", "3", code=0)
    header, *rows, left_out, verdict = done.stdout.splitlines()
    assert header.split()[:2] == ["round", "reload"]
    assert [row.split()[0] for row in rows] == ["1", "2", "3"]
    assert all("equal" in row and "1,024" in row for row in rows)
    assert left_out == "not compared: layers.0.kv_cache; the KV cache"
    assert verdict == "3 of 3 rounds identical to the fresh load"
    assert "ready after" in done.stderr and "round 3 of 3: identical" in done.stderr
    assert "keep_moe_kernel active" in done.stderr
    assert nothing_left(tmp_path)
    assert not list(tmp_path.glob("vllm-hotfix-drill-*"))


def test_a_difference_is_failure_and_names_tensor_and_patch(run: Callable[..., Any]) -> None:
    """The path, how it differs, in which rounds, and what would help; the same in many layers is one line."""
    done = run("--rounds", "3", code=1, SCENE="differs")
    assert "layers.0.attn.W_UV and 1 more like it\n    other values: has other values (2 rounds); " in done.stdout
    assert done.stdout.endswith("1 of 3 rounds identical to the fresh load\n")


def test_a_moved_tensor_counts_where_graphs_captured_it(run: Callable[..., Any]) -> None:
    """With CUDA graphs a tensor at another address is a fault, without them it is a note."""
    done = run("--rounds", "2", code=1, SCENE="moves")
    assert "moved, but equal (2 rounds); keep_moe_kernel (active)" in done.stdout
    done = run("--rounds", "2", "--enforce-eager", code=0, SCENE="moves")
    assert "tensors moved; that is harmless without CUDA graphs" in done.stdout


def test_other_tokens_are_failure(run: Callable[..., Any]) -> None:
    """Also where all tensors are equal."""
    done = run("--rounds", "1", code=1, SCENE="talks_garbage")
    assert "  differ  " in done.stdout.splitlines()[1]


@pytest.mark.parametrize("scene", ["varies", "varies_later"])
def test_tokens_that_vary_by_themselves_prove_nothing(run: Callable[..., Any], scene: str) -> None:
    """A kernel that is not deterministic is told from a wrong reload, and the report says that tokens are no proof."""
    done = run("--rounds", "4", code=0, SCENE=scene)
    assert "  vary  " in done.stdout
    assert "tokens vary from run to run on unchanged weights" in done.stdout


def test_tokens_that_are_chance_after_a_reload_are_wrong(run: Callable[..., Any]) -> None:
    """Where the fresh load's never come again, it is not the kernels that vary."""
    done = run("--rounds", "1", code=1, SCENE="raves")
    assert "  differ  " in done.stdout.splitlines()[1]


@pytest.mark.parametrize("level", ["0", "2"])
def test_a_reload_that_does_nothing_is_failure(run: Callable[..., Any], level: str) -> None:
    """What was lost is missing then, at either level."""
    done = run("--rounds", "1", "--level", level, code=1, SCENE="forgets")
    assert "stale: the reload has not written it" in done.stdout


def test_what_a_forward_pass_makes_may_be_gone(run: Callable[..., Any]) -> None:
    """The next one makes it again."""
    assert run("--rounds", "2", code=0, SCENE="makes_lazily").stdout.endswith(
        "2 of 2 rounds identical to the fresh load\n"
    )


def test_a_closed_output_is_no_verdict(run: Callable[..., Any], real_house: Any, tmp_path: Path) -> None:
    """Where the table cannot be written the status is 2, in one line."""
    run("--rounds", "1", code=0)
    command = f"'{real_house.bare}' -m vllm_hotfix.drill '{tmp_path / 'model'}' --rounds 1"
    path = f"{real_house.folder}{os.pathsep}{tmp_path}"
    env = {"PYTHONPATH": path, "TMPDIR": str(tmp_path), "PATH": os.environ["PATH"]}
    for redirected in (">/dev/full", "0<&- >&-"):
        done = subprocess.run(["sh", "-c", f"{command} {redirected}"], env=env, stderr=subprocess.PIPE, text=True)
        assert done.returncode == (2 if "full" in redirected else 0)
        assert "Traceback" not in done.stderr


def test_what_a_forward_pass_writes_must_be_named(run: Callable[..., Any]) -> None:
    """Scratch that is not known is a difference, with the way to name it."""
    done = run("--rounds", "1", code=1, SCENE="writes")
    assert "layers.0.buffer\n" in done.stdout
    assert "a forward pass writes it: if it is scratch, name it with --scratch" in done.stdout


def test_a_reload_that_raises_is_failure(run: Callable[..., Any]) -> None:
    """The rounds end there; the error is one line, with the patch for it if there is one."""
    done = run("--rounds", "3", "--load-format", "runai_streamer", code=1, SCENE="raises")
    line = "the reload failed: NotImplementedError: Model reloading with `runai_streamer` format is not there; "
    assert f"round 2: {line}" in done.stdout
    assert f"round 2 of 3: {line}" in done.stderr
    assert done.stdout.endswith("1 of 2 rounds identical to the fresh load\n")


@pytest.mark.parametrize(
    ("scene", "line"),
    [
        ("torn", "the engine died in round 1: its process ended by signal SIGKILL"),
        (
            "long_error",
            "the engine does not start: ValueError: 1 validation error for ModelConfig Value error, no such thing",
        ),
        ("loses_nothing", "nothing was discarded: whatever the reload does, this worker's tensors are as they were"),
        ("no_tensors", "a worker has no tensors that could be compared"),
        ("dies_beside_a_fork", "the engine died in round 3: its process ended by signal SIGKILL"),
        ("dead_in_reload", "the engine died in round 1: EngineDeadError: EngineCore is dead"),
        ("dies", "the engine died in round 3: its process ended by signal SIGKILL"),
        ("core_dies", "the engine died in round 3: torch.AcceleratorError: CUDA error: an illegal memory access"),
        (
            "cannot_sleep",
            "the engine does not start: ValueError: Sleep mode is not supported on current platform. "
            "(`--level 0` needs none)",
        ),
        ("silent_death", "the engine died in round 2: EngineCore ended by signal SIGKILL"),
        ("full", "the engine does not start: ValueError: Free memory on device (1.0/139.8 GiB) is less than desired"),
    ],
)
def test_an_engine_that_fails_is_one_line(run: Callable[..., Any], tmp_path: Path, scene: str, line: str) -> None:
    """The root cause, though another process had it; no traceback, status 2, no process left, but the log."""
    done = run("--rounds", "5", "--json", str(tmp_path / "out.json"), code=2, SCENE=scene)
    assert done.stderr.splitlines()[-1] == f"drill: {line}"
    assert not (tmp_path / "out.json").exists()
    assert "Traceback" not in done.stderr + done.stdout
    assert done.stdout == ""
    assert nothing_left(tmp_path)
    (log,) = tmp_path.glob("vllm-hotfix-drill-*/engine.log")
    assert f"its log: {log}" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--load-format", "dummy"], "load format 'dummy' has no weights that a reload could bring back"),
        (["--runner", "pooling"], "does not generate text, and the drill compares what is generated"),
        (["--port", "8000"], "vLLM does not take these engine arguments: unrecognized arguments: --port 8000"),
        (["--worker-extension-cls", "x.Y"], "--worker-extension-cls is what the drill itself needs"),
        (["--json", "/nowhere/at/all.json"], "--json /nowhere/at/all.json: No such file or directory"),
        (["--json", "/"], "--json /: Is a directory"),
        (["--model=other"], "the model is the first argument, not --model"),
    ],
)
def test_what_cannot_be_drilled_is_refused(run: Callable[..., Any], arguments: list[str], line: str) -> None:
    """In one line, with status 2."""
    done = run(*arguments, code=2)
    assert done.stderr.splitlines()[-1].startswith("drill: ") and line in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_models_that_are_none_are_refused_before_anything_starts(run: Callable[..., Any], tmp_path: Path) -> None:
    """No such folder, a folder without config.json, a file."""
    (tmp_path / "empty").mkdir()
    for model, line in (
        (str(tmp_path / "none"), f"there is no model {tmp_path / 'none'}"),
        ("./none", "there is no model ./none"),
        (str(tmp_path / "empty"), f"there is no model in {tmp_path / 'empty'}: it has no config.json"),
        (str(tmp_path / "model/config.json"), f"{tmp_path / 'model/config.json'} is a file"),
    ):
        done = run(model=model, code=2)
        assert done.stderr.startswith(f"drill: {line}") and done.stderr.count("\n") == 1
    assert not (tmp_path / "pids").exists()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("version = '0.19.1'", "vLLM 0.19.1 is not supported; the drill knows 0.20.0 to 0.33.0"),
        ("version = 'mine'", "the version of the installed vLLM, 'mine', is not understood"),
    ],
)
def test_releases_that_are_not_supported_are_refused(
    run: Callable[..., Any], write: Callable[..., Path], text: str, line: str
) -> None:
    """In one line, with status 2."""
    write({"vllm/_version.py": text})
    done = run(code=2)
    assert done.stderr == f"drill: {line}\n"


def test_a_newer_release_is_tried(run: Callable[..., Any], write: Callable[..., Path]) -> None:
    """And the report says that it is not known."""
    write({"vllm/_version.py": "version = '0.40.0'"})
    assert "vLLM 0.40.0 is newer than 0.33.0" in run("--rounds", "1", code=0).stderr


def test_without_vllm_it_is_refused(real_house: Any, tmp_path: Path) -> None:
    """It names the interpreter that has none."""
    done = real_house.run("-m", "vllm_hotfix.drill", str(tmp_path), code=2)
    assert done.stderr == f"drill: no vLLM is installed for {real_house.bare}\n"


@pytest.mark.parametrize(
    "arguments",
    [[], ["--rounds", "3", "MODEL"], ["M", "--rounds", "0"], ["M", "--level", "1"], ["M", "--scratch", "("]],
)
def test_wrong_arguments_are_explained(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    """With the usage, and status 2."""
    with pytest.raises(SystemExit) as ended:
        drill.main(arguments)
    assert ended.value.code == 2
    assert "usage: python -m vllm_hotfix.drill MODEL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_no_process_outlives_the_drill(
    started: Callable[..., Any], tmp_path: Path, number: signal.Signals, status: int
) -> None:
    """Ctrl-C, SIGTERM and even SIGKILL in the middle of a round end the engine's processes too."""
    process = started(SCENE="hangs")
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == status
    assert "Traceback" not in errors
    assert nothing_left(tmp_path)


def test_the_json_has_everything(run: Callable[..., Any], tmp_path: Path) -> None:
    """Versions, arguments, patches, and each difference of each round with its worker."""
    run("--rounds", "2", "--json", str(tmp_path / "out.json"), "--load-format", "auto", code=1, SCENE="differs")
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["vllm"] == "0.20.2"
    assert found["arguments"] == ["--load-format", "auto"]
    assert found["patches"][0]["state"] == "active"
    assert not found["identical"]
    first, second = found["rounds"]
    assert (first["differing"], second["differing"]) == (0, 2)
    assert second["differences"][0]["path"] == "layers.0.attn.W_UV"
    assert second["differences"][0]["rank"] == 0


def test_vllm_is_started_as_serve_starts_it(run: Callable[..., Any], tmp_path: Path) -> None:
    """Engine arguments arrive; sleep mode is on where the drill sleeps; no tokenizer is asked for where none is."""
    run("--rounds", "1", "--load-format", "safetensors", code=0)
    options = json.loads((tmp_path / "options.json").read_text())
    assert options["load_format"] == "safetensors"
    assert options["enable_sleep_mode"] and not options["skip_tokenizer_init"]
    (tmp_path / "model/tokenizer.json").unlink()
    run("--rounds", "1", "--level", "0", code=0)
    options = json.loads((tmp_path / "options.json").read_text())
    assert options["skip_tokenizer_init"] and not options["enable_sleep_mode"]


FRESH = {"a": Digest("1", 64, "4 float32 on cuda:0")}
LOST = FRESH["a"]._replace(digest="0")


@pytest.mark.parametrize(
    ("before", "after", "how"),
    [
        (FRESH["a"], FRESH["a"], None),
        (LOST, FRESH["a"], None),
        (
            LOST,
            LOST,
            "stale: the reload has not written it",
        ),
        (LOST, FRESH["a"]._replace(digest="2"), "has other values"),
        (LOST, LOST._replace(address=128), "has other values"),
        (FRESH["a"], FRESH["a"]._replace(address=128), "moved, but equal"),
        (
            FRESH["a"],
            FRESH["a"]._replace(layout="4 float16 on cuda:0"),
            "is 4 float16 on cuda:0, was 4 float32 on cuda:0",
        ),
        (FRESH["a"], None, "is gone"),
    ],
)
def test_how_a_tensor_differs(before: Digest, after: Digest | None, how: str | None) -> None:
    """A tensor that nobody has written to is told from one that was written wrong, and both from one that moved."""
    found = report.compare(FRESH, {"a": before}, {} if after is None else {"a": after})
    assert found.get("a", (None,))[0] == how


def test_a_tensor_of_a_reload_alone_differs() -> None:
    """What the fresh load did not have is named."""
    assert report.compare({}, {}, FRESH) == {"a": ("was not there after the fresh load", True)}


def test_host_memory_may_move() -> None:
    """No graph captures its addresses."""
    was, now = (Digest("1", address, "scalar float32 on cpu") for address in (1, 2))
    assert report.compare({"a": was}, {"a": was}, {"a": now}) == {}


@pytest.mark.parametrize(
    ("symptom", "patch"),
    [
        ("auto: layers.3.mlp.experts.quant_method.moe_kernel.fused_experts.g1_alphas", "keep_moe_kernel"),
        ("auto: layers.3.mlp.experts.w13_weight", "measured_totals"),
        ("auto: RuntimeError: more than one element of the written-to tensor refers to", "writable_scales"),
        ("auto: layers.3.input_layernorm.weight", "no patch"),
    ],
)
def test_which_patch_addresses_a_symptom(symptom: str, patch: str) -> None:
    """By the path of the tensor or the error's text; a patch that is off comes with its variable."""
    text = report.addressed_by(symptom, {})
    assert text.startswith(patch)
    assert (patch == "no patch") or f"off: VLLM_HOTFIX_{patch.upper()}=1" in text


def test_a_patch_that_is_on_is_said_to_be() -> None:
    """So that a fault it should have mended is seen as one."""
    assert report.addressed_by("auto: x.moe_kernel.y", {"keep_moe_kernel": "not-needed"}).endswith("(not-needed)")


def test_a_long_list_is_cut() -> None:
    """The report ends somewhere, and says where the rest is."""
    names = [f"{chr(97 + one % 26)}{chr(97 + one // 26)}" for one in range(60)]
    this = Round(1, differences=[Difference(name, 0, "has other values", True, "no patch") for name in names])
    lines = report.differences([this])
    assert len(lines) == 41 and lines[-1] == "... and 20 more kinds; --json has them all"
