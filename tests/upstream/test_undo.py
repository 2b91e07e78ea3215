"""Undoing, on a release's real functions: in any order of activation, under other libraries' wrappers, amid calls."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import frame
import pytest
import release_names
import vllm.envs
import wrapt
from release_names import NEEDED, PATCHES, RELEASE, TARGETS, WRAPPED, snapshot

import _vllm_hotfix
from vllm_hotfix import _record
from vllm_hotfix._hooks import Activation
from vllm_hotfix._proxy import Proxy
from vllm_hotfix._record import RECORD

GATES = {patch.name: patch.env for patch in NEEDED}
UNIQUE = list(dict.fromkeys(TARGETS))


@pytest.fixture(scope="module", autouse=True)
def modules() -> None:
    """Import what an engine's worker imports, before any activation."""
    release_names.import_worker_modules()


@pytest.fixture(scope="module", autouse=True)
def parse_once() -> Iterator[None]:
    """Parse a text once for all activations."""
    with release_names.parsed_once():
        yield


def place(name: str) -> tuple[Any, str]:
    """Return what holds a target, and the attribute's name."""
    module, _, qualname = name.partition(":")
    *path, attribute = qualname.split(".")
    owner: Any = sys.modules[module]
    for part in path:
        owner = vars(owner)[part]
    return owner, attribute


def standing(name: str) -> Any:
    """Return what stands in a target's place, as it is stored."""
    owner, attribute = place(name)
    return vars(owner)[attribute]


def different(before: dict[Any, Any]) -> list[str]:
    """Return the names that are not the objects that they were."""
    after = snapshot()
    return [str(key) for key in before | after if before.get(key) is not after.get(key)]


def left_over(folder: Path, handlers: list[Any]) -> list[str]:
    """Return what is left of the package in this process beside its modules."""
    finder = _vllm_hotfix.FINDER
    found = ["meta_path"] * (finder in sys.meta_path) + [*finder.before, *finder.after, *map(str, handlers)]
    found += [name for name in vllm.envs.environment_variables if name.startswith("VLLM_HOTFIX_")]
    return found + [str(path) for path in folder.rglob("*.json")] + [*RECORD.entries, *RECORD.problems]


def orders() -> list[tuple[str, ...]]:
    """Return orders of activation: rotations, both orders of each two that share a target, and seeded shuffles."""
    names = tuple(GATES)
    result = [names[turn:] + names[:turn] for turn in range(len(names))]
    for one, other in itertools.permutations(NEEDED, 2):
        if {target.name for target in one.targets} & {target.name for target in other.targets} & {*TARGETS}:
            result.append((one.name, other.name))
    generator = random.Random(RELEASE)
    result += [tuple(generator.sample(names, len(names))) for _ in range(4)]
    return list(dict.fromkeys(result))


def test_every_order_of_activation_is_undone(tmp_path: Path) -> None:
    """Gates turned on one by one, in many orders: all are active, and undone every name is the object that it was.

    So are the finder, its callbacks, vLLM's table of variables, the state file and what would remove it at exit.
    """

    def child() -> list[Any]:
        import vllm_hotfix

        release_names.look_at_vllm_alone()
        before, result = snapshot(), list[Any]()
        handlers: list[Any] = []
        _record.atexit.register = handlers.append
        _record.atexit.unregister = handlers.remove
        for order in orders():
            for name in order:
                os.environ[GATES[name]] = "1"
                vllm_hotfix.activate()
            states = {name: entry.live() for name, entry in RECORD.entries.items() if name in GATES}
            missing = [] if len(order) < len(GATES) else [n for n in UNIQUE if frame.layers(n) != WRAPPED[n]]
            written = [len(handlers), len(list(tmp_path.rglob("*.json")))]
            vllm_hotfix.deactivate()
            for name in GATES:
                os.environ.pop(GATES[name], None)
            result.append([order, states, missing, written, different(before), left_over(tmp_path, handlers)])
        return result

    results = frame.forked(tmp_path, child).ok()
    assert len(results) == len(orders()) > len(GATES) + 4
    for order, states, missing, written, changed, left in results:
        assert {state for state, _ in states.values()} == {"active"}, (order, states)
        assert {*order} <= states.keys()
        assert written == [1, 1]
        assert (missing, changed, left) == ([], [], []), order


# Others on top. Each returns what it puts in the place, and counts its calls.


def closure(found: Any, ran: list[str]) -> Any:
    """Wrap by a function that says what it wraps."""

    @functools.wraps(found)
    def other(*args: Any, **kwargs: Any) -> Any:
        ran.append("other")
        return found(*args, **kwargs)

    return other


def bare_closure(found: Any, ran: list[str]) -> Any:
    """Wrap by a function that does not say what it wraps."""

    def other(*args: Any, **kwargs: Any) -> Any:
        ran.append("other")
        return found(*args, **kwargs)

    return other


def through_wrapt(found: Any, ran: list[str]) -> Any:
    """Wrap by wrapt."""

    def other(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        ran.append("other")
        return wrapped(*args, **kwargs)

    return wrapt.FunctionWrapper(found, other)


def partial(found: Any, ran: list[str]) -> Any:
    """Wrap by a partial object of a function that is given what it calls."""

    def other(below: Any, *args: Any, **kwargs: Any) -> Any:
        ran.append("other")
        return below(*args, **kwargs)

    return functools.partial(other, found)


OTHERS = (closure, bare_closure, through_wrapt, partial)


def call(function: Any) -> None:
    """Call with arguments that stock cannot work with; what it raises does not matter, who was entered does."""
    with contextlib.suppress(Exception):
        function(object())


def marked(ran: list[str], mark: str) -> Callable[..., Any]:
    """Return what wraps a target in these tests in the place of a patch's own wrapper."""

    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        ran.append(mark)
        return wrapped(*args, **kwargs)

    return wrapper


def mark_all(ran: list[str], mark: str = "") -> None:
    """Let every patch's wrappers only note that they were entered, by a mark or by the target's name."""
    import vllm_hotfix._hooks as hooks

    def wrap_target(patch: Any, target: Any, entry: Any) -> None:
        wrapper, source = marked(ran, mark or target.name), entry.verdict.source(target.name)
        hooks.Wrap(target.name, wrapper, source, target.keep, entry.wraps)

    Activation._wrap_target = staticmethod(wrap_target)  # type: ignore[method-assign]


def under(other: Callable[..., Any], said: Callable[[], list[str]]) -> list[Any]:
    """Have every target wrapped by others on top, in turn undo, activate again, undo, and have the others go."""
    import vllm_hotfix

    ran: list[str] = []
    mark_all(ran, "patch")
    release_names.look_at_vllm_alone()
    stock = {name: standing(name) for name in UNIQUE}
    os.environ["VLLM_HOTFIX_ENABLE"] = "all"
    result = []

    def entered(name: str) -> list[str]:
        ran.clear()
        owner, attribute = place(name)
        call(getattr(owner, attribute))
        return ran.copy()

    for name in UNIQUE:
        patch = next(patch for patch in NEEDED if name in [target.name for target in patch.targets])
        os.environ["VLLM_HOTFIX_ENABLE"] = patch.name
        vllm_hotfix.activate()
        owner, attribute = place(name)
        ours = standing(name)
        count = frame.layers(name)
        # A method is read as its class gives it, which is how others find it.
        theirs = other(ours if other is through_wrapt else getattr(owner, attribute), ran)
        setattr(owner, attribute, theirs)
        row: dict[str, Any] = {"name": name, "count": count, "active": RECORD.entries[patch.name].live()[0]}
        row["on"] = entered(name)
        said()
        vllm_hotfix.deactivate()
        row["said"] = said()
        row["theirs stays"] = standing(name) is theirs
        row["off"] = entered(name)
        vllm_hotfix.activate()
        entry = RECORD.entries[patch.name]
        row["again"] = [entry.live()[0], [] if entry.state == "drifted" else entered(name), entry.reason]
        vllm_hotfix.deactivate()
        row["still theirs"] = standing(name) is theirs
        setattr(owner, attribute, ours)  # as who unwraps puts back what was found
        row["unwrapped"] = entered(name)
        vllm_hotfix.activate()
        row["anew"] = [RECORD.entries[patch.name].live()[0], entered(name)]
        vllm_hotfix.deactivate()
        row["stock"] = standing(name) is stock[name]
        result.append(row)
    return result


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: other.__name__)
def test_under_others_a_patch_steps_aside(other: Callable[..., Any], tmp_path: Path) -> None:
    """For every target: theirs stays in its place, no patch is entered any more, and one line names the function.

    Activated again the patch is at work on top, once; where they do not say what they wrap, theirs is not the known
    function and it is drift. When they unwrap, it is stock, and the next activation and its end leave the original.
    """

    def child() -> list[Any]:
        lines: list[str] = []
        _record.logger.handlers[:] = []
        _record.logger.propagate = False
        handler = _Lines(lines)
        _record.logger.addHandler(handler)
        _record.logger.setLevel("WARNING")

        def said() -> list[str]:
            copied = [line for line in lines if "steps aside" in line]
            lines.clear()
            return copied

        before = snapshot()
        return [under(other, said), different(before)]

    results, changed = frame.forked(tmp_path, child).ok()
    assert changed == []
    assert [row["name"] for row in results] == UNIQUE
    says = other in (closure, through_wrapt)
    for row in results:
        name, count = row["name"], row["count"]
        assert count >= 1, row
        assert row["active"] == "active", row
        assert row["on"] == ["other", *["patch"] * count], row
        assert row["said"] == [f"vllm-hotfix: {name} was wrapped again by others; the patch steps aside inside"] * count
        assert row["theirs stays"], row
        assert row["still theirs"], row
        assert row["off"] == ["other"], row
        state, ran, reason = row["again"]
        if says:
            assert (state, ran) == ("active", [*["patch"] * count, "other"]), row
        else:
            assert state == "drifted", row
            assert name in reason, row
        assert row["unwrapped"] == [], row
        assert row["anew"] == ["active", ["patch"] * count], row
        assert row["stock"], row


class _Lines(_record.logging.Handler):
    """Keeps what is logged."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines

    def emit(self, record: Any) -> None:
        """Keep a line."""
        self.lines.append(record.getMessage())


def test_what_others_hold_is_stock_after_undoing(tmp_path: Path) -> None:
    """For every target: a name in another module, a container, a derived class, and a bound method that one holds."""

    def child() -> list[Any]:
        import types

        import vllm_hotfix

        ran: list[str] = []
        mark_all(ran)
        stock = {name: standing(name) for name in UNIQUE}
        os.environ["VLLM_HOTFIX_ENABLE"] = "all"
        vllm_hotfix.activate()
        taken, held, derived, bound = types.ModuleType("taken"), dict[str, Any](), {}, {}
        sys.modules["taken"] = taken
        for at, name in enumerate(UNIQUE):
            owner, attribute = place(name)
            held[name] = getattr(owner, attribute)
            if isinstance(owner, type):
                derived[name] = type("Derived", (owner,), {attribute: _calling_super(owner, attribute)})
                derived[name].__abstractmethods__ = frozenset()
                own = type("Own", (owner,), {"__init__": lambda self: None})
                own.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
                bound[name] = getattr(object.__new__(own), attribute) if attribute != "__init__" else held[name]
            else:
                setattr(taken, f"name{at}", held[name])
        result = []
        for expected in (True, False):
            if not expected:
                vllm_hotfix.deactivate()
            for at, name in enumerate(UNIQUE):
                owner, attribute = place(name)
                uses = [held[name]]
                if name in derived:
                    uses.append(
                        lambda _, name=name, attribute=attribute: getattr(derived[name], attribute)(
                            object.__new__(derived[name])
                        )
                    )
                    uses.append(bound[name])
                else:
                    uses.append(getattr(taken, f"name{at}"))
                for use in uses:
                    ran.clear()
                    call(use)
                    result.append([name, expected, ran.count(name), WRAPPED[name] if expected else 0])
        identical = [
            getattr(taken, f"name{at}") is stock[name] for at, name in enumerate(UNIQUE) if name not in derived
        ]
        return [result, identical, [name for name in UNIQUE if standing(name) is not stock[name]]]

    result, identical, changed = frame.forked(tmp_path, child).ok()
    assert [row for row in result if row[2] != row[3]] == []
    assert len(result) > 4 * len(UNIQUE)
    assert all(identical)
    assert changed == []


def _calling_super(owner: type, attribute: str) -> Any:
    def method(self: Any, *args: Any) -> Any:
        return getattr(super(type(self), self), attribute)(*args)

    return method


# Amid calls.


def test_undoing_amid_calls(tmp_path: Path) -> None:
    """For every target: undone by another thread while it runs, or by its own wrapper, the call ends as it began."""

    def child() -> list[Any]:
        import vllm_hotfix
        import vllm_hotfix._hooks as hooks

        release_names.look_at_vllm_alone()
        before = snapshot()
        os.environ["VLLM_HOTFIX_ENABLE"] = "all"
        inside, go = threading.Event(), threading.Event()
        ran: list[str] = []
        by = ""

        def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            ran.append("begins")
            if by == "itself":
                vllm_hotfix.deactivate()
            elif len(ran) == 1:
                inside.set()
                assert go.wait(60)
            try:
                return wrapped(*args, **kwargs)
            finally:
                ran.append("ends")

        def wrap_target(patch: Any, target: Any, entry: Any) -> None:
            hooks.Wrap(target.name, wrapper, entry.verdict.source(target.name), target.keep, entry.wraps)

        Activation._wrap_target = staticmethod(wrap_target)  # type: ignore[method-assign]
        result = []
        for by in ("itself", "a thread"):
            for name in UNIQUE:
                os.environ["VLLM_HOTFIX_ENABLE"] = next(
                    patch.name for patch in NEEDED if name in [target.name for target in patch.targets]
                )
                vllm_hotfix.activate()
                owner, attribute = place(name)
                function = getattr(owner, attribute)
                ran.clear(), inside.clear(), go.clear()
                if by == "itself":
                    call(function)
                else:
                    thread = threading.Thread(target=call, args=(function,))
                    thread.start()
                    assert inside.wait(60)
                    vllm_hotfix.deactivate()
                    go.set()
                    thread.join(60)
                first = ran.copy()
                ran.clear()
                call(getattr(owner, attribute))
                result.append([name, first, ran.copy(), isinstance(standing(name), Proxy)])
        return [result, different(before)]

    result, changed = frame.forked(tmp_path, child).ok()
    assert len(result) == 2 * len(UNIQUE)
    for name, first, later, wrapped in result:
        assert first == ["begins", "ends"], (name, first)
        assert later == [], name
        assert not wrapped
    assert changed == []


def test_a_reload_in_another_thread_ends_as_it_began(tmp_path: Path) -> None:
    """Undone between any two steps of a real reload, with every patch on: its result is right each time."""

    def child() -> Any:
        import torch
        from vllm.model_executor.model_loader.reload import layerwise
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        import vllm_hotfix

        torch.accelerator.empty_cache = lambda: None
        before, results = snapshot(), []
        os.environ["VLLM_HOTFIX_ENABLE"] = "all"
        for step in range(4):
            vllm_hotfix.activate()
            model = torch.nn.Linear(2, 1, bias=True).requires_grad_(False)
            turns = [threading.Event() for _ in range(2)]

            def pause(at: int, step: int = step, turns: list[Any] = turns) -> None:
                if at == step:
                    turns[0].set()
                    assert turns[1].wait(60)

            def reload(model: Any = model, pause: Any = pause) -> None:
                for parameter in model.parameters():
                    parameter.weight_loader = default_weight_loader
                layerwise.record_metadata_for_reloading(model)
                pause(0)
                layerwise.initialize_layerwise_reload(model)
                pause(1)
                model.weight.weight_loader(model.weight, torch.tensor([[3.0, 4.0]]))
                pause(2)
                model.bias.weight_loader(model.bias, torch.tensor([5.0]))
                pause(3)
                layerwise.finalize_layerwise_reload(model, None)

            thread = threading.Thread(target=reload)
            thread.start()
            assert turns[0].wait(60)
            vllm_hotfix.deactivate()
            turns[1].set()
            thread.join(60)
            results.append([value for one in model.parameters() for value in one.detach().flatten().tolist()])
        return [results, different(before)]

    results, changed = frame.forked(tmp_path, child).ok()
    assert results == [[3, 4, 5]] * 4
    assert changed == []


def test_no_order_leaves_a_patch_out() -> None:
    """The orders above are made of every patch that this release needs, and of those that share a target."""
    assert {name for order in orders() for name in order} == {*GATES} <= {*PATCHES}
    assert any(len(order) == 2 for order in orders())
