"""What the patches ask of torch and vLLM while they are at work, made to fail, one call at a time.

No table is written by hand: a first run lists every call that a patch's own code makes to code of others, apart from
those by which it passes on to stock. Then each of them fails in a run of its own, with everything that it can raise.
The result is stock's or the patched one, there is one warning at most, and what was interrupted can be done again.
"""

from __future__ import annotations

import contextlib
import linecache
import operator
import os
import re
import sys
import types
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import layers
import mla_layers
import pytest
import test_keep_moe_kernel_fp8 as moe
import test_runai_reload as runai
import test_sleep_tensors as sleeping
import torch
from faults import ERRORS, interrupted, is_free
from layers import Host, Layer, Probe, pieces
from packaging.version import Version
from patching import hearing, switched_on

from vllm_hotfix import _hooks, _patches
from vllm_hotfix._record import RECORD

RELEASE = Version(os.environ["HOTFIX_RELEASE"])
HOME = os.path.dirname(_patches.__file__)
Call = tuple[str, int, str]
#: Lines by which a patch lets stock do stock's work; what that raises is stock's. It asks ``can_load`` itself first.
PASSED_ON = re.compile(
    r"\b(wrapped|stock|__wrapped__|_layerwise_process|_get_weights_iterator|can_load)\(|yield from|in iterator"
)


class Watch:
    """Sees the calls that patches make, and lets one of them fail.

    Args:
        fail: the call that fails, the first time that it is made; None to see all.
        make: makes what it raises.
    """

    def __init__(self, fail: Call | None = None, make: Callable[[], BaseException] | None = None) -> None:
        self.calls: dict[Call, int] = {}
        self.fail, self.make = fail, make
        self.failed = False

    def __enter__(self) -> Watch:
        sys.setprofile(self._see)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _see(self, frame: types.FrameType, event: str, arg: Any) -> None:
        if event == "c_call":
            caller, name, home = frame, getattr(arg, "__qualname__", ""), _home(arg)
        elif event == "call" and frame.f_back is not None:
            caller, name, home = frame.f_back, frame.f_code.co_qualname, frame.f_globals.get("__name__", "")
        else:
            return
        file, line = caller.f_code.co_filename, caller.f_lineno
        if not file.startswith(HOME) or not _is_of_others(home) or name.endswith("__exit__"):
            return
        if PASSED_ON.search(linecache.getline(file, line)):
            return
        call = (os.path.relpath(file, HOME), line, name)
        self.calls[call] = self.calls.get(call, 0) + 1
        if call == self.fail and not self.failed:
            self.failed = True
            assert self.make is not None
            raise self.make()


def _home(function: Any) -> str:
    owner = getattr(function, "__self__", None)
    if isinstance(owner, torch.Tensor):
        return "torch"
    return getattr(function, "__module__", None) or getattr(owner, "__name__", None) or ""


def _is_of_others(home: str) -> bool:
    return home.partition(".")[0] in ("torch", "vllm", "posix", "time", "json", "os", "pathlib")


class Scene:
    """A piece of work that patches take part in.

    Attributes:
        run: does it, and returns what comes of it.
        right: says whether that is as good as stock's.
    """

    def __init__(self, run: Callable[[], Any], right: Callable[[Any, Any], bool] = operator.eq) -> None:
        self.run, self.right = run, right


def plain(host: Host, **_: Any) -> Scene:
    """A layer that stock reloads right: load, and reload twice."""

    def build(model: Probe, config: Any) -> None:
        model.layer = Layer({"weight": (2,), "scale": (1,)})
        model.layer.register_buffer("offset", torch.tensor([4.0]), persistent=False)

    def run() -> list[list[float]]:
        found = []
        model = None
        for first in (1, 5, 9):
            stream = [*pieces("layer.weight", [first, first + 1]), *pieces("layer.scale", [first + 2])]
            if model is None:
                model = host.load(build, stream)
            else:
                host.reload(model, stream)
            found.append([float(value) for tensor in model.parameters() for value in tensor.flatten()])
        return found

    return Scene(run)


def attention(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **_: Any) -> Scene:
    """An MLA layer with fp8 weights: load, reload, and what it computes without a graph."""
    engine = mla_layers.Engine(Host(layers.make_config(tmp_path, dtype="bfloat16")), "fp8", monkeypatch)

    def run() -> Any:
        loaded = engine.load(1)
        engine.reload(loaded, 2)
        return loaded.run().tolist()

    return Scene(run)


def experts(host: Host, monkeypatch: pytest.MonkeyPatch, **_: Any) -> Scene:
    """FP8 experts on CUTLASS's kernels: load, reload, and what they compute without a graph."""
    engine = moe.Engine(host, moe.compressed_per_channel, "VLLM_CUTLASS")
    moe.fp8_kernels.install(monkeypatch, engine.backend)
    monkeypatch.setattr(host.config.compilation_config, "max_cudagraph_capture_size", 8)

    def run() -> Any:
        moe.reset_workspace_manager()
        moe.init_workspace_manager(layers.DEVICE)
        loaded = engine.load(1)
        engine.reload(loaded, 2, "stock")
        return loaded.run().tolist()

    return Scene(run)


def sleep(host: Host, monkeypatch: pytest.MonkeyPatch, **_: Any) -> Scene:
    """A worker sleeps at level 2, wakes up and reloads: what stock brings back is there."""
    pool = sleeping.Pool(monkeypatch)
    for module in (sleeping.vllm.device_allocator, sleeping.gpu_worker):
        monkeypatch.setattr(module, "get_mem_allocator_instance", lambda: pool.allocator, raising=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *args: (1 << 30, 1 << 31))
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda *args: (1 << 30, 1 << 31), raising=False)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *args: None)

    engines: list[Any] = []

    def run() -> Any:
        # One for all, until it is interrupted: to make it takes a look at every object that there is.
        engine = engines.pop() if engines else sleeping.Engine(host, pool)
        engine.worker.sleep(level=2)
        engine.worker.wake_up()
        engine.reload(2)
        engines.append(engine)
        return sleeping.held(engine.model)

    return Scene(run, lambda found, stock: sleeping.differing(found, stock) <= sleeping.LOST | sleeping.ANEW)


def streamer(host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **_: Any) -> Scene:
    """A load through the Run:ai streamer, and a reload, which stock refuses before 0.32.0."""
    runai.save_file(runai.checkpoint(1), tmp_path / "model.safetensors")

    def run() -> Any:
        engine = runai.Engine(host, monkeypatch, str(tmp_path))
        found = [layers.values(engine.model)]
        with contextlib.suppress(NotImplementedError):
            engine.runner.reload_weights()
        return [*found, layers.values(engine.model)]

    return Scene(run, lambda found, stock: all(map(layers.same, found, stock)))


#: The pieces of work, and the patches whose calls fail in each.
SCENES: dict[Callable[..., Scene], str] = {
    plain: "",
    attention: "mla_in_place",
    experts: "keep_moe_kernel",
    sleep: "sleep_tensors",
    streamer: "runai",
}
#: From 0.17 on the streamer gives its tensors away, and they need no care.
OWNED = Version(version("runai_model_streamer")) >= Version("0.17")
#: From 0.26.0 on half of these patches have little to do.
REST = [
    scene for scene in SCENES if scene is plain or (Version("0.26") > RELEASE and not (scene is streamer and OWNED))
]


@pytest.mark.parametrize("scene", REST)
def test_whatever_fails_at_work(
    scene: Callable[..., Scene], host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, subtests: Any
) -> None:
    """The result is as good as stock's, with one warning at most; an interrupt arrives, and all can be done again."""
    one = scene(host=host, monkeypatch=monkeypatch, tmp_path=tmp_path)
    expected = one.run()
    assert one.right(one.run(), expected)
    monkeypatch.setenv("VLLM_HOTFIX_ENABLE", "all")
    with switched_on(monkeypatch, tmp_path, "measured_totals"):
        with Watch() as seen:
            assert one.right(one.run(), expected)
        calls = [call for call in seen.calls if call[0].startswith(SCENES[scene])]
        assert len(calls) > 3
        for call in calls:
            for error in ERRORS if scene is plain else ("MemoryError", "KeyboardInterrupt"):
                with subtests.test(call=call, error=error):
                    RECORD._warned.clear()
                    assert_as_good(one, expected, call, error)


def assert_as_good(one: Scene, expected: Any, call: Call, error: str) -> None:
    """Let a call fail, and see that the work's result is as good as stock's."""
    make, words = ERRORS[error]
    with hearing() as heard:
        with Watch(call, make) as watch:
            found = interrupted(one.run)
        torch.set_default_dtype(torch.float32)  # stock leaves the model's where a load raises
        assert watch.failed
        if error == "KeyboardInterrupt":
            assert found is KeyboardInterrupt and heard == []
        else:
            assert one.right(found, expected)
            assert len(heard) <= 1 and all(words in line for line in heard), heard
        for lock in (_hooks.LOCK, RECORD._lock):
            assert is_free(lock)
        assert one.right(one.run(), expected)
