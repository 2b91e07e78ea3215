"""runai_reload in a release's real `reload_weights` and loader, with a real streamer on real files, beside stock vLLM.

Stock raises in 0.20.0 to 0.31.0. From 0.32.0 on it has the fix, and the patch has nothing to do. The runner is the
release's own class without a device: of the rest of a worker there is only what `reload_weights` asks for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from devices import FakeDevice
from layers import Host, Layer, Probe, same, values
from packaging.version import Version
from patching import counters, state_of, switched_on
from safetensors.torch import save_file
from vllm.config import LoadConfig, VllmConfig
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.runai_streamer_loader import RunaiModelStreamerLoader
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

import vllm_hotfix

VERSION = Version(os.environ["HOTFIX_RELEASE"])
FIXED = Version("0.32") <= VERSION
NAME, GATE, BUFFERS = "runai_reload", "VLLM_HOTFIX_RUNAI_RELOAD", "runai_buffers"
PINNED = "pinned_staging"
REFUSED = "Model reloading with `runai_streamer` format"
SETTINGS = ("RUNAI_STREAMER_CONCURRENCY", "RUNAI_STREAMER_MEMORY_LIMIT", "RUNAI_STREAMER_S3_ENDPOINT")
SIZE = 4096
needs_fault = pytest.mark.skipif(FIXED, reason="from 0.32 on the release has the fix and nothing is wrapped")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start with a streamer that has memory for one tensor, and no other setting of it."""
    for name in SETTINGS:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("RUNAI_STREAMER_MEMORY_LIMIT", "0")


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Apply the patch for one test and undo it afterwards; it turns runai_buffers on."""
    with switched_on(monkeypatch, tmp_path, NAME):
        state, reason = state_of(NAME)
        assert state == ("not-needed" if FIXED else "active"), reason
        assert state_of(BUFFERS)[0] == ("not-needed" if Version("0.22") <= VERSION else "active")
        yield


def checkpoint(seed: int) -> dict[str, torch.Tensor]:
    """Two layers' tensors."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(SIZE, generator=generator) for name in ("one.a", "two.a", "one.b", "two.b")}


def build(model: Probe, _: VllmConfig) -> None:
    """Two layers, each of which is complete with its second tensor."""
    for name in ("one", "two"):
        model.add_module(name, Layer({"a": (SIZE,), "b": (SIZE,)}))


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two checkpoints, each tensor in a file of its own, the layers' in turn."""
    found = []
    for seed in (1, 2):
        folder = tmp_path_factory.mktemp("checkpoint")
        for number, (name, tensor) in enumerate(checkpoint(seed).items()):
            save_file({name: tensor}, folder / f"model-{number}.safetensors")
        found.append(str(folder))
    return found


def cold(host: Host, seed: int) -> dict[str, torch.Tensor]:
    """Return a model's tensors after a load from memory."""
    return values(host.load(build, list(checkpoint(seed).items())))


class Engine:
    """A worker's runner, the release's own, with a model that the streamer's loader has loaded."""

    def __init__(
        self, host: Host, monkeypatch: pytest.MonkeyPatch, model: str, model_weights: str = "", extra: Any = None
    ) -> None:
        self.config = host.config.model_config
        for name, value in {"model": model, "model_weights": model_weights, "revision": "abc"}.items():
            monkeypatch.setattr(self.config, name, value)
        load_config = LoadConfig(
            load_format="runai_streamer", use_tqdm_on_load=False, model_loader_extra_config=extra or {}
        )
        monkeypatch.setattr(host.config, "load_config", load_config)
        self.model = host.load(build, (), lambda *_: get_model_loader(load_config))
        self.runner = self.bare(GPUModelRunner, host.config)

    def bare(self, kind: Any, config: VllmConfig) -> Any:
        """Return a runner of a class with what a reload asks for."""
        runner = kind.__new__(kind)
        runner.vllm_config, runner.model_config, runner.load_config = config, self.config, config.load_config
        runner.lora_config = None
        for name in ("reset_encoder_cache", "reset_mm_cache", "reset_lora_state"):
            setattr(runner, name, lambda: None)
        runner.get_model = lambda: self.model
        return runner


# 1. The fault.


def test_a_reload_is_a_cold_load(
    host: Host, folders: list[str], side: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Stock's reload raises in 0.20.0 to 0.31.0; patched, or from 0.32.0 on, it is a cold load, as often as one likes.

    The model is what the folder holds by now, or what another folder holds; parameters stay where they are.
    """
    engine = Engine(host, monkeypatch, folders[0])
    assert same(values(engine.model), cold(host, 1))
    places = {name: one.data_ptr() for name, one in engine.model.named_parameters()}
    if side == "stock" and not FIXED:
        with pytest.raises(NotImplementedError, match=REFUSED):
            engine.runner.reload_weights()
        assert same(values(engine.model), cold(host, 1))
        return
    for path, seed in ((None, 1), (folders[1], 2), (None, 2), (folders[0], 1)):
        with torch.no_grad():
            for one in engine.model.parameters():
                one.fill_(-1)  # what a sleep has discarded
        engine.runner.reload_weights(weights_path=path)
        assert same(values(engine.model), cold(host, seed))
    assert {name: one.data_ptr() for name, one in engine.model.named_parameters()} == places
    assert counters(NAME) == ({} if FIXED else {"reloads": 4})


@needs_fault
@pytest.mark.parametrize("by_name", [True, False])
def test_the_source_is_that_of_the_model(
    host: Host, folders: list[str], by_name: bool, patched: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`model_weights` and the revision count as in the first load, and are let go of with a path of one's own.

    Then the model is the path, for the reloads after it as well, as from 0.32 on.
    """
    engine = Engine(host, monkeypatch, str(tmp_path), folders[0])
    asked: list[tuple[str, str | None]] = []
    prepare = RunaiModelStreamerLoader._prepare_weights

    def spy(self: Any, model: str, revision: str | None) -> list[str]:
        asked.append((model, revision))
        return prepare(self, model, revision)

    monkeypatch.setattr(RunaiModelStreamerLoader, "_prepare_weights", spy)
    engine.runner.reload_weights()
    engine.runner.reload_weights(None, None)
    assert engine.config.model_weights == folders[0]
    assert same(values(engine.model), cold(host, 1))
    if by_name:
        engine.runner.reload_weights(weights_path=folders[1], weights_iterator=None)
    else:
        engine.runner.reload_weights(None, folders[1], True)
    assert same(values(engine.model), cold(host, 2))
    engine.runner.reload_weights()
    assert asked == [(folders[0], "abc")] * 2 + [(folders[1], None)] * 2
    assert (engine.config.model, engine.config.model_weights) == (folders[1], "")
    assert same(values(engine.model), cold(host, 2))


def test_from_another_path_as_the_fixed_release(
    host: Host, folders: list[str], patched: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In every release, the fixed ones too, a path wins over the `model_weights` of the model that is left."""
    engine = Engine(host, monkeypatch, str(tmp_path), folders[0])
    engine.runner.reload_weights(weights_path=folders[1])
    assert same(values(engine.model), cold(host, 2))
    assert (engine.config.model, engine.config.model_weights) == (folders[1], "")
    assert engine.config.revision is None


@pytest.mark.parametrize("repository", [False, True])
def test_what_is_not_local_is_fetched_as_in_the_first_load(
    host: Host, folders: list[str], repository: bool, patched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object storage address is listed and read by the streamer; a repository is downloaded in its revision."""
    from vllm.model_executor.model_loader import runai_streamer_loader as module

    engine = Engine(host, monkeypatch, folders[0])
    asked: list[Any] = []

    def download(name: str, cache: Any, patterns: Any, revision: str | None, **options: Any) -> str:
        asked.append((name, revision))
        return folders[1]

    def listed(path: str) -> list[str]:
        asked.append(path)
        return sorted(map(str, Path(folders[1]).glob("*.safetensors")))

    monkeypatch.setattr(module, "list_safetensors", listed)
    if repository:
        monkeypatch.setattr(engine.config, "model", "some/model")
        monkeypatch.setattr(module, "download_weights_from_hf", download)
        monkeypatch.setattr(module, "download_safetensors_index_file_from_hf", lambda *args, **kwargs: None)
        monkeypatch.setattr(module, "resolve_revision", lambda model, revision: revision, raising=False)
    else:
        monkeypatch.setattr(engine.config, "model_weights", "s3://bucket/model")
    engine.runner.reload_weights()
    assert asked == ([("some/model", "abc"), folders[1]] if repository else ["s3://bucket/model"])
    assert same(values(engine.model), cold(host, 2))


def test_a_runner_of_another_class(
    host: Host, folders: list[str], patched: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The second model runner of 0.22.0 to 0.31.0 calls the first one's method with itself."""
    engine = Engine(host, monkeypatch, str(tmp_path), folders[0])

    class Other:
        pass

    runner = engine.bare(Other, host.config)
    for path, seed in ((None, 1), (folders[1], 2)):
        GPUModelRunner.reload_weights(runner, weights_path=path)
        assert same(values(engine.model), cold(host, seed))


def test_weights_of_the_callers(host: Host, folders: list[str], side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an iterator of the caller's no loader is asked, also where there is a path as well; nothing is let go of."""
    engine = Engine(host, monkeypatch, folders[0], folders[0])
    engine.runner.reload_weights(iter(checkpoint(2).items()))
    assert same(values(engine.model), cold(host, 2))
    engine.runner.reload_weights(iter(checkpoint(1).items()), folders[1])
    assert same(values(engine.model), cold(host, 1))
    assert (engine.config.model, engine.config.model_weights, engine.config.revision) == (folders[0], folders[0], "abc")
    assert counters(NAME) == {}


# 2. Beside other patches.


@pytest.mark.parametrize("others", [[], [PINNED], [PINNED, "measured_totals"], ["all"]], ids="-".join)
def test_ten_reloads_in_a_row(
    host: Host,
    folders: list[str],
    others: list[str],
    monkeypatch: pytest.MonkeyPatch,
    device: FakeDevice,
    request: pytest.FixtureRequest,
) -> None:
    """Each reload makes a loader from the same configuration, which pins if its key says so, and is a cold load."""
    expected = [cold(host, seed) for seed in (1, 2)]
    monkeypatch.setenv("VLLM_HOTFIX_ENABLE", ",".join(others))
    request.getfixturevalue("patched")
    engine = Engine(host, monkeypatch, folders[0], extra={PINNED: True} if others else None)
    assert device.opened == bool(others)
    for number in range(1, 11):
        engine.runner.reload_weights(weights_path=folders[number % 2] if number % 3 else None)
        seed = (number if number % 3 else number - 1) % 2
        assert same(values(engine.model), expected[seed])
        assert device.opened == (1 + number if others else 0)
    if others:
        assert counters(BUFFERS) == {}
        assert counters(PINNED)["loads"] == 11


# 3. What goes wrong.


@needs_fault
def test_a_folder_without_weights(
    host: Host, folders: list[str], patched: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Stock's own error comes before the layers are taken apart: the model is as it was, and the next reload works."""
    engine = Engine(host, monkeypatch, folders[0])
    with pytest.raises(RuntimeError, match="Cannot find any safetensors"):
        engine.runner.reload_weights(weights_path=str(tmp_path))
    assert same(values(engine.model), cold(host, 1))
    engine.runner.reload_weights(weights_path=folders[1])
    assert same(values(engine.model), cold(host, 2))


@needs_fault
@pytest.mark.parametrize("error", [ZeroDivisionError("stock's own"), KeyboardInterrupt()])
def test_stocks_errors_pass(
    host: Host, folders: list[str], patched: None, monkeypatch: pytest.MonkeyPatch, error: BaseException, tmp_path: Path
) -> None:
    """Whatever stock raises, in a loader that is made or in a reload, comes out as it is.

    A reload after it is not taken for one from another path.
    """

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    engine = Engine(host, monkeypatch, str(tmp_path), folders[0])
    with monkeypatch.context() as broken:
        broken.setattr(engine.runner, "get_model", fail)
        with pytest.raises(type(error)) as caught:
            engine.runner.reload_weights(weights_path=folders[1])
        assert caught.value is error
    assert len(list(loader().get_all_weights(engine.config, engine.model))) == 4
    assert (engine.config.model_weights, engine.config.revision) == (folders[0], "abc")
    engine.runner.reload_weights()
    assert same(values(engine.model), cold(host, 1))
    with pytest.raises(TypeError):
        engine.runner.reload_weights(surprise=1)
    with pytest.raises(AttributeError):
        RunaiModelStreamerLoader(SimpleNamespace())  # no configuration of a loader


@needs_fault
def test_a_method_of_a_derived_class_stays(patched: None) -> None:
    """A loader that has the method of its own keeps it."""

    class Derived(RunaiModelStreamerLoader):
        def get_all_weights(self, *args: Any) -> str:
            return "its own"

    assert Derived(LoadConfig(load_format="runai_streamer")).get_all_weights() == "its own"


@pytest.mark.parametrize("load_format", ["runai_streamer_sharded", "sharded_state"])
def test_sharded_states_are_refused_as_in_stock(
    host: Host, folders: list[str], load_format: str, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sharded state is in the kernels' format and cannot be reloaded in any release: stock's error stays."""
    engine = Engine(host, monkeypatch, folders[0])
    engine.runner.load_config = host.config.load_config = LoadConfig(load_format=load_format)
    with pytest.raises(NotImplementedError, match=load_format):
        engine.runner.reload_weights()


# 4. On and off.


def loader() -> Any:
    """Return a loader as vLLM makes it."""
    return get_model_loader(LoadConfig(load_format="runai_streamer"))


def test_what_is_wrapped_and_given_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Active, loaders have the method and the class has not; afterwards each function is the identical object again.

    From 0.32 on nothing is wrapped: the patch is not needed, and says since when.
    """
    places = [(RunaiModelStreamerLoader, "__init__"), (GPUModelRunner, "reload_weights")]
    stock = [vars(place)[name] for place, name in places]
    assert hasattr(loader(), "get_all_weights") is FIXED
    with switched_on(monkeypatch, tmp_path, NAME):
        live = [vars(place)[name] for place, name in places]
        state, reason = state_of(NAME)
        assert hasattr(loader(), "get_all_weights")
        assert ("get_all_weights" in vars(RunaiModelStreamerLoader)) is FIXED
        if FIXED:
            assert state == "not-needed"
            assert "0.32.0" in reason
            assert all(one is old for one, old in zip(live, stock, strict=True))
        else:
            assert (state, reason) == ("active", "2 functions wrapped")
            assert all(one is not old and one.__wrapped__ is old for one, old in zip(live, stock, strict=True))
    assert all(vars(place)[name] is old for (place, name), old in zip(places, stock, strict=True))
    assert hasattr(loader(), "get_all_weights") is FIXED
    assert state_of(NAME)[0] == "off"


@needs_fault
def test_it_needs_runai_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what it requires turned off by name, the patch is off too, and says why."""
    monkeypatch.setenv(GATE, "1")
    monkeypatch.setenv("VLLM_HOTFIX_RUNAI_BUFFERS", "0")
    vllm_hotfix.activate()
    try:
        assert state_of(NAME)[0] == state_of(BUFFERS)[0] == "off"
        assert not hasattr(loader(), "get_all_weights")
    finally:
        vllm_hotfix.deactivate()
