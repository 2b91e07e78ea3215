"""The installed vLLM, and packages beside it, without importing them: where, which version, a function's fingerprint.

A fingerprint is the SHA-256 of a function's source text, dedented, without comments, docstrings, blank lines
and trailing blanks. It hashes text, not ``ast.dump``, ``ast.unparse`` or tokens, so every Python gives the
same one; decorators, the signature, indentation and the text of literals count. So do statements further down that
put something else in the function's place.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import io
import json
import re
import sys
import tokenize
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from types import CodeType
from typing import Any

from _vllm_hotfix import describe

ABSENT = "absent"  #: stands for a fingerprint where the module, or the function in it, does not exist
LOCK = "upstream.lock"
VERSION = "_version.py"  #: vLLM's file that states its version
_FORMAT = 1
_LARGEST = 1 << 23  # bytes of a source file that are read at most, 20 times vLLM's largest
_RELEASE = re.compile(r"\d+(\.\d+)+(\.post\d+)?")

_Definition = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
#: What has names of its own.
_Scope = (*_Definition, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
#: What a function does; not where it stands.
_CODE = (
    *("co_name", "co_flags", "co_code", "co_exceptiontable", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount"),
    *("co_names", "co_varnames", "co_freevars", "co_cellvars"),
)


class LockError(Exception):
    """The lock file cannot be used; the message says why."""


@dataclass(frozen=True)
class Source:
    """A function's or class's place in a file: ``first`` and ``last`` line (from 1, decorators included).

    ``decorated`` says whether a decorator may have put code of its own in the function's place. ``text`` is the SHA-256
    of the whole file's text.
    """

    file: Path
    first: int
    last: int
    decorated: bool
    fingerprint: str
    text: str


class Sources:
    """The files of installed packages, found once and parsed once each.

    Args:
        path: a folder that holds the packages, to read them there instead of in this interpreter's environment.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._packages: dict[str, Path | None] = {}
        #: What was raised when a package, or vLLM's version, was looked for.
        self.errors: dict[str, str] = {}
        self._files: dict[Path, tuple[str, ast.Module]] = {}

    def package(self, name: str) -> Path | None:
        """The folder of a top-level package, or None. Nothing is imported."""
        if name not in self._packages:
            self._packages[name] = self._find_package(name)
        return self._packages[name]

    def _find_package(self, name: str) -> Path | None:
        if self._path is not None:
            folder = self._path / name
            return folder if (folder / "__init__.py").is_file() else None
        try:
            spec = importlib.util.find_spec(name)
        except Exception as error:  # a module without a spec, or another package's finder, which may raise anything
            self.errors[name] = describe(error)
            return None
        if spec is None or spec.origin is None or not spec.submodule_search_locations:
            return None  # not there, or only a namespace: a folder of that name, say
        return Path(next(iter(spec.submodule_search_locations)))

    @cached_property
    def version(self) -> str | None:
        """The version of vLLM as its ``_version.py`` states it, None where it does not."""
        folder = self.package("vllm")
        try:
            text = (folder / VERSION).read_text("utf-8-sig") if folder else ""
        except (OSError, ValueError) as error:
            self.errors[VERSION] = f"cannot be read ({describe(error)})"
            return None
        match = re.search(
            r"""^(?:__version__\s*=\s*)?(?:version|__version__)\s*(?::\s*str\s*)?=\s*["']([^"']*)["']""", text, re.M
        )
        return match[1] if match else None

    def version_of(self, package: str) -> str | None:
        """The version of a package as the ``.dist-info`` folder beside it is named, None if there is not one such."""
        folder = self.package(package)
        found = set()
        for info in folder.parent.glob("*.dist-info") if folder else ():
            name, _, version = info.name.removesuffix(".dist-info").rpartition("-")
            if re.sub(r"[-_.]+", "_", name).lower() == package.lower():
                found.add(version)
        return found.pop() if len(found) == 1 else None  # an upgrade may have left an older one

    def module(self, name: str) -> Path | None:
        """The file of a module, by its dotted name, or None."""
        top, *rest = name.split(".")
        folder = self.package(top)
        if folder is None:
            return None
        base = folder.joinpath(*rest)
        candidates = (base / "__init__.py", base.with_suffix(".py")) if rest else (base / "__init__.py",)
        return next((file for file in candidates if file.is_file()), None)

    def find(self, target: str) -> Source | None:
        """Find ``module:qualified.name``; None where the module or the name does not exist.

        Raises:
            OSError: the file cannot be read.
            SyntaxError: the file is not this Python's code.
        """
        module, _, qualname = target.partition(":")
        file = self.module(module)
        if file is None:
            return None
        text, tree = self._parse(file)
        chain = _find_nodes(tree, qualname.split("."))
        if not chain:
            return None
        node = chain[-1]
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        mark, decorated = _fingerprint(text, tree, chain), _replaced_by_decorators(node)
        return Source(file, first, node.end_lineno, decorated, mark, _sha256(text))

    def fingerprint(self, target: str) -> str:
        """The fingerprint of ``module:qualified.name``, or ``ABSENT``. Raises what :meth:`find` raises."""
        source = self.find(target)
        return ABSENT if source is None else source.fingerprint

    def _parse(self, file: Path) -> tuple[str, ast.Module]:
        if file not in self._files:
            text = _read(file)
            self._files[file] = text, _parse(text)
        return self._files[file]


def package_of(name: str) -> str:
    """The top-level package of a module or of ``module:qualified.name``."""
    return re.split("[.:]", name, maxsplit=1)[0]


def fingerprint(text: str, qualname: str) -> str:
    """The fingerprint of a function or class in a module's source text, or ``ABSENT``.

    Raises:
        SyntaxError: the text is not this Python's code.
    """
    tree = _parse(text)
    chain = _find_nodes(tree, qualname.split("."))
    return _fingerprint(text, tree, chain) if chain else ABSENT


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read(file: Path) -> str:
    if file.stat().st_size > _LARGEST:  # parsing it could take all memory
        raise ValueError(f"{file} is larger than a source file of any release")
    with tokenize.open(file) as stream:
        return stream.read()


def _parse(text: str) -> ast.Module:
    with _in_silence():
        return ast.parse(text)


@contextlib.contextmanager
def _in_silence() -> Iterator[None]:
    """Leave out warnings of the code's own making, which are said where it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _find_nodes(tree: ast.Module, path: list[str]) -> list[Any]:
    """The last definition of each part of a dotted name, which count when the module has run; empty if one lacks."""
    chain: list[Any] = []
    for name in path:
        found = [node for node in _definitions(chain[-1] if chain else tree) if node.name == name]
        if not found:
            return []
        chain.append(found[-1])
    return chain


def _definitions(scope: ast.AST) -> Iterator[Any]:
    """The functions and classes of a scope, also those under its ``if``, ``try``, ``with``, loops and ``match``."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, _Definition):
            yield node
        elif isinstance(node, (ast.stmt, ast.excepthandler, ast.match_case)):
            yield from _definitions(node)


def _rebound(tree: ast.Module, chain: list[Any]) -> list[Any]:
    """What a module says after a definition that puts something else in its place, or deletes it."""
    path = [node.name for node in chain]
    found = []
    for at, scope in enumerate([tree, *chain[:-1]]):
        # In a module, `A.f = g` and `A = g` are as good as `f = g` in its class.
        ends = {".".join(path[at:end]): chain[end - 1].end_lineno for end in range(at + 1, len(path) + 1)}
        found += [node for node in _of_scope(scope) if (end := ends.get(_bound(node))) and node.lineno > end]
    return found


def _of_scope(scope: ast.AST) -> Iterator[Any]:
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, _Scope):
            yield from _of_scope(node)


def _bound(node: Any) -> str:
    """The name that a part of a statement binds or deletes, dotted for an attribute; empty if it binds none."""
    if isinstance(node, (ast.Name, ast.Attribute)):
        return "" if isinstance(node.ctx, ast.Load) else ast.unparse(node)
    if isinstance(node, ast.alias):
        return node.asname or node.name.partition(".")[0]
    if isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)):
        return node.name or ""
    return (node.rest or "") if isinstance(node, ast.MatchMapping) else ""


def compiled(source: Source, name: str) -> CodeType | None:
    """What this Python compiles a function to; None if its file does not say any more what it said when it was read."""
    waiting = [_compile(source.file, source.text)]
    while waiting:
        code = waiting.pop()
        if code is not None and code.co_name == name and code.co_firstlineno == source.first:
            return code
        waiting += [one for one in code.co_consts if isinstance(one, CodeType)] if code is not None else []
    return None


@lru_cache(maxsize=1)  # a module's targets are asked for one after the other
def _compile(file: Path, expected: str) -> CodeType | None:
    text = _read(file)
    with _in_silence():
        # The whole module: what is imported there can make a difference to a function's code.
        return compile(text, str(file), "exec", dont_inherit=True) if _sha256(text) == expected else None


def same_code(one: Any, other: Any) -> bool:
    """Whether two code objects, or constants of such, are the same; in whichever file and line they stand."""
    if type(one) is not type(other):
        return False
    if isinstance(one, CodeType):
        alike = all(getattr(one, part, None) == getattr(other, part, None) for part in _CODE)
        return alike and same_code(one.co_consts, other.co_consts)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same_code, one, other))
    if isinstance(one, frozenset):
        return sorted(map(repr, one)) == sorted(map(repr, other))
    return repr(one) == repr(other)  # -0.0 is equal to 0.0


def _replaced_by_decorators(node: Any) -> bool:
    """Whether a decorator may put code of its own in the function's place."""
    plain = ("staticmethod", "classmethod", "abstractmethod")
    return any(getattr(decorator, "id", None) not in plain for decorator in node.decorator_list)


def _fingerprint(text: str, tree: ast.Module, chain: list[Any]) -> str:
    mark = _hash(text, chain[-1])
    lines = text.split("\n")
    rebound = ["\n".join(lines[node.lineno - 1 : node.end_lineno]) for node in _rebound(tree, chain)]
    return _sha256("\n".join([mark, *rebound])) if rebound else mark


def _hash(text: str, node: Any) -> str:
    # Lines as the parser counts them: form feeds and the like do not end one.
    lines = text.split("\n")
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    block = lines[first - 1 : node.end_lineno]
    block[-1] = _characters(block[-1], node.end_col_offset)
    indent = len(block[0]) - len(block[0].lstrip(" \t"))
    cuts, inside = _comments_and_literals(block, indented=bool(indent))
    for docstring in _docstrings(node):
        for row in range(docstring.lineno, docstring.end_lineno + 1):
            line = lines[row - 1]
            start = len(_characters(line, docstring.col_offset)) if row == docstring.lineno else 0
            end = len(_characters(line, docstring.end_col_offset)) if row == docstring.end_lineno else len(line)
            cuts.setdefault(row - first, []).append((start, end))
            inside.discard(row - first)
    kept = []
    for row, line in enumerate(block):
        for start, end in sorted(cuts.get(row, ()), reverse=True):
            line = line[:start] + line[end:]
        # Within a literal of several lines every blank counts.
        if row not in inside:
            blank = len(line) - len(line.lstrip(" \t"))
            line = line[min(indent, blank) :]
        if row + 1 not in inside:
            line = line.rstrip()
        if line or row in inside:
            kept.append(line)
    return _sha256("\n".join(kept))


def _characters(line: str, offset: int) -> str:
    """The part of a line before a column of the parser, which counts UTF-8 bytes."""
    return line.encode()[:offset].decode()


def _docstrings(node: Any) -> Iterator[Any]:
    for child in ast.walk(node):
        if isinstance(child, _Definition) and child.body:
            statement = child.body[0]
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                yield statement


def _comments_and_literals(block: list[str], *, indented: bool) -> tuple[dict[int, list[tuple[int, int]]], set[int]]:
    """Where the comments are, by row, and which rows begin inside a literal of several lines."""
    shift = 2 if indented else 1
    text = ("if 1:\n" if indented else "") + "\n".join(block) + "\n"
    comments: dict[int, list[tuple[int, int]]] = {}
    inside: set[int] = set()
    starts = [getattr(tokenize, name, None) for name in ("FSTRING_START", "TSTRING_START")]
    ends = [getattr(tokenize, name, None) for name in ("FSTRING_END", "TSTRING_END")]
    opened: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        row = token.start[0] - shift
        if token.type == tokenize.COMMENT:
            comments.setdefault(row, []).append((token.start[1], token.end[1]))
        elif token.type == tokenize.STRING:
            inside.update(range(row + 1, token.end[0] - shift + 1))
        elif token.type in starts:
            # From 3.12 an f-string is several tokens; before, it is one STRING.
            opened.append(row)
        elif token.type in ends:
            inside.update(range(opened.pop() + 1, token.end[0] - shift + 1))
    return comments, inside


class Lock:
    """What is known: target -> fingerprint -> releases of the target's package, read from ``upstream.lock``.

    ``releases`` are vLLM's, ``packages`` has those of every package, vLLM among them.

    Raises:
        LockError: the file is missing, cut short or not a lock file.
    """

    def __init__(self, text: str) -> None:
        try:
            data = json.loads(text)
            if data["format"] != _FORMAT:
                raise LockError(f"{LOCK} has format {data['format']!r}, this version reads {_FORMAT}")
            self.targets: Mapping[str, Mapping[str, tuple[str, ...]]] = {
                target: {mark: tuple(releases.split()) for mark, releases in known.items()}
                for target, known in data["targets"].items()
            }
            self.releases: tuple[str, ...] = tuple(data["releases"].split())
            beside = {package: tuple(releases.split()) for package, releases in data["packages"].items()}
            self.packages: Mapping[str, tuple[str, ...]] = {**beside, "vllm": self.releases}
            for package, releases in self.packages.items():
                if not releases or not all(map(_RELEASE.fullmatch, releases)):
                    raise ValueError(f"the releases of {package} are not what they should be")
            for target, known in self.targets.items():
                if not {release for some in known.values() for release in some} <= {*self.packages[package_of(target)]}:
                    raise ValueError(f"{target} has releases that its package does not have")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise LockError(
                f"{LOCK} is damaged ({type(error).__name__}: {error}); install vllm-hotfix again"
            ) from error

    @classmethod
    def load(cls) -> Lock:
        """Read the lock file of this package, also out of a zip archive."""
        try:
            loader = sys.modules[__package__].__spec__.loader  # type: ignore[union-attr]
            data = loader.get_data(str(Path(__file__).with_name(LOCK)))  # type: ignore[union-attr]
            return cls(data.decode("utf-8"))
        except (OSError, UnicodeDecodeError, AttributeError) as error:
            raise LockError(
                f"{LOCK} cannot be read ({type(error).__name__}: {error}); install vllm-hotfix again"
            ) from error

    def releases_of(self, target: str, mark: str) -> tuple[str, ...]:
        """The releases in which a target has this fingerprint; empty if it is not known."""
        return self.targets.get(target, {}).get(mark, ())

    @staticmethod
    def dump(
        releases: list[str],
        targets: Mapping[str, Mapping[str, list[str]]],
        packages: Mapping[str, list[str]] | None = None,
    ) -> str:
        """The file's text: one line per target and fingerprint, so that its diff can be read."""
        return (
            json.dumps(
                {
                    "format": _FORMAT,
                    "releases": " ".join(releases),
                    "packages": {package: " ".join(some) for package, some in sorted((packages or {}).items())},
                    "targets": {
                        target: {mark: " ".join(known) for mark, known in marks.items()}
                        for target, marks in sorted(targets.items())
                    },
                },
                indent=1,
            )
            + "\n"
        )
