"""What an interpreter's start costs with the package installed, against one without: paired, in turn.

Virtual environments differ in the package alone, and in a `.pth` of one comment: an environment of vLLM has one
without this package, since vLLM requires setuptools, and Python 3.13 takes half a millisecond for the first, whatever
is in it. Each round starts one interpreter per case, in an order that changes from round to round; the figures are
medians over the rounds of the difference to the start without the package, with a 95 % interval by bootstrap. What is
promised is the difference to an environment with another `.pth`.

    python benchmarks/startup.py [ROUNDS]
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GATE = "VLLM_HOTFIX_MEASURED_TOTALS"
#: Case, what the project promises of it in milliseconds.
BOUNDS = {"installed, no gate set": 0.5, "installed, gate set, no vLLM": 1.5}
STOCK = "not installed"
OTHER = "not installed, another .pth"


def environment(folder: Path, *, package: bool = False, other: bool = False) -> str:
    """Make a virtual environment, with the package in it or another `.pth`; return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = str(folder / "bin" / "python")
    (packages,) = folder.glob("lib/python3*/site-packages")
    for file in packages.glob("*.pth"):  # up to 3.11 setuptools is there
        file.unlink()
    if other:
        (packages / "other.pth").write_text("# nothing\n")
    if package:
        # No dependencies: neither is imported before vLLM is, which is part of what is measured.
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", str(ROOT)], check=True)
    return python


def start(python: str, environ: dict[str, str]) -> tuple[float, float]:
    """Start an interpreter that does nothing; return wall and CPU milliseconds."""
    begin = time.perf_counter()
    pid = os.posix_spawn(python, [python, "-c", "pass"], environ)
    _, status, usage = os.wait4(pid, 0)
    wall = time.perf_counter() - begin
    if status:
        raise SystemExit(f"{python} ended with {status}")
    return 1e3 * wall, 1e3 * (usage.ru_utime + usage.ru_stime)


def interval(values: list[float]) -> tuple[float, float]:
    """The 95 % interval of the median, by bootstrap."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(1000))
    return medians[24], medians[975]


def differences(times: list[tuple[float, float]], base: list[tuple[float, float]]) -> list[float]:
    """The wall milliseconds that a case takes more than another, round by round."""
    return [one[0] - other[0] for one, other in zip(times, base, strict=True)]


def main(rounds: int) -> int:
    """Print the table; return 1 if a bound is missed."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("VLLM_", "PYTHON"))}
    with tempfile.TemporaryDirectory() as folder:
        without, other = environment(Path(folder, "without")), environment(Path(folder, "other"), other=True)
        installed = environment(Path(folder, "with"), package=True)
        off, on = BOUNDS
        cases = {
            STOCK: (without, clean),
            OTHER: (other, clean),
            off: (installed, clean),
            on: (installed, clean | {GATE: "1"}),
        }
        measured: dict[str, list[tuple[float, float]]] = {case: [] for case in cases}
        for number in range(-10, rounds):  # the first ten warm the page cache and write bytecode
            for case in random.Random(number).sample(list(cases), len(cases)):
                times = start(*cases[case])
                if number >= 0:
                    measured[case].append(times)
    print(f"Python {sys.version.split()[0]}, {rounds} rounds, milliseconds (median)")
    print(f"{'case':<30} {'wall':>6} {'CPU':>6} {'to not installed':>17} {'to another .pth':>21} {'promised':>9}")
    missed = False
    for case, times in measured.items():
        wall, cpu = (statistics.median(column) for column in zip(*times, strict=True))
        row = f"{case:<30} {wall:6.2f} {cpu:6.2f}"
        if case != STOCK:
            row += f" {statistics.median(differences(times, measured[STOCK])):17.2f}"
        if case in BOUNDS:
            extra = differences(times, measured[OTHER])
            low, high = interval(extra)
            row += f" {statistics.median(extra):6.2f} [{low:5.2f}, {high:5.2f}] {BOUNDS[case]:9.1f}"
            missed |= statistics.median(extra) > BOUNDS[case]
        print(row)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 300))
