"""Whether a patch fits the vLLM that is installed: the fingerprint decides, release ranges explain."""

from __future__ import annotations

from dataclasses import dataclass, replace

from packaging.version import InvalidVersion, Version

from _vllm_hotfix import describe

from ._patch import DRIFTED, FAILED, NOT_NEEDED, READY, UNSUPPORTED, Patch
from ._upstream import ABSENT, Lock, LockError, Source, Sources


@dataclass(frozen=True)
class Seen:
    """A name that a patch wraps or relies on, as found: ``known`` is whether the lock has its fingerprint."""

    name: str
    fingerprint: str
    known: bool
    source: Source | None


@dataclass(frozen=True)
class Verdict:
    """A patch's state before anything is wrapped (ready, not-needed, unsupported, drifted, failed), and why."""

    state: str
    reason: str
    seen: tuple[Seen, ...] = ()

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
        return _judge(patch, sources, lock)
    except Exception as error:
        return Verdict(FAILED, f"its sources could not be checked: {describe(error)}")


def _judge(patch: Patch, sources: Sources, lock: Lock | LockError) -> Verdict:
    if isinstance(lock, LockError):
        return Verdict(FAILED, str(lock))
    if sources.package("vllm") is None:
        return Verdict(UNSUPPORTED, "no vLLM is installed in this environment")
    version = parse_version(sources.version)
    released = version is not None and not version.is_devrelease and version.local is None
    seen = tuple(_see(name, sources, lock) for name in patch.known_names)
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
    if not unknown and all(one.source is None for one in seen[: len(patch.targets)]):
        return Verdict(NOT_NEEDED, f"vLLM {sources.version} has none of the functions that it patches", seen)
    if not unknown:
        return Verdict(READY, "known code, patched as soon as it is imported", seen)
    names = ", ".join(one.name + (" (not there)" if one.fingerprint == ABSENT else "") for one in unknown)
    oldest, newest = (Version(release) for release in (lock.releases[0], lock.releases[-1]))
    if released and version is not None and not oldest <= version <= newest:
        why = f"vLLM {version} is outside {oldest} to {newest}, and its code is not the known one: {names}"
        return Verdict(UNSUPPORTED, f"{why}; look for a newer vllm-hotfix", seen)
    where = f"vLLM {sources.version or 'of unknown version'}"
    why = f"{where} has code here that is not its release's, or not any known one's: {names}"
    return Verdict(DRIFTED, f"{why}; install vLLM's own files again, or leave the patch off", seen)


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
