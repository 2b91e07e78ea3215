"""``python -m vllm_hotfix.drill MODEL``: does a reload leave the model as a fresh load does? On a real engine, N times.

The engine runs in processes of its own, which end with this one however it ends. Neither vLLM nor torch is imported
here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

from packaging.version import Version

from ._drill import report
from ._drill.report import Difference, Round
from ._judge import parse_version
from ._upstream import Sources

IDENTICAL: Final = 0
DIFFERENT: Final = 1
NOT_DONE: Final = 2

OLDEST: Final = "0.20.0"
NEWEST: Final = "0.33.0"
_PATIENCE: Final = 10  # seconds

_EPILOG: Final = """\
Every other argument is vLLM's, as `vllm serve MODEL` takes it: --load-format runai_streamer --tensor-parallel-size 2.
Patches are on by their variables, as ever: VLLM_HOTFIX_ENABLE=all python -m vllm_hotfix.drill MODEL

Exit status: 0 if every round was identical, 1 if one was not, 2 if the drill could not be done, 130 after Ctrl-C."""

#: An exception in a log, as a traceback ends; vLLM's processes put their names before it.
_EXCEPTION: Final = re.compile(
    r"^(?:\([^)]*\) ?)?(?:\w+ [\d-]+ [\d:]+ \[[^]]*\] ?)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt|NotFound)\w*: .+)$"
)
#: What one process of vLLM says of the failure of another.
_SECOND_HAND: Final = re.compile(
    r"root cause|WorkerProc initialization failed|EngineDeadError|EngineCore encountered|proc\(s\)|[Cc]ancelled"
)


class NotDone(Exception):
    """The drill could not be carried out; the message is one line."""


def main(arguments: list[str] | None = None) -> int:
    """Run the drill.

    Args:
        arguments: words of the command line, ``sys.argv`` by default.

    Returns:
        0 if every round was identical, 1 if one was not, 2 if the drill could not be done.
    """
    parser = argparse.ArgumentParser(
        prog="python -m vllm_hotfix.drill",
        usage="%(prog)s MODEL [engine arguments as vllm serve takes them] [options]",
        description="Start a real engine, then discard and reload its weights, and compare every tensor and the "
        "greedy tokens with the fresh load's, a number of times.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--rounds", type=_positive, default=10, metavar="N", help="how many (default: 10)")
    parser.add_argument(
        "--level",
        type=int,
        choices=(0, 2),
        default=2,
        help="2: sleep, which discards the weights, and wake; 0: overwrite what a sleep would discard, where the "
        "device cannot sleep (default: 2)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was found, for scripts")
    parser.add_argument(
        "--scratch",
        action="append",
        default=[],
        type=_pattern,
        metavar="REGEX",
        help="paths of tensors that are scratch in your model, besides those that are known; can be repeated",
    )
    words = sys.argv[1:] if arguments is None else arguments
    model, rest = (words[0], words[1:]) if words and not words[0].startswith("-") else (None, words)
    # What is not known is vLLM's. MODEL is no argument of this parser, or the value of an unknown option could be it.
    options, others = parser.parse_known_args(rest)
    if model is None:
        parser.error("MODEL, a folder or a model's name, comes first")
    for number in range(3):  # closed ones would be given to the engine's pipes
        with contextlib.suppress(OSError):
            os.fstat(number)
            continue
        os.open(os.devnull, os.O_RDWR)
    try:
        with _terminated_as_interrupted():
            return _drill(model, others, options)
    except (NotDone, OSError) as error:
        print(f"drill: {error}", file=sys.stderr)
        if isinstance(error, OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes once more
        return NOT_DONE
    except KeyboardInterrupt:
        print("drill: interrupted; its engine is gone", file=sys.stderr)
        return 130


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None
    return text


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM end the drill as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _drill(model: str, arguments: list[str], options: argparse.Namespace) -> int:
    version = _check_vllm()
    _check_model(model)
    if options.json is not None:
        new = not options.json.exists()
        try:
            options.json.open("a").close()
            if new:
                options.json.unlink()  # a drill that fails leaves none
        except OSError as error:
            raise NotDone(f"--json {options.json}: {error.strerror}") from None
    plan = {
        "model": model,
        "arguments": arguments + _without_tokenizer(model, arguments),
        "level": options.level,
        "rounds": options.rounds,
        "scratch": options.scratch,
    }
    rounds: list[Round] = []
    ready: dict[str, Any] = {}
    log = Path(tempfile.mkdtemp(prefix="vllm-hotfix-drill-")) / "engine.log"
    _say(f"starting vLLM {version}; its log: {log}")
    for event in _events(plan, log):
        if "ready" in event:
            ready = event["ready"]
            _say(_opening(ready))
        elif "round" in event:
            rounds.append(_round(event["round"]))
            _say(f"round {rounds[-1].number} of {options.rounds}: {_closing(rounds[-1], ready)}")
    # Where the drill could not be done, the log stays: it says more than a line.
    shutil.rmtree(log.parent, ignore_errors=True)
    identical = all(one.identical(graphs=ready["graphs"]) for one in rounds)
    lines = [report.table(rounds), *report.differences(rounds), *_notes(rounds, ready), _verdict(rounds, ready)]
    print("\n".join(lines), flush=True)
    if options.json is not None:
        found = {
            "vllm": version,
            **plan,
            **{name: ready[name] for name in ("device", "workers", "graphs", "patches", "left_out")},
            "identical": identical,
            "rounds": report.as_json(rounds),
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return IDENTICAL if identical else DIFFERENT


def _check_vllm() -> str:
    sources = Sources()
    if sources.package("vllm") is None:
        raise NotDone(f"no vLLM is installed for {sys.executable}")
    version = sources.version
    parsed = parse_version(version)
    if parsed is None:
        raise NotDone(f"the version of the installed vLLM, {version!r}, is not understood")
    if parsed < Version(OLDEST):
        raise NotDone(f"vLLM {version} is not supported; the drill knows {OLDEST} to {NEWEST}")
    if parsed.release > Version(NEWEST).release:
        _say(f"vLLM {version} is newer than {NEWEST}, the newest that the drill was tried with")
    return str(version)


def _check_model(model: str) -> None:
    """Refuse what is no model, before anything is started."""
    path = Path(model)
    if path.is_dir():
        if not any((path / name).is_file() for name in ("config.json", "params.json")):
            raise NotDone(f"there is no model in {model}: it has no config.json")
    elif path.exists() and path.suffix != ".gguf":
        raise NotDone(f"{model} is a file; a model is a folder, or a name")
    elif not path.exists() and (model.startswith((".", "/", "~")) or model.count("/") > 1) and "://" not in model:
        raise NotDone(f"there is no model {model}")


def _without_tokenizer(model: str, arguments: list[str]) -> list[str]:
    """What vLLM needs to be told where a model comes without a tokenizer: the drill needs none."""
    path = Path(model)
    names = ("tokenizer*", "vocab*", "merges.txt", "*.tiktoken", "tekken.json", "spiece.model")
    if not path.is_dir() or any(argument.startswith("--tokenizer") for argument in arguments):
        return []
    return [] if any(any(path.glob(name)) for name in names) else ["--skip-tokenizer-init"]


def _say(text: str) -> None:
    print(f"drill: {text}", file=sys.stderr, flush=True)


# The engine's processes.


def _events(plan: dict[str, Any], log: Path) -> Iterator[dict[str, Any]]:
    """Carry out a plan in an engine of its own, and yield what it reports.

    Raises:
        NotDone: the engine did not start, refused the plan, or ended before the end of the plan.
    """
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "vllm_hotfix._drill.engine", str(writing), json.dumps(plan)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(writing,),
            env=_environment(),
            start_new_session=True,
        )
    number, started = 0, False
    failure: dict[str, Any] | None = None
    try:
        os.close(writing)
        with os.fdopen(reading) as stream:
            for line in stream:
                if not line.endswith("\n"):
                    break  # it has ended while it wrote
                event: dict[str, Any] = json.loads(line)
                if "done" in event:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(_PATIENCE)
                    return
                if "error" in event:
                    failure = event
                    break
                started = True
                number = event["round"]["number"] if "round" in event else number
                yield event
    finally:
        _end(process)
    how = f"its process ended {report.how_it_ended(process.returncode)}"
    failure = failure or {"error": how, "generic": True, "round": number + 1 if started else 0}
    raise NotDone(_failure(failure, log))


def _environment() -> dict[str, str]:
    """This environment, with the patches at hand in each process of the engine."""
    from .__main__ import with_bootstrap

    spawn = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}  # as `vllm serve` sets it
    return {**spawn, **os.environ, "PYTHONPATH": with_bootstrap(os.environ.get("PYTHONPATH"))}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the engine's processes: they get some seconds to leave nothing behind, then they are killed."""
    try:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


def _failure(event: dict[str, Any], log: Path) -> str:
    """One line that says why the drill ended: what one process only heard of another is looked up in the log."""
    reason = event["error"]
    if not event.get("generic"):
        return str(reason)
    heard = _SECOND_HAND.search(reason) or re.search(" ended (by|with) ", reason)
    if heard and (cause := _root_cause(log)):
        reason = cause
    if "Sleep mode" in reason:
        reason += " (`--level 0` needs none)"
    when = "died in" if event["round"] else "does not start:"
    return f"the engine {when} round {event['round']}: {reason}" if event["round"] else f"the engine {when} {reason}"


def _root_cause(log: Path) -> str:
    """The last exception in a log that is no other one's echo."""
    cause = ""
    for line in log.read_text(errors="replace").splitlines():
        match = _EXCEPTION.match(line)
        if match and not _SECOND_HAND.search(match[1]):
            cause = match[1]
    return " ".join(cause.split())[:500]


# What is said.


def _round(found: dict[str, Any]) -> Round:
    fields = {name: value for name, value in found.items() if name not in ("differences", "differing", "moved")}
    return Round(**fields, differences=[Difference(**one) for one in found["differences"]])


def _opening(ready: dict[str, Any]) -> str:
    on = [f"{patch['name']} {patch['state']}" for patch in ready["patches"] if patch["state"] != "off"]
    graphs = "with CUDA graphs" if ready["graphs"] else "without CUDA graphs"
    workers = "1 worker" if ready["workers"] == 1 else f"{ready['workers']} workers"
    return (
        f"ready after {ready['seconds']:.0f} s on {ready['device']}, {graphs}: {ready['tensors']:,} tensors "
        f"in {workers}; patches: {', '.join(on) or 'none is on'}"
    )


def _closing(this: Round, ready: dict[str, Any]) -> str:
    if this.error:
        return f"the reload failed: {this.error}"
    verdict = "identical" if this.identical(graphs=ready["graphs"]) else "NOT identical"
    return f"{verdict}; {this.differing} differ, {this.moved} moved, tokens {this.tokens}, reload {this.reload:.2f} s"


def _notes(rounds: list[Round], ready: dict[str, Any]) -> list[str]:
    notes = []
    reasons: dict[str, list[str]] = {}
    for path, why in ready["left_out"].items():
        reasons.setdefault(why, []).append(path)
    for why, paths in reasons.items():
        notes.append(f"not compared: {paths[0]}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''}; {why}")
    if any(one.tokens == "vary" for one in rounds):
        notes.append("tokens vary from run to run on unchanged weights here, so they prove nothing; the tensors do")
    if not ready["graphs"] and any(one.moved for one in rounds):
        notes.append("tensors moved; that is harmless without CUDA graphs, and counts with them")
    return notes


def _verdict(rounds: list[Round], ready: dict[str, Any]) -> str:
    right = sum(one.identical(graphs=ready["graphs"]) for one in rounds)
    return f"{right} of {len(rounds)} rounds identical to the fresh load"


if __name__ == "__main__":
    sys.exit(main())
