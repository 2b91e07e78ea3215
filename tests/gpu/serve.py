"""Show the package at work in a real `vllm serve` on a GPU, from a mounted folder.

    python tests/gpu/serve.py MODEL FOLDER

MODEL is a checkpoint, FOLDER what `pip install --target FOLDER vllm-hotfix` made. A small tokenizer is written beside
the checkpoint if it has none. The server starts with `--fail-on-environ-validation` and `VLLM_HOTFIX_STRICT=1`,
answers, sleeps at level 2, wakes, reloads and answers again; `status --live` lists its processes before and after.
The same start with a drifted function must fail, with the patch, the variable and the reason in the exception.

Exits 1 if anything is not as it should be.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PORT = 8123
URL = f"http://127.0.0.1:{PORT}"
LAYERWISE = "vllm/model_executor/model_loader/reload/layerwise.py"


def environment(folder: Path, states: Path, *before: Path) -> dict[str, str]:
    """What an operator sets."""
    path = [folder / "vllm_hotfix/bootstrap", *before, os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "VLLM_HOTFIX_MEASURED_TOTALS": "1",
        "VLLM_HOTFIX_STRICT": "1",
        "VLLM_HOTFIX_STATE_DIR": str(states),
        "VLLM_SERVER_DEV_MODE": "1",
    }


def serve(model: Path, environ: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start the server in a process group of its own."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--port", str(PORT)]
    command += ["--enforce-eager", "--max-model-len", "512", "--gpu-memory-utilization", "0.3", "--enable-sleep-mode"]
    command += ["--fail-on-environ-validation", "--served-model-name", "probe"]
    with log.open("wb") as out:
        return subprocess.Popen(command, env=environ, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)


def post(path: str, body: Any = None) -> Any:
    """Post JSON; return what came back, parsed if it is JSON."""
    data = json.dumps(body).encode() if body is not None else b""
    request = urllib.request.Request(URL + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        text = answer.read()
    return json.loads(text) if text.strip() else None


def wait(server: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait until the server is healthy; False if it ended or took too long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and server.poll() is None:
        try:
            urllib.request.urlopen(URL + "/health", timeout=5).close()
        except OSError:
            time.sleep(1)
        else:
            return True
    return False


def stop(server: subprocess.Popen[bytes]) -> None:
    """End the whole process group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if server.poll() is None:
            os.killpg(server.pid, number)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                continue


def answer() -> list[int]:
    """Greedy tokens for a prompt."""
    body = {"model": "probe", "prompt": [1, 5, 9, 13], "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    return list(post("/v1/completions", body | {"return_token_ids": True})["choices"][0]["token_ids"])


def status(environ: dict[str, str], *arguments: str) -> str:
    """What the status command prints."""
    command = [sys.executable, "-m", "vllm_hotfix.status", *arguments]
    return subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout


def tokenizer(model: Path) -> None:
    """Write a word tokenizer if the checkpoint has none."""
    if not (model / "tokenizer.json").exists():
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(32000)}, unk_token="w0"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w2").save_pretrained(model)


def main(model: Path, folder: Path) -> int:
    """Run both starts."""
    tokenizer(model)
    failed = False
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        environ = environment(folder, work / "states")
        print(status(environ))
        server = serve(model, environ, work / "log")
        try:
            if not wait(server, 180):
                print((work / "log").read_text(errors="replace")[-5000:])
                return 1
            fresh = answer()
            print(status(environ, "--live"))
            for path in ("/sleep?level=2", "/wake_up?tags=weights"):
                post(path)
            post("/collective_rpc", {"method": "reload_weights"})
            post("/wake_up?tags=kv_cache")
            again = answer()
            print(f"tokens after sleep, wake and reload: {'the same' if again == fresh else 'OTHERS'} {fresh}")
            live = json.loads(status(environ, "--live", "--json"))["processes"]
            print(status(environ, "--live"))
            print(f"unknown variables in the log: {(work / 'log').read_bytes().count(b'Unknown vLLM environment')}")
            active = [one for one in live if one["patches"]["measured_totals"]["state"] == "active"]
            counted = [one["counters"].get("measured_totals", {}).get("reloads") for one in active]
            failed |= again != fresh or 1 not in counted
        finally:
            stop(server)
        drifted = work / "site"
        drifted.mkdir()
        spec = find_spec("vllm")
        assert spec is not None
        assert spec.origin is not None
        subprocess.run(["cp", "-rs", Path(spec.origin).parent, drifted / "vllm"], check=True)  # a tree of links
        text = (drifted / LAYERWISE).read_text()
        assert "info.load_numel += num_loaded" in text
        (drifted / LAYERWISE).unlink()
        (drifted / LAYERWISE).write_text(text.replace("load_numel += num_loaded", "load_numel += 1 * num_loaded"))
        server = serve(model, environment(folder, work / "states", drifted), work / "log")
        try:
            started = wait(server, 120)
        finally:
            stop(server)
        lines = [line for line in (work / "log").read_text(errors="replace").splitlines() if "HotfixError" in line]
        print(f"drifted: {'STARTED' if started else 'did not start'}\n  {lines[-1] if lines else 'no HotfixError'}")
        failed |= started or not any("VLLM_HOTFIX_MEASURED_TOTALS" in line and "drifted" in line for line in lines)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
