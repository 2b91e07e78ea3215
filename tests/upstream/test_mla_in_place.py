"""mla_in_place on the real MLA attention of each release, beside stock vLLM, through the real layerwise reload.

`mla_layers` says what is stood in for; without CUDA, `graphs` stands for its graphs.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import graphs
import layers
import mla_layers
import pytest
import torch
from layers import Host
from packaging.version import Version
from patching import counters, hearing, state_of, switched_on
from vllm.config import VllmConfig

NAME = "mla_in_place"
RELEASE = Version(os.environ["HOTFIX_RELEASE"])
FIXED = Version("0.32") <= RELEASE
ROUNDS = 10
#: For each kind of derived weights, the first release that refreshes them in place; stock is right before where it is
#: None, for they are views of a parameter that vLLM copies.
FIXED_IN = {
    "unquantized": None,
    "of another dtype": Version("0.26"),
    "fp8": Version("0.26"),
    "aiter fp8": Version("0.32"),
    "aiter fp4": Version("0.32"),
    "replicated queries": Version("0.32"),
}
KINDS = [kind for kind in FIXED_IN if kind != "replicated queries" or Version("0.27") <= RELEASE]


def stock_fails(kind: str) -> bool:
    """Say whether this release sets tensors of this kind anew."""
    fixed_in = FIXED_IN[kind]
    return fixed_in is not None and fixed_in > RELEASE


needs_patch = pytest.mark.skipif(FIXED, reason="this release has the fix, and the patch wraps nothing")


@pytest.fixture
def engine(request: pytest.FixtureRequest, config: VllmConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """What loads and reloads a model of one MLA layer of a kind; its dtype is bfloat16."""
    own = layers.make_config(tmp_path, dtype="bfloat16")
    return mla_layers.Engine(Host(own), getattr(request, "param", "fp8"), monkeypatch)


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Apply the patch for one test and undo it afterwards; where a release has the fix, it stays out."""
    with switched_on(monkeypatch, tmp_path, NAME):
        state, reason = state_of(NAME)
        assert state == ("not-needed" if FIXED else "active"), reason
        yield


@pytest.mark.parametrize("engine", KINDS, indirect=True)
def test_captured_graphs_after_reloads(engine: mla_layers.Engine, side: str, request: pytest.FixtureRequest) -> None:
    """A graph that was captured before computes what a cold load of the new weights computes, ten times in turn.

    Bit for bit, after what the load made was discarded; all that it reads stays where it was. Stock's does not where
    this release sets the layer's derived weights anew. Without a graph both sides are right.
    """
    kind = request.node.callspec.params["engine"]
    old, new = (engine.load(seed).run() for seed in (1, 2))
    assert old.isfinite().all()
    assert new.isfinite().all()
    assert not torch.equal(old, new)
    loaded = engine.load(1)
    graph = loaded.capture()
    places = loaded.places()
    assert torch.equal(graph.replay(), old)
    for number in range(1, ROUNDS + 1):
        seed, expected = ((1, old), (2, new))[number % 2]
        loaded.sleep(graph)
        engine.reload(loaded, seed)
        assert torch.equal(loaded.run(), expected)
        right = side == "patched" or not stock_fails(kind)
        assert torch.equal(graph.replay(), expected) == right
        assert (loaded.places() == places) == right
        if side == "patched" and not FIXED:
            anew = 0 if not stock_fails(kind) else 1 if kind == "replicated queries" else len(places)
            counted = {"tensors_refreshed": anew, "tensors_in_place": len(places) - anew}
            assert counters(NAME) == {name: one * number for name, one in counted.items() if one}
