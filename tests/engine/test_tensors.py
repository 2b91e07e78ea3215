"""The walk over a model's tensors and their digests, on real tensors."""

from __future__ import annotations

import collections
import functools
import json
import random
import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from vllm_hotfix import _tensors
from vllm_hotfix._drill.worker import Extension, _roots

DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.uint16, torch.uint32),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2),
]


def made(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """A tensor of any dtype with random bytes that are numbers in each."""
    tensor = torch.empty(shape, dtype=dtype)
    data = torch.randint(0, 2, (*tensor.shape, tensor.element_size()), generator=torch.Generator().manual_seed(seed))
    return data.to(torch.uint8).reshape(-1).view(dtype).reshape(shape)


def digest(tensor: Tensor) -> str:
    """The digest of one tensor."""
    return _tensors.digests([("", tensor)])[""][0]


@dataclass
class Config:
    """A helper object with a tensor."""

    scale: Tensor


class Slotted:
    """A helper object without a dictionary."""

    __slots__ = ("never", "value")

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Word:
    """A helper object whose slots are one word, and a private one."""

    __slots__ = "word"


class Private(Word):
    """The same with a private slot."""

    __slots__ = ("__hidden",)

    def __init__(self, value: Tensor, word: Tensor) -> None:
        self.__hidden = value
        self.word = word


def with_default(value: Tensor = torch.ones(1), *, other: Tensor = torch.ones(1)) -> Tensor:  # noqa: B008
    """A function that holds tensors."""
    return value + other


class Layer(nn.Module):
    """A layer that holds tensors in every way that vLLM's do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("buffer", torch.ones(2), persistent=False)
        self.plain = torch.ones(1)
        self.listed: Any = [torch.ones(1), {"key": (torch.ones(1),)}]
        self.config = Config(torch.ones(1))
        self.slotted = Slotted(torch.ones(1))
        self.partial = functools.partial(torch.add, torch.ones(1), other=torch.ones(1))
        held = torch.ones(1)
        self.closure = lambda: held
        self.linear.weight.extra = torch.ones(1)
        self.queue = collections.deque([torch.ones(1)])
        self.space = types.SimpleNamespace(value=torch.ones(1))
        self.keys = {1: torch.ones(1), "1": torch.ones(1)}
        self.slots = Private(torch.ones(1), torch.ones(1))
        self.function = functools.partial(with_default)
        self.bound = Config(torch.ones(1)).__eq__
        self.loop = self.listed
        self.up: Any = [self]


PATHS = {
    *("buffer", "plain", "listed[0]", "listed[1][key][0]", "config.scale", "slotted.value", "partial.args[0]"),
    *("queue[0]", "space.value", "keys[1]", "keys['1']", "slots._Private__hidden", "slots.word", "bound.self.scale"),
    *("function.func.defaults[0]", "function.func.keywords[other]"),
    *("partial.keywords[other]", "closure.held", "linear.weight", "linear.weight.extra", "linear.bias"),
}


def test_everything_that_a_layer_holds_is_found() -> None:
    """Once each, by the module's own path, also in helper objects, containers, closures and attributes of tensors."""
    model = nn.ModuleDict({"a": Layer(), "b": Layer()})
    found = [path for path, _ in _tensors.walk([("", model)])]
    # The function is one for both.
    expected = {f"{name}.{path}" for name in "ab" for path in PATHS}
    expected -= {f"b.function.func.{name}" for name in ("defaults[0]", "keywords[other]")}
    assert sorted(found) == sorted(expected)


def test_a_module_that_another_refers_to_has_its_own_path() -> None:
    """An attribute outside the tree of modules, as an experts' object has its layer, does not rename it."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model[0].method = Config(model[1])  # type: ignore[arg-type]
    assert {path for path, _ in _tensors.walk([("", model)])} == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_a_shared_module_belongs_to_the_first_root() -> None:
    """A draft model that shares the embedding does not take it away from the model."""
    shared = nn.Embedding(2, 2)
    roots = [("", nn.Sequential(shared)), ("draft", nn.Sequential(shared, nn.Linear(1, 1)))]
    assert {path for path, _ in _tensors.walk(roots)} == {"0.weight", "draft.1.weight", "draft.1.bias"}


def test_the_engines_objects_are_not_entered() -> None:
    """Configuration and streams hold no weights, and lead everywhere."""
    kind = type("Config", (), {"__module__": "vllm.config.model"})
    layer = nn.Linear(1, 1)
    layer.config = kind()
    layer.config.tensor = torch.ones(1)
    assert {path for path, _ in _tensors.walk([("", layer)])} == {"weight", "bias"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (5, 7), (2, 3, 9)], ids=str)
def test_a_digest_is_of_the_values(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Equal values have one digest wherever they are; one bit that differs, at any place, gives another."""
    tensor = made(dtype, *shape)
    before = digest(tensor)
    assert digest(tensor.clone()) == before
    data = tensor.reshape(-1).view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)
    for place in {0, data.numel() // 2, data.numel() - 1}:
        data[place] ^= 1
        assert digest(tensor) != before
        data[place] ^= 1
    assert digest(tensor) == before


def test_a_digest_sees_signs_that_change_places() -> None:
    """Of float32 numbers, where the upper bits of the sum alone can tell."""
    numbers = torch.ones(10_000)
    seen = set()
    for place in range(0, 10_000, 50):
        numbers[place] = -1
        seen.add(digest(numbers))
        numbers[place] = 1
    assert len(seen) == 200


def test_wrappers_of_other_tensors_are_entered() -> None:
    """What a subclass consists of is found; itself it is no plain tensor, nor is a sparse one or one to come."""
    two = TwoTensor(torch.ones(2), torch.zeros(2))
    layer = nn.Module()
    layer.two = two
    found = dict(_tensors.walk([("", layer)]))
    assert {"two", "two.a", "two.b"} <= found.keys()
    assert [_tensors.is_plain(found[name]) for name in ("two", "two.a", "two.b")] == [False, True, True]
    assert not _tensors.is_plain(torch.ones(2).to_sparse())
    assert not _tensors.is_plain(nn.parameter.UninitializedParameter())


def test_a_draft_model_is_looked_at() -> None:
    """Where either model runner has it, also in a wrapper that captures graphs."""
    draft = nn.Linear(1, 1)
    kind = type("Graphs", (), {"unwrap": lambda self: draft})
    for runner in (
        types.SimpleNamespace(drafter=types.SimpleNamespace(model=draft)),
        types.SimpleNamespace(drafter=types.SimpleNamespace(model=kind())),
        types.SimpleNamespace(drafter=None, speculator=types.SimpleNamespace(model=draft)),
        types.SimpleNamespace(get_draft_model=lambda: draft),
    ):
        runner.get_model = lambda: nn.Linear(1, 1)
        worker = types.SimpleNamespace(model_runner=runner)
        assert {path for path, _ in _tensors.walk(_roots(worker))} == {"weight", "bias", "draft.weight", "draft.bias"}
    runner = types.SimpleNamespace(get_draft_model=lambda: None, get_model=lambda: nn.Linear(1, 1))
    assert [name for name, _ in _roots(types.SimpleNamespace(model_runner=runner))] == [""]


def test_a_worker_tells_its_tensors_and_its_scratch() -> None:
    """The drill's part of a worker, without vLLM: what is compared, what is left out and why, what is poisoned."""
    model = nn.Linear(2, 2)
    model.register_buffer("saved", torch.ones(2))
    model.kv_cache = [torch.ones(3)]
    model.mine = torch.ones(2)
    model.sparse = torch.ones(2).to_sparse()
    worker: Any = Extension()
    worker.model_runner = types.SimpleNamespace(get_model=lambda: model, device=torch.device("cpu"))
    found = json.loads(worker.hotfix_digests(["mine$"]))
    assert found["tensors"].keys() == {"weight", "bias", "saved"}
    assert found["scratch"].keys() == {"kv_cache[0]", "mine", "sparse"}
    assert found["scratch"]["mine"] == "named by --scratch"
    assert worker.hotfix_poison() == 3  # weight, bias, mine: vLLM itself saves buffers
    assert json.loads(worker.hotfix_describe(["weight", "saved"])) == {"weight": "NaN", "saved": "other values"}
    assert model.kv_cache[0].sum() == 3


def test_a_digest_is_of_the_order_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two numbers that change places, within a chunk or between chunks, are seen."""
    monkeypatch.setattr(_tensors, "_CHUNK", 16)
    numbers = torch.arange(100, dtype=torch.int32)
    before = digest(numbers)
    for one, other in ((0, 1), (3, 19), (0, 96), (16, 32)):
        changed = numbers.clone()
        changed[[one, other]] = numbers[[other, one]]
        assert digest(changed) != before


@pytest.mark.parametrize("seed", range(20))
def test_differences_are_seen_in_large_tensors(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any few bytes that change, in a tensor of several chunks and a rest that does not fill a number."""
    monkeypatch.setattr(_tensors, "_CHUNK", 1000)
    chance = random.Random(seed)
    data = torch.randint(0, 256, (10_003,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    changed = data.clone()
    for place in chance.sample(range(len(data)), chance.randrange(1, 5)):
        changed[place] += chance.randrange(1, 256)
    assert digest(changed) != digest(data)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[1:, 1:],
        lambda t: t[:, ::2],
        lambda t: t[:1].expand(4, -1),
        lambda t: t.reshape(-1)[3:8],
        lambda t: t.unsqueeze(1),
    ],
)
def test_views_have_the_digest_of_their_values(view: Any) -> None:
    """Transposed, cut, spread, misaligned: what is not in the view has no part in it."""
    base = torch.arange(48, dtype=torch.int16).reshape(6, 8)
    one, other = view(base), view(base.clone())
    assert digest(one) == digest(other)
    with torch.no_grad():
        other[(0,) * other.dim()] += 1
    assert digest(one) != digest(other)


def test_layouts_are_told() -> None:
    """Shape, dtype, device and an unusual stride; a meta tensor has no address."""
    found = _tensors.digests(
        [
            ("a", torch.zeros(2, 3)),
            ("b", torch.zeros(2, 3).t()),
            ("c", torch.tensor(1)),
            ("d", torch.zeros(2, device="meta")),
        ]
    )
    layouts = {path: layout for path, (_, _, layout) in found.items()}
    assert layouts == {
        "a": "2x3 float32 on cpu",
        "b": "3x2 float32 on cpu, stride (1, 3)",
        "c": "scalar int64 on cpu",
        "d": "2 float32 on meta",
    }
    assert found["d"][1] == 0 and found["a"][1] != 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (5, 7)], ids=str)
def test_poison_changes_every_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Whatever the dtype, also where all was zero; and what is there then has a name."""
    for tensor in (made(dtype, *shape), torch.zeros(shape, dtype=torch.uint8).view(torch.uint8)):
        before = digest(tensor)
        assert _tensors.poison([("", tensor)]) == 1
        assert digest(tensor) != before


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.is_floating_point or d.is_complex], ids=str)
def test_what_is_seen_of_floats(dtype: torch.dtype) -> None:
    """Zeros, NaN after poison, and anything else; a 4-bit float has no NaN."""
    tensor = made(dtype, 5, 3)
    assert _tensors.describe(tensor) == "other values"
    tensor.view(torch.uint8).zero_()
    assert _tensors.describe(tensor) == "zeros"
    _tensors.poison([("", tensor)])
    assert _tensors.describe(tensor) == ("other values" if dtype is torch.float4_e2m1fn_x2 else "NaN")


def test_poison_of_integers_stays_within_bounds() -> None:
    """As indices they lead to the first or second element."""
    for values, expected in (([3, 9, -1], [0, 0, 0]), ([0, 0, 0], [1, 1, 1])):
        tensor = torch.tensor(values)
        _tensors.poison([("", tensor)])
        assert tensor.tolist() == expected


def test_poison_of_what_overlaps() -> None:
    """A tensor whose elements are one place in memory is poisoned, an alias is counted once, nothing else is left."""
    base = torch.ones(1)
    with torch.inference_mode():
        kept = torch.ones(2)
    tensors = [("a", base.expand(4)), ("b", base.expand(4)), ("c", torch.ones(2, device="meta")), ("d", torch.ones(0))]
    assert _tensors.poison(tensors) == 1
    assert base.isnan().all()
    with torch.inference_mode():
        assert _tensors.poison([("", kept)]) == 1
