"""The installed vLLM, and packages beside it, without importing them: where, which version, a function's fingerprint.

A fingerprint is the SHA-256 of a function's source text, dedented, without comments, docstrings, blank lines
and trailing blanks. It hashes text, not ``ast.dump``, ``ast.unparse`` or tokens, so every Python gives the
same one; decorators, the signature, indentation and the text of literals count.
"""

from __future__ import annotations

import ast
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
from functools import cached_property
from pathlib import Path
from typing import Any

from _vllm_hotfix import describe

ABSENT = "absent"  #: stands for a fingerprint where the module, or the function in it, does not exist
LOCK = "upstream.lock"
VERSION = "_version.py"  #: vLLM's file that states its version
_FORMAT = 1
_RELEASE = re.compile(r"\d+(\.\d+)+(\.post\d+)?")

_Definition = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class LockError(Exception):
    """The lock file cannot be used; the message says why."""


@dataclass(frozen=True)
class Source:
    """A function's or class's place in a file: ``first`` and ``last`` line (from 1, decorators included).

    ``decorated`` says whether a decorator may have put code of its own in the function's place.
    """

    file: Path
    first: int
    last: int
    decorated: bool
    fingerprint: str


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
        node = _find_node(tree, qualname.split("."))
        if node is None:
            return None
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        assert node.end_lineno is not None
        return Source(file, first, node.end_lineno, _replaced_by_decorators(node), _fingerprint(text, node))

    def fingerprint(self, target: str) -> str:
        """The fingerprint of ``module:qualified.name``, or ``ABSENT``. Raises what :meth:`find` raises."""
        source = self.find(target)
        return ABSENT if source is None else source.fingerprint

    def _parse(self, file: Path) -> tuple[str, ast.Module]:
        if file not in self._files:
            with tokenize.open(file) as stream:
                text = stream.read()
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
    node = _find_node(_parse(text), qualname.split("."))
    return ABSENT if node is None else _fingerprint(text, node)


def _parse(text: str) -> ast.Module:
    with warnings.catch_warnings():
        # Of the code's own making, and said where it is compiled.
        warnings.simplefilter("ignore", SyntaxWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        return ast.parse(text)


def _find_node(tree: ast.AST, path: list[str]) -> Any:
    """The last definition of a dotted name: the one that counts when the module has run."""
    found = None
    for node in _definitions(tree):
        if node.name == path[0]:
            found = node
    return _find_node(found, path[1:]) if found is not None and path[1:] else found


def _definitions(scope: ast.AST) -> Iterator[Any]:
    """The functions and classes of a scope, also those under its ``if``, ``try``, ``with``, loops and ``match``."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, _Definition):
            yield node
        elif isinstance(node, (ast.stmt, ast.excepthandler, ast.match_case)):
            yield from _definitions(node)


def _replaced_by_decorators(node: Any) -> bool:
    """Whether a decorator may put code of its own in the function's place."""
    plain = ("staticmethod", "classmethod", "abstractmethod")
    return any(getattr(decorator, "id", None) not in plain for decorator in node.decorator_list)


def _fingerprint(text: str, node: Any) -> str:
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
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()


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
