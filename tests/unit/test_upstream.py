"""Fingerprints that every Python computes alike, finding sources without importing them, reading the lock."""

from __future__ import annotations

import importlib
import inspect
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest

from vllm_hotfix import _upstream
from vllm_hotfix._upstream import ABSENT, Lock, LockError, Sources, compiled, fingerprint, package_of, same_code

BASE = '''\
@decorator(1)
def f(a, b=2):
    """Say what."""
    text = "a # b"
    # A comment.
    if a:
        return text  # another one

    return b
'''


def method(text: str) -> str:
    """The same functions as methods of a class ``A``."""
    return "class A:\n" + indent(text, "    ")


METHOD = method(BASE)


def test_the_fingerprint_is_the_sha256_of_what_is_left() -> None:
    """The definition, without anything that does not run: a hash that other tools can compute."""
    import hashlib

    left = '@decorator(1)\ndef f(a, b=2):\n    text = "a # b"\n    if a:\n        return text\n    return b'
    assert fingerprint(BASE, "f") == hashlib.sha256(left.encode()).hexdigest()


#: Source, name, fingerprint: literals, so that every Python version must find the same.
GOLDEN = {
    "plain": ("def f(a):\n    return a\n", "f"),
    "base": (BASE, "f"),
    "method": (METHOD, "A.f"),
    "class": (METHOD, "A"),
    "async": ("async def f():\n    async with a as b:\n        await b  # c\n", "f"),
    "one line": ("def f(): return 1; x = '#'  # c\n", "f"),
    "docstring only": ('def f():\n    """Nothing."""\n', "f"),
    "docstring and statement": ('def f():\n    """One."""; return 1\n', "f"),
    "long docstring": ('def f():\n    """One.\n\n    Two # three.\n    """\n    return 1\n', "f"),
    "docstring of two strings": ('def f():\n    ("One. "  # c\n     "Two.")\n    return 1\n', "f"),
    "raw docstring": ('def f():\n    r"""One \\d."""\n    return 1\n', "f"),
    "bytes are no docstring": ('def f():\n    b"""One."""\n    return 1\n', "f"),
    "f-string is no docstring": ('def f():\n    f"""One."""\n    return 1\n', "f"),
    "hash in f-string": ("def f(a):\n    return f'# {a!r:#>10} #' + f\"{a:#x}\"  # c\n", "f"),
    "long string": ('def f():\n    return """a  \n\n  # b\n    c  """  # d\n', "f"),
    "long f-string": ('def f(a):\n    return f"""a  \n\n  # {a}  \n {\n  a\n}  """  # d\n', "f"),
    "nested f-strings": ("def f(a):\n    return f'''{f\"{a} #\"}\n  # {'#' + a}'''  # c\n", "f"),
    "continued string": ("def f():\n    return 'a  \\\n  # b'  # c\n", "f"),
    "continued line": ("def f():\n    return 1 + \\\n        2  # c\n", "f"),
    "brackets": ("def f(a,  # one\n      b,\n      # two\n      ):\n    return [\n        a,  # three\n    ]\n", "f"),
    "non-ascii": ("def f():\n    é = 'ü ß 漢字 🙂'  # ü\n    return é, '漢字 #'; x = 1  # 🙂\n", "f"),
    "non-ascii docstring": ("def f():\n    'ü 漢字 🙂'; return '🙂'  # ü\n", "f"),
    "tabs": ("class A:\n\tdef f(self):\n\t\tif self:\n\t\t\treturn 1  \t# c\n\t\t\n\t\treturn 2\n", "A.f"),
    "form feed": ("\x0c\ndef f():\n    a = '\x0c'\n\x0c\n    return a  # c\n", "f"),
    "nested": ('def f():\n    def g():\n        """One."""\n        return 1\n    return g\n', "f.g"),
    "inner docstrings": ('class A:\n    """One."""\n    class B:\n        """Two."""\n        x = 1\n', "A"),
    "decorators": ("@a  # c\n\n@b(\n    1,  # d\n)\n# e\ndef f(): ...\n", "f"),
    "lambda default": ("def f(a=lambda: '#', *, b: int = 1, **c) -> None:  # d\n    ...\n", "f"),
    "no newline at the end": ("def f():\n    return 1", "f"),
    "column 0": ("class A:\n    def f(self, a=(\n1,\n2)):\n        return [\n'a', # c\n  'b']\n", "A.f"),
    "comment left of the code": ("class A:\n    def f(self):\n# c\n        return 1\n  # d\n        return 2\n", "A.f"),
}
HASHES = {
    "plain": "19d9baaa5ddecb4b8eb5b522d542e65a72245af24cd03e599a486d3c04de717b",
    "base": "2cfcb2e7ceccc76d3a5271cffb8e05eb64345c9de41565309c37b2b6463fafa2",
    "method": "2cfcb2e7ceccc76d3a5271cffb8e05eb64345c9de41565309c37b2b6463fafa2",
    "class": "01a2520575a5972b5708a8340d334c3a1dc94b28c8ba125fdcc376d9bc08103a",
    "async": "27f285723217945f5986dbf59ed426340a1944bfa4bd4ebe506398de800d3978",
    "one line": "054ec82f00599672855a5c15253764edc2ec3cf1ccbcc4d151b437989fa722dc",
    "docstring only": "e3568148b125be1a657be1d384d9541ca78856ebd717a89bb19514b08413cfa3",
    "docstring and statement": "626d57855c2145f18c2a971abda83d52646f9f9fd60649d59facb1a89ffbffa5",
    "long docstring": "8795b1c438f59538c9f384a0cd430eecc44422596db895a1d5c17f27da4ccf1c",
    "docstring of two strings": "8795b1c438f59538c9f384a0cd430eecc44422596db895a1d5c17f27da4ccf1c",
    "raw docstring": "8795b1c438f59538c9f384a0cd430eecc44422596db895a1d5c17f27da4ccf1c",
    "bytes are no docstring": "edb26ddd4bba2ecaa5a212c9f52015e274ccb7cc9e6a061d87c80f65d83270bf",
    "f-string is no docstring": "cc147bcca1698466cf3f9e7c3c612d47584f9eefc0c83a1d115e564a7a07d4a2",
    "hash in f-string": "2a4f455f673ffbb57aa5c500747f0ea0cb45ef2a6a51284bbc3d1327e49637ef",
    "long string": "36a7075487133bd9d5b22c511c3ccda5d5de30b85b8913a56a0ec751800eac76",
    "long f-string": "27eaaa8e93b79e0d1c683ab57dec151bd7af532a24e608824589e1b1a02249da",
    "nested f-strings": "b9629ee72937e4b7b55d27477827b4c8914b60702ac893560983b3b90b664e32",
    "continued string": "e1edc24e0aac116b43e627bd26ae672091591edfa4d7f564c7af1e5be64aedf6",
    "continued line": "5909e37811fbd68ee21359b78128d80a3643794fc7426484362c21b2447ec5ba",
    "brackets": "8a6b58d40e2b32d4090a83a2e280bf44e911ace48993bf2f9ed01d1785ed91ac",
    "non-ascii": "4b11e761a7fcc73ee3ef47a98d8860505a94379cfcf69680e781fbd0e0901011",
    "non-ascii docstring": "afd84e0ee1e2cc031f65aeef79613c38cf926bc153ae2543afe512264673b038",
    "tabs": "51eca2c79831442f95398813f07038497eedda9d1b4600593a4f111440966052",
    "form feed": "119d36f2cfab1c1ee3baf76d2403b889c555fb5ec7a7d3a20d7c34bd28d2fb7b",
    "nested": "e949228a0a6e4ff2b68015987834ede7375acea0d6c1aabe2de0468a86ff3dd5",
    "inner docstrings": "f68cb492780707bdc9fa4e1cfc0a6f797f6ea8f61dfd94be370d811cfe1cc27d",
    "decorators": "c0b52edbf2b4b3dc349f9a40bb55d2fa97851eccfe6194c8dff3b5f135fd5a25",
    "lambda default": "ce11893fdcd51bdde7357a7349e266b6eec37bc9c291a9cfe4e778b95f931217",
    "no newline at the end": "8795b1c438f59538c9f384a0cd430eecc44422596db895a1d5c17f27da4ccf1c",
    "column 0": "7f1256aec1ac563720824d6e3b8b9bec3cab5ff11305034965d974d427e70619",
    "comment left of the code": "980bee154c2870e43a0ca07c24134363f462c167844b8fc4c34d7c47bacb5287",
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_fingerprints(name: str) -> None:
    """The lock is written by one Python and read by all: these hashes must never change."""
    assert fingerprint(*GOLDEN[name]) == HASHES[name]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    # A comment.\n", ""),
        ("    # A comment.\n", "# Another, at column 0.\n"),
        ("  # another one", "# ünicode 漢字"),
        ('    """Say what."""\n', ""),
        ('"""Say what."""', '"Say # it, ü."'),
        ('"""Say what."""', '"""Say what.\n\n    And why:\n\tcode  \n    """'),
        ("\n\n", "\n"),
        ("\n\n", "\n   \n\n\t\n"),
        ("if a:\n", "if a:   \t\n"),
        ("if a:\n", "if a:\n\n        # Why.\n"),
        ("@decorator(1)\n", "@decorator(1)  # c\n\n# d\n"),
        ("    return b\n", "    return b\n    # The end.\n\n\nx = 1\n"),
        ("    return b\n", "    return b"),
        ("\n", "\r\n"),
    ],
)
@pytest.mark.parametrize(("form", "name"), [(str, "f"), (method, "A.f")])
def test_what_does_not_count(old: str, new: str, form: Callable[[str], str], name: str, tmp_path: Path) -> None:
    """Comments, docstrings, blank lines, trailing blanks and line ends: the same code, read from a file."""
    changed = BASE.replace(old, new)
    assert changed != BASE
    (tmp_path / "m.py").write_bytes(form(changed).encode())
    (tmp_path / "__init__.py").touch()
    assert Sources(tmp_path.parent).fingerprint(f"{tmp_path.name}.m:{name}") == fingerprint(BASE, "f")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("@decorator(1)\n", ""),
        ("@decorator(1)", "@decorator(2)"),
        ("b=2", "b=3"),
        ("(a, b", "(a: int, b"),
        ("a # b", "a # c"),
        ("a # b", "a  # b"),
        ("        return text", "        text\n    return text"),
        ("    return b", "        return b"),
        ("return b", "return  b"),
        ("def f", "async def f"),
        ("    return b\n", "    return b; x = 1\n"),
        ('    text = "a # b"', '    text = "a # b" ""'),
    ],
)
@pytest.mark.parametrize(("form", "name"), [(str, "f"), (method, "A.f")])
def test_what_counts(old: str, new: str, form: Callable[[str], str], name: str) -> None:
    """Decorators, signature, literals, indentation and statements: other code."""
    changed = BASE.replace(old, new)
    assert changed != BASE
    assert fingerprint(form(changed), name) not in (fingerprint(BASE, "f"), ABSENT)


def test_a_method_is_the_same_function_as_its_dedented_text() -> None:
    """What stands deeper, in a class or under an ``if``, is dedented first."""
    assert fingerprint(METHOD, "A.f") == fingerprint(BASE, "f")
    assert fingerprint("if x:\n  if y:\n" + indent(BASE, "    "), "f") == fingerprint(BASE, "f")


@pytest.mark.parametrize("prefix", ["", "f", "r", "rb"])
@pytest.mark.parametrize(
    ("old", "new"),
    [("x  \n", "x\n"), ("\n\n", "\n"), ("\n    y", "\n  y"), ("# z", "#  z"), ("# z", ""), ("\n\n", "\n \n")],
)
def test_blanks_in_long_strings_count(prefix: str, old: str, new: str) -> None:
    """Within a literal of several lines a blank, an empty line or what looks like a comment is part of the text."""
    text = f'class A:\n    def f(self):\n        return {prefix}"""x  \n\n    y\n# z\n"""\n'
    changed = text.replace(old, new)
    assert changed != text
    assert fingerprint(changed, "A.f") != fingerprint(text, "A.f")


def test_continuation_lines_left_of_the_function_count() -> None:
    """A line within brackets may stand left of its function: nothing but blanks is taken from it."""
    text = "class A:\n    def f(self, a=(\n1111, 2)):\n        return a\n"
    assert fingerprint(text, "A.f") != fingerprint(text.replace("1111", "1112"), "A.f")
    assert fingerprint(text, "A.f") != fingerprint(text.replace("1111", "3"), "A.f")


def test_line_ends_do_not_count_in_long_strings_either(tmp_path: Path) -> None:
    """Python reads every line end as a newline, within literals too."""
    text = 'def f():\n    return """a\n  b\n"""\n'
    (tmp_path / "__init__.py").write_bytes(text.replace("\n", "\r\n").encode())
    assert Sources(tmp_path.parent).fingerprint(f"{tmp_path.name}:f") == fingerprint(text, "f")


def test_a_byte_order_mark_does_not_count(tmp_path: Path) -> None:
    """A file from a Windows editor is read like any other."""
    (tmp_path / "__init__.py").write_bytes(b"\xef\xbb\xbf" + BASE.encode())
    assert Sources(tmp_path.parent).fingerprint(f"{tmp_path.name}:f") == fingerprint(BASE, "f")


def test_an_encoding_that_is_declared_is_used(tmp_path: Path) -> None:
    """PEP 263: the text counts, not its bytes."""
    text = "def f():\n    return 'ü'  # ß\n"
    (tmp_path / "__init__.py").write_bytes(b"# -*- coding: latin-1 -*-\n" + text.encode("latin-1"))
    assert Sources(tmp_path.parent).fingerprint(f"{tmp_path.name}:f") == fingerprint(text, "f")


@pytest.mark.parametrize(
    "text",
    [
        "if x:\n    def f(): return 1\nelse:\n    def f(): return 2\n",
        "try:\n    def f(): return 1\nexcept ImportError:\n    def f(): return 2\n",
        "try:\n    import x\nexcept ImportError:\n    pass\nelse:\n    pass\nfinally:\n    def f(): return 2\n",
        "with x:\n    for y in z:\n        while 1:\n            def f(): return 2\n",
        "match x:\n    case 1:\n        def f(): return 2\n",
        "def f(): return 1\ndef f(): return 2\n",
        "class f: pass\ndef f(): return 2\n",
        "@overload\ndef f(a: int): ...\n@overload\ndef f(a: str): ...\ndef f(): return 2\n",
    ],
)
def test_the_last_definition_wins(text: str) -> None:
    """As when the module has run, also under ``if``, ``try``, ``with``, loops and ``match``, and after overloads."""
    assert fingerprint(text, "f") == fingerprint("def f(): return 2", "f")


DEFINED = "class A:\n    def f(self): return 1\ndef f(self): return 1\n"
REBINDING = [
    "f = g(f)",
    "f: object = g",
    "f += 1",
    "a, (b, *f) = 1, (2, 3)",
    "if (f := g): pass",
    "del f",
    "import f",
    "import f.g",
    "import g as f",
    "from g import f",
    "from g import h as f",
    "if x:\n    f = g",
    "try:\n    pass\nexcept ImportError:\n    f = g",
    "try: pass\nexcept ImportError as f: pass",
    "for f in x: pass",
    "with x as f: pass",
    "match x:\n    case f: pass",
    "match x:\n    case [*f]: pass",
    "match x:\n    case {**f}: pass",
]


@pytest.mark.parametrize("text", REBINDING)
def test_what_takes_a_functions_place_counts(text: str) -> None:
    """Whatever a module, or a class, binds a function's name to after its definition is what callers get."""
    known = fingerprint(DEFINED, "f")
    marks = {fingerprint(f"{DEFINED}{text}\n", "f"), fingerprint(f"{DEFINED}{text}  # x\n\n", "f")}
    assert not {known, ABSENT} & marks
    inside = "class A:\n    def f(self): return 1\n" + "".join(f"    {line}\n" for line in text.split("\n"))
    assert fingerprint(inside, "A.f") not in (known, ABSENT)
    assert fingerprint(DEFINED + text, "A.f") == fingerprint(DEFINED, "A.f") == known


@pytest.mark.parametrize("text", ["A.f = g", "del A.f", "A = g(A)", "A.f, x = 1, 2", "if x:\n    A.f = g(A.f)"])
def test_what_takes_a_methods_place_from_outside_counts(text: str) -> None:
    """So does what a module says of a class's attribute, or of the class."""
    known = fingerprint(DEFINED, "f")
    assert fingerprint(f"{DEFINED}{text}\n", "A.f") not in (known, ABSENT)
    assert fingerprint(f"{DEFINED}{text}\n", "f") == known


@pytest.mark.parametrize(
    "text",
    [
        "x = f",
        "f.x = 1",
        "f[0] = 1",
        "x.f = 1",
        "A.f.x = 1",
        "B.f = 1",
        "x = [f for f in y]",
        "x = {f: 1 for f in y}",
        "x = lambda f: f",
        "def g(f): f = 1",
        "class B:\n    f = 1\n    A = 2",
        "from g import f as h",
        "import g.f",
    ],
)
def test_what_leaves_a_function_in_its_place_does_not_count(text: str) -> None:
    """Names of other scopes, and what is said of a function without putting another in its place."""
    for name in ("f", "A.f"):
        assert fingerprint(f"{DEFINED}{text}\n", name) == fingerprint(DEFINED, name)
        assert fingerprint(f"{text}\n{DEFINED}", name) == fingerprint(DEFINED, name)


@pytest.mark.parametrize("text", REBINDING)
def test_what_a_definition_takes_the_place_of_does_not_count(text: str) -> None:
    """The definition comes later, and is what callers get."""
    assert fingerprint(f"{text}\n{DEFINED}", "f") == fingerprint(DEFINED, "f")


CODE = """
    from __future__ import annotations
    import os
    from os import path as where

    class A(Base):
        @plain
        def f(self, a: Unknown = 1, *b, c=2, **d):
            "Words."
            self.__private = super().f(os.getpid(), where.join(a), (1, -0.0), "x" in {"x", "y", 1}, f"{a!r:>{c}}")
            try:
                return [lambda: a + x for x in b]
            finally:
                assert c

    def f():
        return os.getpid()
"""


def written(folder: Path, text: str) -> Sources:
    """A package of one file."""
    (folder / "__init__.py").write_text(dedent(text))
    return Sources(folder.parent)


def code_of(folder: Path, text: str, name: str) -> Any:
    """The code of a function as the import of its module makes it."""
    code = compile(dedent(text), str(folder / "elsewhere.py"), "exec", dont_inherit=True)
    for part in name.split("."):
        (code,) = (one for one in code.co_consts if isinstance(one, types.CodeType) and one.co_name == part)
    return code


@pytest.mark.parametrize("name", ["A.f", "f"])
def test_a_function_is_compiled_as_its_import_does(name: str, tmp_path: Path) -> None:
    """With its class, imports and ``__future__``; in which file and line does not count, every token does."""
    source = written(tmp_path, CODE).find(f"{tmp_path.name}:{name}")
    assert source is not None
    code = compiled(source, "f")
    assert same_code(code, code_of(tmp_path, CODE, name))
    assert same_code(code, code_of(tmp_path, "\n# said\n" + dedent(CODE), name))
    changes = [("getpid()", "getppid()"), ("f(", "g(")] if name == "f" else []
    changes += [
        *[
            ("1, -0.0", "1, 0.0"),
            ("1, -0.0", "1.0, -0.0"),
            ("1, -0.0", "True, -0.0"),
            ("1}", "2}"),
            ("__private", "_p"),
        ],
        *[("a + x", "x + a"), ("a + x", "a - x"), ("finally:", "except:"), ("*b, ", ""), ("a: U", "a, /, e: U")],
        *[(">{c}", "<{c}"), ("**d", "d"), ("assert c", "assert d"), ("where.join", "where.exists"), ("A(B", "B(B")],
    ] * (name == "A.f")
    for old, new in changes:
        other = CODE.replace(old, new)
        assert other != CODE
        renamed = {"A.f": "B.f" if new == "B(B" else "A.f", "f": "g" if new == "g(" else "f"}[name]
        assert not same_code(code, code_of(tmp_path, other, renamed)), new
    assert not same_code(code, None)


def test_a_file_that_has_changed_meanwhile_has_no_code(tmp_path: Path) -> None:
    """What was read is not there any more to be compiled, wherever in the file the change is."""
    source = written(tmp_path, CODE).find(f"{tmp_path.name}:f")
    assert source is not None
    written(tmp_path, CODE + "# more\n")
    assert compiled(source, "f") is None


def test_a_file_larger_than_any_source_is_not_read(tmp_path: Path) -> None:
    """Fifty megabytes of code would take gigabytes to parse."""
    with open(tmp_path / "__init__.py", "wb") as file:
        file.truncate(50 << 20)
    with pytest.raises(ValueError, match="larger than a source file"):
        Sources(tmp_path.parent).find(f"{tmp_path.name}:f")


@pytest.mark.parametrize("name", ["g", "f.x", "A", "A.f", "x"])
def test_absent_names(name: str) -> None:
    """A name that no definition makes is absent: an inner function is not the module's, a variable is no function."""
    assert fingerprint("def f():\n    def g(): pass\nx = 1\n", name) == ABSENT


def test_inner_names_are_looked_up_in_the_last_outer_one() -> None:
    """A class that is defined twice is the second one."""
    text = "class A:\n    def f(self): return 1\nclass A:\n    def g(self): return 1\n"
    assert fingerprint(text, "A.f") == ABSENT
    assert fingerprint(text, "A.g") != ABSENT


@pytest.mark.parametrize("text", [BASE, METHOD, "\n\n" + BASE, "@a\n\n# c\n@b\n\ndef f(): pass\n"])
def test_the_place_is_that_of_the_code_object(text: str, tmp_path: Path) -> None:
    """The first line is what a live function says of itself, decorators included, on every Python."""
    (tmp_path / "__init__.py").write_text(text)
    name = "A.f" if text is METHOD else "f"
    source = Sources(tmp_path.parent).find(f"{tmp_path.name}:{name}")
    assert source is not None
    assert source.decorated

    def codes(code: types.CodeType) -> dict[str, int]:
        found = {code.co_name: code.co_firstlineno}
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                found |= codes(constant)
        return found

    assert source.first == codes(compile(text, "m", "exec"))["f"]
    assert text.split("\n")[source.last - 1].strip() in ("return b", "def f(): pass")


def test_a_source_with_an_odd_escape_is_read_in_silence(tmp_path: Path) -> None:
    """Python warns of such a literal where it compiles it; reading is not compiling, nor is a warning an error."""
    (tmp_path / "__init__.py").write_text("def f():\n    return '\\d', 1 is 1\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Sources(tmp_path.parent).fingerprint(f"{tmp_path.name}:f") != ABSENT


def test_files_are_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dozen targets in one file of vLLM cost one parse."""
    (tmp_path / "__init__.py").write_text("def f(): pass\ndef g(): pass\n")
    calls = []
    parse = _upstream.ast.parse
    monkeypatch.setattr(_upstream.ast, "parse", lambda text: calls.append(text) or parse(text))
    sources = Sources(tmp_path.parent)
    sources.fingerprint(f"{tmp_path.name}:f")
    sources.fingerprint(f"{tmp_path.name}:g")
    assert len(calls) == 1


# Where things are.


def test_modules_and_packages_are_found(tmp_path: Path) -> None:
    """By dotted name, the package before a module of the same name, as the import system has it."""
    for name in ("p/__init__.py", "p/m.py", "p/q/__init__.py", "p/q.py", "p/n/only.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    sources = Sources(tmp_path)
    assert sources.module("p") == tmp_path / "p/__init__.py"
    assert sources.module("p.m") == tmp_path / "p/m.py"
    assert sources.module("p.q") == tmp_path / "p/q/__init__.py"
    assert sources.module("p.n.only") == tmp_path / "p/n/only.py"
    assert sources.module("p.none") is None
    assert sources.module("none.m") is None


def test_an_installed_package_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's own path is asked; the package's code does not run."""
    (tmp_path / "found_not_run").mkdir()
    (tmp_path / "found_not_run/__init__.py").write_text("raise SystemExit")
    (tmp_path / "only_a_folder").mkdir()
    (tmp_path / "only_a_module.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    sources = Sources()
    assert sources.package("found_not_run") == tmp_path / "found_not_run"
    assert "found_not_run" not in sys.modules
    assert sources.package("only_a_folder") is None
    assert sources.package("only_a_module") is None
    assert sources.package("not_there_at_all") is None


@pytest.mark.parametrize("module", [types.ModuleType("stub"), None])
def test_a_stub_in_place_of_a_package_is_not_found(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests put modules without a spec, or None, where vLLM is not wanted."""
    monkeypatch.setitem(sys.modules, "stub", module)
    assert Sources().package("stub") is None


def test_a_finder_that_raises_is_no_reason_to_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some other package's finder may fail in any way: then the package is not found."""

    class Broken:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            raise LookupError(name)

    monkeypatch.setattr(sys, "meta_path", [Broken()])
    assert Sources().package("some_package") is None


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("__version__ = version = '0.20.2'\n__version_tuple__ = version_tuple = (0, 20, 2)\n", "0.20.2"),
        ("__version__: str\nversion: str\n__version__ = version = '0.30.1.dev0+g1.cpu'\n", "0.30.1.dev0+g1.cpu"),
        ('__version__ = "1.0"\n', "1.0"),
        ("version: str = '1.0'\n", "1.0"),
        ("# version = '9'\n__version__ = '1.0'\n", "1.0"),
        ("\ufeff__version__ = '1.0'\n", "1.0"),
        ("__version__ = ''\n", ""),
        ("my_version = '1.0'\n", None),
        ("from x import version\n", None),
        ("", None),
        (None, None),
    ],
)
def test_the_version(tmp_path: Path, text: str | None, version: str | None) -> None:
    """Read from ``_version.py`` as text, whichever tool wrote it; None where it states none."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").touch()
    if text is not None:
        (tmp_path / "vllm/_version.py").write_text(text, "utf-8")
    assert Sources(tmp_path).version == version


def test_a_version_file_that_is_not_text_has_none(tmp_path: Path) -> None:
    """Broken bytes are no version, and no error."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").touch()
    (tmp_path / "vllm/_version.py").write_bytes(b"\xff\xfe\x00")
    assert Sources(tmp_path).version is None
    assert Sources(tmp_path / "vllm").version is None, "nor where there is no vLLM"


@pytest.mark.parametrize(
    ("folders", "version"),
    [
        (["my_package-1.2.dist-info"], "1.2"),
        (["My.Package-1.2.dist-info"], "1.2"),
        (["my-package-1.2+cu1.dist-info", "my_package_s3-1.3.dist-info", "package-1.4.dist-info"], "1.2+cu1"),
        (["my_package_s3-1.3.dist-info"], None),
        (["my_package-1.2.dist-info", "my_package-1.3.dist-info"], None),
        ([], None),
    ],
)
def test_the_version_of_another_package(tmp_path: Path, folders: list[str], version: str | None) -> None:
    """That of the ``.dist-info`` beside it, however its name is spelt; none where there is none, or more than one."""
    for name in ("my_package", *folders):
        (tmp_path / name).mkdir()
    assert Sources(tmp_path).version_of("my_package") is None, "there is only a folder of that name"
    (tmp_path / "my_package/__init__.py").touch()
    assert Sources(tmp_path).version_of("my_package") == version


@pytest.mark.parametrize("name", ["a", "a.b", "a:f", "a:A.f", "a.b:f", "a.b.c:A.f"])
def test_the_package_of_a_name(name: str) -> None:
    """The first part of a module's or a function's name."""
    assert package_of(name) == "a"


# The lock.


def test_the_lock_survives_being_written_and_read() -> None:
    """Every line of the file is one fingerprint, so that its diff can be read."""
    known = {"vllm.b:f": {"aa": ["1.0"], ABSENT: ["1.1"]}, "vllm.a:f": {"bb": ["1.0", "1.1"]}, "s.a:f": {"aa": ["2.0"]}}
    text = Lock.dump(["1.0", "1.1"], known, {"s": ["2.0", "2.1"]})
    lock = Lock(text)
    assert lock.releases == ("1.0", "1.1")
    assert lock.packages == {"vllm": ("1.0", "1.1"), "s": ("2.0", "2.1")}
    assert list(lock.targets) == ["s.a:f", "vllm.a:f", "vllm.b:f"]
    assert lock.releases_of("vllm.b:f", "aa") == ("1.0",)
    assert lock.releases_of("vllm.a:f", "bb") == ("1.0", "1.1")
    assert lock.releases_of("s.a:f", "aa") == ("2.0",)
    assert lock.releases_of("vllm.b:f", "zz") == lock.releases_of("vllm.c:f", "aa") == ()
    assert [line for line in text.splitlines() if "1.0 1.1" in line and "bb" in line]
    assert '  "s": "2.0 2.1"' in text.splitlines()


GOOD = Lock.dump(["1.0"], {"vllm:f": {"aa": ["1.0"]}, "s:f": {"aa": ["2.0"]}}, {"s": ["2.0"]})


@pytest.mark.parametrize("length", range(0, len(GOOD) - 2, 7))
def test_a_lock_that_is_cut_short(length: int) -> None:
    """Wherever the file ends too early, one error says what to do."""
    with pytest.raises(LockError, match=r"upstream\.lock is damaged .*install vllm-hotfix again"):
        Lock(GOOD[:length])


@pytest.mark.parametrize(
    "text",
    [
        "null",
        "[]",
        "{}",
        "1",
        '"format"',
        '{"format": 1}',
        '{"format": 1, "releases": "1.0"}',
        '{"format": 1, "releases": "1.0", "targets": {}}',
        '{"format": 1, "releases": "1.0", "packages": {}}',
        '{"format": 1, "releases": ["1.0"], "packages": {}, "targets": {}}',
        '{"format": 1, "releases": "", "packages": {}, "targets": {}}',
        '{"format": 1, "releases": "1.0 one", "packages": {}, "targets": {}}',
        '{"format": 1, "releases": "1.0", "packages": {}, "targets": []}',
        '{"format": 1, "releases": "1.0", "packages": {}, "targets": {"vllm:f": "aa"}}',
        '{"format": 1, "releases": "1.0", "packages": {}, "targets": {"vllm:f": {"aa": ["1.0"]}}}',
        '{"format": 1, "releases": "1.0", "packages": {}, "targets": {"vllm:f": {"aa": "1.1"}}}',
        '{"format": 1, "releases": "1.0", "packages": "s", "targets": {}}',
        '{"format": 1, "releases": "1.0", "packages": ["s"], "targets": {}}',
        GOOD.replace('"s": "2.0"', '"s": ["2.0"]'),
        GOOD.replace('"s": "2.0"', '"s": ""'),
        GOOD.replace('"s": "2.0"', '"s": "2.0 two"'),
        GOOD.replace('"s": "2.0"', '"s": "1.0"'),
        GOOD.replace('"s": "2.0"', '"other": "2.0"'),
        GOOD.replace('"aa": "2.0"', '"aa": "1.0"'),
        GOOD.replace('"aa": "1.0"', '"aa": "2.0"'),
        GOOD.replace('"aa"', '"a\x00'),
        "[" * 100_000,
    ],
)
def test_a_damaged_lock(text: str) -> None:
    """Whatever is in the file, the error is this one, and nothing later trips over it."""
    assert text != GOOD
    with pytest.raises(LockError, match=r"upstream\.lock is damaged .*install vllm-hotfix again"):
        Lock(text)


@pytest.mark.parametrize("form", ["2", "null", '"1"'])
def test_a_lock_of_another_format(form: str) -> None:
    """A file of a later version is named as such."""
    with pytest.raises(LockError, match=r"upstream\.lock has format .*, this version reads 1"):
        Lock(GOOD.replace('"format": 1', f'"format": {form}'))


def test_the_shipped_lock_can_be_loaded() -> None:
    """It is there, it is readable, and the releases of each package are in order."""
    from packaging.version import Version

    lock = Lock.load()
    for releases in lock.packages.values():
        assert list(releases) == sorted(releases, key=Version)
    assert len(lock.releases) >= 19
    assert {"0.15.7", "0.16.1", "0.17.1"} <= {*lock.packages["runai_model_streamer"]}


@pytest.mark.parametrize("data", [None, b"\xff\xfe", b"{}", b""])
def test_a_lock_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data: bytes | None) -> None:
    """Missing, not text, or damaged: a LockError."""
    if data is not None:
        (tmp_path / "upstream.lock").write_bytes(data)
    monkeypatch.setattr(_upstream, "__file__", str(tmp_path / "_upstream.py"))
    with pytest.raises(LockError, match=r"upstream\.lock .*install vllm-hotfix again"):
        Lock.load()


def test_a_lock_that_may_not_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder in its place stands for all that the system can refuse."""
    (tmp_path / "upstream.lock").mkdir()
    monkeypatch.setattr(_upstream, "__file__", str(tmp_path / "_upstream.py"))
    with pytest.raises(LockError, match="cannot be read"):
        Lock.load()


def test_the_lock_is_found_in_a_zip_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package in an archive has no file to open, so its loader is asked."""
    import zipfile
    import zipimport

    archive = tmp_path / "package.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("vllm_hotfix/__init__.py", "")
        file.writestr("vllm_hotfix/upstream.lock", GOOD)
    package = sys.modules["vllm_hotfix"]
    spec = importlib.machinery.ModuleSpec("vllm_hotfix", zipimport.zipimporter(str(archive)))
    monkeypatch.setattr(package, "__spec__", spec)
    monkeypatch.setattr(_upstream, "__file__", str(archive / "vllm_hotfix/_upstream.py"))
    assert Lock.load().releases == ("1.0",)


def test_the_module_reads_like_the_function_it_fingerprints() -> None:
    """The fingerprint of a live function's source is that of the function in its file."""
    source = dedent(inspect.getsource(_upstream.fingerprint))
    text = Path(_upstream.__file__).read_text("utf-8")
    assert fingerprint(source, "fingerprint") == fingerprint(text, "fingerprint")
