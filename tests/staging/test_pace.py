"""Blocks grow where storage is slow; what a load did is counted, shown and said."""

from __future__ import annotations

import itertools
import logging
import re
import time

import pytest
from checkpoint import values

from vllm_hotfix._patches.pinned_staging import _load, _reader, _staging
from vllm_hotfix._record import RECORD

PAGE = 4096


@pytest.fixture
def blocks(monkeypatch) -> list[int]:
    """The sizes of the blocks that were made."""
    sizes: list[int] = []
    made = _staging.Block.__init__
    monkeypatch.setattr(_staging.Block, "__init__", lambda self, size: (made(self, size), sizes.append(self.size))[0])
    return sizes


@pytest.fixture
def tiny(monkeypatch) -> None:
    """Blocks of 16 KiB to begin with."""
    monkeypatch.setattr(_load, "EXTENT", 16 << 10)
    monkeypatch.setattr(_load, "BLOCK", 16 << 10)


def paced(monkeypatch, seconds: float) -> None:
    """Reading a block takes so long."""
    receive = _reader.Reader._receive
    monkeypatch.setattr(_reader.Reader, "_receive", lambda self, number: (receive(self, number), seconds)[1])


@pytest.mark.parametrize("bound", [40_000, 100_000, 262_144, 300_000, 1_000_000])
def test_slow_storage(monkeypatch, tiny, load, device, files, contents, blocks, bound) -> None:
    """Blocks grow fourfold until two of them are the bound, and every byte is right meanwhile."""
    paced(monkeypatch, 100.0)
    monkeypatch.setattr(_load, "DEFAULT_LIMIT", max(bound, 150_001))
    kept = list(load(files))
    device.finish()
    assert values(kept) == contents
    limit = max(bound, 150_001)
    assert blocks[:2] == [16 << 10] * 2
    # Each step is the largest that is allowed: four times as large, half of the bound, half of what is left to read.
    for before, block in itertools.pairwise(sorted({*blocks})):
        assert before < block <= 4 * before
        assert block == 4 * before or block > min(limit // 2, 500_000) - PAGE
    assert max(blocks) <= limit // 2 + PAGE
    assert max(blocks) > min(limit // 2, 500_000) - PAGE
    assert device.peak <= limit + 2 * PAGE
    assert not device.broken and not device.registered


def test_slow_storage_really(monkeypatch, tiny, load, device, files, contents, blocks) -> None:
    """The same by the clock: the storage's first answers take 30 ms each and pinning next to nothing."""
    monkeypatch.setattr(_staging, "populate", lambda address, size: None)
    answers = [0]
    for kind in (_reader._Library, _reader._RangesLibrary):
        respond = vars(kind)["response"]

        def late(library, respond=respond) -> None:
            answers[0] += 1
            time.sleep(0.03 if answers[0] <= 20 else 0)
            respond(library)

        monkeypatch.setattr(kind, "response", late)
    kept = list(load(files))
    device.finish()
    assert values(kept) == contents
    assert blocks[2] == 64 << 10


def test_fast_storage(monkeypatch, tiny, load, device, files, contents, blocks) -> None:
    """Blocks stay as they are where they are read faster than larger ones are pinned."""
    paced(monkeypatch, 0.0)
    kept = list(load(files))
    device.finish()
    assert values(kept) == contents
    assert blocks == [16 << 10] * 2


def test_growth_refused(monkeypatch, tiny, load, device, files, contents, blocks, lines) -> None:
    """Where a larger block cannot be page-locked the load goes on, with right bytes and one line."""
    paced(monkeypatch, 100.0)
    device.fail("register", 3)
    kept = list(load(files))
    device.finish()
    assert values(kept) == contents
    assert not device.broken and not device.registered and not lines.warnings
    assert len([line for line in lines.infos if "no more memory can be page-locked" in line]) == 1
    assert device.calls("register") == 3


def test_mapped_memory(monkeypatch, tiny, load, device, files) -> None:
    """While blocks are exchanged for larger ones, what is resident stays within the bound too."""
    import ctypes
    import weakref

    paced(monkeypatch, 100.0)
    bound = 262_144
    monkeypatch.setattr(_load, "DEFAULT_LIMIT", bound)
    alive: weakref.WeakSet[_staging.Block] = weakref.WeakSet()
    made, libc, most = _staging.Block.__init__, ctypes.CDLL(None), [0]

    def resident() -> int:
        total = 0
        for block in alive:
            pages = (ctypes.c_ubyte * (block.size // PAGE))()
            assert libc.mincore(ctypes.c_void_p(block.address), ctypes.c_size_t(block.size), pages) == 0
            total += sum(page & 1 for page in pages) * PAGE
        return total

    def create(block, size: int) -> None:
        made(block, size)
        alive.add(block)

    register = device.register
    monkeypatch.setattr(_staging.Block, "__init__", create)
    monkeypatch.setattr(device, "register", lambda *span: (register(*span), most.append(max(most[-1], resident())))[0])
    for _name, tensor in load(files):
        del tensor
    assert len(most) > 4
    assert most[-1] <= bound + 2 * PAGE


def test_line_and_counters(small, load, device, files, contents, lines) -> None:
    """One line at the end, and counters that say the same."""
    number, size = len(contents), sum(len(one.bytes) for one in contents.values())
    for _name, tensor in load(files):
        del tensor
    counters = dict(RECORD.counters["pinned_staging"])
    assert {name: counters.pop(name) for name in ("loads", "tensors", "bytes", "host_bytes")} == {
        "loads": 1, "tensors": number, "bytes": size, "host_bytes": 0,
    }  # fmt: skip
    assert set(counters) == {"milliseconds", "pinning_milliseconds"}
    assert counters["milliseconds"] >= counters["pinning_milliseconds"] >= 0
    (line,) = lines.infos
    pattern = (
        r"vllm-hotfix: pinned_staging (\d+\.\d\d) GiB in (\d+) tensors in (\d+\.\d\d) s \((\d+\.\d) GB/s\) "
        r"through (\d+) MiB of staging memory, (\d+\.\d\d) s to pin"
    )
    found = re.fullmatch(pattern, line)
    assert found, line
    assert int(found[2]) == number and float(found[1]) == round(size / 2**30, 2)
    list(load(files))
    assert RECORD.counters["pinned_staging"]["tensors"] == 2 * number


def test_line_of_large(monkeypatch, small, load, device, files, contents, lines) -> None:
    """The line's figures are those of the load: size, staging memory, rate."""
    monkeypatch.setattr(_load, "BLOCK", 1 << 20)
    real = _load.Load.report

    def report(self, seconds: float) -> None:
        self._bytes, self._pinning = 3 << 30, 1.25
        real(self, 2.0)

    monkeypatch.setattr(_load.Load, "report", report)
    list(load(files))
    (line,) = lines.infos
    assert line.endswith(
        f"pinned_staging 3.00 GiB in {len(contents)} tensors in 2.00 s (1.6 GB/s) through 2 MiB of staging memory, "
        "1.25 s to pin"
    )


def test_line_when_left(small, load, device, files, lines) -> None:
    """A load that is left half way says that it ended early."""
    iterator = load(files)
    for _ in range(50):
        next(iterator)
    iterator.close()
    (line,) = lines.infos
    assert "ended early" in line and "to pin" in line


def test_line_with_host_tensors(small, load, device, files, contents, lines) -> None:
    """Host tensors are in the line and in the counters."""
    device.fail("allocate")
    list(load(files))
    assert lines.infos[-1].endswith("GiB of it as host tensors")
    counters = RECORD.counters["pinned_staging"]
    assert counters["host_bytes"] == counters["bytes"] > 0


@pytest.mark.parametrize("shown", [True, False])
def test_progress_bar(small, load, device, files, contents, capsys, shown) -> None:
    """The bar counts all tensors, those without elements too, and is not there where it is not wanted."""
    list(load(files, use_tqdm=shown))
    text = capsys.readouterr().err
    assert ("Loading safetensors using Runai Model Streamer" in text) is shown
    if shown:
        assert f"100% Completed | {len(contents)}/{len(contents)}" in text


def test_no_lines_below_info(small, load, device, files, lines) -> None:
    """A load logs nothing but its line."""
    list(load(files))
    assert [record.levelno for record in lines.records] == [logging.INFO]
