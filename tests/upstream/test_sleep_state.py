"""sleep_state on a release's real worker, runners and sleep-mode allocator, beside stock vLLM.

Stock loses state in 0.20.0 to 0.28.0. From 0.29.0 on it has the fix, and the patch has nothing to do. A real worker
initializes the KV cache of a real runner, of the first and of the second generation, for a real layer of DeepSeek's
sparse attention with its real metadata builder, and sleeps and wakes. On the CPU these are stood in for, in
`sleeping.py`: what they ask of CUDA, memory pools and mapping above all. No model runs, and no compiled kernel.
"""

from __future__ import annotations

import ctypes
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import layers
import pytest
import torch
import vllm.v1.worker.gpu.attn_utils as attention2
import vllm.v1.worker.gpu.model_runner as runner2
import vllm.v1.worker.gpu_model_runner as runner1
from graphs import Graph
from packaging.version import Version
from patching import counters, hearing, state_of
from sleeping import DEVICE, Memory, gpu
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.device_allocator import cumem
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu_worker import Worker

import vllm_hotfix
from vllm_hotfix._patches import sleep_state
from vllm_hotfix._record import RECORD

try:
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:
    from vllm.v1.core import kv_cache_utils as planning
try:
    from vllm.device_allocator import xpumem
except ImportError:  # before 0.23.0
    xpumem = None

RELEASE = os.environ["HOTFIX_RELEASE"]
FIXED = Version(RELEASE) >= Version("0.29")
NAME, GATE = "sleep_state", "VLLM_HOTFIX_SLEEP_STATE"
RUNNERS = {"v1": runner1.GPUModelRunner, "v2": runner2.GPUModelRunner}
LAYER = "model.layers.0.indexer"
BY_GROUPS = "global_kv_cache_groups" in inspect.signature(planning.get_kv_cache_configs).parameters
EXPANDED = [8, 9, 10, 7, 9, 10, 11, 12]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    """The memory of a GPU."""
    with gpu(monkeypatch) as memory:
        yield memory


class Engine:
    """A worker whose model has one layer with a KV cache.

    Attributes:
        worker: a real one, its runner too; `initialize` has its KV cache made.
    """

    def __init__(self, memory: Memory, folder: Path, runner: type = RUNNERS["v1"], *, sleep_mode: bool = True) -> None:
        folder.mkdir(exist_ok=True)
        self.memory = memory
        self.config = config = layers.make_config(folder)
        config.model_config.enable_sleep_mode = sleep_mode  # refused on a CPU in the constructor
        config.model_config.enable_cumem_allocator = sleep_mode
        config.cache_config.block_size = 64
        with set_current_vllm_config(config):
            DeepseekV32IndexerCache(head_dim=64, dtype=torch.uint8, prefix=LAYER, cache_config=config.cache_config)
            self.worker = Worker(config, local_rank=0, rank=0, distributed_init_method="")
            self.runner = self.worker.model_runner = runner(config, DEVICE)
            self.runner.model = nn.Linear(2, 2)
            if isinstance(self.runner, runner2.GPUModelRunner):
                state = runner2.init_model_state
                self.runner.model_state = state(config, self.runner.model, self.runner.encoder_cache, DEVICE)
                self.runner.decode_query_len = 1  # which loading a model sets, from 0.22.0 on
            self.kv_config = self._plan(config)

    def _plan(self, config: VllmConfig) -> Any:
        """Let the release plan its KV cache, as the engine core does."""
        specs = [self.runner.get_kv_cache_spec()]
        if hasattr(config.cache_config, "kv_cache_layout"):
            config.cache_config.kv_cache_layout = config.cache_config.kv_cache_layout or "NHD"
        groups = [planning.get_global_kv_cache_groups(config, specs)] if BY_GROUPS else []
        (planned,) = planning.get_kv_cache_configs(config, specs, [1 << 20], *groups)
        return planned

    def initialize(self) -> Engine:
        """Have the worker make its KV cache."""
        with set_current_vllm_config(self.config):
            self.worker.initialize_from_config(self.kv_config)
        return self

    def sleep(self, level: int = 1) -> None:
        """Sleep and wake up, as a server does that is told to."""
        self.worker.sleep(level)
        self.worker.wake_up()

    @property
    def builder(self) -> Any:
        """The layer's metadata builder."""
        return self.runner.attn_groups[0][0].get_metadata_builder()

    @property
    def kv_cache(self) -> torch.UntypedStorage:
        """The memory of the layer's KV cache."""
        layer = self.config.compilation_config.static_forward_context[LAYER]
        found = layer.kv_cache[0] if isinstance(layer.kv_cache, list) else layer.kv_cache
        return found.untyped_storage()

    def content(self) -> dict[int, bytes]:
        """What is in the device's memory, by address; the KV cache is left out."""
        kept = {one.data_ptr(): ctypes.string_at(one.data_ptr(), one.nbytes()) for one in self.memory.storages}
        del kept[self.kv_cache.data_ptr()]
        return kept

    def expanded(self) -> list[int]:
        """Let the metadata builder's own function expand three requests that decode 3, 1 and 4 tokens.

        It is what multi-token prediction of three and more tokens has it do on a Hopper GPU: a token sees its
        request's tokens up to itself.
        """
        lengths, tokens = torch.tensor([10, 7, 12], dtype=torch.int32), torch.tensor([3, 1, 4], dtype=torch.int32)
        found = self.builder._prepare_decode_tensors(
            seq_lens=lengths,
            block_table=torch.ones(3, self.builder.expanded_block_table_buffer.shape[1], dtype=torch.int32),
            decode_lens=tokens,
            decode_lens_cpu=tokens,
            query_start_loc=torch.tensor([0, 3, 4], dtype=torch.int32),
            num_decodes=3,
            num_decode_tokens=8,
            use_native=False,
            next_n=4,
            max_decode_len=4,
        )
        return found[0].tolist()


@pytest.fixture(params=RUNNERS)
def generation(request: pytest.FixtureRequest) -> type:
    """The class of a runner."""
    return RUNNERS[request.param]


@pytest.fixture
def make(config: VllmConfig, memory: Memory, tmp_path: Path) -> Callable[..., Engine]:
    """Make an engine."""
    return lambda *args, **options: Engine(options.pop("memory", memory), tmp_path / "model", *args, **options)


# The fault


@pytest.mark.parametrize("level", [1, 2])
def test_what_is_made_beside_the_kv_cache_outlasts_a_sleep(
    make: Callable[..., Engine], generation: type, side: str, level: int
) -> None:
    """All device memory but the KV cache has its content after a sleep, where it was; with stock to 0.28.0 not all has.

    The KV cache itself is discarded on either side.
    """
    engine = make(generation).initialize()
    engine.kv_cache.fill_(1)
    before = engine.content()
    engine.sleep(level)
    after = engine.content()
    lost = [address for address, content in before.items() if after[address] != content]
    assert bool(lost) == (side == "stock" and not FIXED)
    assert not torch.empty(0, dtype=torch.uint8).set_(engine.kv_cache).any()


def test_sparse_attention_counts_right_after_a_sleep(make: Callable[..., Engine], side: str) -> None:
    """DeepSeek's sparse attention with multi-token prediction looks at the tokens that it should.

    With stock to 0.28.0 its builder's row of numbers reads as zeros after a sleep, and tokens see too little.
    """
    engine = make().initialize()
    assert engine.expanded() == EXPANDED
    engine.sleep()
    assert engine.expanded() == ([8, 8, 8, 4, 5, 5, 5, 5] if side == "stock" and not FIXED else EXPANDED)


def test_the_second_runners_graphs_find_its_block_tables(make: Callable[..., Engine], side: str) -> None:
    """What a captured graph reads after a sleep are the addresses, strides and sizes of the block tables.

    With stock to 0.28.0 it reads zeros. To 0.20.2 so does everybody else; from 0.21.0 on stock makes these tensors
    anew after a wake-up, and a graph that has captured the old ones is left behind, as a drafter's in 0.28.0 has.
    """
    engine = make(RUNNERS["v2"]).initialize()
    tables: BlockTables = engine.runner.block_tables

    def read() -> torch.Tensor:
        pointers = [tables.block_table_ptrs, tables.input_block_table_ptrs]
        return torch.cat(pointers).view(torch.int64) + tables.block_table_strides + tables.block_sizes_tensor

    graph = Graph(read)
    addresses = [tables.block_tables[0].gpu.data_ptr(), tables.input_block_tables[0].data_ptr()]
    expected = [address + tables.block_tables[0].gpu.stride(0) + 64 for address in addresses]
    assert graph.replay().tolist() == expected
    for _ in range(2):
        engine.sleep()
        wrong = side == "stock" and not FIXED
        assert graph.replay().tolist() == ([0, 0] if wrong else expected)
        assert read().tolist() == ([0, 0] if wrong and Version(RELEASE) < Version("0.21") else expected)


def test_a_wake_up_in_two_steps(make: Callable[..., Engine], generation: type, patched: None) -> None:
    """Weights first, the KV cache later, as a server that reloads does it: what is beside is there all the time."""
    engine = make(generation).initialize()
    before = engine.content()
    engine.worker.sleep(2)
    if Version(RELEASE) < Version("0.32"):  # from there on a sleep offloads it
        assert engine.content() == before
    for tag in ("weights", "kv_cache"):
        engine.worker.wake_up([tag])
        assert engine.content().items() >= before.items()


# The cure


def test_what_lies_in_the_pool(make: Callable[..., Engine], generation: type, side: str) -> None:
    """The KV cache's pool is entered once; it has the KV cache in it, and nothing else but with stock to 0.28.0."""
    engine = make(generation).initialize()
    inside = [one.data_ptr() for one in engine.memory.pools["kv_cache"]]
    assert engine.kv_cache.data_ptr() in inside
    assert engine.memory.entered.count("kv_cache") == 1
    assert (len(inside) > 1) == (side == "stock" and not FIXED)
    if side == "patched" and not FIXED:
        assert engine.memory.allocator.get_current_usage() == engine.kv_cache.nbytes()
        assert counters(NAME) == {"pools_narrowed": 1}
    assert engine.memory.allocator.current_tag == cumem.CuMemAllocator.default_tag


def test_it_is_counted(make: Callable[..., Engine], patched: None) -> None:
    """Each initialization is counted, and from 0.21.0 on each of four tensors that a wake-up would have moved."""
    engine = make(RUNNERS["v2"]).initialize()
    engine.sleep()
    engine.sleep()
    moved = {} if Version(RELEASE) < Version("0.21") else {"tables_kept": 8}
    assert counters(NAME) == ({} if FIXED else {"pools_narrowed": 1} | moved)


def test_without_sleep_mode_nothing_changes(make: Callable[..., Engine], generation: type, patched: None) -> None:
    """No pool is entered, and nothing is counted."""
    engine = make(generation, sleep_mode=False).initialize()
    assert engine.memory.entered == []
    assert counters(NAME) == {}
    assert engine.memory.tag(torch.empty(0).set_(engine.kv_cache)) is None


def test_a_profiling_run_has_no_pool(make: Callable[..., Engine], patched: None) -> None:
    """A runner that makes a KV cache by itself, to profile CUDA graphs, makes it outside of any pool, as with stock."""
    engine = make()
    with set_current_vllm_config(engine.config):
        engine.runner.initialize_kv_cache(engine.kv_config, is_profiling=True)
    assert engine.memory.entered == []
    assert make().initialize().memory.entered.count("kv_cache") == 1


@pytest.mark.skipif(FIXED, reason="nothing is wrapped where the release has the fix")
@pytest.mark.parametrize("overridden", ["initialize_kv_cache", "initialize_kv_cache_tensors", None])
def test_another_runner_is_left_alone(make: Callable[..., Engine], patched: None, overridden: str | None) -> None:
    """A subclass that makes its KV cache in its own way gets stock's pool, and one warning says so; others do not."""

    class Own(RUNNERS["v1"]):
        pass

    def own(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(Own, self), overridden)(*args, **kwargs)

    if overridden:
        setattr(Own, overridden, own)
    with hearing() as heard:
        engines = [make(Own).initialize() for _ in range(2)]
    assert len(engines[0].memory.pools["kv_cache"]) == 2 if overridden is None else len(heard) == 1
    assert all("Own makes its KV cache in another way" in line for line in heard)
    assert counters(NAME) == ({} if overridden else {"pools_narrowed": 2})


@pytest.mark.skipif(FIXED, reason="nothing is wrapped where the release has the fix")
def test_another_function_in_the_second_runner_is_left_alone(
    make: Callable[..., Engine], patched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the module of the second runner makes the KV cache by a function of others, it gets stock's pool."""
    real = runner2.init_kv_cache
    with monkeypatch.context() as patch, hearing() as heard:
        patch.setattr(runner2, "init_kv_cache", lambda *args, **kwargs: real(*args, **kwargs))
        engine = make(RUNNERS["v2"]).initialize()
    assert len(heard) == 1
    assert len(engine.memory.pools["kv_cache"]) > 1


@pytest.mark.skipif(FIXED, reason="nothing is wrapped where the release has the fix")
def test_an_error_of_its_own_is_one_warning_and_stock(
    make: Callable[..., Engine], patched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the patch's own work raises, stock goes on, and one warning for each place says so."""

    def fail(*args: Any) -> Any:
        raise LookupError("injected")

    tensors = sleep_state._tensors
    monkeypatch.setattr(sleep_state, "_stock_runner", fail)
    monkeypatch.setattr(sleep_state, "_tensors", fail)
    with hearing() as heard:
        for _ in range(2):
            engine = make(RUNNERS["v2"]).initialize()
            engine.sleep()
    assert len(engine.memory.pools["kv_cache"]) > 1
    assert len(heard) == (1 if Version(RELEASE) < Version("0.21") else 3)
    assert all(NAME in line and "LookupError: injected" in line for line in heard)
    assert counters(NAME) == {}
    if Version(RELEASE) >= Version("0.21"):
        ptrs = engine.runner.block_tables.block_table_ptrs
        assert ptrs.tolist() == [engine.runner.block_tables.block_tables[0].gpu.data_ptr()]
        # Only afterwards.
        answers = iter([tensors(engine.runner.block_tables)])
        monkeypatch.setattr(sleep_state, "_tensors", lambda holder: next(answers))
        engine.runner.post_kv_cache_wake_up()
        assert engine.runner.block_tables.block_table_ptrs is not ptrs


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_stocks_own_errors_pass(
    make: Callable[..., Engine], patched: None, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """What is raised while the KV cache is made, or before, comes out as it is, and nothing is left behind."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error("stock's own")

    for place in ("bind_kv_cache", "prepare_kernel_block_sizes"):
        engine = make()
        with monkeypatch.context() as patch, hearing() as heard:
            patch.setattr(runner1, place, fail)
            with pytest.raises(error, match="stock's own"):
                engine.initialize()
        assert heard == []
        assert sleep_state._SCOPE.get() is None
        if Version(RELEASE) >= Version("0.20.1"):  # before, stock's pool keeps its tag after an error
            assert engine.memory.allocator.current_tag == cumem.CuMemAllocator.default_tag
    assert counters(NAME) == {}
    assert make().initialize().expanded() == EXPANDED


# The wrappers by themselves


def test_a_runner_of_another_kind_is_none_of_vllms() -> None:
    """One that derives from neither of vLLM's runners makes its KV cache in its own way."""
    assert not sleep_state._stock_runner(object())


class Pool:
    """A pool that knows whether one is in it."""

    inside = 0

    def __enter__(self) -> None:
        self.inside += 1

    def __exit__(self, *error: object) -> None:
        self.inside -= 1


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker whose initialization is a function of the test, which gets what enters its pool."""
    monkeypatch.setattr(RECORD, "counters", {})
    monkeypatch.setattr(RECORD, "_warned", set())
    monkeypatch.setattr(RECORD, "save", lambda: None)
    monkeypatch.setattr(sleep_state, "_stock_runner", lambda runner: True)
    worker = type("Worker", (), {"model_runner": None})()
    return lambda body: sleep_state.initialize(body, worker, (), {})


def enter(pool: Pool, *args: Any, **kwargs: Any) -> Any:
    """Ask for a pool as a worker does."""
    return sleep_state.use_pool(lambda *args, **kwargs: pool, None, args, kwargs)


def test_the_pool_is_entered_when_the_kv_cache_is_made(alone: Any) -> None:
    """In the block that stock has its pool for, only the KV cache is made in it; after it, and for other tags, stock's.

    Whether the tag is given by position or by name.
    """
    pool = Pool()

    def made() -> int:
        return sleep_state.make_kv_cache(lambda: pool.inside, None, (), {})

    def body() -> str:
        for way in ((("kv_cache",), {}), ((), {"tag": "kv_cache"})):
            with enter(pool, *way[0], **way[1]):
                assert (pool.inside, made(), pool.inside) == (0, 1, 0)
            assert made() == 0
        for tag in ("weights", None):
            assert enter(pool, tag) is pool
        assert enter(pool) is pool
        return "stock's result"

    with hearing() as heard:
        assert alone(body) == "stock's result"
        assert counters(NAME) == {"pools_narrowed": 1}
        assert enter(pool, "kv_cache") is pool
        assert made() == 0
    assert heard == []


def test_a_kv_cache_that_is_not_made_is_told(alone: Any) -> None:
    """If the worker asks for the pool and nothing is made where it should be, one warning says so; else none does."""

    def body() -> None:
        with enter(Pool(), "kv_cache"):
            pass

    with hearing() as heard:
        alone(lambda: None)
        assert heard == []
        alone(body)
    assert len(heard) == 1
    assert "a sleep will not free it" in heard[0]
    assert counters(NAME) == {}


def test_a_nested_initialization_is_one_of_its_own(alone: Any) -> None:
    """One inside of another, or in a worker that comes after a failed one, does not see the other's pool."""
    pool = Pool()

    def inner() -> None:
        assert sleep_state.make_kv_cache(lambda: pool.inside, None, (), {}) == 0

    def body() -> None:
        with enter(pool, "kv_cache"):
            alone(inner)
            assert sleep_state.make_kv_cache(lambda: pool.inside, None, (), {}) == 1

    alone(body)


def test_tensors_made_in_inference_mode_are_renewed_too(alone: Any) -> None:
    """A worker may make its block tables in torch's inference mode and wake up outside of it."""

    class Tables:
        def __init__(self, value: int) -> None:
            self.value = value
            self.renew()

        def renew(self) -> str:
            self.sizes = [self.value]  # what is no tensor is stock's
            self.ptrs = torch.tensor([self.value], dtype=torch.uint64)
            return "stock's result"

    with torch.inference_mode():
        tables = Tables(1)
    first, tables.value = tables.ptrs, 1 << 63
    assert sleep_state.renew_pointers(tables.renew, tables, (), {}) == "stock's result"
    assert tables.ptrs is first
    assert first.tolist() == tables.sizes == [1 << 63]
    assert counters(NAME) == {"tables_kept": 1}


# What is wrapped


@pytest.mark.skipif(xpumem is None, reason="sleep mode came to XPU with 0.23.0")
def test_the_allocator_of_xpu(make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    """On Intel's GPUs the pool holds the KV cache only, too; a sleep there was not played."""
    with gpu(monkeypatch, xpumem) as memory:
        engine = make(memory=memory).initialize()
        assert (len(memory.pools["kv_cache"]) > 1) == (side == "stock" and not FIXED)
        assert engine.kv_cache.data_ptr() in [one.data_ptr() for one in memory.pools["kv_cache"]]


def test_what_is_wrapped_and_given_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its functions are wrapped, by the second runner's name too, and given back; from 0.29.0 on none is."""
    places: list[tuple[Any, str]] = [
        (Worker, "initialize_from_config"),
        (cumem.CuMemAllocator, "use_memory_pool"),
        (RUNNERS["v1"], "initialize_kv_cache_tensors"),
        (attention2, "init_kv_cache"),
        (runner2, "init_kv_cache"),
    ]
    if xpumem is not None:
        places.append((xpumem.XpuMemAllocator, "use_memory_pool"))
    if hasattr(BlockTables, "init_block_table_layout_tensors"):
        places.append((BlockTables, "init_block_table_layout_tensors"))
    stock = [vars(owner)[name] for owner, name in places]
    monkeypatch.setenv("VLLM_HOTFIX_STATE_DIR", str(tmp_path))
    assert state_of(NAME)[0] == "off"
    monkeypatch.setenv(GATE, "1")
    vllm_hotfix.activate()
    try:
        state, reason = state_of(NAME)
        assert state == ("not-needed" if FIXED else "active"), reason
        if FIXED:
            assert "0.29.0" in reason
        live = [vars(owner)[name] for owner, name in places]
        for old, new in zip(stock, live, strict=True):
            assert (new is old) == FIXED
            assert FIXED or new.__wrapped__ is old
    finally:
        vllm_hotfix.deactivate()
    assert [vars(owner)[name] for owner, name in places] == stock
