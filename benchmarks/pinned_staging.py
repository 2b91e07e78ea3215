"""What page-locked staging makes of a load through the Run:ai streamer, against stock in the same run.

    python benchmarks/pinned_staging.py stream|sizes|alternatives|engine|tp2 FOLDER... [--rounds 3] [--json FILE]

FOLDER holds a checkpoint in safetensors files. Every file is read before it is measured, so that it comes out of the
page cache; stock and patched take turns, and who is first changes from round to round.

- `stream`: vLLM's own loader for `runai_streamer`, without a model. Its tensors are copied into parameters on the
  device, which are there before the clock starts; it stops when the last copy has arrived.
- `sizes`: the same with the patch, by the size of a staging block; there are two.
- `alternatives`: the patched loader against the others that a user could choose for the same files.
- `engine`: two engines, one of each side, that load their model again and again; vLLM's log says how long it took.
- `tp2`: the same with two ranks that share the reading, `distributed: true`.

Every parameter of every load is digested on the device and must equal stock's; where one does not, the patch was not
active or a load failed, the exit status is 1. The host's peak is what the process's resident memory rose by.
Needs an installed vLLM; vllm-hotfix is taken from this checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from _streaming import HostPeak, Parameters, headers, hotfix, locked, shards

ROOT = Path(__file__).resolve().parent.parent
GATE = "VLLM_HOTFIX_PINNED_STAGING"
STOCK, PATCHED = "stock", "patched"
STREAMER = "runai_streamer"
ALTERNATIVES = {
    "safetensors": "vLLM's default, safetensors",
    "fastsafetensors": "fastsafetensors",
    "instanttensor": "InstantTensor",
}
TOOK = re.compile(r"Model loading took ([\d.]+) GiB.*? ([\d.]+) seconds")
WEIGHTS = re.compile(r"Loading weights took ([\d.]+) seconds")
#: Lines of the log that have the patch's name in them for another reason.
NOISE = re.compile(r"args: |arguments|^\s+File ")

Result = dict[str, Any]


class Failed(Exception):
    """A measurement without a result."""


# In the measuring processes.


def weights(load_format: str, folder: str, extra: dict[str, Any]) -> Callable[[], Iterator[tuple[str, Any]]]:
    """Build vLLM's loader for a format; return what starts its iterator."""
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    loader: Any = get_model_loader(
        LoadConfig(load_format=load_format, use_tqdm_on_load=False, model_loader_extra_config=dict(extra))
    )
    if load_format == STREAMER:
        return lambda: loader._get_weights_iterator(folder, None)
    return lambda: loader._get_weights_iterator(loader.Source(folder, None, fall_back_to_pt=False))


def measure(request: dict[str, Any], device: str) -> Result:
    """One load into parameters on the device."""
    import torch

    cuda = device.startswith("cuda")
    if request["block"]:
        from vllm_hotfix._patches.pinned_staging import _load

        _load.BLOCK = request["block"] << 20
    begin_of = weights(request["format"], request["folder"], request["extra"])
    parameters = Parameters(headers(request["folder"]), device)
    parameters.clear()
    targets, arrived = parameters.by_name, 0
    gc.collect()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    held, peak = locked(), HostPeak()
    peak.start()
    begin = time.perf_counter()
    for name, tensor in begin_of():
        targets[name].copy_(tensor)
        arrived += 1
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    host = peak.end()
    del tensor
    result = {
        "seconds": seconds,
        "bytes": parameters.bytes,
        "tensors": arrived,
        "peak": host if peak.exact else None,
        "before": peak.before,
        "locked": [held, locked()],
        "device": torch.cuda.max_memory_allocated() - parameters.memory.nbytes if cuda else 0,
        "digests": parameters.digests(),
    }
    if arrived != len(targets):
        raise ValueError(f"{arrived} tensors arrived of {len(targets)}")
    return result


def serve(device: str, reply: Callable[[Result], None], side: str) -> None:
    """Answer one request a line with one measurement, until there are none."""
    import torch
    import vllm
    from vllm.model_executor.model_loader import get_model_loader  # noqa: F401 - the long import comes first

    cuda = device.startswith("cuda")
    torch.set_grad_enabled(False)
    # The context, the allocator and the copies in both directions are ready before anything is measured.
    warm = torch.ones(1 << 20, device=device)
    warm.copy_(torch.ones(1 << 20)).add_(torch.ones_like(warm)).cpu()
    del warm
    name = torch.cuda.get_device_name() if cuda else "CPU"
    streamer = importlib.metadata.version("runai-model-streamer")
    reply({"about": f"{name}, vLLM {vllm.__version__}, torch {torch.__version__}, streamer {streamer}"})
    for line in sys.stdin:
        request = json.loads(line)
        package = request["format"]
        if package in ("fastsafetensors", "instanttensor") and importlib.util.find_spec(package) is None:
            reply({"missing": True})
            continue
        try:
            result = measure(request, device)
            result["hotfix"] = hotfix() if side == PATCHED else None
        except Exception as error:
            import traceback

            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"[:300]}
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()  # the next load finds the allocator as an engine's first load does
        reply(result)


def engine(request: dict[str, Any], reply: Callable[[Result], None], side: str) -> None:
    """One engine: load, digest, generate."""
    begin = time.perf_counter()
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    options: dict[str, Any] = {}
    if request["sleep"]:
        options["enable_sleep_mode"] = True
    if request["extra"]:
        options["model_loader_extra_config"] = request["extra"]
    llm = LLM(
        model=request["folder"],
        load_format=STREAMER,
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_batched_tokens=512,
        max_num_seqs=4,
        gpu_memory_utilization=0.3,  # both sides' engines are there at once
        tensor_parallel_size=request["ranks"],
        enforce_eager=True,
        enable_prefix_caching=False,
        seed=0,
        disable_log_stats=True,
        worker_cls="_streaming.Worker",
        **options,
    )
    ready = time.perf_counter() - begin
    ranks = llm.collective_rpc("measured", args=(side == PATCHED,))
    sampling = SamplingParams(temperature=0, max_tokens=16, detokenize=False, ignore_eos=True)
    prompts: Any = [TokensPrompt(prompt_token_ids=[1, 5, 9, 13, 17 + number]) for number in range(3)]
    tokens = [list(one.outputs[0].token_ids) for one in llm.generate(prompts, sampling, use_tqdm=False)]
    blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    reply({"ready": ready, "ranks": ranks, "tokens": tokens, "blocks": blocks})
    for _ in sys.stdin:
        llm.collective_rpc("load_again")
        reply({"ranks": llm.collective_rpc("measured", args=(side == PATCHED,))})


def child(mode: str, side: str, device: str) -> None:
    """Run one of the measuring processes: requests by stdin, replies by stdout, all else to stderr."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(result: Result) -> None:
        channel.write(json.dumps(result) + "\n")
        channel.flush()

    if mode == "serve":
        serve(device, reply, side)
    else:
        engine(json.loads(sys.stdin.readline()), reply, side)


# In the process that starts them.


class Side:
    """A measuring process of one side, started when it is asked and again after it has failed."""

    def __init__(self, name: str, arguments: argparse.Namespace, logs: Path) -> None:
        self.name = name
        self.patched = name == PATCHED and not arguments.stock_twice
        self.arguments = arguments
        self.log = logs / f"{name}.log"
        self.about = ""
        self._process: subprocess.Popen[str] | None = None
        self._engine: tuple[str, int] | None = None

    def extra(self, **keys: Any) -> dict[str, Any]:
        """This side's `model_loader_extra_config`."""
        extra = keys | json.loads(self.arguments.extra)
        if self.patched:
            extra |= {"pinned_staging": True} | json.loads(self.arguments.patched_extra)
        return extra

    def start(self, mode: str) -> subprocess.Popen[str]:
        """Start a process with the patch or without it."""
        environ = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_HOTFIX_")}
        inherited = [path for path in [os.environ.get("PYTHONPATH")] if path]
        environ |= {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), *inherited]),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        }
        command = [sys.executable, str(Path(__file__).resolve()), "--child", mode]
        if self.patched:
            environ |= {key: value for key, value in os.environ.items() if key.startswith("VLLM_HOTFIX_")}
            environ[GATE] = "1"
            command = [sys.executable, "-m", "vllm_hotfix", "run", "--", *command]
        command += [PATCHED if self.patched else STOCK, "--device", self.arguments.device]
        with self.log.open("a") as log:
            return subprocess.Popen(
                command, env=environ, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )

    def _read(self, process: subprocess.Popen[str]) -> Result:
        killer = threading.Timer(self.arguments.timeout, process.kill)
        killer.start()
        try:
            assert process.stdout
            line = process.stdout.readline()
        finally:
            killer.cancel()
        if not line:
            process.kill()
            raise Failed(f"the process ended with {process.wait()}")
        return dict(json.loads(line))

    def _send(self, process: subprocess.Popen[str], request: dict[str, Any]) -> Result:
        assert process.stdin
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        except OSError as error:
            raise Failed(f"the process is gone: {error}") from error
        with Sampler(process.pid) as sampler:
            result = self._read(process)
        if "error" in result:
            raise Failed(result["error"])
        if "before" in result and result["peak"] is None:
            result["peak"] = sampler.peak - result["before"]
        return result

    def ask(self, folder: str, load_format: str, block: int = 0) -> Result:
        """Have one load measured, with a block of so many MiB if it is the patched side's."""
        extra = self.extra() if load_format == STREAMER else {}
        if block:
            extra["memory_limit"] = max(2 * block << 20, 1_000_000_000)
        try:
            if self._process is None:
                self._process = self.start("serve")
                self.about = self._read(self._process)["about"]
            return self._send(self._process, {"folder": folder, "format": load_format, "extra": extra, "block": block})
        except Failed:
            self.close()
            raise
        finally:
            if self.arguments.fresh:
                self.close()

    def engine(self, folder: str, ranks: int) -> Result:
        """Have one load of an engine measured: its first, then it loads again."""
        extra = self.extra(distributed=True) if ranks > 1 else self.extra()
        if self._engine != (folder, ranks):
            self.close()
        seen = self.log.stat().st_size if self.log.exists() else 0
        if self._process is None:
            self._process, self._engine = self.start("engine"), (folder, ranks)
        request = {"folder": folder, "ranks": ranks, "sleep": self.arguments.sleep_mode, "extra": extra}
        try:
            result = self._send(self._process, request)
        except Failed:
            self.close()
            raise
        text = self.log.read_text(errors="replace")[seen:]
        took, weights_took = TOOK.search(text), WEIGHTS.search(text)
        # A release's CPU worker logs nothing: then the worker's own clock has to do.
        result["logged"] = took is not None
        first = result["ranks"][0]
        result["gib"], result["seconds"] = map(float, took.groups()) if took else (first["gib"], first["seconds"])
        result["weights"] = float(weights_took.group(1)) if weights_took else None
        return result

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        self._engine = None
        if process is not None:
            assert process.stdin
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()

    def remarks(self) -> list[str]:
        """What the log has about the patch, the last lines of it."""
        if not self.patched or not self.log.exists():
            return []
        lines = self.log.read_text(errors="replace").splitlines()
        return [line[:240] for line in lines if re.search("hotfix|pinned", line) and not NOISE.search(line)][-6:]


class Sampler:
    """Watches another process's resident memory, for kernels that cannot forget a peak."""

    def __init__(self, pid: int) -> None:
        self.peak = 0
        self._file = Path(f"/proc/{pid}/statm")
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            with contextlib.suppress(OSError, ValueError, IndexError):
                self.peak = max(self.peak, int(self._file.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()


def warm(folder: str) -> None:
    """Read every file once."""

    def read(path: Path) -> None:
        buffer = bytearray(1 << 24)
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    files = shards(folder)
    if not files:
        raise SystemExit(f"{folder}: no safetensors files")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, files))


class Book:
    """All measurements of a run, written out after each."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.path = arguments.json
        self.bad: list[str] = []
        self.missing: set[tuple[str, str]] = set()
        self._records: list[Result] = []
        #: The first load of a work: stock, or where stock fails, which is reported, the patched one.
        self._reference: dict[tuple[str, int], dict[str, str]] = {}
        self._rise: dict[tuple[str, int], list[int]] = {}

    def add(self, work: str, who: str, number: int, measurement: Callable[[], Result]) -> list[Result]:
        """Take a measurement; return it, or nothing if it failed."""
        try:
            result = measurement()
        except Failed as error:
            self.bad.append(f"{work}, {who}, round {number}: {error}")
            self._write({"work": work, "who": who, "round": number, "error": str(error)})
            return []
        if "missing" in result:
            self.missing.add((work, who))
            return []
        for rank, part in enumerate(result.get("ranks", [result])):
            self._compare(f"{work}, {who}, round {number}, rank {rank}", (work, rank), part)
            said = part["hotfix"]
            if said is not None and said["state"] != "active":
                self.bad.append(f"{work}, {who}, round {number}: the patch is {said['state']}")
        self._write({"work": work, "who": who, "round": number} | result)
        return [result]

    def _compare(self, where: str, key: tuple[str, int], part: Result) -> None:
        digests = part.pop("digests")
        reference = self._reference.setdefault(key, digests)
        names = reference.keys() | digests.keys()
        differ = sorted(name for name in names if reference.get(name) != digests.get(name))
        part["parameters"] = len(digests)
        part["differ"] = differ[:20]
        part["all"] = hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()[:12]
        if differ:
            self.bad.append(f"{where}: {len(differ)} of {len(names)} parameters differ: {', '.join(differ[:8])}")
        before, after = ([value or 0 for value in values] for values in part["locked"])
        rise = [late - early for early, late in zip(before, after, strict=True)]
        if any(one > other for one, other in zip(rise, self._rise.setdefault(key, rise), strict=True)):
            self.bad.append(f"{where}: locked and pinned memory were {before}, are {after}")

    def _write(self, record: Result) -> None:
        self._records.append(record)
        if self.path:
            Path(self.path).write_text(json.dumps(self._records, indent=1))
        seconds = f"{record['seconds']:.2f} s" if "seconds" in record else record["error"]
        print(f"  {record['work']}, {record['who']}, round {record['round']}: {seconds}", file=sys.stderr, flush=True)


def spread(results: list[Result], key: str = "seconds") -> str:
    """The least and the median, as text."""
    values = [result[key] for result in results if result.get(key) is not None]
    return f"{min(values):.2f} / {statistics.median(values):.2f}" if values else "-"


def ratio(stock: list[Result], patched: list[Result]) -> str:
    """How many times faster the patched side is, by medians."""
    if not stock or not patched:
        return "-"
    return f"{statistics.median(r['seconds'] for r in stock) / statistics.median(r['seconds'] for r in patched):.2f}"


def gib(values: list[int]) -> str:
    """The largest, in GiB."""
    return f"{max(values) / 2**30:.2f}" if values else "-"


def same(results: list[Result]) -> str:
    """Whether every parameter of every load is the reference's."""
    bad = sum(1 for result in results if result["differ"])
    if not results:
        return "-"
    return (
        f"**{bad} of {len(results)} loads differ**" if bad else f"all {results[0]['parameters']}, {len(results)} loads"
    )


def table(head: list[str], rows: list[list[str]]) -> None:
    """Print a Markdown table."""
    print("\n| " + " | ".join(head) + " |\n|" + " --- |" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    sys.stdout.flush()


def take(rounds: int, book: Book, work: str, asks: dict[str, Callable[[], Result]]) -> dict[str, list[Result]]:
    """Measure everyone once a round, who begins changes; who failed or is not installed is left out from then on."""
    results: dict[str, list[Result]] = {who: [] for who in asks}
    order = list(asks)
    for number in range(rounds):
        first = number % len(order)
        for who in order[first:] + order[:first]:
            if len(results[who]) == number:
                results[who] += book.add(work, who, number, asks[who])
    return results


def works(
    arguments: argparse.Namespace, book: Book, asks: Callable[[str], dict[str, Callable[[], Result]]]
) -> Iterator[tuple[str, dict[str, list[Result]]]]:
    """Measure in every folder whom `asks` has for it; its name and the results."""
    for folder in arguments.folders:
        work = Path(folder).name
        warm(folder)
        yield work, take(arguments.rounds, book, work, asks(folder))


def stream(arguments: argparse.Namespace, book: Book, sides: dict[str, Side]) -> None:
    """The loader alone, stock against patched."""
    rows, counted = [], []

    def asks(folder: str) -> dict[str, Callable[[], Result]]:
        return {who: functools.partial(side.ask, folder, STREAMER) for who, side in sides.items()}

    for work, results in works(arguments, book, asks):
        stock, patched = results[STOCK], results[PATCHED]
        known = (stock + patched)[:1]
        rows.append(
            [
                work,
                f"{known[0]['bytes'] / 2**30:.2f} GiB, {known[0]['tensors']}" if known else "-",
                spread(stock),
                spread(patched),
                ratio(stock, patched),
                gib([result["peak"] for result in stock]),
                gib([result["peak"] for result in patched]),
                gib([result["device"] for result in patched]),
                same(stock + patched),
            ]
        )
        counted += [f"{work}: {result['hotfix']}" for result in patched[-1:] if result["hotfix"]]
    print(f"\n{sides[STOCK].about}; {arguments.rounds} rounds, seconds: min / median")
    head = ["work", "tensors", "stock", "patched", "times faster", "host peak GiB, stock", "patched"]
    table([*head, "device GiB beside the parameters, patched", "parameters equal"], rows)
    finish(counted, sides)


def sizes(arguments: argparse.Namespace, book: Book, sides: dict[str, Side]) -> None:
    """The patched loader with staging blocks of several sizes."""
    rows = []

    def asks(folder: str) -> dict[str, Callable[[], Result]]:
        ask = functools.partial(sides[PATCHED].ask, folder, STREAMER)
        return {f"2 x {size} MiB": functools.partial(ask, size) for size in arguments.blocks}

    for work, results in works(arguments, book, asks):
        for who, got in results.items():
            rows.append([work, who, spread(got), same(got)])
    print(f"\n{sides[PATCHED].about}; {arguments.rounds} rounds, seconds: min / median")
    table(["work", "staging memory", "patched", "parameters equal"], rows)


def alternatives(arguments: argparse.Namespace, book: Book, sides: dict[str, Side]) -> None:
    """The patched loader against others; the default loader's parameters are the reference."""
    rows, counted = [], []
    loaders = [*ALTERNATIVES, STREAMER]
    sides_of = {name: sides[PATCHED if name == STREAMER else STOCK] for name in loaders}

    def asks(folder: str) -> dict[str, Callable[[], Result]]:
        return {name: functools.partial(side.ask, folder, name) for name, side in sides_of.items()}

    for work, results in works(arguments, book, asks):
        for load_format, label in {STREAMER: "Run:ai streamer, patched", **ALTERNATIVES}.items():
            got = results[load_format]
            rows.append(
                [
                    work,
                    label,
                    "not installed" if (work, load_format) in book.missing else spread(got),
                    ratio(got, results[STREAMER]),
                    gib([result["peak"] for result in got]),
                    gib([result["device"] for result in got]),
                    same(got),
                ]
            )
        counted += [f"{work}: {result['hotfix']}" for result in results[STREAMER][-1:] if result["hotfix"]]
    print(f"\n{sides[STOCK].about}; {arguments.rounds} rounds, seconds: min / median")
    head = ["work", "loader", "seconds", "times the patched streamer's", "host peak GiB"]
    table([*head, "device GiB beside the parameters", "parameters equal"], rows)
    finish(counted, sides)


def engines(arguments: argparse.Namespace, book: Book, sides: dict[str, Side], ranks: int) -> None:
    """A whole engine, stock against patched."""
    rows, counted = [], []

    def asks(folder: str) -> dict[str, Callable[[], Result]]:
        return {who: functools.partial(side.engine, folder, ranks) for who, side in sides.items()}

    for work, results in works(arguments, book, asks):
        stock, patched = results[STOCK], results[PATCHED]
        everything = stock + patched
        for rank in range(ranks):
            parts = {who: [result["ranks"][rank] for result in got] for who, got in results.items()}
            rows.append(
                [
                    work if ranks == 1 else f"{work}, rank {rank}",
                    f"{spread(stock)}" if rank == 0 else "",
                    f"{spread(patched)}" if rank == 0 else "",
                    ratio(stock, patched) if rank == 0 else "",
                    spread(parts[STOCK]),
                    spread(parts[PATCHED]),
                    gib([part["peak"] for part in parts[STOCK]]),
                    gib([part["peak"] for part in parts[PATCHED]]),
                    same(parts[STOCK] + parts[PATCHED]),
                ]
            )
            counted += [f"{work}, rank {rank}: {part['hotfix']}" for part in parts[PATCHED][-1:] if part["hotfix"]]
        blocks = {who: [result["blocks"] for result in got[:1]] for who, got in results.items()}
        memory = {who: sorted({result["gib"] for result in got}) for who, got in results.items()}
        first = [result for result in everything if "tokens" in result]
        tokens = len({json.dumps(result["tokens"]) for result in first})
        counted.append(f"{work}: KV blocks {blocks}, model GiB {memory}, greedy tokens: {tokens} kind(s)")
        if not all(result["logged"] for result in everything):
            counted.append(f"{work}: no 'Model loading took' in the log, the worker's own seconds instead")
        counted.append(f"{work}: 'Loading weights took' {[result['weights'] for result in everything]}")
        counted.append(f"{work}: engine ready after {[round(result['ready'], 1) for result in first]} s")
    print(f"\n{ranks} rank(s), {arguments.rounds} rounds, seconds: min / median")
    head = ["work", "'Model loading took', stock", "patched", "times faster", "worker's load, stock", "patched"]
    table([*head, "host peak GiB, stock", "patched", "parameters and buffers equal"], rows)
    finish(counted, sides)


def finish(counted: list[str], sides: dict[str, Side]) -> None:
    """Print what the patch counted and logged."""
    print()
    for line in [*counted, *sides[PATCHED].remarks()]:
        print(f"- {line}")


def main() -> int:
    """Run the part that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", choices=["stream", "sizes", "alternatives", "engine", "tp2"])
    parser.add_argument("folders", nargs="+", metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="where every single measurement is written")
    parser.add_argument("--fresh", action="store_true", help="a new process for each measurement of a loader too")
    parser.add_argument("--extra", default="{}", metavar="JSON", help="model_loader_extra_config of both sides")
    parser.add_argument("--patched-extra", default="{}", metavar="JSON", help="more of it for the patched side")
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 16, 32, 64, 128, 512, 4000, 7600], metavar="MIB")
    parser.add_argument("--sleep-mode", action="store_true", help="engines with enable_sleep_mode")
    parser.add_argument("--timeout", type=float, default=240, help="seconds that one measurement may take")
    parser.add_argument("--device", default="cuda:0", help=argparse.SUPPRESS)
    parser.add_argument("--stock-twice", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.folders = [os.path.abspath(folder) for folder in arguments.folders]
    book = Book(arguments)
    with tempfile.TemporaryDirectory() as logs:
        sides = {name: Side(name, arguments, Path(logs)) for name in (STOCK, PATCHED)}
        try:
            if arguments.part == "stream":
                stream(arguments, book, sides)
            elif arguments.part == "sizes":
                sizes(arguments, book, sides)
            elif arguments.part == "alternatives":
                alternatives(arguments, book, sides)
            else:
                engines(arguments, book, sides, 2 if arguments.part == "tp2" else 1)
        finally:
            for side in sides.values():
                side.close()
        for line in book.bad:
            print(f"- WRONG: {line}")
        if book.bad:
            for side in sides.values():
                text = side.log.read_text(errors="replace") if side.log.exists() else ""
                print(f"\n{side.log.name}, its end:\n{text[-4000:]}", file=sys.stderr)
    return int(bool(book.bad))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3], sys.argv[5])
    else:
        sys.exit(main())
