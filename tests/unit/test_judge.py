"""Whether a patch fits: the source decides, releases explain."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from vllm_hotfix._judge import Seen, Verdict, judge, parse_version
from vllm_hotfix._patch import DRIFTED, FAILED, NOT_NEEDED, READY, UNSUPPORTED, Patch, Target
from vllm_hotfix._upstream import ABSENT, Lock, LockError, Source, Sources, fingerprint

OLD = "def f():\n    return 1\n"
NEW = "def f():\n    return 2\n"
FIXED = "def f():\n    return 3\n"
OTHER = "def f():\n    return 4\n"
HELPER = "def helper():\n    return 0\n"
MARKS = {name: fingerprint(text, "f") for name, text in [("old", OLD), ("new", NEW), ("fixed", FIXED)]}


S = "runai_model_streamer"
STREAMER_0_1 = "def open():\n    return 1\n\ndef read():\n    return 1\n"
STREAMER_0_2 = "def open():\n    return 1\n\ndef read():\n    return 2\n"
STREAMER_0_3 = "def open():\n    return 3\n"


def streamer_lock() -> Lock:
    """A lock of one vLLM and of three streamers, the last of which has no ``read`` any more."""
    known: dict[str, dict[str, list[str]]] = {"vllm.m:f": {MARKS["old"]: ["1.0"]}}
    for release, text in [("0.1", STREAMER_0_1), ("0.2", STREAMER_0_2), ("0.3", STREAMER_0_3)]:
        for name in ("open", "read"):
            marks = known.setdefault(f"{S}.m:{name}", {})
            marks.setdefault(fingerprint(text, name), []).append(release)
    return Lock(Lock.dump(["1.0"], known, {S: ["0.1", "0.2", "0.3"]}))


def lock_of(**targets: dict[str, list[str]]) -> Lock:
    """A lock of releases 1.0 to 1.3 whose ``f`` changes in 1.1 and is fixed in 1.2."""
    known = {"vllm.m:f": {MARKS["old"]: ["1.0"], MARKS["new"]: ["1.1"], MARKS["fixed"]: ["1.2", "1.3"]}}
    known["vllm.m:helper"] = {fingerprint(HELPER, "helper"): ["1.0", "1.1", "1.2", "1.3"]}
    return Lock(Lock.dump(["1.0", "1.1", "1.2", "1.3"], known | {f"vllm.m:{k}": v for k, v in targets.items()}))


def patch(**fields: Any) -> Patch:
    """A patch of ``vllm.m:f`` that looks into ``vllm.m:helper``."""
    defaults: dict[str, Any] = {"targets": (Target("vllm.m:f", "f"),), "relies": ("vllm.m:helper",), "since": "1.0"}
    return Patch("p", "VLLM_HOTFIX_P", "a fault", "example/vllm#1", **(defaults | fields))


@pytest.fixture
def sources(tmp_path: Path) -> Any:
    """Write a vLLM of a version and with a module ``m``, and read it."""

    def sources(version: str | None, text: str) -> Sources:
        folder = tmp_path / "vllm"
        folder.mkdir()
        (folder / "__init__.py").touch()
        (folder / "m.py").write_text(text, "utf-8")
        if version is not None:
            (folder / "_version.py").write_text(f"__version__ = version = {version!r}\n")
        return Sources(tmp_path)

    return sources


def test_known_code_is_ready(sources: Any) -> None:
    """Every name's fingerprint is in the lock; the verdict has each one's place."""
    verdict = judge(patch(), sources("1.0", OLD + HELPER), lock_of())
    assert verdict.state == READY
    assert [(one.name, one.known) for one in verdict.seen] == [("vllm.m:f", True), ("vllm.m:helper", True)]
    source = verdict.source("vllm.m:f")
    assert source is not None
    assert (source.file.name, source.first, source.last) == ("m.py", 1, 2)
    assert verdict.source("vllm.m:unknown") is None


@pytest.mark.parametrize(("version", "state"), [("1.0", DRIFTED), ("1.0+vendor", READY)])
def test_a_known_release_has_its_own_code(sources: Any, version: str, state: str) -> None:
    """1.0 with the body of 1.1 is not 1.0: what else of it is other code nobody knows. A fork may have it."""
    assert judge(patch(), sources(version, NEW + HELPER), lock_of()).state == state


@pytest.mark.parametrize(
    "version", ["1.0", "1.3", "1.1rc1", "1.0+cu129", "1.4.dev3", "0.9+vendor", None, "not a version"]
)
def test_unknown_code_is_drifted(sources: Any, version: str | None) -> None:
    """A known release, a vendor's build, a development version or none: with other code each is drifted, by name."""
    verdict = judge(patch(), sources(version, OTHER + HELPER), lock_of())
    assert verdict.state == DRIFTED
    assert "vllm.m:f" in verdict.reason
    assert "helper" not in verdict.reason
    assert (version or "of unknown version") in verdict.reason


def test_a_changed_helper_is_drifted_too(sources: Any) -> None:
    """What the wrapper looks into counts like what it wraps."""
    verdict = judge(patch(), sources("1.0", OLD + HELPER.replace("0", "1")), lock_of())
    assert verdict.state == DRIFTED
    assert "vllm.m:helper" in verdict.reason


@pytest.mark.parametrize("version", ["0.9", "1.4", "2.0", "1.4rc1", "1.3.post1"])
def test_unknown_code_of_an_unknown_release_is_unsupported(sources: Any, version: str) -> None:
    """Before the first and after the last known release the answer is a newer vllm-hotfix."""
    verdict = judge(patch(), sources(version, OTHER + HELPER), lock_of())
    assert verdict.state == UNSUPPORTED
    assert version in verdict.reason
    assert "1.0 to 1.3" in verdict.reason
    assert "vllm.m:f" in verdict.reason


@pytest.mark.parametrize("version", ["0.9", "1.4", "1.4.dev3+g123", "1.0+cu129", None, "not a version"])
def test_known_code_of_any_version_is_ready(sources: Any, version: str | None) -> None:
    """A release that is not in the lock, a fork or a build without a version: the same function, so it fits."""
    assert judge(patch(), sources(version, OLD + HELPER), lock_of()).state == READY


@pytest.mark.parametrize("version", ["1.2", "1.2.post1", "1.3", "7"])
@pytest.mark.parametrize("text", [FIXED, OTHER, OLD])
def test_a_release_with_the_fix_does_not_need_it(sources: Any, version: str, text: str) -> None:
    """At or past the fixing release it is not needed, whatever the code: nothing is patched there."""
    verdict = judge(patch(fixed_in="1.2"), sources(version, text + HELPER), lock_of())
    assert verdict.state == NOT_NEEDED
    assert "1.2" in verdict.reason


@pytest.mark.parametrize("version", ["1.2rc1", "1.1", "1.3.dev1", "1.3+vendor", None, "not a version"])
def test_the_faulty_code_of_another_build_is_ready(sources: Any, version: str | None) -> None:
    """A release candidate before the fix, a development or vendor's build is judged by its code."""
    assert judge(patch(fixed_in="1.2"), sources(version, NEW + HELPER), lock_of()).state == READY


@pytest.mark.parametrize("version", ["1.1", "1.2.dev1", "1.1+vendor", None, "not a version"])
def test_the_fixed_code_of_another_build_does_not_need_it(sources: Any, version: str | None) -> None:
    """A vendor has backported the fix: known code, and of no release with the fault."""
    verdict = judge(patch(fixed_in="1.2"), sources(version, FIXED + HELPER), lock_of())
    assert verdict.state == NOT_NEEDED
    assert "vllm.m:f" in verdict.reason


def test_fixed_code_beside_unknown_code_is_drifted(sources: Any) -> None:
    """One function as in the fixed releases proves nothing if the other is code that nobody knows."""
    assert judge(patch(fixed_in="1.2"), sources("1.1.dev1", FIXED), lock_of()).state == DRIFTED


def test_an_absent_target_is_drifted_where_no_release_lacks_it(sources: Any) -> None:
    """The reason says that it is not there, not that it has changed."""
    verdict = judge(patch(), sources("1.0", HELPER), lock_of())
    assert verdict.state == DRIFTED
    assert "vllm.m:f (not there)" in verdict.reason
    assert verdict.seen[0].fingerprint == ABSENT


def test_an_absent_module_is_drifted(sources: Any, tmp_path: Path) -> None:
    """A module that was moved is no error, only unknown code."""
    found = sources("1.0", OLD)
    (tmp_path / "vllm/m.py").unlink()
    verdict = judge(patch(), found, lock_of())
    assert verdict.state == DRIFTED
    assert "vllm.m:f (not there), vllm.m:helper (not there)" in verdict.reason


def test_an_absent_target_is_known_where_the_lock_says_so(sources: Any) -> None:
    """Some releases lack a target: it is left out there, and has no source to wrap."""
    both = patch(targets=(Target("vllm.m:f", "f"), Target("vllm.m:g", "g")))
    verdict = judge(both, sources("1.0", OLD + HELPER), lock_of(g={ABSENT: ["1.0"]}))
    assert verdict.state == READY
    assert verdict.source("vllm.m:g") is None


def test_a_target_can_stand_in_for_another() -> None:
    """One that names another with ``unless`` is wrapped only in releases that lack that, and known in all."""
    either = patch(targets=(Target("vllm.m:g", "g"), Target("vllm.m:f", "f", unless="vllm.m:g")))
    source = Source(Path("m.py"), 1, 2, False, "", "")
    for names, wanted in ((("f", "g"), ["vllm.m:g"]), (("f",), ["vllm.m:f"])):
        seen = tuple(Seen(f"vllm.m:{name}", "", True, source if name in names else None) for name in ("f", "g"))
        assert [target.name for target in Verdict(READY, "", seen).wanted(either)] == wanted
    assert either.known_names == ("vllm.m:g", "vllm.m:f", "vllm.m:helper")


def test_no_target_at_all_is_not_ready(sources: Any) -> None:
    """Where the lock knows that every target can be absent, and they are: there is nothing that could be patched."""
    lone = patch(targets=(Target("vllm.m:g", "g"),), relies=())
    assert judge(lone, sources("1.0", ""), lock_of(g={ABSENT: ["1.0"]})).state not in (READY, FAILED)


def test_a_syntax_error_is_failed(sources: Any) -> None:
    """A file that this Python cannot read is said with its error; nothing is raised."""
    verdict = judge(patch(), sources("1.0", "def f(:\n"), lock_of())
    assert verdict.state == FAILED
    assert "SyntaxError" in verdict.reason


@pytest.mark.parametrize("data", [b"\xff\xfe def f(): pass", b"def f():\n    return '\0'\n", b"# coding: no-such\n"])
def test_a_file_that_is_not_text_is_failed(sources: Any, tmp_path: Path, data: bytes) -> None:
    """Broken bytes are said with their error; nothing is raised."""
    found = sources("1.0", "")
    (tmp_path / "vllm/m.py").write_bytes(data)
    verdict = judge(patch(), found, lock_of())
    assert verdict.state == FAILED
    assert "Error" in verdict.reason


def test_an_unreadable_file_is_failed(sources: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file without permission to read is said; nothing is raised."""
    found = sources("1.0", OLD)
    (tmp_path / "vllm/m.py").chmod(0)
    if os.geteuid() == 0:  # root reads everything

        def refuse(file: Path) -> None:
            raise PermissionError(13, "Permission denied", str(file))

        monkeypatch.setattr("tokenize.open", refuse)
    verdict = judge(patch(), found, lock_of())
    assert verdict.state == FAILED
    assert "PermissionError" in verdict.reason


def test_a_file_that_nests_too_deep_is_failed(sources: Any) -> None:
    """Neither the parser's limits nor Python's stack end the host."""
    verdict = judge(patch(), sources("1.0", "x = " + "(" * 5000 + ")" * 5000), lock_of())
    assert verdict.state == FAILED


def test_no_vllm_is_unsupported(tmp_path: Path) -> None:
    """Without a vLLM nothing can be judged, and that is what the reason says."""
    verdict = judge(patch(), Sources(tmp_path), lock_of())
    assert verdict.state == UNSUPPORTED
    assert verdict.reason == "no vLLM is installed in this environment"
    assert verdict.seen == ()


def test_a_folder_named_vllm_is_no_vllm(tmp_path: Path) -> None:
    """A checkout's or a cache's folder of that name has no ``__init__.py``."""
    (tmp_path / "vllm").mkdir()
    assert judge(patch(), Sources(tmp_path), lock_of()).state == UNSUPPORTED


def test_a_damaged_lock_is_failed(sources: Any) -> None:
    """The reason is the lock's own word on what is wrong with it."""
    assert judge(patch(), sources("1.0", OLD), LockError("upstream.lock is damaged")) == Verdict(
        FAILED, "upstream.lock is damaged"
    )


def test_a_lock_that_does_not_know_the_patch_is_drifted(sources: Any) -> None:
    """A lock of another version of this package knows other targets: nothing is patched by it."""
    assert judge(patch(), sources("1.0", OLD + HELPER), Lock(Lock.dump(["1.0"], {}))).state == DRIFTED


# A package beside vLLM.


BESIDE: dict[str, Any] = {"relies": (f"{S}.m:open", f"{S}.m:read")}


@pytest.fixture
def streamer(tmp_path: Path) -> Any:
    """Write a streamer of a version (None: with no metadata) and with a module ``m``."""

    def streamer(version: str | None, text: str) -> None:
        (tmp_path / S).mkdir()
        (tmp_path / S / "__init__.py").touch()
        (tmp_path / S / "m.py").write_text(text, "utf-8")
        if version is not None:
            (tmp_path / f"{S}-{version}.dist-info").mkdir()

    return streamer


def test_no_package_beside_is_not_needed(sources: Any) -> None:
    """Where the package is not installed there is nothing that could go wrong with it."""
    verdict = judge(patch(**BESIDE), sources("1.0", OLD), streamer_lock())
    assert verdict.state == NOT_NEEDED
    assert verdict.reason == "no Run:ai streamer (runai_model_streamer) is installed, so there is nothing to patch"


@pytest.mark.parametrize("version", ["0.1", "0.2", "0.9", None])
@pytest.mark.parametrize("vllm", ["1.0", "1.1.dev1", "1.0+vendor"])
@pytest.mark.parametrize("text", [STREAMER_0_1, STREAMER_0_2, STREAMER_0_3])
def test_known_code_beside_is_ready(sources: Any, streamer: Any, version: str | None, vllm: str, text: str) -> None:
    """One release has all names as they are, an absent one included, whatever the version says; under any vLLM."""
    streamer(version, text)
    verdict = judge(patch(**BESIDE), sources(vllm, OLD), streamer_lock())
    assert verdict.state == READY
    assert [(one.name, one.known) for one in verdict.seen] == [(name, True) for name in patch(**BESIDE).known_names]


@pytest.mark.parametrize("vllm", ["1.0", "1.1.dev1", "1.0+vendor"])
def test_unknown_code_of_a_known_release_beside_is_drifted(sources: Any, streamer: Any, vllm: str) -> None:
    """The reason has the package, its version, only what differs from that release, and what to do."""
    streamer("0.2", STREAMER_0_2.replace("2", "4"))
    verdict = judge(patch(**BESIDE), sources(vllm, OLD), streamer_lock())
    assert verdict.state == DRIFTED
    assert verdict.reason == (
        "Run:ai streamer (runai_model_streamer) 0.2 has code here that is not its release's: "
        "runai_model_streamer.m:read; install one of 0.1, 0.2, 0.3, or leave the patch off"
    )
    assert [one.known for one in verdict.seen] == [True, True, False]


@pytest.mark.parametrize(("version", "said"), [("0.4", "0.4"), ("0.2.1", "0.2.1"), (None, "of unknown version")])
def test_unknown_code_of_an_unknown_release_beside_is_unsupported(
    sources: Any, streamer: Any, version: str | None, said: str
) -> None:
    """It is compared with the release that it is nearest to: here the one whose ``read`` it has."""
    streamer(version, STREAMER_0_1.replace("open", "opened"))
    verdict = judge(patch(**BESIDE, fixed_in="1.1"), sources("1.0", OLD), streamer_lock())
    assert verdict.state == UNSUPPORTED
    assert f"streamer (runai_model_streamer) {said} is not a known release" in verdict.reason
    assert f": {S}.m:open (not there); install one of 0.1, 0.2, 0.3, or leave the patch off" in verdict.reason
    assert "read" not in verdict.reason


@pytest.mark.parametrize(("version", "differs"), [("0.1", "open"), ("0.3", "read"), ("0.4", "read")])
def test_code_of_several_releases_beside_is_not_known(sources: Any, streamer: Any, version: str, differs: str) -> None:
    """Each function is one that some release has, but no release has them together; the newer one is compared with."""
    streamer(version, STREAMER_0_3 + STREAMER_0_1[STREAMER_0_1.index("def read") :])
    verdict = judge(patch(**BESIDE), sources("1.0", OLD), streamer_lock())
    assert verdict.state == (UNSUPPORTED if version == "0.4" else DRIFTED)
    assert f": {S}.m:{differs};" in verdict.reason
    assert [one.name for one in verdict.seen if not one.known] == [f"{S}.m:{differs}"]


def test_a_lock_that_does_not_know_the_package_beside_is_unsupported(sources: Any, streamer: Any) -> None:
    """A lock of another version of this package has neither its releases nor its names; nothing is raised."""
    streamer("0.1", STREAMER_0_1)
    lock = Lock(Lock.dump(["1.0"], {"vllm.m:f": {MARKS["old"]: ["1.0"]}}))
    verdict = judge(patch(**BESIDE), sources("1.0", OLD), lock)
    assert verdict.state == UNSUPPORTED
    assert f"{S}.m:open, {S}.m:read" in verdict.reason


@pytest.mark.parametrize("installed", [True, False])
def test_vllm_is_judged_first(sources: Any, streamer: Any, installed: bool) -> None:
    """With other code in vLLM it is vLLM's fault, whatever stands beside it."""
    if installed:
        streamer("0.1", "")
    verdict = judge(patch(**BESIDE), sources("1.0", OTHER), streamer_lock())
    assert verdict.state == DRIFTED
    assert "vllm.m:f" in verdict.reason
    assert S not in verdict.reason
    assert [one.name for one in verdict.seen] == [*patch(**BESIDE).known_names]


def test_the_fix_is_looked_for_in_vllm_alone(sources: Any, streamer: Any) -> None:
    """The numbers of another package's releases say nothing of the release that has the fix."""
    streamer("0.1", STREAMER_0_1)
    lock = Lock(Lock.dump(["0.1"], {"vllm.m:f": {MARKS["old"]: ["0.1"]}, f"{S}.m:g": {ABSENT: ["9.0"]}}, {S: ["9.0"]}))
    assert judge(patch(relies=(f"{S}.m:g",), fixed_in="0.2"), sources("0.2.dev1", OLD), lock).state == READY


def test_the_fix_counts_whatever_is_beside(sources: Any, streamer: Any) -> None:
    """A vendor's build with the fixed code needs no patch, also beside a package that is not known."""
    streamer("0.1", "")
    fixed = Lock(Lock.dump(["1.0", "1.2"], {"vllm.m:f": {MARKS["old"]: ["1.0"], MARKS["fixed"]: ["1.2"]}}))
    assert judge(patch(**BESIDE, fixed_in="1.2"), sources("1.1+vendor", FIXED), fixed).state == NOT_NEEDED


def test_no_target_in_vllm_is_not_needed_whatever_is_beside(sources: Any, streamer: Any) -> None:
    """Nothing of vLLM would be wrapped; a target beside it is one to judge all the same."""
    streamer("0.1", STREAMER_0_1 + "1 / 0\ndef read(): pass\n")
    known = {"vllm.m:f": {ABSENT: ["1.0"]}}
    lock = Lock(Lock.dump(["1.0"], known, {S: ["0.1"]}))
    found = sources("1.0", "")
    verdict = judge(patch(**BESIDE), found, lock)
    assert verdict.state == NOT_NEEDED
    assert verdict.reason == "vLLM 1.0 has none of the functions that it patches"
    both = (Target("vllm.m:f", "f"), Target(f"{S}.m:read", "read"))
    assert judge(patch(targets=both, relies=()), found, lock).state == DRIFTED
    gone = (Target("vllm.m:f", "f"), Target(f"{S}.m:gone", "gone"))
    assert judge(patch(targets=gone, relies=()), found, lock).state == DRIFTED
    lock = Lock(Lock.dump(["1.0"], known | {f"{S}.m:gone": {ABSENT: ["0.1"]}}, {S: ["0.1"]}))
    assert judge(patch(targets=gone, relies=()), found, lock).state == NOT_NEEDED


def test_what_stays_wrapped_is_said(sources: Any, streamer: Any) -> None:
    """A patch whose settings stay understood says that they do nothing."""
    streamer("0.2", "")
    kept = patch(**BESIDE, targets=(Target("vllm.m:f", "f", always=True),))
    found = sources("1.0", OLD)
    assert "; until then its settings are understood and do nothing" in judge(kept, found, streamer_lock()).reason
    assert "settings" not in judge(patch(**BESIDE), found, streamer_lock()).reason


@pytest.mark.parametrize("text", [None, "", "unknown", "0.20.x", "1.0-", "dev", "0.20.2 (custom)"])
def test_versions_that_are_not_understood(text: str | None) -> None:
    """They are None, not an error."""
    assert parse_version(text) is None


def test_versions_that_are_understood() -> None:
    """Local and development parts are kept."""
    version = parse_version("0.30.1.dev7+g1234.cpu")
    assert version is not None
    assert version.is_devrelease
    assert version.local == "g1234.cpu"
