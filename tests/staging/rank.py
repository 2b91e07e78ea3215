"""One of two ranks: does the jobs that arrive on the standard input, a JSON object a line, and answers in kind.

A process does many: importing vLLM takes longer than a load.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from checkpoint import values
from fake_cuda import Device
from vllm.model_executor.model_loader import weight_utils

from vllm_hotfix._patches.pinned_staging import _cuda, _load
from vllm_hotfix._record import RECORD

SETTINGS = ("EXTENT", "BLOCK", "DEFAULT_LIMIT", "CAP", "_PROBE")


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append((record.levelname, record.getMessage()))


def work(rank: int, job: dict[str, Any]) -> dict[str, Any]:
    """Load the files together with the other rank, and say what came of it."""
    device, lines, streamer = Device(), _Lines(), _Lines()
    own = job["ranks"][rank]
    for call, numbers in own.get("fail", {}).items():
        device.fail(call, *numbers)
    for name in SETTINGS:
        setattr(_load, name, job["settings"].get(name, DEFAULTS[name]))
    _cuda.open_device = lambda: device  # type: ignore[assignment]
    weight_utils.current_platform = SimpleNamespace(  # type: ignore[attr-defined]
        is_cuda=lambda: True, is_cuda_alike=lambda: False, device_name="fake"
    )
    RECORD._warned.clear()
    RECORD.counters.clear()
    logger = logging.getLogger("vllm.hotfix")
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    streamer_logger = logging.getLogger("runai_model_streamer")
    streamer_logger.setLevel(logging.INFO)
    streamer_logger.addHandler(streamer)
    os.environ.update(job["environment"])
    dist.init_process_group(
        "gloo", init_method=f"file://{job['store']}", rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )
    before, answer, kept = dict(os.environ), {}, []
    files = job["files"]
    try:
        iterator = _load.tensors(
            weight_utils,
            lambda: weight_utils.runai_safetensors_weights_iterator(files, False, job["distributed"]),
            files,
            use_tqdm=False,
            distributed=job["distributed"],
        )
        for named in iterator:
            kept.append(named)
            if len(kept) == own.get("leave"):
                iterator.close()  # type: ignore[attr-defined]
                break
        device.finish()
        answer["tensors"] = {
            name: [str(one.dtype), list(one.shape), hashlib.sha256(one.bytes).hexdigest()]
            for name, one in values(kept).items()
        }
    except Exception as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    finally:
        kept.clear()
        named = iterator = None
        gc.collect()
        after = dict(os.environ)
        for environment in (before, after):
            environment.pop("RUNAI_STREAMER_PROCESS_GROUP_SIZE", None)  # the streamer's own, under stock as well
        dist.destroy_process_group()
        for name in job["environment"]:
            os.environ.pop(name, None)
        os.environ.pop("RUNAI_STREAMER_PROCESS_GROUP_SIZE", None)
        logger.removeHandler(lines)
        streamer_logger.removeHandler(streamer)
    return answer | {
        "environment": after == before,
        "pinned": device.ever,
        "peak": device.peak,
        "left": len(device.registered) + len(device.allocated),
        "broken": device.broken,
        "lines": lines.found,
        "streamer": [text for _, text in streamer.found],
        "counters": RECORD.counters.get("pinned_staging", {}),
    }


DEFAULTS = {name: getattr(_load, name) for name in SETTINGS}

if __name__ == "__main__":
    # What libraries print must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    gc.collect()
    gc.freeze()  # collecting need not look at what vLLM and torch consist of
    for line in sys.stdin:
        print(json.dumps(work(int(sys.argv[1]), json.loads(line))), file=answers)
