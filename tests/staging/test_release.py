"""However a load ends: copies done, streamer closed, unregistered, unmapped; in children nothing; nothing left."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint import value, values
from fake_cuda import FREED, DeviceTensor, Event
from vllm.model_executor.model_loader import weight_utils

from vllm_hotfix._patches.pinned_staging import _load, _reader, _staging


class Stop(Exception):
    """The consumer has had enough."""


@pytest.fixture
def traced(monkeypatch, device) -> list[str]:
    """The order of what ends a load; also when copies were still queued as a block was given back."""
    order: list[str] = []
    unmap, leave, unregister = _staging._unmap, weight_utils.SafetensorsStreamer.__exit__, device.unregister
    mapping: dict[int, int] = {}
    made = _staging.Block.__init__

    def create(block, size: int) -> None:
        made(block, size)
        mapping[block.address] = block.size

    def unmapped(address: int, size: int, pid: int) -> None:
        # Not an assertion: this is called where no error arrives.
        locked = any(address <= one < address + size for one in device.registered)
        order.append("unmap while page-locked" if locked else "unmap")
        for one in [one for one in mapping if address <= one < address + size]:
            del mapping[one]
        unmap(address, size, pid)

    def left(streamer: Any, *error: Any) -> Any:
        order.append("close")
        return leave(streamer, *error)

    def unregistered(address: int) -> None:
        order.append("unregister")
        assert address in mapping
        unregister(address)

    monkeypatch.setattr(_staging, "_unmap", unmapped)
    monkeypatch.setattr(_staging.Block, "__init__", create)
    monkeypatch.setattr(weight_utils.SafetensorsStreamer, "__exit__", left)
    monkeypatch.setattr(device, "unregister", unregistered)
    return order


def threads() -> set[threading.Thread]:
    """The threads of Python's that run, but for the one that watches over progress bars."""
    return {thread for thread in threading.enumerate() if type(thread).__name__ != "TMonitor"}


def take(iterator: Iterator[Any], number: int) -> list[Any]:
    """The first tensors."""
    return list(itertools.islice(iterator, number))


def exhausted(iterator: Iterator[Any], after: int, fault: Callable[[], None]) -> list[Any]:
    """All is taken."""
    return list(iterator)


def raises(iterator: Iterator[Any], after: int, fault: Callable[[], None]) -> list[Any]:
    """The consumer's loop raises."""
    kept: list[Any] = []

    def consume(iterator: Iterator[Any]) -> None:
        for named in iterator:
            kept.append(named)
            if len(kept) == after:
                raise Stop

    with pytest.raises(Stop):
        consume(iterator)
    del iterator
    return kept


def closed(iterator: Any, after: int, fault: Callable[[], None]) -> list[Any]:
    """The generator is closed half way."""
    kept = take(iterator, after)
    iterator.close()
    return kept


def dropped(iterator: Any, after: int, fault: Callable[[], None]) -> list[Any]:
    """The generator is dropped half way."""
    return take(iterator, after)


def thrown(iterator: Any, after: int, fault: Callable[[], None]) -> list[Any]:
    """A KeyboardInterrupt arrives in the generator."""
    kept = take(iterator, after)
    with pytest.raises(KeyboardInterrupt):
        iterator.throw(KeyboardInterrupt())
    return kept


def broken(iterator: Any, after: int, fault: Callable[[], None]) -> list[Any]:
    """The streamer raises half way."""
    kept = take(iterator, after)
    fault()
    with pytest.raises(ValueError, match="storage is gone"):
        kept.extend(iterator)
    return kept


def interrupted(iterator: Any, after: int, fault: Callable[[], None]) -> list[Any]:
    """A KeyboardInterrupt arrives while the load waits for the streamer."""
    kept = take(iterator, after)
    fault()
    with pytest.raises(KeyboardInterrupt):
        kept.extend(iterator)
    return kept


@pytest.mark.parametrize("after", [1, 40, 200])
@pytest.mark.parametrize("end", [exhausted, raises, closed, dropped, thrown, broken, interrupted])
def test_order(monkeypatch, small, load, device, files, contents, traced, end, after) -> None:
    """Whatever ends it: first the streamer is closed, then copies are done, then unregistered, then unmapped."""
    before = threads()

    def fault() -> None:
        def response(library: Any) -> None:
            raise KeyboardInterrupt if end is interrupted else ValueError("storage is gone")

        monkeypatch.setattr(_reader._Library, "response", response)
        monkeypatch.setattr(_reader._RangesLibrary, "response", response)

    iterator = load(files)
    passed = [iterator]
    del iterator
    kept = end(passed.pop(), after, fault)
    # The tensors that are kept are the only thing that keeps anything.
    assert not device.registered and not device.broken
    gc.collect()
    assert traced == ["close", *["unregister"] * device.ever, *["unmap"] * device.ever]
    assert device.ever == (1 if after == 1 and end is not exhausted and len(kept) < 2 else 2)
    assert threads() == before

    device.finish()
    assert values(kept) == {name: contents[name] for name, _ in kept}
    used = {at for at, memory in device.allocated.items()
            if any(at <= tensor.data_ptr() < at + len(memory) for _, tensor in kept if tensor.nbytes)}  # fmt: skip
    assert set(device.allocated) == used, "device memory is kept that no tensor is in"
    if used:
        name, last = next((name, tensor) for name, tensor in reversed(kept) if tensor.nbytes)
        kept.clear()
        gc.collect()
        assert len(device.allocated) == 1
        assert value(last) == contents[name]
        del last
        gc.collect()
    assert not device.allocated and not device.broken
    assert not device.pending()


def test_truncated(small, load, device, files, traced, tmp_path) -> None:
    """A file that is cut off after its header was read is an error, and all is given back."""
    copies = []
    for path in files:
        copy = tmp_path / Path(path).name
        copy.write_bytes(Path(path).read_bytes())
        copies.append(str(copy))
    iterator = load(copies)
    kept = take(iterator, 30)
    os.truncate(copies[2], os.path.getsize(copies[2]) - 300_000)
    with pytest.raises(Exception, match=r"libstreamer"):
        kept.extend(iterator)
    assert not device.registered
    del iterator, kept
    gc.collect()
    assert traced == ["close", *["unregister"] * 2, *["unmap"] * 2]
    assert not device.allocated and not device.broken


def test_never_started(small, load, device, files) -> None:
    """An iterator that nobody asks takes nothing."""
    iterator = load(files)
    del iterator
    gc.collect()
    assert not device.log


@pytest.mark.parametrize("numbers", [(1,), (2,), (1, 2)])
def test_unregister_fails(monkeypatch, small, load, device, files, contents, lines, traced, numbers) -> None:
    """What cannot be unlocked is said once, stays mapped, hides no result of the load, and is tried for each block."""
    stuck: list[Any] = []
    monkeypatch.setattr(_staging, "_stuck", stuck, raising=False)
    device.fail("unregister", *numbers)
    kept = list(load(files))
    device.finish()
    gc.collect()
    assert values(kept) == contents
    (warning,) = lines.warnings
    assert "page-locked" in warning and "no unregister today" in warning
    assert len(device.registered) == len(numbers) and device.calls("unregister") == 2
    assert traced.count("unmap") == 2 - len(numbers) and "unmap while page-locked" not in traced
    mapped = addresses()
    assert all(any(start <= place < end for start, end in mapped) for place in device.registered)
    assert {tensor.data_ptr() for tensor in stuck} == set(device.registered)
    device.registered.clear()
    device.heal("unregister")


# Interrupts.


def afterwards(monkeypatch, device, call: str, number: int, error: type[BaseException]) -> None:
    """Let an interrupt come right after that call of the device's, counted from 1, has returned."""
    real, calls = getattr(device, call), itertools.count(1)

    def interrupted(*args: Any) -> Any:
        result = real(*args)
        if next(calls) == number:
            raise error
        return result

    monkeypatch.setattr(device, call, interrupted)


def check_given_back(device, traced: list[str]) -> None:
    """Nothing is page-locked, mapped or allocated, and nothing was unmapped before it was unregistered."""
    gc.collect()
    assert not device.registered and not device.broken
    assert traced.count("unmap") == device.ever
    assert "unmap while page-locked" not in traced
    assert not device.allocated
    device.finish()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize(
    ("call", "number"),
    [("register", 1), ("register", 2), ("copy", 1), ("copy", 5), ("copy", 30), ("mark", 1), ("mark", 6)],
)
def test_interrupt_after_a_call(monkeypatch, small, load, device, files, traced, call, number, error) -> None:
    """An interrupt right after a call has returned reaches the caller, and what that call did is undone."""
    afterwards(monkeypatch, device, call, number, error)
    with pytest.raises(error):
        for _name, tensor in load(files):
            del tensor
    check_given_back(device, traced)
    assert traced.count("unregister") == device.ever


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("numbers", [(1,), (2,), (1, 2), (1, 2, 3)])
@pytest.mark.parametrize("after", [40, 1000])
def test_interrupt_before_unregister(small, load, device, files, traced, numbers, error, after) -> None:
    """An interrupt on the way to unregistering reaches the caller when every block has been unregistered."""
    iterator: Any = load(files)
    device.fail("unregister", *numbers, error=error)
    with pytest.raises(error):
        take(iterator, after)
        iterator.close()
    assert not device.registered
    del iterator
    check_given_back(device, traced)


@pytest.mark.parametrize("number", [1, 2])
def test_interrupt_after_unregister(monkeypatch, small, load, device, files, traced, number) -> None:
    """An interrupt right after a block was unregistered does not keep the other page-locked, and reaches the caller."""
    monkeypatch.setattr(_staging, "_stuck", [], raising=False)
    iterator: Any = load(files)
    afterwards(monkeypatch, device, "unregister", number, KeyboardInterrupt)
    take(iterator, 40)
    with pytest.raises(KeyboardInterrupt):
        iterator.close()
    assert not device.registered and not device.broken
    assert "unmap while page-locked" not in traced


@pytest.mark.parametrize("after", [40, 60, 90])
def test_interrupt_in_the_last_wait(monkeypatch, small, load, device, files, traced, after) -> None:
    """An interrupt while the end of a load waits for the copies: they are waited for, and the interrupt comes then."""
    iterator: Any = load(files)
    take(iterator, after)
    assert device.pending()
    real, calls = Event.synchronize, itertools.count(1)

    def synchronize(event: Event) -> None:
        if next(calls) == 1:
            raise KeyboardInterrupt
        real(event)

    monkeypatch.setattr(Event, "synchronize", synchronize)
    with pytest.raises(KeyboardInterrupt):
        iterator.close()
    assert next(calls) > 2
    assert not device.registered
    del iterator
    check_given_back(device, traced)


@pytest.mark.parametrize("number", [1, 2])
def test_interrupt_while_blocks_grow(monkeypatch, load, device, files, traced, number) -> None:
    """An interrupt on the way to unregistering a block that makes room for a larger one leaves nothing page-locked."""
    monkeypatch.setattr(_load, "EXTENT", 16 << 10)
    monkeypatch.setattr(_load, "BLOCK", 16 << 10)
    receive = _reader.Reader._receive
    monkeypatch.setattr(_reader.Reader, "_receive", lambda reader, places: (receive(reader, places), 100.0)[1])
    device.fail("unregister", number, error=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        for _name, tensor in load(files):
            del tensor
    check_given_back(device, traced)


@pytest.mark.parametrize("number", [1, 2])
def test_interrupt_after_pin(monkeypatch, small, load, device, files, traced, number) -> None:
    """An interrupt right after a block was pinned, before it was put to use, leaves nothing page-locked."""
    pin, calls = _staging.Block.pin, itertools.count(1)

    def pinned(block: _staging.Block, device: Any) -> None:
        pin(block, device)
        if next(calls) == number:
            raise KeyboardInterrupt

    monkeypatch.setattr(_staging.Block, "pin", pinned)
    with pytest.raises(KeyboardInterrupt):
        for _name, tensor in load(files):
            del tensor
    check_given_back(device, traced)


def test_capturing(small, load, device, files, contents) -> None:
    """While a graph is captured no device memory is freed; the next load frees it."""
    kept = list(load(files))
    device.finish()
    device.graph = True
    before = device.calls("free")
    kept.clear()
    gc.collect()
    assert device.calls("free") == before and device.allocated
    device.graph = False
    for _name, tensor in load(files):
        del tensor
    assert not device.allocated


def test_freed_memory_is_poisoned(small, load, device, files) -> None:
    """The check of kept tensors can fail: freed device memory reads otherwise."""
    kept = take(load(files), 40)
    tensor = next(tensor for _, tensor in kept if type(tensor) is DeviceTensor)
    device.finish()
    address = next(at for at, memory in device.allocated.items() if at <= tensor.data_ptr() < at + len(memory))
    device.free(address)
    assert set(value(tensor).bytes) == {FREED}
    device.free = lambda address: None


# Children.


def child(work: Callable[[], None]) -> int:
    """Run something in a forked child, which then ends at once; how it ended."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    limit = time.monotonic() + 20
    while time.monotonic() < limit:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("the child hangs")


def addresses() -> list[tuple[int, int]]:
    """What is mapped in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [tuple(int(one, 16) for one in line.split()[0].split("-")) for line in lines]  # type: ignore[misc]


def flags(address: int) -> list[str]:
    """The kernel's flags of the mapping that holds an address; `dc` is for those that children do not get."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(one, 16) for one in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError("nothing is mapped there")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("block", [128 << 10, 5 << 20])
def test_fork(monkeypatch, load, device, files, contents, traced, block) -> None:
    """A child of the middle of a load has none of the staging memory, releases nothing, and disturbs nothing."""
    monkeypatch.setattr(_load, "EXTENT", 64 << 10)
    monkeypatch.setattr(_load, "BLOCK", block)
    monkeypatch.setattr(_load.Load, "first_block", lambda *_: block)
    stagings: list[_staging.Staging] = []
    made = _staging.Staging.__init__
    monkeypatch.setattr(_staging.Staging, "__init__", lambda self, *args: (stagings.append(self), made(self, *args))[1])
    iterator = load(files)
    kept = take(iterator, 100)
    (staging,) = stagings
    places = [block.address for block in staging.blocks]
    assert places and all("dc" in flags(place) for place in places)
    before = {place: ctypes.string_at(place, 4096) for place in places}

    def work() -> None:
        # What the child maps for itself may lie there.
        there = [place for place in places for start, end in addresses() if start <= place < end]
        assert not any(ctypes.string_at(place, 4096) == before[place] for place in there), "the child has it"
        staging.release()
        assert len(staging.blocks) == len(places) and not traced

    assert child(work) == 0
    assert not traced and len(device.registered) == len(places)
    kept.extend(iterator)
    device.finish()
    assert values(kept) == contents
    assert not device.registered and not device.broken


# Leaks.


def census() -> dict[str, int]:
    """What a process can leak."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "maps": len(addresses()),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "locked": int(status["VmLck"].split()[0]),
        "pinned": int(status["VmPin"].split()[0]),
    }


def test_leaks(small, load, device, files) -> None:
    """After 20 loads, of which every second is left half way, the process has what it had."""

    def some(number: int) -> None:
        for index in range(number):
            iterator = load(files)
            take(iterator, 100 if index % 2 else 1000)
            del iterator
        device.streams[0].queue.clear()
        device.streams[0].done = 0
        device._graveyard.clear()
        device.log.clear()

    some(4)
    before = census()
    some(20)
    after = census()
    assert after.pop("maps") <= before.pop("maps") + 5
    assert after == before
    assert not device.registered and not device.allocated
