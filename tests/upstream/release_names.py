"""The names of one release that the patches know: where they stand, what they are live, and how text can change."""

from __future__ import annotations

import ast
import contextlib
import io
import keyword
import os
import sys
import textwrap
import tokenize
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import frame
import pytest
import vllm
import vllm.envs
from frame import RELOAD
from packaging.version import Version

from vllm_hotfix import _hooks, _upstream
from vllm_hotfix._catalog import CATALOG
from vllm_hotfix._judge import Verdict, judge
from vllm_hotfix._upstream import Lock, Source, Sources

RELEASE = os.environ["HOTFIX_RELEASE"]
SOURCE = Path(vllm.__file__).parent
SOURCES = Sources(SOURCE.parent)
#: The patches whose fault this release has; of the others nothing is wrapped.
NEEDED = [patch for patch in CATALOG if patch.fixed_in is None or Version(RELEASE) < Version(patch.fixed_in)]
NAMES = [name for name in dict.fromkeys(name for patch in NEEDED for name in patch.known_names) if SOURCES.find(name)]
TARGETS = [
    target.name
    for patch in NEEDED
    for target in patch.targets
    if SOURCES.find(target.name) and not (target.unless and SOURCES.find(target.unless))
]
#: How often each function that some patch wraps is wrapped with every gate on.
WRAPPED = {
    target.name: TARGETS.count(target.name)
    for patch in CATALOG
    for target in patch.targets
    if SOURCES.find(target.name)
}
#: The classes that have targets: module and name of each.
CLASSES = {
    (name.partition(":")[0], name.partition(":")[2].rpartition(".")[0])
    for name in TARGETS
    if "." in name.partition(":")[2]
}
FUNCTIONS = [target for target in dict.fromkeys(TARGETS) if "." not in target.partition(":")[2]]
PATCHES = {patch.name: patch for patch in CATALOG}
#: Takes the functions that prepare NVFP4 layers by name.
NVFP4 = "vllm.model_executor.layers.fused_moe.oracle.nvfp4"


def found(name: str) -> Source:
    """Return the place of a name that this release has."""
    source = SOURCES.find(name)
    assert source is not None
    return source


def relative(source: Source) -> str:
    """Return a file's name within the vllm folder."""
    return str(source.file.relative_to(SOURCE))


def import_worker_modules() -> list[str]:
    """Import what an engine's worker imports, by-name importers of targets among it."""
    modules = ["vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu_model_runner", "vllm.plugins"]
    modules += [*frame.TARGET_MODULES, NVFP4]
    if Version(RELEASE) >= Version("0.32"):
        modules.append(f"{RELOAD}.inplace")
    if Version(RELEASE) >= Version("0.33"):
        modules.append("vllm.distributed.weight_transfer.sharded_rdt_engine")
    frame.import_all(modules)
    return modules


@contextlib.contextmanager
def parsed_once() -> Iterator[None]:
    """Parse, fingerprint and compile a text once for all tests: a patch has many files, most of them as they are."""
    marks: dict[tuple[str, tuple[str, ...]], str] = {}
    real = _upstream._fingerprint

    def fingerprint(text: str, tree: ast.Module, chain: list[Any]) -> str:
        key = text, tuple(node.name for node in chain)
        if key not in marks:
            marks[key] = real(text, tree, chain)
        return marks[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_upstream, "_parse", lru_cache(64)(_upstream._parse))
        patch.setattr(_upstream, "_compile", lru_cache(64)(_upstream._compile.__wrapped__))
        patch.setattr(_upstream, "_fingerprint", fingerprint)
        yield


class _VllmAlone:
    """What the package sees of `sys`: only the modules of vLLM and of the tests, so that looking at all is quick."""

    class modules:
        """The modules in `sys.modules` that count."""

        get = sys.modules.get

        @staticmethod
        def items() -> list[tuple[str, Any]]:
            """Return what `dict.items` would."""
            return [(key, one) for key, one in list(sys.modules.items()) if key.partition(".")[0] in ("vllm", "taken")]


def look_at_vllm_alone() -> None:
    """In a child that activates often: look for names that hold a function in vLLM's modules alone."""
    vars(_hooks)["sys"] = _VllmAlone


def judged(
    folder: Path, changes: dict[str, str | None] | None = None, version: str | None = None, of: str = ""
) -> dict[str, Verdict]:
    """Judge every patch, or those of one name, on this release's files, some of them changed or (None) left out."""
    patches = [patch for patch in CATALOG if of in ("", *patch.known_names)]
    changes = dict(changes or {})
    if version is not None:
        changes["_version.py"] = f"__version__ = version = {version!r}\n"
    sources = [SOURCES.find(name) for patch in patches for name in patch.known_names]
    for name in {relative(source) for source in sources if source} | {"__init__.py", "_version.py"}:
        text = changes.get(name, (SOURCE / name).read_text("utf-8"))
        if text is not None:
            path = folder / "vllm" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
    return {patch.name: judge(patch, Sources(folder), Lock.load()) for patch in patches}


def patches_of(name: str) -> set[str]:
    """Return the patches, of those that this release needs, that wrap a name or rely on it."""
    return {patch.name for patch in NEEDED if name in patch.known_names}


def docstrings(text: str) -> list[ast.Expr]:
    """Return the docstrings of a module's functions and classes."""
    return [
        node.body[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        and isinstance(node.body[0], ast.Expr)
        and isinstance(node.body[0].value, ast.Constant)
    ]


OPERATORS = {"==": "!=", "<": "<=", "<=": "<", ">=": ">", ">": ">=", "+": "-", "-": "+", "*": "+", "+=": "-="}
WORDS = {"True": "False", "False": "True", "None": "True", "and": "or", "or": "and", "is": "=="}


def mutants(source: Source) -> Iterator[str]:
    """Yield the file's text with one token of a function or class changed, for each that code can be made of."""
    text = source.file.read_text("utf-8")
    lines = text.splitlines(keepends=True)
    documented = {row for doc in docstrings(text) for row in range(doc.lineno, (doc.end_lineno or 0) + 1)}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        row, start = token.start
        if not source.first <= row <= source.last or row in documented or token.end[0] != row:
            continue
        old, new = token.string, None
        if token.type == tokenize.NAME:
            new = WORDS.get(old) if keyword.iskeyword(old) else f"{old}_"
        elif token.type == tokenize.NUMBER:
            new = f"1{old}"
        elif token.type == tokenize.STRING and len(old) > 2:
            new = old[:-1] + "x" + old[-1]
        elif token.type == tokenize.OP:
            new = OPERATORS.get(old)
        if new is not None:
            line = lines[row - 1]
            changed = line[:start] + new + line[token.end[1] :]
            around = [*lines[source.first - 1 : row - 1], changed, *lines[row : source.last]]
            try:
                ast.parse(textwrap.dedent("".join(around)))
            except SyntaxError:  # `is not` has become `== not`
                continue
            yield "".join([*lines[: row - 1], changed, *lines[row:]])


def cut(lines: list[str], source: Source) -> list[str]:
    """Return a file's lines without a function or class."""
    return [*lines[: source.first - 1], *lines[source.last :]]


def holders() -> dict[str, list[tuple[str, str]]]:
    """Return, for each function that a patch wraps, the modules and names that hold the very same object."""
    result: dict[str, list[tuple[str, str]]] = {}
    for target in FUNCTIONS:
        module, _, name = target.partition(":")
        original = vars(sys.modules[module])[name]
        result[target] = [
            (key, bound)
            for key, one in list(sys.modules.items())
            if isinstance(one, ModuleType)
            for bound, value in list(vars(one).items())
            if value is original
        ]
    return result


def snapshot() -> dict[tuple[str, str], Any]:
    """Return every attribute of every module of vLLM and of the classes that have targets."""
    objects: dict[str, Any] = {
        key: module for key, module in sys.modules.items() if key.partition(".")[0] == "vllm" and module is not None
    }
    objects |= {name: vars(sys.modules[module])[name] for module, name in CLASSES}
    objects["Worker"] = sys.modules["vllm.v1.worker.gpu_worker"].Worker
    objects["environment_variables"] = vllm.envs
    taken = {(key, name): value for key, owner in objects.items() for name, value in list(vars(owner).items())}
    return taken | {("environment", name): value for name, value in vllm.envs.environment_variables.items()}
