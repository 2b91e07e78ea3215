"""measured_totals in a real engine: vLLM 0.32 on the CPU with the Run:ai streamer, a process for each engine.

Only vLLM's own objects and the installed package take part. A reload of the weights that are loaded already would
prove nothing, so checkpoint B comes between A and A, and each is compared with a cold load of itself: the greedy
tokens, and the SHA-256 of every tensor that the model's modules reach.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import checkpoints, worker
from engine.launch import GATE, Engine, Failed, counters, differences

ON = {GATE: "1"}
PINNED_ON = {"VLLM_HOTFIX_PINNED_STAGING": "1"}
EXPERT_WEIGHTS = {
    f"model.layers.{layer}.mlp.experts.routed_experts.{name}"
    for layer in range(checkpoints.LAYERS)
    for name in ("w13_weight", "w2_weight")
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Checkpoint A and B in every order of tensors, by names such as ``A-layers``."""
    return checkpoints.write_all(tmp_path_factory.mktemp("checkpoints"))


class Engines:
    """Runs engines on all cores in the background, in the order in which they are named."""

    def __init__(self, pool: ThreadPoolExecutor, folder: Path) -> None:
        self.pool, self.folder = pool, folder
        self.futures: dict[str, Future[dict[str, Any] | Failed]] = {}
        self.running: list[Engine] = []

    def start(self, name: str, plan: dict[str, Any], gates: dict[str, str] | None = None) -> None:
        """Queue an engine."""

        def run() -> dict[str, Any] | Failed:
            with Engine(plan, self.folder / name, sys.executable, gates) as engine:
                self.running.append(engine)
                try:
                    return engine.result()
                except Failed as failure:
                    return failure

        self.futures[name] = self.pool.submit(run)

    def stop(self) -> None:
        """Start no more engines and end those that run."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        for engine in self.running:
            engine.stop()

    def __getitem__(self, name: str) -> dict[str, Any]:
        result = self.futures[name].result()
        if isinstance(result, Failed):
            raise result
        return result

    def warnings(self, name: str) -> list[str]:
        """Return the lines of an engine's log in which the package warned."""
        log = (self.folder / name / "engine.log").read_text(errors="replace")
        return [line for line in log.splitlines() if "vllm-hotfix: " in line and "INFO" not in line]


@pytest.fixture(scope="module")
def engines(folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """All engines of this module: started with the first test that needs one, results by name."""
    a, b = folders["A-layers"], folders["B-layers"]
    leftover = {
        "load": folders["A-leftover"],
        "reloads": [folders["B-leftover"], folders["A-leftover"], b],
        "one_at_a_time": True,
        "inspect": True,
    }
    ordinary = {
        "load": a,
        "reloads": [folders["B-scattered"], folders["A-late"], b],
        "keep_kernels": True,
        "inspect": True,
    }
    pool = ThreadPoolExecutor(min(4, len(os.sched_getaffinity(0))))
    engines = Engines(pool, tmp_path_factory.mktemp("engines"))
    engines.start("cold B", {"load": b, "inspect": True})
    engines.start("leftover, on", leftover, ON)
    engines.start("leftover, off", leftover)
    engines.start("ordinary, on", ordinary, {**ON, "VLLM_HOTFIX_STRICT": "1"})
    engines.start("ordinary, off", ordinary)
    engines.start("dummy, on", {"load": a, "load_format": "dummy", "reloads": [b], "inspect": True}, ON)
    pinned = {"load": a, "extra_config": {"pinned_staging": True}, "inspect": True}
    engines.start("pinned, on", pinned, PINNED_ON)
    try:
        yield engines
    finally:
        engines.stop()


@pytest.fixture(scope="module")
def cold_a(engines: Engines) -> dict[str, Any]:
    """Tokens and digests of a cold load of A without the package's gates."""
    return engines["ordinary, off"]["steps"][0]


@pytest.fixture(scope="module")
def cold_b(engines: Engines) -> dict[str, Any]:
    """Tokens and digests of a cold load of B without the package's gates."""
    return engines["cold B"]["steps"][0]


def assert_same(step: dict[str, Any], cold: dict[str, Any]) -> None:
    """Check that a step left the tensors of a cold load, all of them, and gave its tokens."""
    assert differences(step, cold) == []
    assert step["tokens"] == cold["tokens"]


def test_checkpoints_differ_in_every_tensor() -> None:
    """Checkpoints of two seeds share names and shapes and no value of a whole tensor, norm weights included."""
    first, second = dict(checkpoints.tensors(1)), dict(checkpoints.tensors(2))
    assert list(first) == list(second)
    assert [name for name in first if torch.equal(first[name], second[name])] == []
    assert {name: t.shape for name, t in first.items()} == {name: t.shape for name, t in second.items()}


def test_digests_reach_derived_tensors() -> None:
    """The walk finds parameters, buffers, plain attributes, containers, closures, slots and helper objects.

    It tells values, dtypes and shapes apart and leaves the key-value cache out.
    """

    class Helper:
        __module__ = "vllm.helper"
        __slots__ = ("__dict__", "in_slot")

    def closure(tensor: torch.Tensor) -> Any:
        return lambda: tensor

    layer = torch.nn.Linear(2, 2)
    model = torch.nn.Sequential(layer)
    layer.register_buffer("buffer", torch.zeros(1))
    layer.plain, layer.kv_cache, layer.listed = torch.zeros(2), torch.zeros(3), [{"key": torch.zeros(4)}]
    layer.function, layer.quant_method = closure(torch.zeros(5)), Helper()
    layer.quant_method.in_slot, layer.quant_method.in_dict = torch.zeros(6), torch.zeros(7)
    layer.weight.derived = torch.zeros(8)
    found = worker.digests(model)
    assert set(found) == {
        "0.weight",
        "0.weight.derived",
        "0.bias",
        "0.buffer",
        "0.plain",
        "0.listed[0][key]",
        "0.function<tensor>",
        "0.quant_method.in_slot",
        "0.quant_method.in_dict",
    }
    layer.quant_method.in_slot = torch.ones(6)
    layer.plain = torch.zeros(2, dtype=torch.bfloat16)
    layer.listed[0]["key"] = torch.zeros(2, 2)
    after = worker.digests(model)
    changed = {"0.quant_method.in_slot", "0.plain", "0.listed[0][key]"}
    assert {path for path in found if found[path] != after[path]} == changed


def test_cold_loads_differ(cold_a: dict[str, Any], cold_b: dict[str, Any]) -> None:
    """A and B give other tokens for every prompt and other weights in every layer: doing nothing cannot pass."""
    assert all(a != b for a, b in zip(cold_a["tokens"], cold_b["tokens"], strict=True))
    same = {path for path, digest in cold_a["digests"].items() if cold_b["digests"][path] == digest}
    # What is left: the rotary table, attention scales of 1, and weights that oneDNN has taken in (the probes differ).
    assert [
        p for p in same if not p.endswith(("cos_sin_cache", "_scale", "_scale_cpu", "proj.weight", "gate.weight"))
    ] == []
    assert all(path in cold_a["digests"] for path in EXPERT_WEIGHTS)


@pytest.mark.parametrize("kind", ["leftover", "ordinary"])
def test_reloads_equal_cold_loads(engines: Engines, cold_a: dict, cold_b: dict, kind: str) -> None:
    """With the gate on, A, then B, then A again equal cold loads in tokens and in every tensor.

    ``leftover``: every layer of experts has more loader calls than tensors. ``ordinary``: as many, but B's layers
    come in pieces over all shards and A's last reload brings a projection and the norms last.
    """
    first, second, third = engines[f"{kind}, on"]["steps"][:3]
    assert_same(first, cold_a)
    assert_same(second, cold_b)
    assert_same(third, cold_a)


def test_stock_processes_experts_too_early(engines: Engines, cold_b: dict[str, Any]) -> None:
    """With the gate off, a reload of experts that are loaded in more calls than declared leaves them wrong.

    This is the fault that measured_totals is for. Only the experts' weights are wrong, and the tokens with them.
    If this fails, vLLM has changed and the patch may not be needed.
    """
    step = engines["leftover, off"]["steps"][1]
    wrong = differences(step, cold_b)
    assert wrong
    assert set(wrong) <= EXPERT_WEIGHTS
    assert step["tokens"] != cold_b["tokens"]


def test_fewer_loads_than_measured_end_right(engines: Engines, cold_b: dict[str, Any]) -> None:
    """A reload that brings fewer loader calls than the first load made is completed at its end."""
    step = engines["leftover, on"]["steps"][3]
    assert_same(step, cold_b)


def test_ordinary_checkpoint_needs_no_patch(engines: Engines, cold_a: dict, cold_b: dict) -> None:
    """With the gate off, an ordinary unquantized checkpoint reloads right: there the patch changes nothing.

    Stock counts each tensor once and processes every layer at its last tensor.
    """
    _, second, third = engines["ordinary, off"]["steps"][:3]
    assert_same(second, cold_b)
    assert_same(third, cold_a)
    tensors = sum(1 for _ in checkpoints.tensors(1))
    assert second["trigger"] == third["trigger"] == {"loads": tensors, "dropped": 0, "finalized": 0}


#: Loader calls that a first load counts: one a tensor, but for the norms, which have vLLM's default loader.
COUNTED = sum(1 for name, _ in checkpoints.tensors(1) if "norm" not in name)


@pytest.mark.parametrize("gate", ["on", "off"])
def test_stock_forgets_the_cpu_layout(engines: Engines, cold_b: dict[str, Any], gate: str) -> None:
    """Where vLLM keeps its CPU expert kernels, a reload leaves the experts in checkpoint layout, gate on or off.

    This is why all other reloads here forget the kernels first. If this fails, vLLM's CPU backend is mended and
    `worker.forget_cpu_kernels` can go.
    """
    step = engines[f"ordinary, {gate}"]["steps"][3]
    assert set(differences(step, cold_b)) == EXPERT_WEIGHTS
    assert step["tokens"] != cold_b["tokens"]


def test_live_process_says_active_and_counts(engines: Engines) -> None:
    """In the live engine measured_totals is active, and its counters say what was measured and held back."""
    result = engines["leftover, on"]
    (process,) = result["live"]
    assert process["pid"] == result["pid"]
    assert process["patches"]["measured_totals"]["state"] == "active"
    experts = checkpoints.LAYERS * checkpoints.EXPERTS
    assert counters(result)["loader_calls_measured"] == COUNTED + experts
    assert counters(result)["reloads"] == 3
    assert counters(result)["layers_measured"] > 0
    assert counters(result)["layers_triggered_early"] > 0


def test_off_is_off(engines: Engines) -> None:
    """Without a gate no process of the engine has a state file: the package did nothing."""
    assert engines["leftover, off"]["live"] == []


def test_strict_engine_starts(engines: Engines) -> None:
    """An engine under VLLM_HOTFIX_STRICT=1 starts when its patch is active, and works.

    On an ordinary checkpoint stock's trigger never comes too early, and the counter says so.
    """
    result = engines["ordinary, on"]
    (process,) = result["live"]
    assert process["patches"]["measured_totals"]["state"] == "active"
    assert counters(result)["reloads"] == 3
    assert counters(result)["layers_triggered_early"] == 0


def test_dummy_first_load_keeps_the_stock_trigger(engines: Engines, cold_b: dict[str, Any]) -> None:
    """After a first load of dummy weights nothing is measured, nothing is held back, and a reload is right."""
    result = engines["dummy, on"]
    step = result["steps"][1]
    assert_same(step, cold_b)
    assert {name for name, value in counters(result).items() if value} == {"reloads"}


def test_pinned_staging_without_cuda_is_stock_and_says_so(engines: Engines, cold_a: dict[str, Any]) -> None:
    """Where there is no CUDA, an engine with `pinned_staging` starts, loads as stock does, and warns once why.

    The patch is active in the live process, understands the key that vLLM 0.32 would refuse, and counts the load.
    """
    result = engines["pinned, on"]
    (step,) = result["steps"]
    assert_same(step, cold_a)
    (warning,) = engines.warnings("pinned, on")
    assert "WARNING" in warning
    assert "pinned_staging: stock loads these weights" in warning
    assert "not CUDA" in warning
    (process,) = result["live"]
    assert process["patches"] == {"pinned_staging": process["patches"]["pinned_staging"]}
    assert process["patches"]["pinned_staging"]["state"] == "active"
    assert counters(result, "pinned_staging") == {"stock_loads": 1}
