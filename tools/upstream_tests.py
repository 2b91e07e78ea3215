"""Run vLLM's own tests with every patch on and with none, and compare.

TESTS is vLLM's source tree of the release that is installed, or its ``tests`` folder (both mean
``tests/model_executor/model_loader``), or folders and test files in that. Nothing is fetched, copied or written
there: pytest sees the folder through a link, without the ``vllm`` that may lie beside it, and without a network.

Each file runs in a process of its own, stock and patched in turn. A file with a difference is run again on both
sides before it counts. The result is a table in Markdown. It ends with 0 if patched vLLM does what stock does, with
1 if not, and with 2 and one line if that could not be found out.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

STOCK, PATCHED = SIDES = ("stock", "patched")
DEFAULT = "model_executor/model_loader"
ALIASES = ("VLLM_LAYERWISE_RELOAD_MEASURED_TOTALS", "VLLM_RELOAD_KEEP_MOE_KERNEL")
OFFLINE = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_NO_USAGE_STATS"), "1")
#: Beside vLLM's tests in its source tree, and not what is to be tested: that is installed.
NOT_LINKED = ("vllm", "build", "dist")
#: What a test can come to that is not well; with an error after, the test itself has passed.
BAD = ("failed", "error", "error after", "crashed", "timed out", "not run", "not there")
#: pytest's exit codes after which its reports are all there: passed, failed, interrupted by an error, no tests.
WHOLE = (0, 1, 2, 5)
FAULTS = ("drifted", "failed", "unsupported")
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of Linux
CHARACTERS = 2000

PROBE = """
import importlib.util, json
import vllm
assert importlib.util.find_spec("pytest"), "pytest is not installed"
try:
    import torch
    cuda = torch.cuda.is_available()
except ImportError:
    cuda = False
print(json.dumps({"vllm": getattr(vllm, "__version__", None), "cuda": cuda}))
"""


class Refused(Exception):
    """What was asked for cannot be done, in one line."""


# In pytest's process: this file is also the plugin that says what happens there.


def pytest_addoption(parser: Any) -> None:
    """Take the file that the plugin writes to."""
    parser.addoption("--witness", help="where upstream_tests.py wants to read what happens")


def pytest_configure(config: Any) -> None:
    """Start to write; the plugin's hooks are those of the object."""
    config.pluginmanager.register(Witness(config.getoption("--witness")))


class Witness:
    """pytest's reports and, at the end, the patches, a line of JSON each; written at once, for a crash may follow."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.pid = os.getpid()

    def tell(self, **event: Any) -> None:
        """Write a line, if this is not a child that a test has forked."""
        if os.getpid() == self.pid:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")

    def report(self, report: Any, phase: str) -> None:
        """Write what pytest says of a phase of a test."""
        outcome, text = report.outcome, report.longreprtext
        if hasattr(report, "wasxfail"):
            outcome, text = ("xfailed" if report.skipped else "xpassed"), str(report.wasxfail)
        elif report.skipped and isinstance(report.longrepr, tuple):
            text = str(report.longrepr[2])
        self.tell(test=report.nodeid, phase=phase, outcome=outcome, text=text)

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be imported, or is skipped as a whole."""
        if not report.passed:
            self.report(report, "collect")

    def pytest_collection_finish(self, session: Any) -> None:
        """All tests that will run."""
        self.tell(tests=[item.nodeid for item in session.items])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self.tell(test=nodeid, phase="start", outcome="", text="")

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A phase of a test has ended."""
        self.report(report, report.when)

    def pytest_sessionfinish(self) -> None:
        """The patches, as the live objects say; importing the package here would activate it."""
        package = sys.modules.get("vllm_hotfix")
        told = package and {
            "version": package.__version__,
            "patches": {patch["name"]: [patch["state"], patch["reason"]] for patch in package.patches()},
            "counters": package.counters(),
        }
        self.tell(package=told)


# The tests.


@dataclass(frozen=True)
class Tests:
    """vLLM's ``tests`` folder and what is to run of it.

    Args:
        folder: the ``tests`` folder.
        files: test files, relative to it.
    """

    folder: Path
    files: tuple[str, ...]


def find(paths: Iterable[str]) -> Tests:
    """The tests that paths name.

    Raises:
        Refused: there are none, they are not vLLM's, or not all of the same vLLM, or some are named twice.
    """
    root: Path | None = None
    files: list[str] = []
    for path in paths:
        place = Path(os.path.abspath(path))
        if not place.exists():
            raise Refused(f"there is no {path}")
        if (place / "tests/conftest.py").is_file():
            place = place / "tests"
        home = next((one for one in (place, *place.parents) if one.name == "tests" and _is_home(one)), None)
        if home is None:
            raise Refused(f"{path} is not in a folder `tests` with a conftest.py, as vLLM's tests are")
        if root not in (None, home):
            raise Refused(f"{path} is of another folder of tests than {root}")
        root = home
        if place == home:
            place = home / DEFAULT
        found = [place] if place.is_file() else sorted({*place.rglob("test_*.py"), *place.rglob("*_test.py")})
        if not found:
            raise Refused(f"there are no tests in {place}")
        names = [str(one.relative_to(home)) for one in found]
        if twice := set(names) & set(files):
            raise Refused(f"{min(twice)} is given twice")
        files += names
    assert root is not None
    return Tests(root, tuple(files))


def _is_home(folder: Path) -> bool:
    return (folder / "conftest.py").is_file() and (folder / "__init__.py").is_file()


def release_of(tests: Tests) -> str | None:
    """The release that the tests are of, if what lies beside them tells: an sdist's metadata, or a built vLLM."""
    for file, pattern in (("PKG-INFO", r"^Version: (.+)$"), ("vllm/_version.py", r"^__version__ = .*'(.+)'$")):
        with contextlib.suppress(OSError):
            if told := re.search(pattern, (tests.folder.parent / file).read_text("utf-8"), re.M):
                return told[1]
    return None


@contextlib.contextmanager
def view(tests: Tests) -> Iterator[Path]:
    """A folder of links to run in: the tests, and what else vLLM's source tree has but for vLLM itself."""
    with tempfile.TemporaryDirectory(prefix="upstream-tests-") as name:
        folder = Path(name)
        beside = tests.folder.parent
        for one in beside.iterdir() if (beside / "pyproject.toml").is_file() else ():
            if one.name not in NOT_LINKED and one.suffix != ".egg-info" and not one.name.startswith("."):
                (folder / one.name).symlink_to(one)
        if not (folder / "tests").is_symlink():
            (folder / "tests").symlink_to(tests.folder)
        (folder / "upstream_tests.py").unlink(missing_ok=True)
        (folder / "upstream_tests.py").symlink_to(Path(__file__).resolve())
        (folder / "state").mkdir()
        yield folder


# Running them.


@dataclass
class Result:
    """What became of a test: ``passed``, ``skipped``, ``xfailed``, ``xpassed`` or one of ``BAD``, and why."""

    outcome: str
    text: str = ""

    @property
    def why(self) -> str:
        """The reason in one line: of a traceback the last error."""
        errors = [line[1:].strip() for line in self.text.splitlines() if re.match(r"E\s+\S", line)]
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        # What pytest marks with E is first the error, then what it has to say of it.
        chosen = next((one for one in reversed(errors) if re.match(r"[\w.]+(Error|Exception|Exit)\b", one)), None)
        return (chosen or (errors or lines[-1:] or [""])[0])[:160]

    @property
    def kind(self) -> tuple[str, str]:
        """The outcome, with its reason but for what differs from run to run: numbers, addresses, temporary paths."""
        why = self.why if self.outcome in BAD else ""
        return self.outcome, re.sub(r"/\S+|0x[0-9a-f]+|\d+(\.\d+)?", "*", why)


@dataclass
class Run:
    """One file on one side."""

    results: dict[str, Result] = field(default_factory=dict)
    seconds: float = 0.0
    package: dict[str, Any] | None = None


class Runner:
    """Runs a file of tests on a side.

    Args:
        folder: the view of the tests.
        timeout: seconds for a file.
        environ: each side's variables.
    """

    def __init__(self, folder: Path, timeout: float, environ: Mapping[str, Mapping[str, str]]) -> None:
        self.folder = folder
        self.timeout = timeout
        self.environ = environ

    def run(self, file: str, side: str) -> Run:
        """Run a file; whatever it does to its process is a result."""
        events, log = self.folder / "state/events", self.folder / "state/log"
        events.write_text("")
        command = [sys.executable, "-m", "pytest", "-p", "upstream_tests", "--witness", str(events)]
        command += ["-p", "no:cacheprovider", "--rootdir", str(self.folder), "-q", "--tb=short", f"tests/{file}"]
        start = time.perf_counter()
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environ[side],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(self.timeout)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end_all(process)
        run = Run(seconds=time.perf_counter() - start)
        tail = log.read_text("utf-8", "replace")[-CHARACTERS:]
        _read(
            [json.loads(line) for line in events.read_text("utf-8").splitlines()], run, code, self.timeout, tail, file
        )
        return run


def end_all(process: subprocess.Popen[bytes]) -> None:
    """End a process and whatever it has started, also in sessions of its own: orphans become children of this one."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    while children := [pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()]:
        for pid in children:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(int(pid), signal.SIGKILL)
                os.waitpid(int(pid), 0)


def _read(events: list[dict[str, Any]], run: Run, code: int | None, timeout: float, tail: str, file: str) -> None:
    """Make results of what the plugin has written and of how the process ended."""
    tests: list[str] = []
    running: str | None = None
    whole = False
    for event in events:
        if "tests" in event:
            tests = event["tests"]
        elif "package" in event:
            run.package, whole = event["package"], True
        else:
            name, phase, outcome = event["test"], event["phase"], event["outcome"]
            running = name if phase == "start" else None if phase == "teardown" else running
            before = run.results.get(name)
            if outcome == "failed" and phase != "call":
                outcome = "error after" if before is not None and before.outcome == "passed" else "error"
            told = outcome not in ("", "rerun") and (phase == "call" or outcome != "passed")
            if told and (before is None or before.outcome not in BAD):
                run.results[name] = Result(outcome, event["text"])
    how = "timed out" if code is None else "crashed"
    words = f"after {timeout:g} s" if code is None else _ended(code)
    if running is not None:
        run.results[running] = Result(how, f"{tail}\n{words}")
    elif code not in WHOLE or not whole:
        run.results[f"tests/{file}"] = Result(how, f"{tail}\n{words}")
    for name in tests:
        run.results.setdefault(name, Result("not run", f"the file's process {how} before"))


def _ended(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"ended by {signal.Signals(-code).name}"
    return f"ended with {code}"


# Comparing.

SAME, BROKEN, OTHERWISE, ONLY_PATCHED, FLAKY = "same", "broken", "fails otherwise", "passes only patched", "flaky"


def judge(stock: list[Result], patched: list[Result]) -> str:
    """Judge a test by its results of every run: a difference counts that was seen twice, beside a steady stock.

    A failure on both sides for another reason is a difference too: the patch's failure may hide behind stock's.
    """
    seen = Counter(map(_differ, stock, patched))
    if set(seen) == {SAME}:
        return SAME
    verdict = max((BROKEN, OTHERWISE, ONLY_PATCHED), key=lambda one: seen[one])
    steady = len({one.kind for one in stock}) == 1
    return verdict if steady and seen[verdict] >= min(2, len(stock)) else FLAKY


def _differ(stock: Result, patched: Result) -> str:
    if stock.kind == patched.kind:
        return SAME
    if patched.outcome not in BAD:
        return ONLY_PATCHED if stock.outcome in (*BAD, "skipped") else BROKEN
    return OTHERWISE if stock.outcome in BAD else BROKEN


@dataclass
class Outcome:
    """A file with the runs of both sides."""

    file: str
    first: str
    runs: dict[str, list[Run]]
    verdicts: dict[str, str] = field(default_factory=dict)

    def results(self, side: str, test: str) -> list[Result]:
        """A test's results on a side, one for each run."""
        return [run.results.get(test, Result("not there")) for run in self.runs[side]]

    def judge(self) -> bool:
        """Judge each test; says whether any differs."""
        tests = dict.fromkeys(test for runs in self.runs.values() for run in runs for test in run.results)
        self.verdicts = {test: judge(*(self.results(side, test) for side in SIDES)) for test in tests}
        return set(self.verdicts.values()) - {SAME} != set()

    def states(self) -> dict[str, tuple[str, str]]:
        """The patches' states after the first patched run that has told them, by name."""
        told = [run.package for run in self.runs[PATCHED] if run.package]
        return {name: (state, reason) for name, (state, reason) in (told[0]["patches"] if told else {}).items()}


def run_all(tests: Tests, runner: Runner, again: int) -> Iterator[Outcome]:
    """Run each file on both sides in turn, which of them first in turn as well, and those that differ again."""
    for number, file in enumerate(tests.files):
        order = SIDES if number % 2 == 0 else SIDES[::-1]
        outcome = Outcome(file, order[0], {side: [] for side in SIDES})
        for _ in range(1 + again):
            for side in order:
                outcome.runs[side].append(runner.run(file, side))
            if any(run.package for run in outcome.runs[STOCK]):
                raise Refused(f"{file}: the package was active in the run that should be stock's")
            if not outcome.judge():
                break
        counts = "; ".join(f"{side} {tally(outcome, side)}, {outcome.runs[side][0].seconds:.0f} s" for side in order)
        worse = Counter(verdict for verdict in outcome.verdicts.values() if verdict != SAME)
        more = "".join(f"; {count} {verdict}" for verdict, count in worse.items())
        print(f"[{number + 1}/{len(tests.files)}] {file}: {counts}{more}", file=sys.stderr, flush=True)
        yield outcome


def tally(outcome: Outcome, side: str) -> str:
    """How many of a file's tests came to what on a side, in its first run."""
    counts = Counter(result.outcome for result in outcome.runs[side][0].results.values())
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items())) or "no tests"


# Saying it.


def render(outcomes: list[Outcome], facts: Mapping[str, Any]) -> list[str]:
    """The report in Markdown."""
    lines = [
        f"vLLM {facts['vllm']}, vllm-hotfix {facts['package']}, Python {facts['python']}; the tests are of "
        f"{facts['tests'] or 'a release that their folder does not tell: it is trusted'}; CUDA: "
        f"{'yes' if facts['cuda'] else 'no'}; patched: {' '.join(facts['variables'])}",
        "",
        "| file | stock | patched | differ | first | s stock | s patched | active |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in outcomes:
        active = sum(state == "active" for state, _ in one.states().values())
        differ = sum(verdict != SAME for verdict in one.verdicts.values())
        seconds = " | ".join(f"{one.runs[side][0].seconds:.1f}" for side in SIDES)
        counts = " | ".join(tally(one, side) for side in SIDES)
        lines.append(f"| {one.file} | {counts} | {differ} | {one.first} | {seconds} | {active} |")
    verdicts = Counter(verdict for one in outcomes for verdict in one.verdicts.values())
    total = {side: Counter(r.outcome for one in outcomes for r in one.runs[side][0].results.values()) for side in SIDES}
    for side in SIDES:
        counts = ", ".join(f"{count} {what}" for what, count in sorted(total[side].items()))
        lines += ["", f"{side}: {counts}; {sum(one.runs[side][0].seconds for one in outcomes):.0f} s"]
    lines += ["", f"compared: {', '.join(f'{verdicts[one]} {one}' for one in (SAME, *DIFFERENT))}"]
    lines += ["", "| patch | active after files | worst state | counters |", "| --- | --- | --- | --- |"]
    for name, (files, state, counters) in _patches(outcomes).items():
        counted = " ".join(f"{key}={value}" for key, value in counters.items())
        lines.append(f"| {name} | {files} | {state} | {counted or '-'} |")
    for verdict in DIFFERENT:
        lines += _details(outcomes, verdict)
    lines += _reasons(outcomes, "Fails on both sides", BAD) + _reasons(outcomes, "Skipped on both sides", ("skipped",))
    return lines


DIFFERENT = (BROKEN, OTHERWISE, ONLY_PATCHED, FLAKY)


def _patches(outcomes: list[Outcome]) -> dict[str, tuple[int, str, Counter[str]]]:
    """For each patch: after how many files it was active, its worst state with the reason, and its counters' sums."""
    found: dict[str, tuple[int, str, Counter[str]]] = {}
    for one in outcomes:
        for name, (state, reason) in one.states().items():
            files, worst, counters = found.get(name, (0, "", Counter()))
            told = next(run.package for run in one.runs[PATCHED] if run.package)
            counters.update(told["counters"].get(name, {}))
            if state in FAULTS:
                worst = f"{state}: {reason}"
            elif not worst.startswith(FAULTS) and (state == "active" or not worst):
                worst = state
            found[name] = (files + (state == "active"), worst, counters)
    return found


def _details(outcomes: list[Outcome], verdict: str) -> list[str]:
    lines = []
    for one in outcomes:
        for test in (test for test, found in one.verdicts.items() if found == verdict):
            lines += ["", f"`{test}`", ""]
            for side in SIDES:
                results = one.results(side, test)
                lines.append(f"- {side}: {', '.join(result.outcome for result in results)}")
                text = next((result.text for result in results if result.outcome in (*BAD, "skipped")), "").strip()
                if text:
                    lines += ["", "```", *text[-CHARACTERS:].splitlines(), "```", ""]
    return [*([""] if lines else []), f"## {verdict.capitalize()}", *lines] if lines else []


def _reasons(outcomes: list[Outcome], title: str, kinds: tuple[str, ...]) -> list[str]:
    """Tests that came to the same on both sides, counted by reason."""
    reasons: Counter[tuple[str, str]] = Counter()
    for one in outcomes:
        for test, verdict in one.verdicts.items():
            result = one.results(STOCK, test)[0]
            if verdict == SAME and result.outcome in kinds:
                reasons[result.outcome, result.why.replace("|", "\\|")] += 1
    lines = [f"| {count} | {outcome} | {why} |" for (outcome, why), count in reasons.most_common()]
    return ["", f"## {title}", "", "| tests | outcome | reason |", "| --- | --- | --- |", *lines] if lines else []


# The command line.


def environments(force: bool) -> dict[str, dict[str, str]]:
    """Each side's variables: none of the package's, or every patch; neither side writes bytecode or asks a hub."""
    drop = (*ALIASES, "PYTEST_ADDOPTS", "PYTEST_PLUGINS")
    stock = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_HOTFIX_") and k not in drop}
    stock |= {"PYTHONDONTWRITEBYTECODE": "1", **OFFLINE}
    # Also where the package is not installed. The folder holds nothing but a sitecustomize.
    bootstrap = str(Path(__file__).resolve().parents[1] / "vllm_hotfix/bootstrap")
    path = os.pathsep.join(filter(None, [bootstrap, stock.get("PYTHONPATH")]))
    patched = {**stock, "PYTHONPATH": path, "VLLM_HOTFIX_ENABLE": "all"}
    return {STOCK: stock, PATCHED: patched | ({"VLLM_HOTFIX_PINNED_STAGING": "force"} if force else {})}


def probe(folder: Path, environ: Mapping[str, str]) -> dict[str, Any]:
    """What is installed.

    Raises:
        Refused: vLLM cannot be imported, or there is no pytest.
    """
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise Refused(f"{sys.executable}: {(done.stderr.strip().splitlines() or ['it ended without a word'])[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(options: argparse.Namespace) -> int:
    """Run the tests, print the report.

    Raises:
        Refused: they cannot be run, or nothing of what they did can be compared.
    """
    tests = find(options.tests)
    release = release_of(tests)
    with view(tests) as folder:
        facts = probe(folder, environments(False)[STOCK])
        if release is not None and str(facts["vllm"]).partition("+")[0] != release.partition("+")[0]:
            raise Refused(f"the tests are those of vLLM {release}, and {facts['vllm']} is installed")
        environ = environments(options.force or facts["cuda"])
        outcomes = list(run_all(tests, Runner(folder, options.timeout, environ), options.again))
    if not any(
        r.outcome in ("passed", "error after")
        for one in outcomes
        for run in one.runs[STOCK]
        for r in run.results.values()
    ):
        reasons = [r.why for one in outcomes for run in one.runs[STOCK] for r in run.results.values()]
        raise Refused(f"stock passes none of these tests: {(reasons or ['there are none'])[0]}")
    patches = _patches(outcomes)
    if not any(files for files, _, _ in patches.values()):
        states = [f"{name} is {state}" for name, (_, state, _) in patches.items()] or ["the package was not imported"]
        raise Refused(f"no patch was active in any of these tests: {'; '.join(states)}")
    told = next(run.package for one in outcomes for run in one.runs[PATCHED] if run.package)
    own = [f"{name}={value}" for name, value in environ[PATCHED].items() if name.startswith("VLLM_HOTFIX_")]
    facts |= {"tests": release, "package": told["version"], "python": sys.version.split()[0], "variables": own}
    if options.json:
        Path(options.json).write_text(json.dumps({**facts, "files": [asdict(one) for one in outcomes]}, indent=1))
    print("\n".join(render(outcomes, facts)))
    wrong = any(verdict in (BROKEN, OTHERWISE) for one in outcomes for verdict in one.verdicts.values())
    return int(wrong or any(state.startswith(FAULTS) for _, state, _ in patches.values()))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    summary, _, more = str(__doc__).partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tests", nargs="+", metavar="TESTS", help="vLLM's source tree, its tests, or some of them")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for a file on a side (900)")
    parser.add_argument("--again", type=int, default=2, help="how often a file with a difference is run again (2)")
    parser.add_argument("--force", action="store_true", help="VLLM_HOTFIX_PINNED_STAGING=force also without CUDA")
    parser.add_argument("--json", metavar="FILE", help="write every result there")
    options = parser.parse_args(arguments)
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return compare(options)
    except Refused as error:
        print(f"upstream_tests: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("upstream_tests: interrupted", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
