"""pinned_staging against a fake device, with one release of the real streamer, which stands first on `PYTHONPATH`."""

from __future__ import annotations

import gc
import importlib.metadata
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch
    from checkpoint import Value
    from fake_cuda import Device
    from ranks import Ranks

    Named = tuple[str, torch.Tensor]

STREAMER = os.environ.get("HOTFIX_STREAMER")
EXTENT, BLOCK = 64 << 10, 128 << 10

if STREAMER is None:
    collect_ignore_glob = ["test_*.py"]
else:
    sys.path.insert(0, str(Path(__file__).parent))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import checkpoint
    import fake_cuda
    import runai_model_streamer
    from ranks import Ranks

    RANKS = Ranks()
    found = importlib.metadata.version("runai_model_streamer"), Path(runai_model_streamer.__file__).parents[1]
    assert found == (STREAMER, Path(os.environ["PYTHONPATH"].split(os.pathsep)[0])), "PYTHONPATH leads elsewhere"

    from vllm.model_executor.model_loader import weight_utils

    from vllm_hotfix._patches.pinned_staging import _cuda, _load, _reader
    from vllm_hotfix._record import RECORD


def pytest_report_header() -> str:
    """Name the streamer under test."""
    if STREAMER is None:
        return "streamer: none, set HOTFIX_STREAMER and PYTHONPATH to run tests/staging"
    return f"streamer: {STREAMER}"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the ranks import vLLM while other tests run."""
    if (
        STREAMER is not None
        and any("ranks" in getattr(item, "fixturenames", ()) for item in session.items)
        and not session.config.option.collectonly
    ):
        RANKS.start()


def pytest_sessionfinish() -> None:
    """End the ranks, also of a session that was interrupted."""
    if STREAMER is not None:
        RANKS.stop()


@pytest.fixture(scope="session")
def ranks() -> Ranks:
    """Two processes that load together."""
    return RANKS


class Lines(logging.Handler):
    """What was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.records.append(record)

    def at(self, level: int) -> list[str]:
        """The messages of one level."""
        return [record.getMessage() for record in self.records if record.levelno == level]

    @property
    def warnings(self) -> list[str]:
        """The warnings; an error is none that a test expects."""
        assert not self.at(logging.ERROR)
        return self.at(logging.WARNING)

    @property
    def infos(self) -> list[str]:
        """The lines for information."""
        return self.at(logging.INFO)


@pytest.fixture(autouse=True)
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lines]:
    """What the package logs, with its record empty."""
    monkeypatch.setattr(RECORD, "_warned", set())
    monkeypatch.setattr(RECORD, "counters", {})
    logger, handler = logging.getLogger("vllm.hotfix"), Lines()
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.manager._clear_cache()  # type: ignore[attr-defined]
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


@pytest.fixture(autouse=True)
def platform(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A platform that says it is CUDA, as far as the load asks; the stock path takes it for a CPU."""
    platform = SimpleNamespace(is_cuda=lambda: True, is_cuda_alike=lambda: False, device_name="fake")
    monkeypatch.setattr(weight_utils, "current_platform", platform)
    monkeypatch.delenv(_load.LIMIT, raising=False)
    return platform


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """The device that loads find. None of its memory may have come from PyTorch's allocator."""
    device = fake_cuda.Device()
    monkeypatch.setattr(_cuda, "open_device", lambda: device)
    yield device
    gc.collect()
    device.finish()
    assert not device.foreign


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extents of 64 KiB and blocks of 128 KiB, which do not grow: 3 MB are many refills."""
    receive = _reader.Reader._receive
    monkeypatch.setattr(_reader.Reader, "_receive", lambda reader, number: (receive(reader, number), 0.0)[1])
    monkeypatch.setattr(_load, "EXTENT", EXTENT)
    monkeypatch.setattr(_load, "BLOCK", BLOCK)


@pytest.fixture
def load(device: Device) -> Callable[..., Iterator[Named]]:
    """Makes the iterator of a load."""
    return start


def start(files: list[str], *, use_tqdm: bool = False, distributed: bool = False, **more: Any) -> Iterator[Named]:
    """The iterator of a load, over vLLM's own module."""

    def stock() -> Iterator[Named]:
        return weight_utils.runai_safetensors_weights_iterator(files, use_tqdm, distributed)

    return _load.tensors(weight_utils, stock, files, use_tqdm=use_tqdm, distributed=distributed, **more)


@pytest.fixture(scope="session", autouse=True)
def quick() -> Iterator[None]:
    """Collecting garbage need not look at what vLLM and torch consist of."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three shards, 3 MB."""
    return checkpoint.shards(tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="session")
def contents(files: list[str]) -> dict[str, Value]:
    """What is in the shards."""
    return checkpoint.contents(files)
