"""The memory limit keeps its meaning, and the environment is left alone."""

from __future__ import annotations

import os
import weakref

import pytest
from checkpoint import noise, values, write
from fake_cuda import DeviceTensor

from vllm_hotfix._patches.pinned_staging import _load, _staging

LARGEST = 150_001
PAGE = 4096


@pytest.fixture
def mapped(monkeypatch) -> list[int]:
    """The most bytes of staging memory that were mapped at once, and how many are now."""
    most, now = [0, 0], _staging.Block.__init__

    def made(block, size: int) -> None:
        now(block, size)
        most[1] += block.size
        most[0] = max(most)
        weakref.finalize(block, gone, block.size)

    def gone(size: int) -> None:
        most[1] -= size

    monkeypatch.setattr(_staging.Block, "__init__", made)
    return most


def environment() -> dict[str, str]:
    """The environment, but for what the older streamers set for themselves, under stock as well."""
    return {name: value for name, value in os.environ.items() if name != "RUNAI_STREAMER_PROCESS_GROUP_SIZE"}


@pytest.mark.parametrize(
    ("limit", "bound"),
    [
        (None, 2 * 128 << 10),
        ("-1", 2 * 128 << 10),
        ("0", LARGEST),
        (str(LARGEST), LARGEST),
        (str(LARGEST + 1), LARGEST + 1),
        ("200000", 200_000),
        ("1000000", 2 * 128 << 10),
    ],
)
def test_bound(monkeypatch, small, load, device, files, contents, mapped, limit, bound) -> None:
    """Staging memory never exceeds the limit, pages aside; every tensor arrives, on the device."""
    if limit is not None:
        monkeypatch.setenv(_load.LIMIT, limit)
    monkeypatch.setattr(_load, "_PROBE", PAGE)  # what is pinned before the largest tensor is known
    before = environment()
    kept = list(load(files))
    device.finish()
    assert values(kept) == contents
    assert all(type(tensor) is DeviceTensor for _, tensor in kept if tensor.nbytes)
    assert 0 < device.peak <= mapped[0] <= bound + 2 * PAGE
    assert environment() == before


def test_default_bound(monkeypatch, small, load, device, files, contents, mapped) -> None:
    """With no limit set it is the default that bounds."""
    monkeypatch.setattr(_load, "DEFAULT_LIMIT", LARGEST + 100)
    kept = list(load(files))
    device.finish()
    assert values(kept) == contents
    assert 0 < device.peak <= mapped[0] <= LARGEST + 100 + 2 * PAGE


def test_default_is_no_limit(monkeypatch, small, load, device, files, contents, lines) -> None:
    """A tensor that is larger than the default bound is no reason to leave the load to stock: nobody set a limit."""
    monkeypatch.setattr(_load, "DEFAULT_LIMIT", 100_000)
    kept = list(load(files))
    device.finish()
    assert values(kept) == contents
    assert not [line for line in lines.infos if "left to stock" in line]
    assert all(type(tensor) is DeviceTensor for _, tensor in kept if tensor.nbytes)


def test_unlimited_is_capped(monkeypatch, small, load, device, files, contents) -> None:
    """Where the limit is "unlimited" the cap bounds."""
    monkeypatch.setattr(_load, "CAP", LARGEST)
    monkeypatch.setenv(_load.LIMIT, "-1")
    kept = list(load(files))
    device.finish()
    assert values(kept) == contents
    assert 0 < device.peak <= LARGEST + 2 * PAGE


@pytest.mark.parametrize("limit", ["1", "1000", str(LARGEST - 1), "-2"])
def test_too_small(monkeypatch, small, load, device, files, limit) -> None:
    """A limit below the largest tensor is stock's exception; nothing stays page-locked."""
    from runai_model_streamer.file_streamer.requests_iterator import RunaiStreamerMemoryLimitException

    monkeypatch.setenv(_load.LIMIT, limit)
    with pytest.raises(RunaiStreamerMemoryLimitException):
        list(load(files))
    assert not device.registered and not device.allocated


@pytest.mark.parametrize("limit", ["much", "1e9", ""])
def test_not_a_number(monkeypatch, small, load, device, files, lines, limit) -> None:
    """A limit that is no number is for the stock path to judge, with one warning that says why it is asked."""
    monkeypatch.setenv(_load.LIMIT, limit)
    with pytest.raises(ValueError, match="invalid literal for int"):
        list(load(files))
    (warning,) = lines.warnings
    assert "stock loads these weights" in warning and "invalid literal" in warning
    assert not device.log


def test_one_block(monkeypatch, load, device, tmp_path) -> None:
    """A limit with no room for a second block: one is used again and again."""
    data = [(f"t{i}", "U8", (5000,), noise(5000, i)) for i in range(40)]
    path = str(write(tmp_path / "a.safetensors", data))
    monkeypatch.setenv(_load.LIMIT, "5000")
    monkeypatch.setattr(_load.Load, "first_block", lambda *_: 4096)
    kept = list(load([path]))
    device.finish()
    assert {name: one.bytes for name, one in values(kept).items()} == {name: content for name, *_, content in data}
    assert device.ever == 1 and device.calls("copy") > 40


def test_share_of_a_node(monkeypatch, device, files) -> None:
    """A rank's part of a node's limit bounds too, where it is less than what the rank began with."""
    from vllm.model_executor.model_loader import weight_utils

    monkeypatch.setenv(_load.LIMIT, "400000")
    load = _load._prepare(weight_utils, files, False, None)
    load.share([40_000] * 10, 100_000)
    staging = load.staging
    staging.second(400_000)
    assert 40_000 <= sum(block.size for block in staging.blocks) <= 100_000 + 2 * PAGE
    load.end()
    assert not device.registered
