"""pinned_staging in a release's real loader, with a real streamer on real files, beside stock vLLM.

There is no GPU here: `devices.py` plays the device, and vLLM's platform is called CUDA where a test needs that.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import inspect
import logging
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import frame
import pytest
import runai_model_streamer
import torch
from devices import Cuda, FakeDevice
from layers import Host, Layer, Probe, same, values
from packaging.version import Version
from safetensors.torch import save_file
from vllm.config import LoadConfig, VllmConfig
from vllm.model_executor.model_loader import get_model_loader, runai_streamer_loader, weight_utils
from vllm.model_executor.model_loader.runai_streamer_loader import RunaiModelStreamerLoader
from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

import vllm_hotfix
from vllm_hotfix._patches import pinned_staging, runai_buffers
from vllm_hotfix._patches.pinned_staging import _cuda
from vllm_hotfix._record import RECORD, logger

VERSION = Version(os.environ["HOTFIX_RELEASE"])
GATE = "VLLM_HOTFIX_PINNED_STAGING"
KEY = "pinned_staging"
PINNED = {KEY: True}
SETTINGS = ("RUNAI_STREAMER_CONCURRENCY", "RUNAI_STREAMER_MEMORY_LIMIT", "RUNAI_STREAMER_S3_ENDPOINT")
STREAMER = Path(runai_model_streamer.__file__).parent
STOCK = inspect.unwrap(weight_utils.runai_safetensors_weights_iterator)
_LOAD = "vllm_hotfix._patches.pinned_staging._load"

Named = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Start with no setting of the streamer, and put back what a loader sets."""
    for name in (*SETTINGS, GATE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_HOTFIX_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(RECORD, "_warned", set())
    monkeypatch.setattr(RECORD, "counters", {})


def activate() -> None:
    """Activate; pinned_staging must be active."""
    vllm_hotfix.activate()
    state, reason = RECORD.entries[KEY].live()
    assert state == "active", reason


def turned_on(monkeypatch: pytest.MonkeyPatch, value: str) -> Iterator[None]:
    """Turn the patch on by a value of its gate, and off again."""
    monkeypatch.setenv(GATE, value)
    activate()
    yield
    vllm_hotfix.deactivate()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Turn the patch on for one test."""
    yield from turned_on(monkeypatch, "1")


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Turn the patch on, and the key by default."""
    yield from turned_on(monkeypatch, "force")


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the package warns of from here on."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    heard: list[str] = []
    monkeypatch.setattr(logger, "handlers", [Handler(logging.WARNING)])
    monkeypatch.setattr(logger, "level", logging.WARNING)
    monkeypatch.setattr(logger, "propagate", False)
    logger.manager._clear_cache()  # type: ignore[attr-defined]
    return heard


@pytest.fixture
def forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the module of the pinned path one that cannot be imported."""
    monkeypatch.delattr(pinned_staging, "_load", raising=False)
    monkeypatch.setitem(sys.modules, _LOAD, None)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three shards with tensors of many types and shapes, some more than a page apart."""
    folder = tmp_path_factory.mktemp("checkpoint")
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.uint8)
    for shard in range(3):
        tensors = {f"{shard}.scalar": torch.tensor(0.5 + shard), f"{shard}.mask": torch.arange(33) % 3 == shard}
        for number, dtype in enumerate(dtypes):
            size = (7 + shard, 1 + number * 400)
            tensors[f"{shard}.{number}"] = (torch.rand(size, generator=generator) * 100).to(dtype)
        save_file(tensors, folder / f"model-{shard}.safetensors")
    return str(folder)


@pytest.fixture(scope="session")
def expected(checkpoint: str) -> Named:
    """What stock's iterator delivers, in copies."""
    return read(STOCK(files_of(checkpoint), False))


def files_of(folder: str) -> list[str]:
    """Return the shards."""
    return sorted(map(str, Path(folder).glob("*.safetensors")))


def read(iterator: Any) -> Named:
    """Return a copy of every tensor; each name comes once."""
    found: Named = {}
    for name, tensor in iterator:
        assert name not in found
        found[name] = tensor.clone()
    return found


def equal(left: Named, right: Named) -> bool:
    """Say whether names, types, shapes and bits are the same."""
    return same(left, right) and all(left[name].dtype == right[name].dtype for name in left)


def config_of(extra: dict[str, Any] | None = None, **options: Any) -> LoadConfig:
    """Return a configuration as an engine makes it."""
    options = {"load_format": "runai_streamer", "use_tqdm_on_load": False} | options
    return LoadConfig(model_loader_extra_config=dict(extra or {}), **options)


def loader_of(extra: dict[str, Any] | None = None, **options: Any) -> RunaiModelStreamerLoader:
    """Return a loader as vLLM makes it."""
    loader = get_model_loader(config_of(extra, **options))
    assert type(loader) is RunaiModelStreamerLoader
    return loader


def iterate(loader: RunaiModelStreamerLoader, folder: str) -> Any:
    """Return the loader's iterator over a folder's tensors."""
    return loader._get_weights_iterator(folder, None)


def is_stock(iterator: Any) -> bool:
    """Say whether an iterator is a generator of stock's own function, be it with runai_buffers around it."""
    if getattr(iterator, "gi_code", None) is runai_buffers._known.__code__:
        iterator = iterator.gi_frame.f_locals["iterator"]
    return getattr(iterator, "gi_code", None) is STOCK.__code__


def answer(extra: dict[str, Any]) -> tuple[Any, ...]:
    """Return what making a loader leads to: an error, or its setting, and the streamer's variables."""
    for name in SETTINGS:
        os.environ.pop(name, None)
    try:
        result: Any = loader_of(extra)._is_distributed
    except ValueError as error:
        result = str(error)
    return result, {name: os.environ.get(name) for name in SETTINGS}


# 1. The key.


def test_the_key_is_understood(gate: None) -> None:
    """With the gate on, a loader is made with the key true or false, the configuration given either way."""
    for value in (True, False):
        config = config_of({KEY: value})
        assert RunaiModelStreamerLoader(config).load_config is config
        assert RunaiModelStreamerLoader(load_config=config).load_config is config


@pytest.mark.parametrize("undone", [False, True])
def test_without_the_gate_the_key_gets_stocks_answer(undone: bool, request: pytest.FixtureRequest) -> None:
    """Without the gate, and after `deactivate()`, releases to 0.23 ignore the key and later ones refuse it."""
    if undone:
        request.getfixturevalue("gate")
        vllm_hotfix.deactivate()
    result, _ = answer(PINNED)
    if Version("0.24") > VERSION:
        assert result is False
    else:
        assert result == "Unexpected extra config keys for runai_streamer: {'pinned_staging'}"


@pytest.mark.parametrize("value", [1, 0, "true", None, [True]])
def test_a_value_that_is_not_a_bool_is_refused(gate: None, value: Any) -> None:
    """The error is worded as stock's for `distributed`; nothing of the other settings has been taken over."""
    with pytest.raises(ValueError, match="must be a bool") as caught:
        loader_of({KEY: value, "concurrency": 3})
    assert str(caught.value) == f"pinned_staging must be a bool, got {value!r}"
    assert "RUNAI_STREAMER_CONCURRENCY" not in os.environ


def test_stock_judges_every_other_setting(request: pytest.FixtureRequest) -> None:
    """Beside the key, true or false, or without it, each setting takes effect or is refused exactly as in stock."""
    settings: list[dict[str, Any]] = [
        {},
        {"surprise": 1},
        {"concurrency": 3, "memory_limit": 5_000_000, "distributed": True},
        {"distributed": False},
        {"concurrency": "many"},
        {"memory_limit": 0},
        {"memory_limit": -1},
        {"distributed": "yes"},
    ]
    stock = [(extra, answer(extra)) for extra in settings]
    request.getfixturevalue("gate")
    for key in ({}, {KEY: True}, {KEY: False}):
        assert [(extra, answer(extra | key)) for extra in settings] == stock


def test_settings_reach_stock(gate: None) -> None:
    """`concurrency` and `memory_limit` become the streamer's variables, `distributed` the loader's own."""
    result, variables = answer({"concurrency": 3, "memory_limit": 5_000_000, "distributed": True, KEY: True})
    assert result is True
    assert variables["RUNAI_STREAMER_CONCURRENCY"] == "3"
    assert variables["RUNAI_STREAMER_MEMORY_LIMIT"] == "5000000"


def test_the_configuration_stays_for_the_next_loader(gate: None, device: FakeDevice, checkpoint: str) -> None:
    """The loader has the very configuration that it was given, key and all; each loader made from it pins."""
    config = config_of(PINNED | {"concurrency": 2})
    extra = config.model_loader_extra_config
    for number in (1, 2, 3):
        loader = get_model_loader(config)
        assert loader.load_config is config
        assert config.model_loader_extra_config is extra
        assert extra == {KEY: True, "concurrency": 2}
        read(iterate(loader, checkpoint))
        assert device.opened == number


def test_the_setting_belongs_to_the_loader(gate: None, device: FakeDevice, checkpoint: str, expected: Named) -> None:
    """Loaders without the key, made before, after and between those with it, are stock."""
    loaders = [loader_of(extra) for extra in ({}, PINNED, {}, {KEY: False}, PINNED, {"concurrency": 2})]
    for loader in (*loaders, *reversed(loaders)):
        iterator = iterate(loader, checkpoint)
        assert is_stock(iterator) is (loader.load_config.model_loader_extra_config.get(KEY) is not True)
        assert equal(read(iterator), expected)
    assert device.opened == 4


# 2. The default.


@pytest.mark.parametrize("value", ["force", " Force "])
def test_force_makes_the_key_true_by_default(
    value: str, monkeypatch: pytest.MonkeyPatch, force: None, device: FakeDevice, checkpoint: str, expected: Named
) -> None:
    """A loader without the key, or without any setting, pins; an explicit false wins."""
    monkeypatch.setenv(GATE, value)
    for extra in ({}, {"concurrency": 2}, PINNED):
        assert equal(read(iterate(loader_of(extra), checkpoint)), expected)
    assert device.opened == 3
    assert is_stock(iterate(loader_of({KEY: False}), checkpoint))


@pytest.mark.parametrize("variables", [{"VLLM_HOTFIX_ENABLE": KEY}, {"VLLM_HOTFIX_ENABLE": "all"}, {GATE: "on"}])
def test_on_is_not_force(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, device: FakeDevice, checkpoint: str
) -> None:
    """Turned on by a list, or by its own variable, the patch waits for the key."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    activate()
    try:
        assert is_stock(iterate(loader_of(), checkpoint))
        assert not is_stock(iterate(loader_of(PINNED), checkpoint))
    finally:
        vllm_hotfix.deactivate()


# 3. The iterator.


def test_a_loader_that_pins_yields_from_the_device(
    gate: None, device: FakeDevice, checkpoint: str, expected: Named, warnings: list[str]
) -> None:
    """Every tensor is a device tensor, bit-identical to stock's, and keeps its value until it is dropped."""
    iterator = iterate(loader_of(PINNED), checkpoint)
    assert not is_stock(iterator)
    assert device.opened == 0  # nothing happens before the first tensor is asked for
    first = next(iterator)
    assert device.registered
    tensors = dict([first, *iterator])
    assert device.registered == {}
    assert all(device.holds(tensor) for tensor in tensors.values())
    assert equal(tensors, expected)
    assert vllm_hotfix.counters()[KEY]["tensors"] == len(expected)
    assert vllm_hotfix.counters()[KEY]["bytes"] == sum(tensor.nbytes for tensor in expected.values())
    assert warnings == []


@pytest.mark.parametrize("end", ["close", "drop", "raise"])
def test_a_load_that_ends_early_gives_everything_back(
    gate: None, device: FakeDevice, checkpoint: str, end: str
) -> None:
    """Closed, dropped, or left by an error of its consumer: nothing stays page-locked or allocated."""
    iterator = iterate(loader_of(PINNED), checkpoint)
    if end == "raise":
        with pytest.raises(ZeroDivisionError):
            for _ in iterator:
                raise ZeroDivisionError
    else:
        next(iterator)
        assert device.registered
    if end == "close":
        iterator.close()
    del iterator
    assert device.registered == {}


@pytest.mark.parametrize("extra", [{}, {KEY: False}, {"concurrency": 2, KEY: False}], ids=str)
def test_without_the_key_the_iterator_is_stocks(
    gate: None, forbidden: None, device: FakeDevice, checkpoint: str, expected: Named, extra: dict[str, Any]
) -> None:
    """Key absent or false: the generator of stock's own function; the pinned path is not even imported."""
    iterator = iterate(loader_of(extra), checkpoint)
    assert is_stock(iterator)
    assert equal(read(iterator), expected)
    assert device.opened == 0


def test_the_sharded_loader_stays_stock(
    force: None, forbidden: None, device: FakeDevice, checkpoint: str, expected: Named
) -> None:
    """`runai_streamer_sharded` uses the same iterator and stays stock, whatever the default."""
    loader = get_model_loader(config_of(load_format="runai_streamer_sharded"))
    assert isinstance(loader, ShardedStateLoader)
    assert equal(read(loader.iterate_over_files(files_of(checkpoint))), expected)
    assert device.opened == 0
    with pytest.raises(ValueError, match=KEY):
        get_model_loader(config_of(PINNED, load_format="runai_streamer_sharded"))


def test_a_direct_call_stays_stock(
    force: None, forbidden: None, device: FakeDevice, checkpoint: str, expected: Named
) -> None:
    """Called by anyone but a loader, by whichever name, with arguments either way, the iterator is stock's."""
    files = files_of(checkpoint)
    for function in (
        weight_utils.runai_safetensors_weights_iterator,
        runai_streamer_loader.runai_safetensors_weights_iterator,
    ):
        assert is_stock(function(files, False))
        iterator = function(hf_weights_files=files, use_tqdm_on_load=False, is_distributed=False)
        assert is_stock(iterator)
        assert equal(read(iterator), expected)


def test_a_direct_call_amid_a_pinned_load_stays_stock(gate: None, device: FakeDevice, checkpoint: str) -> None:
    """The loader is known only while its iterator is made, not while that is consumed."""
    iterator = iterate(loader_of(PINNED), checkpoint)
    next(iterator)
    assert is_stock(weight_utils.runai_safetensors_weights_iterator(files_of(checkpoint), False))
    assert is_stock(iterate(loader_of(), checkpoint))
    iterator.close()


def test_a_loader_whose_files_are_missing_is_forgotten(
    gate: None, device: FakeDevice, checkpoint: str, tmp_path: Path
) -> None:
    """After stock's own error for a folder without weights, the next iterator is not taken for that loader's."""
    with pytest.raises(RuntimeError, match="Cannot find any safetensors"):
        iterate(loader_of(PINNED), str(tmp_path))
    assert is_stock(weight_utils.runai_safetensors_weights_iterator(files_of(checkpoint), False))


@pytest.mark.skipif(Version("0.33") > VERSION, reason="0.33 has the third argument")
@pytest.mark.parametrize("extra", [{}, PINNED], ids=["stock", "pinned"])
def test_the_choice_of_files_passes_through(
    gate: None, device: FakeDevice, checkpoint: str, expected: Named, extra: dict[str, Any]
) -> None:
    """What 0.33 says of unused weights reaches stock, which leaves a shard out, by position and by name."""
    wanted = {name: tensor for name, tensor in expected.items() if not name.startswith("1.")}
    loader = loader_of(extra)

    def unused(name: str) -> bool:
        return name.startswith("1.")

    assert equal(read(loader._get_weights_iterator(checkpoint, None, unused)), wanted)
    by_name = loader._get_weights_iterator(model_or_path=checkpoint, revision=None, is_unused_weight=unused)
    assert equal(read(by_name), wanted)
    assert device.opened == (2 if extra else 0)


def test_without_cuda_stock_loads_and_one_warning_says_why(
    gate: None, checkpoint: str, expected: Named, warnings: list[str]
) -> None:
    """As here: the weights are stock's, however often they are loaded, and one line names the platform."""
    for _ in range(3):
        assert equal(read(iterate(loader_of(PINNED), checkpoint)), expected)
    (warning,) = warnings
    assert KEY in warning
    assert "stock loads these weights" in warning
    assert "not CUDA" in warning
    assert vllm_hotfix.counters()[KEY] == {"stock_loads": 3}


def test_a_device_that_cannot_be_opened_is_named(
    gate: None, device: FakeDevice, checkpoint: str, expected: Named, warnings: list[str], monkeypatch: Any
) -> None:
    """What stands against the device, page-locking included, is in the one warning; stock loads."""

    def refuse(*args: Any) -> Any:
        raise _cuda.CudaError("cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY (2)")

    monkeypatch.setattr(device, "register", refuse)
    assert equal(read(iterate(loader_of(PINNED), checkpoint)), expected)
    (warning,) = warnings
    assert "CUDA_ERROR_OUT_OF_MEMORY" in warning


def test_weights_that_go_elsewhere_are_left_to_stock(
    gate: None, device: FakeDevice, checkpoint: str, expected: Named, warnings: list[str]
) -> None:
    """Where vLLM was told to load the weights on the CPU, stock does, and one line says so."""
    assert equal(read(iterate(loader_of(PINNED, device="cpu"), checkpoint)), expected)
    assert device.opened == 0
    (warning,) = warnings
    assert "'cpu'" in warning


# 4. Models.

FIRST = {"one.w": [[1.0, 2.0], [3.0, 4.0]], "one.scale": [0.5], "two.w": [[5.0, 6.0]]}
SECOND = {"one.w": [[7.0, 8.0], [9.0, 10.0]], "one.scale": [0.25], "two.w": [[11.0, 12.0]]}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two checkpoints of `small`, each in two shards."""
    folders = []
    for content in (FIRST, SECOND):
        folder = tmp_path_factory.mktemp("small")
        for shard in ("one", "two"):
            tensors = {name: torch.tensor(value) for name, value in content.items() if name.startswith(shard)}
            save_file(tensors, folder / f"{shard}.safetensors")
        folders.append(str(folder))
    return folders


def small(model: Probe, _: VllmConfig) -> None:
    """Two layers, each of which derives a tensor when it is loaded."""
    model.one = Layer({"w": (2, 2), "scale": (1,)}, formula=lambda layer: layer.w * layer.scale)
    model.two = Layer({"w": (1, 2)})


def load(host: Host, folder: str, extra: dict[str, Any]) -> Any:
    """Load a model through the release's own `load_model` and the streamer's loader."""
    host.config.model_config.model_weights = folder
    try:
        return host.load(small, (), lambda *_: loader_of(extra))
    finally:
        host.config.model_config.model_weights = ""


def test_a_model_loads_as_in_stock(host: Host, models: list[str], device: FakeDevice, gate: None) -> None:
    """`load_model` leaves the same parameters and derived tensors, and device memory is free again."""
    stock = values(load(host, models[0], {}))
    assert stock["one.w"].tolist() == FIRST["one.w"]
    assert device.opened == 0
    assert same(values(load(host, models[0], PINNED)), stock)
    assert device.opened == 1
    assert device.copies > 0
    assert device.allocated == {}


@pytest.mark.skipif(Version("0.32") > VERSION, reason="before 0.32 the streamer's loader cannot reload")
@pytest.mark.parametrize("both", [False, True], ids=["alone", "with measured_totals"])
def test_ten_reloads_in_a_row(
    host: Host, models: list[str], device: FakeDevice, both: bool, request: pytest.FixtureRequest, monkeypatch: Any
) -> None:
    """Each of ten reloads makes its loader from the same configuration, pins, and leaves what stock's leaves."""
    from vllm.model_executor.model_loader.reload import inplace

    model_config = host.config.model_config
    for name in ("model", "model_weights", "revision"):
        monkeypatch.setattr(model_config, name, getattr(model_config, name))
    stock = [values(load(host, folder, {})) for folder in models]
    if both:
        monkeypatch.setenv("VLLM_HOTFIX_MEASURED_TOTALS", "1")
    request.getfixturevalue("gate")
    model = load(host, models[0], PINNED)
    monkeypatch.setattr(host.config, "load_config", config_of(PINNED))
    for number in range(1, 11):
        inplace.reload_weights(host.config, model, None, models[number % 2], True)
        assert same(values(model), stock[number % 2])
        assert device.opened == 1 + number
        assert device.registered == device.allocated == {}


def test_measured_totals_beside_it(
    host: Host, models: list[str], device: FakeDevice, gate: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With both patches on, measured_totals sees every loader call of a pinned load, and a reload is right."""
    stock = [values(load(host, folder, {})) for folder in models]
    monkeypatch.setenv("VLLM_HOTFIX_MEASURED_TOTALS", "1")
    vllm_hotfix.activate()
    assert {entry.live()[0] for entry in RECORD.entries.values()} == {"active"}
    assert len(RECORD.entries) == 2
    monkeypatch.setattr(RECORD, "counters", {})
    model = load(host, models[0], PINNED)
    assert same(values(model), stock[0])
    host.reload(model, [(name, tensor) for name, tensor in iterate(loader_of(PINNED), models[1])])
    assert same(values(model), stock[1])
    assert vllm_hotfix.counters()["measured_totals"]["reloads"] == 1
    assert vllm_hotfix.counters()[KEY]["tensors"] == 2 * len(FIRST)


def threads(*functions: Callable[[], Any]) -> list[Any]:
    """Call functions in threads of their own and return what they return."""
    results: list[Any] = [None] * len(functions)

    def run(index: int, function: Callable[[], Any]) -> None:
        try:
            results[index] = function()
        except BaseException as error:
            results[index] = error

    running = [threading.Thread(target=run, args=one, daemon=True) for one in enumerate(functions)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(60)
        assert not thread.is_alive()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def test_two_loaders_in_two_threads(gate: None, device: FakeDevice, checkpoint: str, expected: Named) -> None:
    """Two pinned loads that go on step by step together deliver each its own tensors."""
    step = threading.Barrier(2, timeout=30)

    def run() -> Named:
        found: Named = {}
        for name, tensor in iterate(loader_of(PINNED), checkpoint):
            step.wait()
            found[name] = tensor
        return found

    first, second = threads(run, run)
    assert equal(first, expected)
    assert equal(second, expected)
    assert {tensor.data_ptr() for tensor in first.values()}.isdisjoint(t.data_ptr() for t in second.values())
    assert device.opened == 2


def test_iterators_made_at_the_same_time_know_their_loader(gate: None, device: FakeDevice, checkpoint: str) -> None:
    """While one thread makes a pinned loader's iterator, another's without the key is stock's, and the reverse."""
    pinned, plain = loader_of(PINNED), loader_of()
    inside = threading.Barrier(2, timeout=30)

    def both_inside(*args: Any) -> list[str]:
        inside.wait()
        return files_of(checkpoint)

    for loader in (pinned, plain):
        loader._prepare_weights = both_inside  # called while the iterator is made
    first, second = threads(lambda: iterate(pinned, checkpoint), lambda: iterate(plain, checkpoint))
    assert not is_stock(first)
    assert is_stock(second)


def test_two_loads_in_turn_in_one_thread(gate: None, device: FakeDevice, checkpoint: str, expected: Named) -> None:
    """A draft model's load between the target's tensors, one pinned and one not, disturbs neither."""
    pinned, plain = iterate(loader_of(PINNED), checkpoint), iterate(loader_of(), checkpoint)
    found: tuple[Named, Named] = ({}, {})
    for left, right in zip(pinned, plain, strict=True):
        found[0][left[0]], found[1][right[0]] = left[1].clone(), right[1].clone()
    del left, right
    assert equal(found[0], expected)
    assert equal(found[1], expected)
    assert device.opened == 1


# 5. States.


def originals() -> dict[str, Any]:
    """Return what stands in the places of the three functions, and under the names that others took."""
    return {
        "init": vars(RunaiModelStreamerLoader)["__init__"],
        "get": vars(RunaiModelStreamerLoader)["_get_weights_iterator"],
        "iterator": vars(weight_utils)["runai_safetensors_weights_iterator"],
        "taken": vars(runai_streamer_loader)["runai_safetensors_weights_iterator"],
    }


def test_deactivate_restores_the_originals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Active, all three functions are wrapped, under every name; afterwards each is the identical object again."""
    before = originals()
    monkeypatch.setenv(GATE, "1")
    for _ in range(2):
        activate()
        during = originals()
        assert all(during[name].__wrapped__ is before[name] for name in before)
        assert during["iterator"] is during["taken"]
        vllm_hotfix.deactivate()
        after = originals()
        assert all(after[name] is before[name] for name in before)


def test_deactivate_amid_a_load_lets_it_go_on(gate: None, device: FakeDevice, checkpoint: str, expected: Named) -> None:
    """A load that is half way goes on pinned, to its end; a loader that was made before is stock from then on."""
    loader = loader_of(PINNED)
    iterator = iterate(loader, checkpoint)
    tensors = dict([next(iterator)])
    vllm_hotfix.deactivate()
    assert inspect.unwrap(weight_utils.runai_safetensors_weights_iterator) is STOCK
    assert weight_utils.runai_safetensors_weights_iterator is STOCK
    tensors.update(iterator)
    assert equal(tensors, expected)
    assert all(device.holds(tensor) for tensor in tensors.values())
    assert is_stock(iterate(loader, checkpoint))


def other_streamer(folder: Path, *, changed: bool, version: str | None = None) -> Path:
    """Copy the streamer, with a token of its `FileStreamer` changed, or under another version, or both."""
    home = folder / "streamer"
    (info,) = STREAMER.parent.glob("runai_model_streamer-*.dist-info")
    own = info.name.removesuffix(".dist-info").rpartition("-")[2]
    (home / f"runai_model_streamer-{version or own}.dist-info").mkdir(parents=True)
    shutil.copytree(STREAMER, home / "runai_model_streamer", ignore=shutil.ignore_patterns("__pycache__"))
    if changed:
        file = home / "runai_model_streamer/file_streamer/file_streamer.py"
        text = file.read_text()
        start = text.index("class FileStreamer")
        # Works as before, and is other code.
        line = next(line for line in text[start:].splitlines() if re.match(r"\s+self\.\w+ = ", line))
        file.write_text(text[:start] + text[start:].replace(line, line.replace("= ", "= None or ", 1), 1))
    return home


def install_streamer(home: Path | None) -> None:
    """In a child: make the streamer the one in that folder, or take it away, for vLLM too."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "runai_model_streamer"]:
        del sys.modules[name]
    sys.path[:] = [entry for entry in sys.path if not Path(entry, "runai_model_streamer/__init__.py").is_file()]
    if home is not None:
        sys.path.insert(0, str(home))
    importlib.invalidate_caches()
    if home is not None:
        module = importlib.import_module("runai_model_streamer")
        assert Path(module.__file__).parent == home / "runai_model_streamer"
        weight_utils.SafetensorsStreamer = module.SafetensorsStreamer


def with_streamer(folder: Path, home: Path | None, checkpoint: str, expected: Named) -> frame.Outcome:
    """With another streamer, in a process of its own: the state, what the key leads to, and whether the load is right.

    The gate says `force`, so that a loader would pin if it could.
    """

    def child() -> dict[str, Any]:
        install_streamer(home)
        frame.hear_warnings()
        fake = FakeDevice()
        _cuda.open_device = fake.open
        weight_utils.current_platform = Cuda()
        vllm_hotfix.activate()
        (state,) = (patch for patch in vllm_hotfix.patches() if patch["name"] == KEY)
        result = {"state": state["state"], "reason": state["reason"], "key": answer(PINNED)[0]}
        result["bad"] = answer({KEY: 1})[0]
        if home is not None:
            result["right"] = []
            for extra in ({}, PINNED) if result["key"] is False else ({},):
                iterator = iterate(loader_of(extra), checkpoint)
                result["stock"] = is_stock(iterator)
                result["right"].append(equal(read(iterator), expected))
        result["opened"] = fake.opened
        return result

    return frame.forked(folder, child, **{GATE: "force"})


@pytest.mark.parametrize(
    ("version", "state"), [(None, "drifted"), ("9.9.9", "unsupported")], ids=["own version", "other version"]
)
def test_an_unknown_streamer_leaves_stock_and_the_key_understood(
    version: str | None, state: str, tmp_path: Path, checkpoint: str, expected: Named
) -> None:
    """A streamer with one other token: one warning, stock loads, and the key is neither refused nor left unchecked."""
    home = other_streamer(tmp_path, changed=True, version=version)
    outcome = with_streamer(tmp_path, home, checkpoint, expected)
    result = outcome.ok()
    assert result["state"] == state, result
    assert "FileStreamer" in result["reason"]
    assert result["key"] is False
    assert result["bad"] == "pinned_staging must be a bool, got 1"
    assert result["right"] == [True, True]
    assert result["stock"] is True
    assert result["opened"] == 0
    assert len(outcome.warnings) == 1, outcome.output
    assert all(word in outcome.warnings[0] for word in (KEY, GATE, state, "stock vLLM runs"))


def test_a_known_streamer_under_another_version_pins(tmp_path: Path, checkpoint: str, expected: Named) -> None:
    """The code decides: a streamer of unknown version whose code is known is patched."""
    home = other_streamer(tmp_path, changed=False, version="9.9.9")
    outcome = with_streamer(tmp_path, home, checkpoint, expected)
    result = outcome.ok()
    assert result["state"] == "active", result
    assert result["right"] == [True, True]
    assert result["opened"] == 2
    assert outcome.warnings == []


def test_without_a_streamer_there_is_nothing_to_patch(tmp_path: Path, checkpoint: str, expected: Named) -> None:
    """No streamer is installed: not needed, no warning, and the key gets stock's own answer."""
    outcome = with_streamer(tmp_path, None, checkpoint, expected)
    result = outcome.ok()
    assert result["state"] == "not-needed"
    assert (result["key"] is False) is (Version("0.24") > VERSION)
    assert outcome.warnings == []


def at_fault(folder: Path, prepare: Callable[[], None], checkpoint: str, expected: Named) -> frame.Outcome:
    """In a process of its own, prepared: the state, what the settings lead to, and whether loads are stock's."""

    def child() -> dict[str, Any]:
        prepare()
        frame.hear_warnings()
        fake = FakeDevice()
        _cuda.open_device = fake.open
        weight_utils.current_platform = Cuda()
        vllm_hotfix.activate()
        (state,) = (patch for patch in vllm_hotfix.patches() if patch["name"] == KEY)
        result = {"state": state["state"], "reason": state["reason"]}
        result |= {"key": answer(PINNED)[0], "other": answer(PINNED | {"surprise": 1})[0], "bad": answer({KEY: 1})[0]}
        result["right"] = []
        for extra in ({}, PINNED, {KEY: False}) if result["key"] is False else ({},):
            iterator = iterate(loader_of(extra), checkpoint)
            result["right"].append(is_stock(iterator) and equal(read(iterator), expected))
        result["opened"] = fake.opened
        vllm_hotfix.deactivate()
        result["undone"] = not hasattr(vars(RunaiModelStreamerLoader)["__init__"], "__wrapped__")
        return result

    return frame.forked(folder, child, **{GATE: "1"})


def check_understood(outcome: frame.Outcome, state: str, why: str) -> None:
    """One warning, stock loads, and the key is understood: neither refused nor left unchecked."""
    result = outcome.ok()
    assert result["state"] == state, result
    assert why in result["reason"]
    assert result["key"] is False, result
    surprise = "Unexpected extra config keys for runai_streamer: {'surprise'}"
    assert result["other"] == (False if Version("0.24") > VERSION else surprise)
    assert result["bad"] == "pinned_staging must be a bool, got 1"
    assert result["right"] == [True, True, True]
    assert result["opened"] == 0
    assert result["undone"] is True
    assert len(outcome.warnings) == 1, outcome.output
    assert all(word in outcome.warnings[0] for word in (KEY, GATE, state, "stock vLLM runs"))


def test_a_changed_iterator_leaves_stock_and_the_key_understood(
    tmp_path: Path, checkpoint: str, expected: Named
) -> None:
    """With other code in vLLM's iterator that does the same: drifted; a loader with the key is made and is stock."""
    file = Path(weight_utils.__file__)
    text = file.read_text()
    start = text.index("def runai_safetensors_weights_iterator")
    changed = text[:start] + text[start:].replace("streamer.stream_files(", "(streamer.stream_files)(", 1)
    assert changed != text
    source = file.parents[2]
    home = frame.linked_tree(tmp_path / "changed", source, {str(file.relative_to(source)): changed})

    def prepare() -> None:
        sys.path.insert(0, str(home))
        vllm = sys.modules["vllm"]
        vllm.__path__[:] = [str(home / "vllm")]
        vllm.__spec__ = importlib.machinery.PathFinder.find_spec("vllm", [str(home)])

    check_understood(at_fault(tmp_path, prepare, checkpoint, expected), "drifted", "runai_safetensors_weights_iterator")


def test_a_failed_wrap_leaves_stock_and_the_key_understood(tmp_path: Path, checkpoint: str, expected: Named) -> None:
    """Where a target cannot be wrapped: failed, and a loader with the key is made and is stock."""

    def prepare() -> None:
        del pinned_staging.weights_iterator

    check_understood(at_fault(tmp_path, prepare, checkpoint, expected), "failed", "weights_iterator")
