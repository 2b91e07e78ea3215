"""``python -m vllm_hotfix.status``: what is active, and why the rest is not.

By default neither vLLM nor torch is imported: the sources are found and fingerprinted, so ``ready`` is the best that
can be said. ``--import`` imports the targets and looks at the live objects, ``--live`` asks the running processes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import site
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from _vllm_hotfix import describe

from ._catalog import CATALOG
from ._judge import Verdict, judge, parse_version
from ._patch import (
    ACTIVE,
    FAILED,
    FAULTS,
    NOT_NEEDED,
    OFF,
    READY,
    STALE_GRAPHS,
    STATE_DIR,
    Gate,
    Patch,
    Problem,
    read_gates,
)
from ._upstream import VERSION, Lock, LockError, Sources

WIDTH = 100
#: What a worker imports first: modules of targets import each other, in some releases in a circle.
_LOADER = "vllm.model_executor.model_loader"


def report(*, imported: bool = False) -> dict[str, Any]:
    """Collect the status of this interpreter's environment.

    Args:
        imported: whether the targets are to be imported, so that live objects are looked at.

    Returns:
        ``vllm`` (``version`` and ``location``, None where there is none), ``channels`` (``name``, ``installed``,
        ``detail``), ``problems`` (lines of text), ``wrong_variables`` (names) and ``patches`` (``name``, ``env``,
        ``gate``, ``state``, ``reason``, ``upstream``, ``releases``, ``targets``), all of it JSON. A patch's
        ``targets`` come with ``name``, ``fingerprint``, ``known`` and ``wrapped`` (None while the target is not
        imported, or where it is a helper that is only relied on).
    """
    sources = Sources()
    gates, problems = read_gates(CATALOG, os.environ)
    wrong = list(dict.fromkeys(problem.variable for problem in problems))
    try:
        lock: Lock | LockError = Lock.load()
    except LockError as error:
        lock = error
        problems.append(Problem("vllm-hotfix", str(error)))
    folder = sources.package("vllm")
    if folder is not None and parse_version(sources.version) is None:
        why = sources.errors.get(VERSION, f"{sources.version!r} is not understood")
        problems.append(Problem("vLLM", f"its version {why}; its code alone decides"))
    if imported and folder is not None:
        problems += _import_targets(gates, sources)
    return {
        "vllm": {"version": sources.version, "location": str(folder) if folder else None},
        "channels": channels(),
        "problems": [str(problem) for problem in problems],
        "wrong_variables": wrong,
        "patches": [_describe(patch, gates[patch.name], judge(patch, sources, lock), imported) for patch in CATALOG],
    }


def _import_targets(gates: Mapping[str, Gate], sources: Sources) -> list[Problem]:
    """Import the modules of the enabled patches' targets, as an engine would, where their package is installed."""
    problems = []
    modules = [target.name.partition(":")[0] for patch in CATALOG if gates[patch.name].on for target in patch.targets]
    if modules:
        modules.insert(0, _LOADER)
    for module in dict.fromkeys(modules):
        if sources.module(module) is None:  # some releases lack some
            continue
        try:
            # vLLM logs to stdout, where only the status belongs.
            with contextlib.redirect_stdout(sys.stderr):
                importlib.import_module(module)
        except Exception as error:
            problems.append(Problem(module, f"cannot be imported: {describe(error)}"))
    return problems


def _describe(patch: Patch, gate: Gate, verdict: Verdict, imported: bool) -> dict[str, Any]:
    state, reason = (verdict.state, verdict.reason) if gate.on else (OFF, gate.reason)
    hooks = sys.modules.get("vllm_hotfix._hooks")
    wraps: Mapping[str, Any] = {}
    if hooks is not None and patch.name in hooks.RECORD.entries:
        # Applied in this process: what the live objects say counts, whatever the gate says by now.
        state, reason = hooks.state_of(patch)
        wraps = hooks.RECORD.entries[patch.name].wraps
    elif hooks is not None and hooks.RECORD.undone:
        state, reason = OFF, "undone by vllm_hotfix.deactivate()"
    elif gate.on and state == READY and "vllm" in sys.modules:
        state, reason = FAILED, "vLLM was imported and the patch was not applied; import vllm_hotfix earlier"
    if imported and state == READY:
        reason = "not all its modules could be imported here, see the problems; is this vLLM's interpreter?"
    targets = {target.name for target in patch.targets}
    return {
        "name": patch.name,
        "env": patch.env,
        "gate": gate.value,
        "variable": gate.variable,
        "state": state,
        "reason": reason,
        "fault": patch.fault,
        "upstream": patch.upstream,
        "releases": patch.releases,
        "targets": [
            {
                "name": seen.name,
                "fingerprint": seen.fingerprint,
                "known": seen.known,
                "wrapped": _wrapped(seen.name, wraps) if seen.name in targets else None,
            }
            for seen in verdict.seen
        ],
    }


def _wrapped(target: str, wraps: Mapping[str, Any]) -> bool | None:
    if target.partition(":")[0] not in sys.modules:
        return None
    return target in wraps and bool(wraps[target].alive)


def channels() -> list[dict[str, Any]]:
    """The ways by which this environment's interpreters activate the patches, and whether each is there."""
    from importlib.metadata import PackageNotFoundError, distribution

    folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    files = [Path(folder, name) for folder in folders for name in ("vllm_hotfix.pth", "vllm_hotfix.start")]
    found = {file.name: str(file) for file in reversed(files) if file.is_file()}
    bootstrap = Path(__file__).with_name("bootstrap")
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    on_path = [path for path in inherited if Path(path).resolve() == bootstrap.resolve()]
    try:
        entry_points = distribution("vllm-hotfix").entry_points
        plugin = any(point.group == "vllm.general_plugins" for point in entry_points)
    except PackageNotFoundError:
        plugin = False
    allowed = os.environ.get("VLLM_PLUGINS")
    left_out = plugin and allowed is not None and "vllm_hotfix" not in allowed.split(",")
    return [
        _channel(".pth", found.get("vllm_hotfix.pth"), "vllm_hotfix.pth is in no site-packages of this interpreter"),
        _channel(
            ".start", found.get("vllm_hotfix.start"), "vllm_hotfix.start is in no site-packages of this interpreter"
        ),
        _channel("sitecustomize", next(iter(on_path), None), f"PYTHONPATH does not hold {bootstrap}"),
        _channel(
            "plugin",
            "vllm.general_plugins: vllm_hotfix" if plugin and not left_out else None,
            "left out by VLLM_PLUGINS, add vllm_hotfix to it"
            if left_out
            else "vllm-hotfix is not installed as a distribution",
        ),
    ]


def _channel(name: str, found: str | None, otherwise: str) -> dict[str, Any]:
    return {"name": name, "installed": found is not None, "detail": found or otherwise}


def check(data: Mapping[str, Any], *, imported: bool) -> bool:
    """Say whether no variable is wrong and no enabled patch at fault; with ``--import``, whether all are at work."""
    if data["wrong_variables"]:
        return False
    for patch in data["patches"]:
        state = patch["state"]
        if state in FAULTS or (imported and state not in (OFF, ACTIVE, NOT_NEEDED)):
            return False
    return True


def table(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The patches as lines of at most 100 columns: a line of facts each, then the reason and the fault."""
    lines = [f"{'PATCH':<18} {'STATE':<12} {'GATE':<34} {'FAULT IN':<17} UPSTREAM", "-" * WIDTH]
    for row in rows:
        gate = _plain(f"{row['variable']}={row['gate']}" if row["gate"] is not None else f"{row['env']} unset")
        upstream = row["upstream"].rpartition("/")[2]
        start, end = f"{row['name']:<18} {row['state']:<12} ", f" {row['releases']:<17} {upstream}"
        if len(gate) > 40:  # a long list in VLLM_HOTFIX_ENABLE, say
            gate = gate[:31] + "..."
        if len(f"{start}{gate:<34}{end}") <= WIDTH:
            lines.append(f"{start}{gate:<34}{end}")
        else:
            lines += _fold(start + gate, " " * 32) + _fold(" " * 66 + end, " " * 67)
        lines += _fold("    why:   " + (_plain(row["reason"]) or "-"), " " * 11)
        lines += _fold("    fault: " + row["fault"], " " * 11)
    return lines


def _fold(text: str, indent: str) -> list[str]:
    """A text as lines of at most 100 columns."""
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def _plain(text: str) -> str:
    """A text from elsewhere on one line and without codes for the terminal."""
    return "".join(one if one.isprintable() else "?" for one in " ".join(text.split()))


def render(data: Mapping[str, Any]) -> list[str]:
    """The status as lines of at most 100 columns."""
    vllm = data["vllm"]
    if vllm["location"] is None:
        lines = [f"vLLM      not installed in the environment of {sys.executable}"]
    else:
        lines = [f"vLLM      {vllm['version'] or 'of unknown version'} in {vllm['location']}"]
    for number, channel in enumerate(data["channels"]):
        title = "channels" if number == 0 else ""
        sign = "yes" if channel["installed"] else "no "
        lines.append(f"{title:<9} {channel['name']:<14} {sign}  {channel['detail']}")
    on = any(patch["state"] != OFF for patch in data["patches"])
    if on and not any(channel["installed"] for channel in data["channels"]):
        lines.append(
            "note      no channel brings the patches into vLLM: install the package, or see sitecustomize above"
        )
    lines += [f"problem   {_plain(problem)}" for problem in data["problems"]]
    return [*(part for line in lines for part in _fold(line, " " * 10)), "", *table(data["patches"])]


def live_report() -> dict[str, Any]:
    """What this user's running processes say of themselves: ``folder``, ``processes``, ``skipped`` (lines of text).

    Raises:
        OSError: the folder of the state files is there but cannot be used.
    """
    from ._record import folder_path, live

    found = list(live())
    return {
        "folder": str(folder_path()),
        "processes": [one for one in found if not isinstance(one, str)],
        "skipped": [one for one in found if isinstance(one, str)],
    }


def render_live(data: Mapping[str, Any]) -> list[str]:
    """The running processes as lines of at most 100 columns."""
    lines: list[str] = []
    for process in data["processes"]:
        age = max(0, time.time() - process["time"])
        line = f"{process['pid']}  vLLM {process['vllm']}, {age:.0f} s ago: {_plain(process['title'])}"
        lines.append(line if len(line) <= WIDTH else line[: WIDTH - 3] + "...")
        for name, patch in process["patches"].items():
            counters = " ".join(f"{key}={value}" for key, value in process["counters"].get(name, {}).items())
            reason = "" if patch["state"] == ACTIVE and counters else _plain(patch["reason"])
            lines += _fold(f"    {name:<18} {patch['state']:<12} {reason or counters or '-'}", " " * 36)
            if reason and counters:
                lines += _fold(" " * 36 + counters, " " * 36)
    lines += [part for one in data["skipped"] for part in _fold(_plain(one), "    ")]
    return lines or _fold(
        f"no running process has written to {data['folder']}: none has a patch turned on, or it has another user, "
        f"temporary folder or {STATE_DIR}",
        "    ",
    )


def check_live(data: Mapping[str, Any]) -> bool:
    """Say whether no running process has a patch at fault, or one that could not refresh what captured graphs read."""
    states = {patch["state"] for process in data["processes"] for patch in process["patches"].values()}
    return not states & {*FAULTS, STALE_GRAPHS}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0, or 1 with ``--check`` if an enabled patch is not as it should be, here or with ``--live`` in a running
        process, or if ``--live`` cannot look.
    """
    parser = argparse.ArgumentParser(prog="python -m vllm_hotfix.status", description="What vllm-hotfix has active.")
    parser.add_argument("--import", dest="imported", action="store_true", help="import vLLM and look at live objects")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--check", action="store_true", help="exit 1 if an enabled patch is not as it should be")
    parser.add_argument("--live", action="store_true", help="the running processes with their patches and counters")
    options = parser.parse_args(arguments)
    if options.live:
        if options.imported:
            parser.error("--live does not go with --import")
        try:
            data = live_report()
        except OSError as error:
            print(f"the state files cannot be read: {error}", file=sys.stderr)
            return 1
        lines, good = render_live(data), check_live(data)
    else:
        data = report(imported=options.imported)
        lines, good = render(data), check(data, imported=options.imported)
    _print(json.dumps(data, indent=1) if options.json else "\n".join(lines))
    return 1 if options.check and not good else 0


def _print(text: str) -> None:
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):
            # What the terminal's encoding lacks is shown as an escape, not as a traceback.
            sys.stdout.reconfigure(errors="backslashreplace")
        print(text, flush=True)
    except BrokenPipeError:  # status | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
