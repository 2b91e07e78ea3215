"""A driver of Ray with vLLM's own worker as actors: ``ray_driver.py CHECKPOINT OTHER RESULT``.

vLLM's whole Ray executor refuses a CPU, so this does what it does with its workers, by the methods that it calls: it
makes an actor of `RayWorkerWrapper`, which imports vLLM there, sends the driver's variables, and then has the actor
create its worker and load. The cluster is started before the gates are set, as one of another machine would be.

The result: for each stage, what an actor says of itself, and what the status says of all running processes.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import cloudpickle
import ray
from worker import live_processes

GATE = "VLLM_HOTFIX_MEASURED_TOTALS"


def look(worker: Any) -> dict[str, Any]:
    """Return what an actor's process has of the package; its modules are not imported for it."""
    hotfix = sys.modules.get("vllm_hotfix")
    layerwise = sys.modules.get("vllm.model_executor.model_loader.reload.layerwise")
    return {
        "pid": os.getpid(),
        "from": hotfix.__file__ if hotfix else None,
        "vllm": "vllm" in sys.modules,
        "gate": os.environ.get("VLLM_HOTFIX_MEASURED_TOTALS"),
        "finders": [type(finder).__module__ for finder in sys.meta_path].count("_vllm_hotfix"),
        "states": {one["name"]: one["state"] for one in hotfix.patches()} if hotfix else {},
        "wrapped": [name for name, value in vars(layerwise or sys).items() if type(value).__name__ == "Proxy"],
        "taken": [
            name
            for name, value in vars(sys.modules.get("vllm.model_executor.model_loader.reload", sys)).items()
            if type(value).__name__ == "Proxy"
        ],
    }


def import_targets(worker: Any) -> None:
    """Import what the patch wraps, before anyone has asked for it."""
    import vllm.model_executor.model_loader.reload.layerwise  # noqa: F401


def main(checkpoint: str, other: str, result: Path) -> None:
    """Drive one actor from its import of vLLM to a reload."""
    os.chdir(result.parent)  # Ray has its workers import from the current folder, which is not to be the checkout
    home = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: it holds sockets
    ray.init(
        num_cpus=1,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=100 << 20,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=home,
    )
    try:
        from vllm.v1.executor.ray_utils import RayWorkerWrapper

        actor = ray.remote(num_cpus=0)(RayWorkerWrapper).remote(rpc_rank=0)

        def call(method: Any, *args: Any, **kwargs: Any) -> Any:
            name = method if isinstance(method, str) else cloudpickle.dumps(method)
            return ray.get(actor.execute_method.remote(name, *args, **kwargs))

        address = ray.get_runtime_context().gcs_address
        stages = {}
        config = engine_config(checkpoint)
        call(import_targets)
        stages["imported"] = call(look)
        os.environ[GATE] = "1"
        call("update_environment_variables", [variables()])
        stages["variables"] = call(look)
        options = {"vllm_config": config, "local_rank": 0, "rank": 0, "is_driver_worker": True}
        options["distributed_init_method"] = f"file://{home}/rendezvous"
        call("init_worker", [options])
        stages["worker"] = call(look)
        call("init_device")
        call("load_model")
        call("reload_weights", weights_path=other)
        stages["loaded"] = call(look)
        live = live_processes()
    finally:
        ray.shutdown()
        shutil.rmtree(home, ignore_errors=True)
    result.write_text(json.dumps({"stages": stages, "live": live, "after": live_processes(), "address": address}))


def variables() -> dict[str, str]:
    """The driver's variables that vLLM itself would send to its workers."""
    from vllm.ray.ray_env import get_env_vars_to_copy
    from vllm.v1.executor.ray_utils import WORKER_SPECIFIC_ENV_VARS

    names = get_env_vars_to_copy(exclude_vars=WORKER_SPECIFIC_ENV_VARS)
    return {name: os.environ[name] for name in names if name in os.environ}


def engine_config(checkpoint: str) -> Any:
    """The configuration of a small engine on the CPU."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=checkpoint,
        load_format="safetensors",
        skip_tokenizer_init=True,
        enforce_eager=True,
        kv_cache_memory_bytes=16 << 20,
        max_model_len=64,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        seed=0,
    ).create_engine_config()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
