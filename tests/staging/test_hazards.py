"""Memory is written again only when nothing reads it any more: each wait, with it and without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from checkpoint import Value, value, values

from vllm_hotfix._patches.pinned_staging import _load, _slabs, _staging


def keep_all(load, device, files) -> dict[str, bytes]:
    """A consumer that keeps every tensor and never waits."""
    kept = list(load(files))
    device.finish()
    return {name: value(tensor).bytes for name, tensor in kept}


def keep_none(load, device, files) -> dict[str, bytes]:
    """A consumer that queues its read of each tensor and drops it."""
    found = {}
    for name, tensor in load(files):
        found[name] = device.read(tensor) if tensor.nbytes else bytearray()
        del tensor
    device.finish()
    return {name: bytes(data) for name, data in found.items()}


def other_stream(load, device, files) -> dict[str, bytes]:
    """A consumer that takes every second tensor on a stream of its own, which is late, or early, as is worse."""
    side, found = device.new_stream("side"), {}
    for early in (True, False):
        home, iterator, number = device.current, load(files), 0
        while True:
            number += 1
            # On its stream from before it asks: that is when the load can know.
            with device.on(side if number % 2 else home):
                named = next(iterator, None)
                if named is None:
                    break
                name, tensor = named
                found[name, early] = device.read(tensor) if tensor.nbytes else bytearray()
                del named, tensor
                if early:
                    side.run()
        device.finish(home)
    assert all(found[name, True] == data for (name, _), data in found.items())
    return {name: bytes(data) for (name, _), data in found.items()}


def keep_some(load, device, files) -> dict[str, bytes]:
    """A consumer that keeps one tensor of about every extent and reads the others late."""
    found, kept = {}, []
    for number, (name, tensor) in enumerate(load(files)):
        if number % 7 == 0:
            kept.append((name, tensor))
        else:
            found[name] = device.read(tensor) if tensor.nbytes else bytearray()
        del tensor
    device.finish()
    return {name: bytes(data) for name, data in found.items()} | {name: value(one).bytes for name, one in kept}


CONSUMERS = [keep_all, keep_none, keep_some, other_stream]


@pytest.mark.parametrize("consumer", CONSUMERS)
@pytest.mark.parametrize("held", [None, 300_000])
def test_waits(monkeypatch, small, load, device, files, contents, consumer, held) -> None:
    """Right bytes for every kind of consumer, with many refills and with little device memory."""
    if held:
        monkeypatch.setattr(_slabs, "HELD", held)
    assert consumer(load, device, files) == {name: one.bytes for name, one in contents.items()}
    assert not device.broken and not device.registered


def nothing(*_: object) -> None:
    """In place of a wait."""


def no_refill_wait(monkeypatch, device) -> None:
    """Blocks are read into again without a wait, and waited for at the end."""
    wait, release = _staging.Block.wait, _staging.Staging.release

    def end(staging) -> None:
        monkeypatch.setattr(_staging.Block, "wait", wait)
        release(staging)

    monkeypatch.setattr(_staging.Block, "wait", nothing)
    monkeypatch.setattr(_staging.Staging, "release", end)


def no_release_wait(monkeypatch, device) -> None:
    """Blocks are unregistered without a wait."""
    release = _staging.Staging.release

    def end(staging) -> None:
        monkeypatch.setattr(_staging.Block, "wait", nothing)
        release(staging)

    monkeypatch.setattr(_staging.Staging, "release", end)


def no_follow(monkeypatch, device) -> None:
    """The consumer's stream does not wait for the copy."""
    monkeypatch.setattr(device, "follow", nothing)


def no_follow_stream(monkeypatch, device) -> None:
    """The next copy into a slab does not wait for the consumers of it."""
    monkeypatch.setattr(device, "follow_stream", nothing)


def no_used(monkeypatch, device) -> None:
    """The consumer's stream is not noted."""
    monkeypatch.setattr(_slabs.Slab, "used", nothing)


def no_mark_of_moves(monkeypatch, device) -> None:
    """The consumer's stream waits for the copy, but not for the tensors that were moved within the device."""
    finish = _load._OnDevice.finish

    def end(extent) -> None:
        copied = extent._copied
        finish(extent)
        extent._copied = copied

    monkeypatch.setattr(_load._OnDevice, "finish", end)


def no_free_wait(monkeypatch, device) -> None:
    """Device memory is freed without a wait for the streams that use it."""
    for stream in device.streams:
        monkeypatch.setattr(stream, "synchronize", nothing)


def early_lease(monkeypatch, device) -> None:
    """A slab is given back while tensors still need it."""
    tensor = _slabs.Slab.tensor

    def taken(slab: _slabs.Slab):
        whole = tensor(slab)
        slab.slabs.give_back(slab)
        return whole

    monkeypatch.setattr(_slabs.Slab, "tensor", taken)
    monkeypatch.setattr(_slabs._Lease, "__del__", nothing)


@pytest.mark.parametrize(
    ("without", "consumer"),
    [
        (no_refill_wait, keep_all),
        (no_refill_wait, keep_none),
        (no_release_wait, keep_all),
        (no_follow, other_stream),
        (no_follow_stream, other_stream),
        (no_used, other_stream),
        (no_mark_of_moves, other_stream),
        (no_free_wait, keep_none),
        (early_lease, keep_all),
        (early_lease, keep_some),
    ],
)
def test_each_wait_is_needed(
    monkeypatch, small, load, device, files, contents: dict[str, Value], without: Callable, consumer: Callable
) -> None:
    """Taken out, each wait is missed: that is what makes the test above one of waits."""
    without(monkeypatch, device)
    try:
        wrong = consumer(load, device, files) != {name: one.bytes for name, one in contents.items()}
    except AssertionError:  # its own: the bytes of two orders differ
        wrong = True
    assert wrong or device.broken


def test_slabs_are_used_again(small, load, device, files) -> None:
    """A consumer that keeps nothing needs three slabs, however long the load is."""
    for _name, tensor in load(files):
        del tensor
    assert device.calls("copy") > 40
    small_ones = [size for call, size in device.log if call == "allocate" and size < 100_000]
    assert len(small_ones) <= 3


def test_kept_views_stay(monkeypatch, small, load, device, files, contents) -> None:
    """What is kept is not written again by later loads."""
    kept = [named for i, named in enumerate(load(files)) if i % 5 == 0]
    for _ in range(3):
        for _name, tensor in load(files):
            del tensor
    device.finish()
    assert values(kept) == {name: contents[name] for name, _ in kept}


def test_two_loads_at_once(small, load, device, files, contents) -> None:
    """A draft model's load beside the model's: each has memory of its own."""

    def pairs() -> Iterator[tuple[str, object]]:
        for one, two in zip(load(files), load(files[::-1]), strict=True):
            yield 1, one
            yield 2, two

    kept = list(pairs())
    device.finish()
    for load_number in (1, 2):
        assert values(named for number, named in kept if number == load_number) == contents
    assert not device.broken and not device.registered
