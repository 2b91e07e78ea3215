"""What a patch is: data that says what it wraps, behind which gate, in which releases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from _vllm_hotfix import ALIASES

OFF: Final = "off"  #: no gate
READY: Final = "ready"  #: gate on, source known, not every target imported yet
ACTIVE: Final = "active"  #: the live objects are wrapped, optional ones as they come
NOT_NEEDED: Final = "not-needed"  #: this release has the fix, or what the fix is for is not installed
UNSUPPORTED: Final = "unsupported"  #: a vLLM or streamer outside what is known
DRIFTED: Final = "drifted"  #: source unknown to the lock
FAILED: Final = "failed"  #: an exception, in the reason
STALE_GRAPHS: Final = "stale-graphs"  #: a reload could not refresh what captured graphs read
STATES: Final = (OFF, READY, ACTIVE, NOT_NEEDED, UNSUPPORTED, DRIFTED, FAILED, STALE_GRAPHS)
#: A patch in one of these was asked for and is not at work.
FAULTS: Final = (UNSUPPORTED, DRIFTED, FAILED)

ENABLE: Final = "VLLM_HOTFIX_ENABLE"
DISABLE: Final = "VLLM_HOTFIX_DISABLE"
STRICT: Final = "VLLM_HOTFIX_STRICT"
STATE_DIR: Final = "VLLM_HOTFIX_STATE_DIR"

_ON = ("1", "true", "yes", "on")
_OFF = ("0", "false", "no", "off")


class HotfixError(RuntimeError):
    """A patch that was asked for is not at work, and ``VLLM_HOTFIX_STRICT`` says that this stops the engine."""


@dataclass(frozen=True)
class Target:
    """A function, of vLLM or of a package beside it, that a patch wraps.

    Attributes:
        name: ``module:qualified.name``.
        wrapper: name of the function in the patch's module that wraps it, with wrapt's signature
            ``(wrapped, instance, args, kwargs)``.
        keep: modules whose own name for the function stays the stock one.
        always: wrapped also where other code of the patch is not known, so that its settings stay understood.
        unless: another name; where that is there, this target is only checked and not wrapped.
        optional: its module is imported only if a model needs it; the patch is active before that.
    """

    name: str
    wrapper: str
    keep: tuple[str, ...] = ()
    always: bool = False
    unless: str | None = None
    optional: bool = False


@dataclass(frozen=True)
class Patch:
    """A fix as data.

    Attributes:
        name: the patch's name, as in ``VLLM_HOTFIX_ENABLE``; its module in ``vllm_hotfix._patches`` is named like it.
        env: its gate.
        fault: what is wrong upstream, in one line.
        upstream: the thread that fixes it there.
        targets: what it wraps, in the order of wrapping. In a release where one does not exist, and the lock
            says so, it is left out.
        relies: functions and classes, of vLLM or of packages beside it, that the wrappers call or look into; they must
            be known too.
        aliases: upstream's own names for the gate.
        values: values of the gate that are accepted besides those for on and off, and mean on.
        requires: names of patches that this one turns on with it.
        since: first release with the fault.
        fixed_in: first release without it, None if there is none.
        symptoms: regular expressions of what the drill shows of the fault: after the load format and a colon, the path
            of a tensor that differs, or a reload's error.
        traced: whether a target is traced by torch.compile, so that its gate belongs into vLLM's cache key.
    """

    name: str
    env: str
    fault: str
    upstream: str
    targets: tuple[Target, ...]
    relies: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    since: str = "0.20.0"
    fixed_in: str | None = None
    symptoms: tuple[str, ...] = ()
    traced: bool = False

    @property
    def releases(self) -> str:
        """The releases with the fault, as a version specifier."""
        return f">={self.since}" + (f",<{self.fixed_in}" if self.fixed_in else "")

    @property
    def known_names(self) -> tuple[str, ...]:
        """Everything whose source must be known: the targets, then what they rely on."""
        return tuple(target.name for target in self.targets) + self.relies


@dataclass(frozen=True)
class Gate:
    """What the environment says of one patch: on or off, the variable that decided, its value, and why."""

    on: bool
    variable: str
    value: str | None = None
    reason: str = ""


@dataclass(frozen=True)
class Problem:
    """Something wrong with a setting: one warning, and under ``VLLM_HOTFIX_STRICT`` a reason not to start."""

    variable: str
    reason: str

    def __str__(self) -> str:
        return f"{self.variable}: {self.reason}"


def read_gates(patches: Iterable[Patch], environ: Mapping[str, str]) -> tuple[dict[str, Gate], list[Problem]]:
    """Read every patch's gate.

    The patch's own variable decides (its alias where it is not set), then ``VLLM_HOTFIX_ENABLE``, then the patches
    that require it; ``VLLM_HOTFIX_DISABLE`` wins over everything. An empty variable counts as not set.

    Args:
        patches: the catalog.
        environ: the environment, ``os.environ`` or a copy.

    Returns:
        The gate of each patch by its name, and what is wrong with the settings. Nothing is raised.
    """
    catalog = {patch.name: patch for patch in patches}
    problems = _unknown_variables(catalog.values(), environ)
    enabled = _read_list(ENABLE, catalog, environ, problems)
    disabled = _read_list(DISABLE, catalog, environ, problems)
    read_flag(STRICT, environ, problems)
    gates: dict[str, Gate] = {}
    for patch in catalog.values():
        own = _read_own(patch, environ, problems)
        if patch.name in disabled:
            gates[patch.name] = Gate(False, DISABLE, environ[DISABLE], f"turned off by {DISABLE}")
        elif own is not None:
            gates[patch.name] = own
        elif patch.name in enabled:
            gates[patch.name] = Gate(True, ENABLE, environ[ENABLE], f"turned on by {ENABLE}")
        else:
            gates[patch.name] = Gate(False, patch.env, None, f"{patch.env} is not set")
    _follow_requirements(catalog, gates)
    return gates, problems


def read_flag(name: str, environ: Mapping[str, str], problems: list[Problem] | None = None) -> bool:
    """Read an on/off variable; a value that is neither counts as off and is added to ``problems``."""
    value = environ.get(name, "").strip().lower()
    if value and value not in _ON + _OFF and problems is not None:
        problems.append(
            Problem(name, f"{environ[name]!r} is neither on (1 true yes on) nor off (0 false no off); taken as off")
        )
    return value in _ON


def _read_own(patch: Patch, environ: Mapping[str, str], problems: list[Problem]) -> Gate | None:
    for variable in (patch.env, *patch.aliases):
        raw = environ.get(variable, "").strip()
        if not raw:
            continue
        value = raw.lower()
        if value in _ON + patch.values:
            return Gate(True, variable, raw, f"turned on by {variable}")
        if value not in _OFF:
            accepted = " ".join(_ON + patch.values + _OFF)
            problems.append(Problem(variable, f"{raw!r} is not one of {accepted}; {patch.name} stays off"))
            return Gate(False, variable, raw, f"{variable} has a value that is not understood")
        return Gate(False, variable, raw, f"turned off by {variable}")
    return None


def _read_list(
    variable: str, catalog: Mapping[str, Patch], environ: Mapping[str, str], problems: list[Problem]
) -> set[str]:
    names = {name.strip().lower() for name in environ.get(variable, "").split(",")} - {""}
    if variable == DISABLE and names & {*_ON}:
        return set(catalog)  # in a hurry
    for name in sorted(names - {"all", *catalog}):
        problems.append(Problem(variable, f"there is no patch {name!r}; there are: all, {', '.join(catalog)}"))
    return set(catalog) if "all" in names else names & set(catalog)


def _unknown_variables(patches: Iterable[Patch], environ: Mapping[str, str]) -> list[Problem]:
    known = {ENABLE, DISABLE, STRICT, STATE_DIR}
    known |= {name for patch in patches for name in (patch.env, *patch.aliases)}
    return [
        Problem(name, "no patch of this vllm-hotfix has this variable; is it misspelt, or of another version?")
        for name in environ
        if (name.startswith("VLLM_HOTFIX_") or name in ALIASES) and name not in known
    ]


def _follow_requirements(catalog: Mapping[str, Patch], gates: dict[str, Gate]) -> None:
    """Turn on what an enabled patch requires, at any depth; where some of that is off by name, the patch is off too."""
    enabled = [patch for patch in catalog.values() if gates[patch.name].on]
    required = {patch.name: _required(patch, catalog) for patch in enabled}
    refused = {name for name, gate in gates.items() if not gate.on and gate.value is not None}
    for patch in enabled:
        for name in required[patch.name]:
            if name in refused:
                why = f"requires {name}, which is off: {gates[name].reason}"
                gates[patch.name] = Gate(False, gates[name].variable, gates[name].value, why)
                break
    for patch in enabled:
        gate = gates[patch.name]
        for name in required[patch.name] if gate.on else ():
            if not gates[name].on:
                why = f"turned on by {patch.name}, which requires it"
                gates[name] = Gate(True, gate.variable, gate.value, why)


def _required(patch: Patch, catalog: Mapping[str, Patch]) -> list[str]:
    """The names of all that a patch requires, directly or through another."""
    found: list[str] = []
    waiting = [*patch.requires]
    while waiting:
        name = waiting.pop(0)
        if name not in found:
            found.append(name)
            waiting += catalog[name].requires
    return found


def own_variables(patches: Iterable[Patch], environ: Mapping[str, str]) -> list[str]:
    """The variables of this package that are set: its own and upstream's names for its gates."""
    aliases = {*ALIASES, *(alias for patch in patches for alias in patch.aliases)}
    return [name for name in environ if name.startswith("VLLM_HOTFIX_") or name in aliases]
