"""Whether a patch fits the vLLM and the packages beside it that are installed.

The fingerprint decides, release ranges explain.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from packaging.version import InvalidVersion, Version

from _vllm_hotfix import describe

from ._patch import DRIFTED, FAILED, FAULTS, NOT_NEEDED, READY, UNSUPPORTED, Patch, Target
from ._upstream import ABSENT, Lock, LockError, Source, Sources, package_of

_TITLES = {"runai_model_streamer": "Run:ai streamer (runai_model_streamer)"}


@dataclass(frozen=True)
class Seen:
    """A name that a patch wraps or relies on, as found: ``known`` is whether the lock has its fingerprint."""

    name: str
    fingerprint: str
    known: bool
    source: Source | None

    @property
    def package(self) -> str:
        """The top-level package that it is of."""
        return package_of(self.name)


@dataclass(frozen=True)
class Verdict:
    """A patch's state before anything is wrapped (ready, not-needed, unsupported, drifted, failed), and why."""

    state: str
    reason: str
    seen: tuple[Seen, ...] = ()

    def wanted(self, patch: Patch) -> list[Target]:
        """The targets to wrap: those that are there, or, of a patch that does not fit, the known ``always`` ones."""
        there = [one for one in patch.targets if self.source(one.name) and not (one.unless and self.source(one.unless))]
        if self.state not in FAULTS:
            return there
        known = {seen.name for seen in self.seen if seen.known}
        return [target for target in there if target.always and target.name in known]

    def source(self, target: str) -> Source | None:
        """Where the source of one of the patch's names was found."""
        return next((seen.source for seen in self.seen if seen.name == target), None)


def parse_version(text: str | None) -> Version | None:
    """The version of vLLM, None where it has none or one that is not understood."""
    try:
        return Version(text) if text else None
    except InvalidVersion:
        return None


def judge(patch: Patch, sources: Sources, lock: Lock | LockError) -> Verdict:
    """Judge one patch against the sources found. Never raises an Exception."""
    try:
        verdict = _judge(patch, sources, lock)
        if verdict.state in FAULTS and verdict.wanted(patch):
            verdict = replace(
                verdict, reason=f"{verdict.reason}; until then its settings are understood and do nothing"
            )
        return verdict
    except Exception as error:
        return Verdict(FAILED, f"its sources could not be checked: {describe(error)}")


def _judge(patch: Patch, sources: Sources, lock: Lock | LockError) -> Verdict:
    if isinstance(lock, LockError):
        return Verdict(FAILED, str(lock))
    if sources.package("vllm") is None:
        why = f": {sources.errors['vllm']}" if "vllm" in sources.errors else ""
        return Verdict(UNSUPPORTED, f"no vLLM is installed in this environment{why}")
    seen = tuple(_see(name, sources, lock) for name in patch.known_names)
    verdict = _judge_vllm(patch, tuple(one for one in seen if one.package == "vllm"), sources, lock)
    beside = tuple(one for one in seen if one.package != "vllm")
    verdict = replace(verdict, seen=verdict.seen + beside)
    if verdict.state != READY:
        return verdict
    other = _judge_beside(patch, verdict, sources, lock)
    targets = seen[: len(patch.targets)]
    if all(one.source is None for one in targets) and (other is None or not {*targets} & {*beside}):
        reason = f"vLLM {sources.version} has none of the functions that it patches"
        return replace(verdict, state=NOT_NEEDED, reason=reason)
    return other or verdict


def _judge_vllm(patch: Patch, seen: tuple[Seen, ...], sources: Sources, lock: Lock) -> Verdict:
    """Judge a patch by the names that are vLLM's."""
    version = parse_version(sources.version)
    released = version is not None and not version.is_devrelease and version.local is None
    if patch.fixed_in is not None:
        if released and version is not None and version >= Version(patch.fixed_in):
            return Verdict(NOT_NEEDED, f"vLLM {version} has the fix (since {patch.fixed_in})", seen)
        if all(one.known for one in seen) and (mark := _fixed(patch, seen, lock)):
            return Verdict(NOT_NEEDED, f"{mark} is as in the releases that have the fix (since {patch.fixed_in})", seen)
    if released and str(version) in lock.releases:
        # A known release has its own code, and nothing else.
        seen = tuple(replace(one, known=str(version) in lock.releases_of(one.name, one.fingerprint)) for one in seen)
    else:
        seen = tuple(replace(one, known=one.known and _may_be_absent(one, seen, lock)) for one in seen)
    unknown = [one for one in seen if not one.known]
    if not unknown:
        return Verdict(READY, "known code, patched as soon as it is imported", seen)
    names = _listed(unknown)
    oldest, newest = (Version(release) for release in (lock.releases[0], lock.releases[-1]))
    if released and version is not None and not oldest <= version <= newest:
        why = f"vLLM {version} is outside {oldest} to {newest}, and its code is not the known one: {names}"
        return Verdict(UNSUPPORTED, f"{why}; look for a newer vllm-hotfix", seen)
    where = f"vLLM {sources.version or 'of unknown version'}"
    why = f"{where} has code here that is not its release's, or not any known one's: {names}"
    return Verdict(DRIFTED, f"{why}; install vLLM's own files again, or leave the patch off", seen)


def _judge_beside(patch: Patch, verdict: Verdict, sources: Sources, lock: Lock) -> Verdict | None:
    """What is against a patch in a package beside vLLM: it is not there, or no known release has all its code.

    None if there is nothing.
    """
    for package in dict.fromkeys(one.package for one in verdict.seen if one.package != "vllm"):
        title = _TITLES.get(package, package)
        if sources.package(package) is None:
            return replace(verdict, state=NOT_NEEDED, reason=f"no {title} is installed, so there is nothing to patch")
        releases = lock.packages.get(package, ())
        names = [one for one in verdict.seen if one.package == package]
        other = {r: [one for one in names if r not in lock.releases_of(one.name, one.fingerprint)] for r in releases}
        if not all(other.values()):
            continue
        version = sources.version_of(package)
        if version in releases:
            state, differ, why = DRIFTED, other[version], f"{title} {version} has code here that is not its release's"
        else:
            # Compared with the release that it is nearest to, the newest of them.
            state, differ = UNSUPPORTED, min(reversed(other.values()), key=len, default=names)
            why = f"{title} {version or 'of unknown version'} is not a known release, nor is its code that of one"
        why = f"{why}: {_listed(differ)}; install one of {', '.join(releases)}, or leave the patch off"
        seen = tuple(replace(one, known=one.known and one not in differ) for one in verdict.seen)
        return Verdict(state, why, seen)
    return None


def _listed(names: list[Seen]) -> str:
    return ", ".join(one.name + (" (not there)" if one.fingerprint == ABSENT else "") for one in names)


def _see(name: str, sources: Sources, lock: Lock) -> Seen:
    source = sources.find(name)
    mark = ABSENT if source is None else source.fingerprint
    return Seen(name, mark, bool(lock.releases_of(name, mark)), source)


def _may_be_absent(one: Seen, seen: tuple[Seen, ...], lock: Lock) -> bool:
    """Whether a name that is not there is not there in a release that has the other names as they are.

    A fork or a development build may mix the code of releases; what it lacks must fit to what it has.
    """
    if one.fingerprint != ABSENT:
        return True
    others = [set(lock.releases_of(other.name, other.fingerprint)) for other in seen if other.fingerprint != ABSENT]
    together = set.intersection(*others) if others else set()
    return not others or bool((together or set.union(*others)) & set(lock.releases_of(one.name, ABSENT)))


def _fixed(patch: Patch, seen: tuple[Seen, ...], lock: Lock) -> str | None:
    """The first name whose body stands only in releases that have the fix."""
    assert patch.fixed_in is not None
    fixed = Version(patch.fixed_in)
    for one in seen:
        if all(Version(release) >= fixed for release in lock.releases_of(one.name, one.fingerprint)):
            return one.name
    return None
