"""sleep_tensors on the releases' real worker, allocator and layers, beside stock vLLM.

The worker's `sleep` and `wake_up` and the allocator are vLLM's. Played by host memory: the driver's calls that map and
unmap a block. All tensors that come to be while a model is loaded, whoever holds them, are blocks of the weights' pool:
unmapped, they hold garbage, and mapped again zeros, as on a GPU. Then the real reload brings the parameters.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.device_allocator
from layers import Host, Piece, Probe, same
from packaging.version import Version
from patching import counters, hearing, switched_on, written_counters
from torch import nn
from vllm.config import LoRAConfig, VllmConfig
from vllm.device_allocator import cumem
from vllm.distributed.eplb.eplb_state import EplbModelState
from vllm.lora.layers import ReplicatedLinearWithLoRA
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsKVCacheMethod
from vllm.model_executor.models.gemma3n import Gemma3nAltUp
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_hotfix._patches import sleep_tensors
from vllm_hotfix._tensors import walk

RELEASE = Version(os.environ["HOTFIX_RELEASE"])
NAME = "sleep_tensors"
#: Since when stock saves what: Gemma 3n's scales (they are buffers), the draft model's buffers.
SAVES_GEMMA = Version("0.29.0") <= RELEASE
SAVES_DRAFT_BUFFERS = Version("0.27.0") <= RELEASE
#: Where a wake-up of the KV cache alone copies to the weights, which are not mapped yet.
WAKES_EARLY = Version("0.27.0") > RELEASE


def tensors() -> list[torch.Tensor]:
    """Return all tensors of this process that have memory."""
    gc.collect()
    found = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    strided = [one for one in found if one.layout is torch.strided and not one.is_meta]
    return [one for one in strided if one.untyped_storage().nbytes()]


class Pool:
    """vLLM's own allocator, with host memory for its blocks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cumem, "cumem_available", True)
        monkeypatch.setattr(cumem, "libcudart", SimpleNamespace(cudaMemcpy=ctypes.memmove))
        monkeypatch.setattr(cumem, "create_and_map", lambda handle: ctypes.memset(handle[2], 0, handle[1]))
        monkeypatch.setattr(cumem, "unmap_and_release", lambda handle: ctypes.memset(handle[2], 0xDD, handle[1]))
        for name in ("is_pin_memory_available", "PIN_MEMORY"):
            monkeypatch.setattr(cumem, name, (lambda: False) if name.startswith("is") else False, raising=False)
        self.allocator: Any = cumem.CuMemAllocator()
        monkeypatch.setattr(cumem.CuMemAllocator, "instance", self.allocator)
        #: Keeps the blocks.
        self._blocks: list[Any] = []

    def put(self, tag: str, make: Callable[[], Any]) -> Any:
        """Have all tensors that a function makes in blocks with this tag."""
        others = tensors()  # kept, or a new one could have the identity of one that is gone
        before = {id(one) for one in others}
        made = make()
        for one in tensors():
            storage = one.untyped_storage()
            if id(one) not in before and storage.data_ptr() not in self.allocator.pointer_to_data:
                self._blocks.append(storage)
                self.allocator.current_tag = tag
                self.allocator._python_malloc_callback((0, storage.nbytes(), storage.data_ptr(), 0))
        return made


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    """What the worker's allocator is, and what it asks of the device."""
    pool = Pool(monkeypatch)
    for module in (vllm.device_allocator, gpu_worker):
        monkeypatch.setattr(module, "get_mem_allocator_instance", lambda: pool.allocator, raising=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *args: (1 << 30, 1 << 31))
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda *args: (1 << 30, 1 << 31), raising=False)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *args: None)
    return pool


class Holder:
    """An object of vLLM's that holds tensors."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


class Runner:
    """What a worker asks of its model runner."""

    def __init__(self, model: nn.Module, drafter: nn.Module | None = None) -> None:
        self.model = model
        self.drafter = Holder(model=drafter) if drafter is not None else None

    def get_model(self) -> nn.Module:
        """Return the target model."""
        return self.model

    def get_draft_model(self) -> nn.Module | None:
        """Return the draft model."""
        return self.drafter.model if self.drafter is not None else None

    def post_kv_cache_wake_up(self) -> None:
        """Do nothing: no KV cache is quantized here."""


def make_worker(runner: Any) -> Any:
    """Return the release's own worker, without a device."""
    worker: Any = gpu_worker.Worker.__new__(gpu_worker.Worker)
    worker.model_runner = runner
    options = SimpleNamespace(enable_nccl_comm_suspend=False, sleep_preserve_parameter_names=[])
    worker.model_config = options
    worker.vllm_config = SimpleNamespace(model_config=options)
    worker.cache_config = SimpleNamespace(cache_dtype="auto")
    worker.synchronize_device = lambda: None
    for name in ("_sleep_saved_buffers", "_sleep_saved_draft_buffers", "_sleep_saved_parameters"):
        setattr(worker, name, {})
    worker._sleep_rebuild_draft_metadata_buffers = False
    if RELEASE >= Version("0.25"):
        from vllm.device_allocator.sleep_mode_backend import CuMemBackend

        worker._sleep_mode_backend = worker.__dict__["sleep_mode_backend"] = CuMemBackend()
        worker._get_sleep_mode_backend = lambda: worker._sleep_mode_backend
    return worker


def held(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of every tensor that a model and its helpers hold."""
    strided = [(path, one) for path, one in walk([("", model)]) if one.layout is torch.strided and not one.is_meta]
    return {path: one.detach().clone() for path, one in strided if one.numel()}


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> set[str]:
    """Return the paths of tensors that are not the same bit for bit."""
    return {path for path in expected if path not in found or not same({"": found[path]}, {"": expected[path]})}


def build(model: Probe, config: VllmConfig) -> None:
    """Build real layers whose plain tensors no checkpoint has, and one of each kind that a test can tell apart."""
    options = {"num_kv_heads": 2, "cache_config": config.cache_config, "prefix": "attn"}
    model.attn = Attention(2, 32, 1.0, alibi_slopes=[0.5, 0.25], **options)
    model.scaled = Attention(2, 32, 1.0, **{**options, "prefix": "scaled"})
    method = CompressedTensorsKVCacheMethod(SimpleNamespace(kv_cache_scheme=None))
    model.scaled.quant_method = method
    options = {"get_quant_method": lambda layer, prefix: method, "online_quantization_config": None}
    model.scaled.quant_config = SimpleNamespace(**options)
    method.create_weights(model.scaled)
    model.norm = RMSNorm(8, has_weight=False)
    model.altup = Gemma3nAltUp(64, 1e-6, 4, 1.0, 0, None, "altup")
    model.lora = ReplicatedLinearWithLoRA(ReplicatedLinear(16, 16, bias=False))
    model.lora.create_lora_weights(1, LoRAConfig(max_lora_rank=8, max_loras=1, lora_dtype=torch.float32))
    model.lora.lora_a_stacked[0].fill_(3)
    model.register_buffer("positions", torch.arange(9), persistent=False)
    model.helper = Holder(tables=[torch.arange(4), {"index": torch.arange(6)[1:3]}])
    model.view = model.altup.correct_output_scale.data[:2]
    model.W_UV = torch.ones(5)


#: What stock loses of that in a level-2 sleep and a reload.
LOST = {
    "attn.impl.alibi_slopes",
    "norm.weight",
    "lora.lora_a_stacked[0]",
    "helper.tables[0]",
    "helper.tables[1][index]",
    "W_UV",
}
LOST |= set() if SAVES_GEMMA else {"altup.router_input_scale"}
#: Of compressed-tensors' attention: scales to 0.31.0, with which calibration divides to 0.27.1.
LOST |= {f"scaled._{name}_scale" for name in "qkv" if Version("0.32.0") > RELEASE}
LOST |= {f"scaled.{name}_range" for name in "qkv" if Version("0.28.0") > RELEASE}
#: What the next reload makes anew, and what is in host memory on a GPU machine.
ANEW = {
    *("attn.q_range", "attn.k_range", "attn.v_range", "attn._k_scale_cpu", "attn._v_scale_cpu"),
    *("scaled._k_scale_cpu", "scaled._v_scale_cpu"),
}


class Engine:
    """A worker with a loaded model, checkpoints for it, and a drafter."""

    def __init__(self, host: Host, pool: Pool) -> None:
        self.host = host
        self.pool = pool
        self.model: Any = None
        pool.put("weights", lambda: self._load(1))
        self.worker = make_worker(Runner(self.model))

    def _load(self, seed: int) -> Any:
        model = self.host.load(self._build, self._stream(seed))
        if self.model is None:
            self.model = model
        return model

    def _build(self, model: Probe, config: VllmConfig) -> None:
        build(model, config)
        # Checkpoints have no scales of the attention, as a rule.
        self.shapes = {name: one.shape for name, one in model.named_parameters() if "scaled" not in name}

    def _stream(self, seed: int) -> Iterator[Piece]:
        generator = torch.Generator().manual_seed(seed)
        for name, shape in self.shapes.items():
            yield Piece(name, torch.rand(shape, generator=generator))

    def reload(self, seed: int) -> None:
        """Reload as the worker does."""
        self.host.reload(self.model, self._stream(seed))

    def fresh(self, seed: int) -> dict[str, torch.Tensor]:
        """Return what a fresh load of other weights holds."""
        return held(self._load(seed))


@pytest.fixture
def engine(host: Host, pool: Pool) -> Engine:
    """Return a worker with a loaded model."""
    return Engine(host, pool)


def lost(engine: Engine, seed: int) -> set[str]:
    """Return the paths of what is not as in a fresh load of these weights."""
    return differing(held(engine.model), engine.fresh(seed)) - ANEW


# The fault


@pytest.mark.parametrize("tags", [[None], [["weights"], ["kv_cache"]], [["weights", "kv_cache"]]], ids=str)
def test_a_sleep_and_a_reload_are_a_fresh_load(engine: Engine, tags: list[Any], side: str) -> None:
    """With stock, plain tensors of real layers are zeros; patched, all is as in a fresh load, twice in a row.

    XX
        derived by a reload on a GPU, and stays zeros here: `W_UV`.
    """
    for seed in (2, 3):
        engine.worker.sleep(level=2)
        for some in tags:
            engine.worker.wake_up(some)
        engine.reload(seed)
        assert lost(engine, seed) == (LOST if side == "stock" else {"W_UV"})
    if side == "stock":
        assert all(not one.any() for path, one in held(engine.model).items() if path in LOST)


def test_it_is_restored_before_vllm_goes_on(engine: Engine, patched: None) -> None:
    """What vLLM does after the pool is mapped finds the tensors restored: it derives some of a draft model there."""
    seen: list[list[float]] = []
    named_buffers = engine.model.named_buffers

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(engine.model.attn.impl.alibi_slopes.tolist())
        return named_buffers(*args, **kwargs)

    engine.worker.sleep(2)
    engine.model.named_buffers = spy
    engine.worker.wake_up()
    assert seen == [[0.5, 0.25]]


@pytest.mark.parametrize("level", [0, 1])
def test_a_lighter_sleep_is_stocks(engine: Engine, patched: None, level: int) -> None:
    """Nothing is saved at another level than 2: at 1 stock keeps all of the pool."""
    engine.worker.sleep(level)
    engine.worker.wake_up()
    assert counters(NAME) == {}
    if level == 1:
        assert lost(engine, 1) == set()


# The draft model, LoRA, the load balancer


def test_a_draft_model(host: Host, pool: Pool, side: str) -> None:
    """Its parameters, buffers and plain tensors are there after a sleep; with stock they are zeros.

    From 0.27.0 on stock restores its buffers. What it shares with the target model is the reload's to bring back.
    """
    engine = Engine(host, pool)

    def make() -> nn.Module:
        drafter = nn.Module()
        drafter.shared = engine.model.altup
        drafter.head = ReplicatedLinear(8, 8, bias=False)
        drafter.head.weight.data.fill_(2)
        drafter.register_buffer("rope", torch.arange(1.0, 9))
        drafter.scale = torch.tensor(4.0)
        return drafter

    drafter = pool.put("weights", make)
    engine.worker = make_worker(Runner(engine.model, drafter))
    expected = held(drafter)
    engine.worker.sleep(2)
    engine.worker.wake_up(["weights"])
    zeros = {path for path, one in held(drafter).items() if not one.any() and expected[path].any()}
    # The target's parameters are zeros until they are reloaded.
    own = {path for path in zeros if not path.startswith("shared.")}
    assert any(path.startswith("shared.") for path in zeros)
    if side == "stock":
        assert own == {"head.weight", "scale"} | (set() if SAVES_DRAFT_BUFFERS else {"rope"})
    else:
        assert own == set()
    engine.reload(1)
    if side == "stock" and not SAVES_GEMMA:
        own.add("shared.router_input_scale")
    assert differing(held(drafter), expected) == own


class Wrapper:
    """A model in a wrapper that captures graphs: a class of the engine's."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def unwrap(self) -> nn.Module:
        """Return the model."""
        return self._model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


Wrapper.__module__ = "vllm.compilation.cuda_graph"


@pytest.mark.parametrize("place", ["drafter", "speculator"])
def test_where_a_draft_model_is(engine: Engine, pool: Pool, patched: None, place: str) -> None:
    """It is found in both model runners' places, in a wrapper too, with what its proposer holds beside it."""
    proposer = pool.put("weights", lambda: Holder(model=nn.Linear(2, 2), table=torch.ones(3)))
    model = proposer.model
    expected = model.weight.tolist()
    proposer.model = Wrapper(model)
    runner: Any = Runner(engine.model)
    runner.get_draft_model = lambda: model
    setattr(runner, place, proposer)
    engine.worker.model_runner = runner
    engine.worker.sleep(2)
    engine.worker.wake_up()
    assert model.weight.tolist() == expected
    assert proposer.table.tolist() == [1, 1, 1]


@pytest.mark.parametrize("second", [False, True])
def test_the_load_balancers_maps(engine: Engine, pool: Pool, second: bool, side: str) -> None:
    """The real state of the expert load balancer: its maps are zeros with stock, and restored patched."""

    def make() -> Any:
        values: dict[str, Any] = {field.name: None for field in dataclasses.fields(EplbModelState)}
        values["physical_to_logical_map"] = torch.arange(1, 9).view(2, 4)
        values["logical_replica_count"] = torch.ones(2, 4)
        return EplbModelState(**values)

    state = pool.put("weights", make)
    balancer = SimpleNamespace(model_states={"model": state}, should_record_tensor=pool.put("weights", new_flag))
    if second:
        engine.worker.model_runner.eplb = SimpleNamespace(state=balancer)
    else:
        engine.worker.model_runner.eplb_state = balancer
    engine.worker.sleep(2)
    engine.worker.wake_up()
    expected = 0 if side == "stock" else 1
    assert state.logical_replica_count.tolist() == [[expected] * 4] * 2
    assert state.physical_to_logical_map.flatten().tolist() == [expected * one for one in range(1, 9)]
    assert balancer.should_record_tensor.item() == bool(expected)


def new_flag() -> torch.Tensor:
    """Return a flag that is set."""
    return torch.ones(1, dtype=torch.bool)


def test_what_the_lora_manager_holds(engine: Engine, pool: Pool, patched: None) -> None:
    """What LoRA's manager holds beside the layers is saved too."""
    engine.worker.model_runner.lora_manager = pool.put("weights", lambda: Holder(tables=(torch.ones(3),)))
    engine.worker.sleep(2)
    engine.worker.wake_up()
    assert engine.worker.model_runner.lora_manager.tables[0].tolist() == [1, 1, 1]


# What is saved


def saved(engine: Engine) -> list[int]:
    """Return the sizes of what would be saved now."""
    return [len(view) for view in sleep_tensors._to_save(engine.worker.model_runner, engine.pool.allocator)]


def test_only_what_is_lost_is_saved(host: Host, pool: Pool, patched: None) -> None:
    """Once each: not parameters and buffers, nor views of them, nor other memory than the weights' pool.

    Of tensors that share memory, all of it that one of them spans.
    """
    engine = Engine(host, pool)
    model: Any = nn.Module()
    engine.worker.model_runner.model = model
    assert saved(engine) == []

    def make() -> None:
        model.weight = nn.Parameter(torch.ones(64))
        model.register_buffer("buffer", torch.ones(32))
        model.register_buffer("inner", model.weight.data[4:5])
        model.views = [
            model.weight.data[3:9],
            model.weight.data[4:9],
            model.weight.detach().view(8, 8).t(),
            model.buffer[1:],
        ]
        model.kept = torch.arange(100.0)
        model.parts = [model.kept[10:20], model.kept[:3], model.kept.view(10, 10)[:, 3], model.kept]
        part = torch.arange(50.0)
        model.strided = part.view(5, 10)[1:4, 2:9:3]  # elements 12 to 38
        model.overlapping = part[30:45]
        model.nothing = [torch.ones(3, device="meta"), torch.ones(0), torch.ones(3).to_sparse(), torch.ones(5)[2:2]]
        model.same = model.kept
        model.one = torch.tensor(1, dtype=torch.uint8)
        model.broad = torch.ones(1).expand(1000)
        model.W_UK_T = torch.ones(7)

    pool.put("weights", make)
    model.late = torch.ones(5)
    pool.put("kv_cache", lambda: setattr(model, "cache", torch.ones(6)))
    assert saved(engine) == [1, 4, (45 - 30) * 4, (39 - 12) * 4, 400]
    before = held(model)
    engine.worker.sleep(2)
    assert model.kept[0] != 0
    engine.worker.wake_up()
    assert differing(held(model), before) == {"weight", "views[0]", "views[1]", "views[2]", "cache", "W_UK_T"}


def test_counters_and_the_log(engine: Engine, patched: None, tmp_path: Path) -> None:
    """They say how often a sleep saved something, how many tensors, how many bytes, and how often they came back."""
    sizes = saved(engine)
    once = {"sleeps": 1, "tensors_saved": len(sizes), "bytes_saved": sum(sizes), "wakes": 1}
    with hearing(20) as heard:
        for number in (1, 2):
            engine.worker.sleep(2)
            asleep = {name: one * number for name, one in once.items() if name != "wakes" or number > 1}
            assert written_counters(tmp_path, NAME) == asleep | ({"wakes": 1} if number > 1 else {})
            engine.worker.wake_up()
            assert counters(NAME) == {name: one * number for name, one in once.items()}
            assert written_counters(tmp_path, NAME) == counters(NAME)
    assert len(heard) == 2
    assert f"saved {len(sizes)} tensors, 0.0 MiB" in heard[0]


# Other orders


def test_a_wake_up_without_a_sleep_is_stocks(engine: Engine, patched: None) -> None:
    """Nothing is copied."""
    engine.pool.allocator.wake_up([])
    engine.worker.wake_up([])
    assert counters(NAME) == {}


def test_a_wake_up_of_the_kv_cache_first(engine: Engine, patched: None) -> None:
    """What was saved waits for the weights' wake-up; before 0.27.0 stock's buffers do not, and are lost."""
    engine.worker.sleep(2)
    engine.worker.wake_up(["kv_cache"])
    assert "wakes" not in counters(NAME)
    assert engine.model.norm.weight[0] != 1
    engine.worker.wake_up(tags=["weights"])
    engine.reload(2)
    assert lost(engine, 2) == {"W_UV"} | ({"positions", "scaled._prob_scale"} if WAKES_EARLY else set())


def test_a_second_sleep_saves_nothing_new(engine: Engine, patched: None) -> None:
    """The memory cannot be read then; what the first has saved comes back, and the next sleep saves again."""
    engine.worker.sleep(2)
    engine.worker.sleep(2)
    assert counters(NAME)["sleeps"] == 1
    engine.worker.wake_up()
    assert engine.model.norm.weight.tolist() == [1] * 8
    engine.model.norm.weight.fill_(5)
    engine.worker.sleep(2)
    engine.worker.wake_up()
    assert engine.model.norm.weight.tolist() == [5] * 8


def test_a_sleep_that_raises(engine: Engine, patched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock's exception passes. What was saved before it comes back if the memory is gone, and is not kept for later.

    A sleep that raised with all memory still there is tried again with other values: those are saved.
    """
    with monkeypatch.context() as patch:
        patch.setattr(type(engine.pool.allocator), "sleep", raising(KeyboardInterrupt("stock's own")))
        with pytest.raises(KeyboardInterrupt, match="stock's own"):
            engine.worker.sleep(2)
    engine.model.norm.weight.fill_(5)
    engine.worker.sleep(1)
    engine.worker.wake_up()
    assert engine.model.norm.weight.tolist() == [5] * 8
    gone = raising(ValueError("late"))
    with monkeypatch.context() as patch:
        for module in (torch.cuda, torch.accelerator):
            name = "mem_get_info" if module is torch.cuda else "get_memory_info"
            answers = iter([(1, 2)])
            patch.setattr(module, name, lambda *args, a=answers: next(a, None) or gone(), raising=False)
        with pytest.raises(ValueError, match="late"):
            engine.worker.sleep(2)
    assert engine.model.norm.weight[0] not in (0, 5)
    engine.worker.wake_up()
    assert engine.model.norm.weight.tolist() == [5] * 8


def raising(error: BaseException) -> Callable[..., Any]:
    """Return a function that raises."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fail


def test_a_tensor_that_is_replaced_meanwhile(engine: Engine, patched: None) -> None:
    """The new one is left alone, and the memory of the old one is still there to be written to."""
    engine.worker.sleep(2)
    engine.model.norm.weight = torch.full((8,), 7.0)
    gc.collect()
    engine.worker.wake_up()
    assert engine.model.norm.weight.tolist() == [7] * 8
    assert engine.model.attn.impl.alibi_slopes.tolist() == [0.5, 0.25]


# When it goes wrong, and what it leaves alone


def test_no_allocator(host: Host, monkeypatch: pytest.MonkeyPatch, patched: None) -> None:
    """Where no pool is in use (no sleep mode, another backend) a sleep is stock's own."""
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", None)
    slept: list[Any] = []
    assert sleep_tensors.sleep(lambda *args, **kwargs: slept.append((args, kwargs)), None, (2,), {}) is None
    assert slept == [((2,), {})]
    assert counters(NAME) == {}


def test_a_cpu_worker_is_stocks(patched: None) -> None:
    """A CPU worker has a `sleep` of its own, which does nothing."""
    assert not hasattr(CPUWorker.sleep, "__wrapped__")
    assert hasattr(gpu_worker.Worker.sleep, "__wrapped__")


def test_an_error_in_saving_is_one_warning_and_stock(
    engine: Engine, patched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If its own work raises, one warning says so, and the sleep is stock's."""
    monkeypatch.setattr(sleep_tensors, "_roots", raising(LookupError("injected")))
    with hearing() as heard:
        for _ in range(2):
            engine.worker.sleep(2)
            engine.worker.wake_up()
    assert engine.model.norm.weight.tolist() == [0] * 8
    assert len(heard) == 1
    assert NAME in heard[0]
    assert "LookupError: injected" in heard[0]
    with pytest.raises(KeyboardInterrupt):
        monkeypatch.setattr(sleep_tensors, "_roots", raising(KeyboardInterrupt()))
        engine.worker.sleep(2)


def test_a_host_without_room_keeps_the_small_ones(
    engine: Engine, patched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is saved until the host's memory ends comes back; one warning says that the rest is lost."""
    to = torch.Tensor.to

    def full(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if "copy" in kwargs and len(tensor) > 100:
            raise RuntimeError("can't allocate memory")
        return to(tensor, *args, **kwargs)

    sizes = saved(engine)
    monkeypatch.setattr(torch.Tensor, "to", full)
    with hearing() as heard:
        engine.worker.sleep(2)
    engine.worker.wake_up()
    assert len(heard) == 1
    assert "can't allocate memory" in heard[0]
    assert engine.model.norm.weight.tolist() == [1] * 8
    assert not engine.model.lora.lora_a_stacked[0].any()
    kept = [size for size in sizes if size <= 100]
    assert counters(NAME)["tensors_saved"] == len(kept) < len(sizes)
    assert counters(NAME)["bytes_saved"] == sum(kept)


def test_an_error_in_restoring_is_one_warning(engine: Engine, patched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wake-up goes on."""
    engine.worker.sleep(2)
    (saved,) = sleep_tensors._saved.values()
    saved.parts[0] = (saved.parts[0][0], torch.ones(1000))
    with hearing() as heard:
        engine.worker.wake_up()
    assert len(heard) == 1
    assert "no reload brings back are lost" in heard[0]
    assert engine.model.positions.tolist() == [*range(9)]


def test_what_is_wrapped_and_given_back(engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The worker's and the allocators' functions are wrapped, and given back; undone in a sleep, stock wakes up."""
    places = [(gpu_worker.Worker, "sleep"), (cumem.CuMemAllocator, "wake_up")]
    if RELEASE >= Version("0.23"):
        from vllm.device_allocator import xpumem

        places.append((xpumem.XpuMemAllocator, "wake_up"))
    stock = [vars(owner)[name] for owner, name in places]
    with switched_on(monkeypatch, tmp_path, NAME):
        live = [vars(owner)[name] for owner, name in places]
        assert all(one is not old and one.__wrapped__ is old for one, old in zip(live, stock, strict=True))
        engine.worker.sleep(2)
        assert sleep_tensors._saved
    assert all(vars(owner)[name] is old for (owner, name), old in zip(places, stock, strict=True))
    assert not sleep_tensors._saved
    engine.worker.wake_up()
    assert engine.model.norm.weight.tolist() == [0] * 8
