"""Every step of a pinned load, made to fail with anything: the load's result is stock's, and nothing stays.

`STEPS` is the table; the load and the streamer are real, the device is `fake_cuda`.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import threading
from typing import Any

import pytest
import torch
from checkpoint import values
from fake_cuda import Device, DeviceTensor, Event
from faults import ERRORS

from vllm_hotfix._patches.pinned_staging import _cuda, _load, _slabs, _staging
from vllm_hotfix._record import RECORD, Entry

#: What a load asks of the system, torch, CUDA and the record: the object that has it (None is vLLM's platform), its
#: name, and which of its calls fail (0 is all of them, where the call is not stock's too).
STEPS: dict[str, tuple[Any, str, tuple[int, ...]]] = {
    "ask for the platform": (None, "is_cuda", (0, 1)),
    "open the device": (_cuda, "open_device", (0, 1)),
    "ask for a file's size": (os.path, "getsize", (1, 4)),
    "make a block": (_staging, "Block", (0, 1, 2)),
    "map": (torch, "frombuffer", (0, 1, 2, 3)),
    "populate": (_staging, "populate", (0, 1, 2)),
    "register": (Device, "register", (0, 1, 2)),
    "ask for free memory": (Device, "memory", (0, 1, 2, 3)),
    "parse a header": (json, "loads", (1, 3)),
    "plan": (_load, "_extents", (0, 1)),
    "take device memory": (_slabs.Slabs, "take", (0, 1, 2, 20)),
    "allocate": (Device, "allocate", (0, 1, 2, 20)),
    "make a tensor": (Device, "tensor", (0, 1, 2, 20)),
    "ask for the stream": (Device, "stream", (0, 1, 2, 20)),
    "copy": (Device, "copy", (0, 1, 2, 20)),
    "record an event": (Device, "mark", (0, 1, 2, 20)),
    "wait for an event": (Event, "synchronize", (0, 1, 2, 20)),
    "unregister": (Device, "unregister", (0, 1, 2)),
    "free": (Device, "free", (0, 1, 2, 20)),
    "write the record": (RECORD, "_save", (0, 1)),
}


def cases() -> list[Any]:
    """Return every step with everything that it can raise, at some of its calls and at all of them."""
    return [
        pytest.param(step, error, number, id=f"{step}-{error}-{number or 'always'}")
        for step, (*_, numbers) in STEPS.items()
        for error in ERRORS
        for number in numbers
        if number or error != "KeyboardInterrupt"  # nobody interrupts everything
    ]


@pytest.mark.parametrize(("step", "error", "number"), cases())
def test_a_step_of_a_load_fails(
    step, error, number, small, load, device, platform, files, contents, lines, monkeypatch, tmp_path
) -> None:
    """All tensors come, as stock's would; one line says what was done without; an interrupt reaches the consumer.

    When the load has ended nothing is page-locked, allocated or running, and the next load is pinned as ever.
    """
    make, words = ERRORS[error]
    owner, name, _ = STEPS[step]
    owner = platform if owner is None else owner
    real = getattr(owner, name)
    threads = threading.active_count()
    calls, failed, kept = 0, 0, []

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls, failed
        calls += 1
        if number not in (0, calls):
            return real(*args, **kwargs)
        failed += 1
        raise make()

    monkeypatch.setenv("VLLM_HOTFIX_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(RECORD, "entries", {"pinned_staging": Entry()})
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, call)
        interrupted = False
        try:
            for named in load(files):
                kept.append(named if type(named[1]) is DeviceTensor else (named[0], named[1].clone()))
                del named  # stock's is good until the next is asked for
        except KeyboardInterrupt:
            interrupted = True
        device.finish()
        found = values(kept)
        kept.clear()
        gc.collect()
    assert failed
    # Nothing can be told by memory that is given back when its last tensor dies.
    assert interrupted == (error == "KeyboardInterrupt" and step != "free")
    assert interrupted or found == contents
    said = lines.at(logging.ERROR) + lines.at(logging.WARNING) + [line for line in lines.infos if words in line]
    if (step, error) == ("ask for a file's size", "OSError"):
        assert said == []  # it is in object storage
    elif error != "KeyboardInterrupt":
        assert len(said) == 1 and words in said[0], said
    if step not in ("unregister", "free"):  # what cannot be given back stays
        assert not device.registered and not device.allocated
    assert threading.active_count() <= threads + 1  # what watches over progress bars
    assert not device.broken
    before = len(device.registered), device.calls("copy")
    kept = list(load(files))
    device.finish()
    assert values(kept) == contents
    assert len(device.registered) == before[0] and device.calls("copy") > before[1] and not device.broken
