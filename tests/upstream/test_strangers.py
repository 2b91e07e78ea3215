"""Strangers' vLLMs: a release's real source with one thing changed, judged, and run where it can be."""

from __future__ import annotations

import ast
import functools
import importlib.util
import itertools
import os
import py_compile
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from py_compile import PycInvalidationMode
from textwrap import dedent
from typing import Any

import frame
import pytest
import release_names
from release_names import NAMES, NEEDED, SOURCE, TARGETS, found, mutants, snapshot
from releases import STREAMERS, streamer

from vllm_hotfix import _upstream
from vllm_hotfix._catalog import CATALOG
from vllm_hotfix._judge import judge
from vllm_hotfix._proxy import Proxy
from vllm_hotfix._record import RECORD
from vllm_hotfix._upstream import ABSENT, Lock, Source, Sources, fingerprint, package_of

LOCK = Lock.load()
UNIQUE = list(dict.fromkeys(TARGETS))
STREAMED = list(dict.fromkeys(n for patch in CATALOG for n in patch.known_names if package_of(n) != "vllm"))


@pytest.fixture(scope="module", autouse=True)
def modules() -> None:
    """Import what an engine's worker imports, before any activation."""
    release_names.import_worker_modules()


@pytest.fixture(scope="module", autouse=True)
def parse_once() -> Iterator[None]:
    """Parse a text once for all tests."""
    with release_names.parsed_once():
        yield


# Changes of a definition. Each takes its lines, as a module of its own, and its node, and yields other lines.

Edits = Iterator[str]


def outline(source: Source, name: str) -> tuple[str, str]:
    """Return a definition as a small module, under a class where it is a method, and its dotted name there.

    Its fingerprint is the one that it has in its file.
    """
    lines = source.file.read_text("utf-8").split("\n")[source.first - 1 : source.last]
    last = name.partition(":")[2].rpartition(".")[2]
    text = "\n".join(lines) + "\n"
    if not lines[0].startswith(" "):
        return text, last
    return f"class Around:\n{text}", f"Around.{last}"


def node_of(text: str, qualname: str) -> Any:
    """Return the definition in such a module."""
    return _upstream._find_nodes(_upstream._parse(text), qualname.split("."))[-1]


def replaced(text: str, node: Any, new: str) -> str:
    """Return a text with a node's own text replaced."""
    lines = text.split("\n")
    before = "\n".join([*lines[: node.lineno - 1], _part(lines[node.lineno - 1], 0, node.col_offset)])
    after = "\n".join([_part(lines[node.end_lineno - 1], node.end_col_offset), *lines[node.end_lineno :]])
    return before + new + after


def _part(line: str, start: int, end: int | None = None) -> str:
    return line.encode()[start:end].decode()


def statements(node: Any) -> list[list[Any]]:
    """Return the bodies of a definition: its own, and those of the blocks in it."""
    return [
        body
        for one in ast.walk(node)
        for body in (getattr(one, "body", None), getattr(one, "orelse", None))
        if isinstance(body, list) and body and isinstance(body[0], ast.stmt)
    ]


def words(node: Any) -> list[Any]:
    """Return the docstrings, which do not count."""
    return [
        one.body[0].value
        for one in ast.walk(node)
        if isinstance(one, (ast.FunctionDef, ast.ClassDef)) and isinstance(one.body[0], ast.Expr)
    ]


def dedented(text: str, node: Any) -> Edits:
    """Take the last statement of an inner block out of it."""
    for body in statements(node):
        for one in body[:-1]:
            inner = getattr(one, "body", [])
            if len(inner) > 1 and not getattr(one, "orelse", []) and inner[-1].lineno == inner[-1].end_lineno:
                lines = text.split("\n")
                row = inner[-1].lineno - 1
                lines[row] = " " * one.col_offset + lines[row].lstrip()
                yield "\n".join(lines)


def other_string(text: str, node: Any) -> Edits:
    """Change one byte within a literal of one line."""
    for one in ast.walk(node):
        if isinstance(one, ast.Constant) and isinstance(one.value, str) and one not in words(node):
            literal = ast.get_source_segment(text, one) or ""
            if len(literal) > 2 and literal[0] in "'\"" and "\n" not in literal and literal[:3] != '"""':
                yield replaced(text, one, literal[0] + chr(ord(literal[1]) ^ 1) + literal[2:])


def other_f_string(text: str, node: Any) -> Edits:
    """Change one byte within an f-string."""
    for one in ast.walk(node):
        if isinstance(one, ast.JoinedStr):
            literal = ast.get_source_segment(text, one) or ""
            if literal.startswith(('f"', "f'")) and "\n" not in literal:
                yield replaced(text, one, literal[:-1] + "." + literal[-1])


def other_long_string(text: str, node: Any) -> Edits:
    """Put a literal of several lines at the beginning, with one and with another blank in it, and say it elsewhere."""
    first = node.body[1] if node.body[0:1] and isinstance(node.body[0], ast.Expr) and node.body[1:] else node.body[0]
    lines = text.split("\n")
    blank = " " * first.col_offset
    for literal in ('"""a\n  b"""', '"""a\n b"""', '"""a\n  b  """'):
        yield "\n".join([*lines[: first.lineno - 1], f"{blank}words = {literal}", *lines[first.lineno - 1 :]])
        yield "\n".join([*lines[: first.end_lineno], f"{blank}{literal}", *lines[first.end_lineno :]])


def swapped(text: str, node: Any) -> Edits:
    """Put two statements of one line each in the other order."""
    for body in statements(node):
        for one, other in itertools.pairwise(body):
            lines = text.split("\n")
            first, second = one.lineno - 1, other.lineno - 1
            alike = (
                one.end_lineno == one.lineno and other.end_lineno == other.lineno and one.value not in words(node)
                if isinstance(one, ast.Expr)
                else one.end_lineno == one.lineno and other.end_lineno == other.lineno
            )
            if alike and lines[first] != lines[second] and second == first + 1:
                lines[first], lines[second] = lines[second], lines[first]
                yield "\n".join(lines)


def other_decorator(text: str, node: Any) -> Edits:
    """Give a decorator an argument."""
    for one in node.decorator_list:
        segment = (ast.get_source_segment(text, one) or "").replace("()", "")
        yield replaced(text, one, f"{segment[:-1]}, extra=1)" if segment.endswith(")") else f"{segment}(extra=1)")


def other_default(text: str, node: Any) -> Edits:
    """Change a default."""
    for one in ast.walk(node):
        if isinstance(one, ast.arguments):
            for default in [*one.defaults, *filter(None, one.kw_defaults)]:
                yield replaced(text, default, f"({ast.get_source_segment(text, default)}, 1)")


def other_annotation(text: str, node: Any) -> Edits:
    """Change an annotation, of an argument, of what is returned, of a variable or field."""
    for one in ast.walk(node):
        for annotation in (getattr(one, "annotation", None), getattr(one, "returns", None)):
            if annotation is not None:
                yield replaced(text, annotation, f"{ast.get_source_segment(text, annotation)} | None")


def other_return(text: str, node: Any) -> Edits:
    """Return something else, or, where nothing is returned, something."""
    for one in ast.walk(node):
        if isinstance(one, ast.Return):
            value = ast.get_source_segment(text, one.value) if one.value else None
            yield replaced(text, one, f"return not ({value})" if value else "return 1")


EDITS = (
    dedented,
    other_string,
    other_f_string,
    other_long_string,
    swapped,
    other_decorator,
    other_default,
    other_annotation,
    other_return,
)


def edits(source: Source, name: str) -> Iterator[tuple[str, str, str]]:
    """Yield the first, the middle and the last change of each kind, with its kind and the definition's name in it."""
    text, qualname = outline(source, name)
    node = node_of(text, qualname)
    for edit in EDITS:
        made = list(edit(text, node))
        for at in sorted({0, len(made) // 2, len(made) - 1}) if made else ():
            yield edit.__name__, made[at], qualname


@functools.cache
def seen_kinds() -> dict[str, set[str]]:
    """Return the kinds of changes that there are for each name."""
    return {name: {kind for kind, _, _ in edits(found(name), name)} for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_any_change_of_code_is_other_code(name: str) -> None:
    """A dedented statement, another string, order, decorator, default, annotation, return: no lock knows it."""
    source = found(name)
    text, qualname = outline(source, name)
    assert fingerprint(text, qualname) == source.fingerprint
    kinds = set()
    for kind, changed, qualified in edits(source, name):
        ast.parse(changed)
        mark = fingerprint(changed, qualified)
        assert mark not in (ABSENT, source.fingerprint), kind
        assert not LOCK.releases_of(name, mark), kind
        kinds.add(kind)
    assert "other_long_string" in kinds


def test_there_are_changes_of_every_kind() -> None:
    """Among the names of a release each kind of change is made, most of them for most names."""
    kinds = [kind for some in seen_kinds().values() for kind in some]
    assert {*kinds} == {edit.__name__ for edit in EDITS}
    assert sum(kinds.count(kind) > len(NAMES) // 4 for kind in {*kinds}) > 4, {k: kinds.count(k) for k in {*kinds}}


# The live objects where one name was changed.


def see(changes: dict[Path, str]) -> None:
    """In a child: let the package see other text in some files."""
    _upstream._read = lambda file: changes.get(file) or file.read_text("utf-8")


def whole(source: Source, name: str) -> str:
    """Return a file's text with one definition changed: the last change that keeps its name."""
    *_, (_, changed, qualname) = edits(source, name)
    block = changed.split("\n")[1 if qualname.startswith("Around.") else 0 : -1]
    lines = source.file.read_text("utf-8").split("\n")
    return "\n".join([*lines[: source.first - 1], *block, *lines[source.last :]])


def test_a_changed_name_leaves_every_object_stock(tmp_path: Path) -> None:
    """Each target and helper changed in turn, the streamer's too: its patches are drifted and name it, all is stock.

    All of vLLM's objects stay the identical ones, but for settings that stay understood and patches that it is not
    of; with nothing changed all are active again.
    """
    files = Sources()
    names = [*NAMES, *(name for name in STREAMED if files.find(name))]

    def child() -> list[Any]:
        import vllm_hotfix

        release_names.look_at_vllm_alone()
        before, result = snapshot(), []
        for name in [*names, ""]:
            of = [patch for patch in NEEDED if name in patch.known_names]
            if name:
                source = files.find(name)
                assert source is not None
                see({source.file: whole(source, name)})
            else:
                see({})
            os.environ["VLLM_HOTFIX_ENABLE"] = ",".join(patch.name for patch in of or NEEDED)
            vllm_hotfix.activate()
            needed = {patch.name for patch in NEEDED}  # one may require another that the release has no fault for
            entries = {one: entry.live() for one, entry in RECORD.entries.items() if one in needed}
            wrapped = {wrap for entry in RECORD.entries.values() for wrap in entry.wraps}
            after = snapshot()
            places = {id(before[key]) for key in before if before[key] is not after.get(key)}
            proxies = {
                id(_inner(vars(w.parent)[w.attribute])) for e in RECORD.entries.values() for w in e.wraps.values()
            }
            missed = places - proxies - _seams(before)
            vllm_hotfix.deactivate()
            restored = snapshot()
            different = [str(key) for key in before | restored if before.get(key) is not restored.get(key)]
            result.append([name, [patch.name for patch in of], entries, sorted(wrapped), len(missed), different])
        return result

    results = frame.forked(tmp_path, child).ok()
    assert [row[0] for row in results] == [*names, ""]
    always = {target.name for patch in CATALOG for target in patch.targets if target.always}
    for name, of, entries, wrapped, missed, different in results:
        assert different == [], name
        assert missed == 0, name
        drifted = {patch for patch, (state, _) in entries.items() if state == "drifted"}
        assert {patch for patch, (state, _) in entries.items() if state == "active"} == entries.keys() - drifted
        assert drifted == {*of}, (name, entries)
        allowed = {t.name for patch in CATALOG for t in patch.targets if patch.name in entries.keys() - drifted}
        assert {*wrapped} <= (allowed | always) - ({name} - allowed), name
        for patch in drifted:
            assert name in entries[patch][1], entries[patch]


def _inner(found: Any) -> Any:
    while type(found) is Proxy:
        found = found.__wrapped__
    return found


def _seams(before: dict[Any, Any]) -> set[int]:
    return {id(value) for (_, name), value in before.items() if name == "compile_factors"}


# A changed copy of a module, executed.

TRACED = """
def _traced(f):
    @__import__("functools").wraps(f)
    def traced(*args, **kwargs):
        return f(*args, **kwargs)
    return traced

def _plain(f):
    def plain(*args, **kwargs):
        return f(*args, **kwargs)
    return plain

"""


def at_end(line: str) -> Callable[..., tuple[str, str | None]]:
    """Add a line to the end of the module, with the function's name in it."""

    def change(text: str, source: Source, qualname: str) -> tuple[str, str | None]:
        return f"{text}\n{TRACED}\n{line.format(f=qualname)}\n", None

    change.__name__ = line
    return change


def hidden(value: str) -> Callable[..., tuple[str, str | None]]:
    """Put a value into the function's place without a statement that says so."""

    def change(text: str, source: Source, qualname: str) -> tuple[str, str | None]:
        owner, _, last = qualname.rpartition(".")
        put = f"setattr({owner}, {last!r}, {{}})" if owner else f"globals().update({last}={{}})"
        return f"{text}\n{TRACED}\n{put.format(value.format(f=qualname))}\n", None

    change.__name__ = f"hidden {value}"
    return change


def before_it(*added: str, new: str = "") -> Callable[..., tuple[str, str | None]]:
    """Put decorators before a definition, or change its own words."""

    def change(text: str, source: Source, qualname: str) -> tuple[str, str | None]:
        lines = text.split("\n")
        blank = " " * (len(lines[source.first - 1]) - len(lines[source.first - 1].lstrip()))
        block = [*(blank + one for one in added), *lines[source.first - 1 : source.last]]
        if new:
            at = next(i for i, line in enumerate(block) if line.lstrip().startswith("def "))
            block[at] = block[at].replace("def ", new, 1)
        return "\n".join([*lines[: source.first - 1], *block, *lines[source.last :]]), None

    change.__name__ = " ".join([*added, new])
    return change


def under_a_condition(first: str, line: str) -> Callable[..., tuple[str, str | None]]:
    """Put a definition into a branch, the known one textually last, and another one before it."""

    def change(text: str, source: Source, qualname: str) -> tuple[str, str | None]:
        lines = text.split("\n")
        blank = " " * (len(lines[source.first - 1]) - len(lines[source.first - 1].lstrip()))
        other = [blank + part.format(f=qualname.rpartition(".")[2]) for part in (first, line)]
        block = [f"    {one}" if one.strip() else one for one in lines[source.first - 1 : source.last]]
        return "\n".join([*lines[: source.first - 1], *other, f"{blank}else:", *block, *lines[source.last :]]), None

    change.__name__ = f"{first} {line}"
    return change


def moved(text: str, source: Source, qualname: str) -> tuple[str, str | None]:
    """Define it in another module, and import it back under its old name."""
    lines = text.split("\n")
    block = dedent("\n".join(lines[source.first - 1 : source.last]))
    blank = " " * (len(lines[source.first - 1]) - len(lines[source.first - 1].lstrip()))
    last = qualname.rpartition(".")[2]
    back = f"{blank}from elsewhere import {last}"
    future = "from __future__ import annotations\n"
    # Its decorators stay behind: it need not run.
    elsewhere = future + "\n".join(block.split("\n")[_decorators(block) :])
    return "\n".join([*lines[: source.first - 1], back, *lines[source.last :]]), elsewhere


def _decorators(block: str) -> int:
    return int(ast.parse(block).body[0].lineno) - 1


def stale(text: str, source: Source, qualname: str) -> tuple[str, str | None]:
    """Leave the text as it is, and have Python run a compiled file of other code."""
    return text, None


SAME: list[Callable[..., tuple[str, str | None]]] = [
    at_end("# nothing else: {f}"),
    under_a_condition("if not __name__:", "    def {f}(*args): pass"),
]
CHANGED: list[Callable[..., tuple[str, str | None]]] = [
    at_end("{f} = _traced({f})"),
    at_end("{f} = _plain({f})"),
    at_end("del {f}"),
    at_end("{f} = __import__('functools').partial({f})"),
    at_end("{f} = lambda *args: None"),
    at_end("{f} = property({f})"),
    at_end("{f} = __import__('functools').lru_cache({f})"),
    at_end("{f} = None"),
    at_end("if True: {f} = _traced({f})"),
    before_it("@__import__('functools').lru_cache"),
    before_it("@__import__('functools').wraps(print)"),
    before_it("@(lambda f: f)"),
    before_it("@property"),
    before_it("@staticmethod"),
    before_it("@classmethod"),
    before_it(new="async def "),
    before_it(new="def renamed_"),
    moved,
]
#: What the text does not show: the function is the known one there, and something else stands in its place.
HIDDEN: list[Callable[..., tuple[str, str | None]]] = [
    hidden("_traced({f})"),
    hidden("_plain({f})"),
    hidden("print"),
    hidden("property({f})"),
    under_a_condition("if __name__:", "    def {f}(*args): pass"),
    under_a_condition("if __name__:", "    {f} = None"),
    under_a_condition("if __name__:", "    pass"),
]


def execute(folder: Path, name: str, source: Source, change: Any) -> str | None:
    """In a child: put a changed copy of a target's module in its place; return what its import raised."""
    module_name, _, qualname = name.partition(":")
    text, elsewhere = change(source.file.read_text("utf-8"), source, qualname)
    folder.mkdir()
    file = folder / source.file.name
    file.write_text(text, "utf-8")
    if change is stale:
        file.write_text(_run_instead(text, source), "utf-8")
        py_compile.compile(str(file), invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)
        file.write_text(text, "utf-8")
    sys.modules.pop("elsewhere", None)
    if elsewhere is not None:
        sys.modules["elsewhere"] = types.ModuleType("elsewhere")
        code = compile(elsewhere, str(folder / "elsewhere.py"), "exec", dont_inherit=True)
        exec(code, vars(sys.modules["elsewhere"]))
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    Sources.module = lambda self, asked: file if asked == module_name else REAL(self, asked)  # type: ignore
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a stranger's own affair
        return f"{type(error).__name__}: {error}"
    return None


REAL = Sources.module


def _run_instead(text: str, source: Source) -> str:
    """Return a text whose lines are the same, and whose function does nothing."""
    lines = text.split("\n")
    node = next(
        n
        for n in ast.walk(_upstream._parse(text))
        if getattr(n, "lineno", 0)
        and isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))
        and min([n.lineno, *(d.lineno for d in n.decorator_list)]) == source.first
    )
    body = node.body
    for row in range(body[0].lineno - 1, source.last):
        lines[row] = ""
    lines[body[0].lineno - 1] = " " * body[0].col_offset + "pass"
    return "\n".join(lines)


def live(name: str) -> Any:
    """Return what stands in a target's place in the module that is there now, None if there is nothing."""
    module, _, qualname = name.partition(":")
    one: Any = sys.modules[module]
    for part in qualname.split("."):
        one = getattr(one, "__dict__", {}).get(part)
    return one


def chosen(at: int) -> list[Any]:
    """Return some of the changes for a target, others for the next; an old compiled file for each."""

    def some(changes: list[Any], count: int) -> list[Any]:
        return [changes[(at * count + turn) % len(changes)] for turn in range(count)]

    return [*some(SAME, 1), *some(CHANGED, 2), *some(HIDDEN, 2), stale]


def test_what_runs_as_something_else_is_drift(tmp_path: Path) -> None:
    """Executed copies of the real modules: what is no plain known function in its place is drifted and not touched.

    Renamed, moved, async, decorated, a property, assigned over, deleted, under a condition, from an old compiled file,
    also where the text does not show it. Each target has a part of the changes in turn. As they are, or under a
    condition that holds, the same copies are active.
    """

    def child() -> list[Any]:
        import vllm.utils.torch_utils
        from vllm.model_executor import custom_op

        import vllm_hotfix

        release_names.look_at_vllm_alone()
        vllm.utils.torch_utils.direct_register_custom_op = lambda *args, **kwargs: None  # once is enough
        tables = {**vars(custom_op), **vars(custom_op.CustomOp)}
        registries = [table for name, table in tables.items() if name.startswith("op_registry")]
        sys.dont_write_bytecode = False
        result = []
        for at, name in enumerate(UNIQUE):
            source = found(name)
            # Not those that rely on it: what a helper is at run time is not looked at.
            of = [patch.name for patch in NEEDED if name in [target.name for target in patch.targets]]
            original = sys.modules[name.partition(":")[0]]
            for turn, change in enumerate(chosen(at)):
                for registry in registries:
                    registry.clear()  # a class is registered once
                raised = execute(tmp_path / f"{at}-{turn}", name, source, change)
                before = live(name)
                os.environ["VLLM_HOTFIX_ENABLE"] = ",".join(of)
                vllm_hotfix.activate()
                states = {patch: RECORD.entries[patch].live() for patch in of}
                wrapped = type(live(name)) is Proxy
                vllm_hotfix.deactivate()
                result.append([name, change.__name__, states, wrapped, live(name) is before, raised])
            sys.modules[name.partition(":")[0]] = original
            Sources.module = REAL  # type: ignore[method-assign]
        return result

    results = frame.forked(tmp_path, child).ok()
    assert len(results) == 6 * len(UNIQUE)
    assert {row[1] for row in results} == {change.__name__ for change in [*SAME, *CHANGED, *HIDDEN, stale]}
    same = {change.__name__ for change in SAME}
    always = {target.name for patch in CATALOG for target in patch.targets if target.always}
    for name, change, states, wrapped, untouched, raised in results:
        assert untouched, (name, change)
        assert raised is None or change not in same, raised
        if change.startswith("hidden _traced") and found(name).decorated:
            continue  # cannot be told from what its decorator makes of it
        for state, reason in states.values():
            if change in same:
                assert (state, wrapped) == ("active", True), (name, change, reason)
            else:
                assert state == "drifted", (name, change, reason)
                assert name in reason or raised, (name, change, reason)
        assert change in same or not wrapped or name in always, (name, change)


# The streamer, each release of it.


def beside(folder: Path, version: str, changes: dict[str, str], named: str) -> Path:
    """Make a folder with this vLLM and a streamer, some of its files changed, under a version."""
    real = streamer(version)
    folder.mkdir()
    (folder / "vllm").symlink_to(SOURCE)
    frame.linked_tree(folder, real / "runai_model_streamer", changes)
    (folder / f"runai_model_streamer-{named}.dist-info").mkdir()
    return folder


# The runs of other releases have the other streamers.
@pytest.mark.parametrize("version", [os.environ["HOTFIX_STREAMER"]] if "HOTFIX_STREAMER" in os.environ else STREAMERS)
def test_a_changed_streamer_is_not_known(version: str, tmp_path: Path) -> None:
    """Token by token, in each name of each release: under its version drifted, under another unsupported, and named."""
    real = Sources(streamer(version))
    (patch,) = (patch for patch in CATALOG if patch.name == "pinned_staging")
    names = [name for name in STREAMED if real.find(name)]
    assert len(names) > 7
    for at, name in enumerate(names):
        source = real.find(name)
        assert source is not None
        texts = list(mutants(source))
        for text in texts[:: max(1, len(texts) // 12)]:
            mark = fingerprint(text, name.partition(":")[2])
            assert mark == ABSENT or not LOCK.releases_of(name, mark)
        for kind, changed, qualname in edits(source, name):
            assert not LOCK.releases_of(name, fingerprint(changed, qualname)), kind
        file = str(source.file.relative_to(streamer(version) / "runai_model_streamer"))
        for named, state in ((version, "drifted"), ("9.9.9", "unsupported")):
            folder = beside(tmp_path / f"{at}-{named}", version, {file: texts[-1]}, named)
            verdict = judge(patch, Sources(folder), LOCK)
            assert verdict.state == state, verdict.reason
            assert name in verdict.reason
            assert verdict.wanted(patch) == [target for target in patch.targets if target.always]
    verdict = judge(patch, Sources(beside(tmp_path / "same", version, {}, "9.9.9")), LOCK)
    assert verdict.state == "ready", verdict.reason


# Files that are no good source, or odd ones.

ODD: dict[str, Callable[[bytes], bytes]] = {
    "byte order mark": lambda data: b"\xef\xbb\xbf" + data,
    "line ends": lambda data: data.replace(b"\n", b"\r\n"),
    "latin-1": lambda data: b"# -*- coding: latin-1 -*-\n" + data.decode().encode("latin-1", "replace"),
    "form feeds": lambda data: data.replace(b"\n\n\ndef ", b"\n\n\x0c\ndef "),
}
BAD = {
    "tabs": lambda data: data.replace(b"    ", b"\t"),
    "null bytes": lambda data: data + b"\0",
    "binary": lambda data: bytes(range(256)) * 99,
    "not UTF-8": lambda data: data + b"# \xff\xfe\n",
    "unknown coding": lambda data: b"# -*- coding: klingon -*-\n" + data,
    "cut short": lambda data: data[: len(data) // 2] + b"(",
    "empty": lambda data: b"",
    "large": lambda data: data + b"# large\n" * (50 << 17),
}


@pytest.mark.parametrize("kind", [*ODD, *BAD])
def test_any_file_is_judged(kind: str, tmp_path: Path) -> None:
    """Odd bytes that mean the same are known code; what is no such source is a fault with a reason, never an error."""
    name = f"{frame.RELOAD}.layerwise:_layerwise_process"
    for patch in [patch for patch in NEEDED if name in patch.known_names]:
        files = {found(one).file for one in patch.known_names if one in NAMES}
        for file in {*files, SOURCE / "_version.py", SOURCE / "__init__.py"}:
            path = tmp_path / patch.name / "vllm" / file.relative_to(SOURCE)
            path.parent.mkdir(parents=True, exist_ok=True)
            data = file.read_bytes()
            path.write_bytes((ODD | BAD)[kind](data) if file == found(name).file else data)
        verdict = judge(patch, Sources(tmp_path / patch.name), LOCK)
        if kind in ODD:
            assert verdict.state in ("ready", "not-needed"), verdict.reason
        else:
            assert verdict.state in ("drifted", "failed"), verdict.reason
            assert name in verdict.reason or "sources could not be checked" in verdict.reason, verdict.reason
