"""What the drill's digests say: which tensors a reload left different, how, and which patch addresses it."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, NamedTuple

from .._catalog import CATALOG

#: Differences that are listed; the JSON has all.
_LISTED: Final = 40
#: A layout in host memory, whose addresses no graph captures.
_HOST: Final = re.compile(r" on cpu\b")
_DIGITS: Final = re.compile(r"(?<![\w])\d+(?![\w])")


class Digest(NamedTuple):
    """A tensor as `_tensors.digests` gives it: hash of its values, address, and layout in words."""

    digest: str
    address: int
    layout: str


Digests = Mapping[str, Digest]


@dataclass
class Difference:
    """A tensor that is not what it was after the fresh load.

    Attributes:
        path: the tensor's path in the model.
        rank: of the worker that holds it.
        how: what differs, in words.
        values: whether more differs than the address.
        patch: what addresses it, with its state here.
    """

    path: str
    rank: int
    how: str
    values: bool
    patch: str = ""


@dataclass
class Round:
    """One round: sleep, wake, reload, digest, generate.

    Attributes:
        number: from 1.
        tensors: compared, in all workers.
        differences: of all workers.
        tokens: ``equal``, ``differ``, or ``vary`` where two runs of one state differ too.
        reload: seconds that ``reload_weights`` took.
        digest: seconds that the digests took, in the slowest worker.
        memory: bytes that are used after the round, of each worker's device.
        error: why the reload failed; empty if it did not.
    """

    number: int
    tensors: int = 0
    differences: list[Difference] = field(default_factory=list)
    tokens: str = ""
    reload: float = 0.0
    digest: float = 0.0
    memory: list[int] = field(default_factory=list)
    error: str = ""

    @property
    def differing(self) -> int:
        """The number of tensors of which more differs than the address."""
        return sum(one.values for one in self.differences)

    @property
    def moved(self) -> int:
        """The number of tensors that are equal at another address."""
        return len(self.differences) - self.differing

    def identical(self, *, graphs: bool) -> bool:
        """Whether all is as after the fresh load; a tensor may move where no graph has captured its address."""
        wrong = self.differing or (graphs and self.moved)
        return not (self.error or wrong or self.tokens == "differ")


def compare(fresh: Digests, before: Digests, after: Digests, lazy: Collection[str] = ()) -> dict[str, tuple[str, bool]]:
    """Compare a worker's tensors with those of the fresh load.

    Args:
        fresh: after the fresh load.
        before: right before the reload, after what was discarded or poisoned.
        after: after the reload.
        lazy: paths of tensors that a forward pass has made: the next one makes them again if they are gone.

    Returns:
        For each path that differs: in words how, and whether more differs than the address.
    """
    found = {}
    for path in {**fresh, **after}:
        was, now = fresh.get(path), after.get(path)
        if was is None:
            found[path] = "was not there after the fresh load", True
        elif now is None:
            if path not in lazy:
                found[path] = "is gone", True
        elif was.layout != now.layout:
            found[path] = f"is {now.layout}, was {was.layout}", True
        elif was.digest != now.digest:
            # At the same address, and as it was before: nobody has written to it.
            stale = before.get(path) == now
            found[path] = "stale: the reload has not written it" if stale else "has other values", True
        elif was.address != now.address and not _HOST.search(now.layout):
            found[path] = "moved, but equal", False
    return found


def written_by_a_pass(first: Digests, second: Digests) -> list[str]:
    """Paths of tensors that a forward pass has changed: a fresh load cannot tell what is right there."""
    return [path for path, one in second.items() if path in first and first[path].digest != one.digest]


def addressed_by(symptom: str, states: Mapping[str, str]) -> str:
    """Name the patch that addresses a symptom: the path of a tensor, or an error.

    Args:
        symptom: the text in which each patch's ``symptoms`` are looked for.
        states: the state of each patch in the worker.
    """
    found = [patch for patch in CATALOG if any(re.search(one, symptom) for one in patch.symptoms)]
    if not found:
        return "no patch"
    words = []
    for patch in found:
        state = states.get(patch.name, "off")
        words.append(f"{patch.name} ({f'off: {patch.env}=1' if state == 'off' else state})")
    return ", ".join(words)


def how_it_ended(status: int) -> str:
    """Say how a process ended, by its exit status, which is negative for a signal."""
    return f"by signal {signal.Signals(-status).name}" if status < 0 else f"with status {status}"


def table(rounds: Iterable[Round]) -> str:
    """Show rounds, one in a line."""
    rows = [("round", "reload s", "digest s", "tensors", "differ", "moved", "tokens", "memory MiB")]
    for one in rounds:
        memory = " ".join(f"{used / 2**20:,.0f}" for used in one.memory)
        numbers = (f"{one.reload:.2f}", f"{one.digest:.2f}", f"{one.tensors:,}", f"{one.differing:,}", f"{one.moved:,}")
        row = (*numbers, one.tokens, memory) if not one.error else (*numbers[:1], "", "", "", "", "", "")
        rows.append((str(one.number), *row))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(word.rjust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"round {one.number}: the reload failed: {one.error}" for one in rounds if one.error]
    return "\n".join(lines)


def differences(rounds: Sequence[Round]) -> list[str]:
    """List what differs: tensors that differ alike, in layers, experts, workers and rounds, are one line."""
    alike: dict[tuple[str, str, str], list[tuple[int, Difference]]] = {}
    for one in rounds:
        for each in one.differences:
            key = (_DIGITS.sub("*", each.path), each.how, each.patch)
            alike.setdefault(key, []).append((one.number, each))
    lines = []
    for (_, how, patch), some in alike.items():
        paths = list(dict.fromkeys(each.path for _, each in some))
        numbers = sorted({number for number, _ in some})
        when = f"round {numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} rounds"
        more = f" and {len(paths) - 1} more like it" if len(paths) > 1 else ""
        lines.append(f"{paths[0]}{more}\n    {how} ({when}); {patch}")
    if len(lines) > _LISTED:
        lines[_LISTED:] = [f"... and {len(lines) - _LISTED} more kinds; --json has them all"]
    return lines


def as_json(rounds: Iterable[Round]) -> list[dict[str, Any]]:
    """The rounds with all that was found, for ``--json``."""
    return [{**asdict(one), "differing": one.differing, "moved": one.moved} for one in rounds]
