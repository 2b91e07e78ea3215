"""Interpreters that end in the middle of a load, each in a way of its own: forks of one that has imported vLLM.

Writes `WAY.code` and `WAY.err` into a folder for every way that is named: `leaving.py FOLDER FILE WAY...`
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import checkpoint  # noqa: F401  imported here, not in each fork
import fake_cuda
from vllm.model_executor.model_loader import weight_utils

from vllm_hotfix._patches.pinned_staging import _cuda, _load

folder, file, *ways = sys.argv[1:]
children = {}
for way in ways:
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(Path(folder, f"{way}.err"), os.O_WRONLY | os.O_CREAT, 0o600), 2)
        break
    children[pid] = way
else:
    for _ in ways:
        pid, status = os.wait()
        Path(folder, f"{children[pid]}.code").write_text(str(os.waitstatus_to_exitcode(status)))
    os._exit(0)

# In a fork, from here to the end of its interpreter.

device = fake_cuda.Device()
_cuda.open_device = lambda: device  # type: ignore[assignment]
weight_utils.current_platform = SimpleNamespace(  # type: ignore[attr-defined]
    is_cuda=lambda: True, is_cuda_alike=lambda: False, device_name="fake"
)
_load.EXTENT, _load.BLOCK = 64 << 10, 128 << 10
iterator = _load.tensors(weight_utils, lambda: iter(()), [file], use_tqdm=way == "bar", distributed=False)
kept = [next(iterator) for _ in range(40)]
assert device.registered
if way == "error":
    raise RuntimeError("the consumer's")
if way == "exit":
    sys.exit(3)
if way == "interrupt":
    raise KeyboardInterrupt
if way == "cycle":
    cycle = [iterator]
    cycle.append(cycle)  # type: ignore[arg-type]
    del iterator, cycle
if way == "tensors":
    del iterator  # only the tensors are left
