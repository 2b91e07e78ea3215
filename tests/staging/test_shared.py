"""Two ranks share the reading: both get every tensor, each reads into page-locked memory, and none waits in vain."""

from __future__ import annotations

import hashlib
import inspect
from typing import Any

import pytest
from checkpoint import noise, write
from runai_model_streamer import SafetensorsStreamer

LARGEST = 150_001
SETTINGS = {"EXTENT": 64 << 10, "BLOCK": 200_000, "_PROBE": 4096}
ENVIRONMENT = {
    "RUNAI_STREAMER_DIST": "1",
    "RUNAI_STREAMER_DIST_TIMEOUT": "20",
    "RUNAI_STREAMER_DIST_BUFFER_MIN_BYTESIZE": "400000",
    "GLOO_SOCKET_IFNAME": "lo",
}


@pytest.fixture
def share(ranks, files, tmp_path):
    """Let both ranks load the files, each with its own faults; what they answer."""

    def share(*faults: dict[str, Any], files: list[str] = files, limit: str | None = None, dist: str = "1",
              distributed: bool = True, **settings: int) -> list[dict[str, Any]]:  # fmt: skip
        environment = ENVIRONMENT | {"RUNAI_STREAMER_DIST": dist}
        if limit is not None:
            environment["RUNAI_STREAMER_MEMORY_LIMIT"] = limit
        return ranks.work(
            {
                "store": str(tmp_path / f"store{len(list(tmp_path.iterdir()))}"),
                "files": files,
                "environment": environment,
                "settings": SETTINGS | settings,
                "distributed": distributed,
                "ranks": faults or ({}, {}),
            }
        )

    return share


@pytest.fixture(scope="module")
def expected(contents) -> dict[str, Any]:
    """What every rank must get. The older streamers share no tensor without elements, under stock as well."""
    empties = "owned" in inspect.signature(SafetensorsStreamer.stream_files).parameters
    return {
        name: [str(one.dtype), list(one.shape), hashlib.sha256(one.bytes).hexdigest()]
        for name, one in contents.items()
        if one.bytes or empties
    }


def check(answers: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Both got everything, and left nothing."""
    for answer in answers:
        assert "error" not in answer, answer["error"]
        assert answer["tensors"] == expected
        assert answer["left"] == 0 and not answer["broken"]
        assert answer["environment"]


def warnings(answer: dict[str, Any]) -> list[str]:
    """What a rank warned of."""
    return [text for level, text in answer["lines"] if level != "INFO"]


def test_share(share, expected) -> None:
    """Every rank gets every tensor, through page-locked blocks of its own, and says so in one line."""
    answers = share()
    check(answers, expected)
    for answer in answers:
        assert answer["pinned"] >= 2 and not warnings(answer)
        assert answer["counters"]["tensors"] == len(expected)
        assert answer["counters"]["loads"] == 1 and "stock_loads" not in answer["counters"]
        assert [level for level, text in answer["lines"] if "staging memory" in text] == ["INFO"]


@pytest.mark.parametrize("block", [16_384, 100_000, 32 << 20])
def test_blocks(share, expected, block) -> None:
    """No size of block changes what arrives, also where the largest tensor needs a larger one."""
    answers = share(BLOCK=block)
    check(answers, expected)
    assert all(answer["pinned"] and not warnings(answer) for answer in answers)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_refused(share, expected, rank) -> None:
    """A rank that can page-lock nothing goes on as stock, with one warning; the other does not notice."""
    faults: list[dict[str, Any]] = [{}, {}]
    faults[rank] = {"fail": {"register": []}}
    answers = share(*faults)
    check(answers, expected)
    assert answers[rank]["pinned"] == 0 and answers[rank]["counters"] == {"stock_loads": 1}
    (warning,) = warnings(answers[rank])
    assert "no register today" in warning
    assert answers[1 - rank]["pinned"] >= 1 and not warnings(answers[1 - rank])


@pytest.mark.parametrize("rank", [0, 1])
def test_second_block_refused(share, expected, rank) -> None:
    """A rank that can page-lock one block uses that."""
    faults: list[dict[str, Any]] = [{}, {}]
    faults[rank] = {"fail": {"register": [2, 3, 4, 5, 6, 7, 8, 9]}}
    answers = share(*faults)
    check(answers, expected)
    assert answers[rank]["pinned"] == 1 and not warnings(answers[rank])


@pytest.mark.parametrize("rank", [0, 1])
def test_larger_block_refused(share, expected, rank) -> None:
    """A rank whose larger block is refused goes on with pageable memory, not as stock: the ranks have met."""
    faults: list[dict[str, Any]] = [{}, {}]
    faults[rank] = {"fail": {"register": [2, 3, 4, 5, 6, 7, 8, 9]}}
    answers = share(*faults, BLOCK=16_384)
    check(answers, expected)
    (warning,) = warnings(answers[rank])
    assert "pageable staging memory" in warning and "no register today" in warning
    assert answers[rank]["counters"]["loads"] == 1


def test_all_refused(share, expected) -> None:
    """Both ranks as stock."""
    answers = share({"fail": {"register": []}}, {"fail": {"register": []}})
    check(answers, expected)
    assert all(answer["counters"] == {"stock_loads": 1} for answer in answers)


@pytest.mark.parametrize("limit", ["-1", "0", str(2 * LARGEST), "700000"])
def test_limit(share, expected, limit) -> None:
    """The limit bounds each rank's page-locked memory; it is a node's, or a rank's, as the streamer has it."""
    answers = share(limit=limit, BLOCK=60_000)
    check(answers, expected)
    bound = {"-1": 3_000_000, "0": LARGEST}.get(limit) or max(LARGEST, int(limit))
    assert all(0 < answer["peak"] <= bound + 8192 for answer in answers)


def test_default_is_no_limit(share, expected) -> None:
    """A tensor that is larger than the default bound is no error: nobody set a limit."""
    check(share(DEFAULT_LIMIT=100_000), expected)


def test_empty_shard(share, expected, files, tmp_path) -> None:
    """A file without tensors takes nothing with it."""
    empty = str(write(tmp_path / "empty.safetensors", []))
    answers = share(files=[files[0], empty, *files[1:]])
    check(answers, expected)


def test_no_false_ring(share, expected) -> None:
    """The newer streamers report the ring of their buffers: not that of the headers, where the load has none."""
    answers = share()
    check(answers, expected)
    for answer in answers:
        assert not [line for line in answer["streamer"] if "CPU ring" in line]


def test_less_tensors_than_ranks(share, tmp_path) -> None:
    """A rank that has nothing to read gets the tensor of the other."""
    data = noise(1000, 5)
    path = str(write(tmp_path / "one.safetensors", [("a", "U8", (1000,), data)]))
    answers = share(files=[path])
    check(answers, {"a": ["torch.uint8", [1000], hashlib.sha256(data).hexdigest()]})


def test_not_shared(share, contents) -> None:
    """Where the streamer decides that each rank reads everything, each does."""
    for answer in share(dist="0"):
        assert "error" not in answer and answer["left"] == 0
        assert {name: one[2] for name, one in answer["tensors"].items()} == {
            name: hashlib.sha256(one.bytes).hexdigest() for name, one in contents.items()
        }


@pytest.mark.parametrize("refused", [(), (0,), (1,), (0, 1)])
def test_not_distributed(share, contents, refused) -> None:
    """Two ranks that each read everything: a refused one is stock's, with one warning; no one waits for the other."""
    faults: list[dict[str, Any]] = [{"fail": {"register": []}} if rank in refused else {} for rank in range(2)]
    answers = share(*faults, distributed=False)
    every = {
        name: [str(one.dtype), list(one.shape), hashlib.sha256(one.bytes).hexdigest()] for name, one in contents.items()
    }
    check(answers, every)
    for rank, answer in enumerate(answers):
        if rank in refused:
            assert answer["counters"] == {"stock_loads": 1} and len(warnings(answer)) == 1
        else:
            assert answer["counters"]["loads"] == 1 and answer["pinned"] >= 1 and not warnings(answer)


@pytest.mark.parametrize("refused", [None, 0, 1])
@pytest.mark.parametrize("left", [0, 1])
def test_not_distributed_and_left(share, contents, refused, left) -> None:
    """A rank that leaves such a load half way, refused or not, does not keep the other from its end."""
    faults: list[dict[str, Any]] = [{}, {}]
    faults[left] = {"leave": 7}
    if refused is not None:
        faults[refused] |= {"fail": {"register": []}}
    answers = share(*faults, distributed=False)
    assert [len(answer["tensors"]) for answer in answers] == ([7, len(contents)] if left == 0 else [len(contents), 7])
    for answer in answers:
        assert "error" not in answer and answer["left"] == 0 and not answer["broken"]


def test_again(share, expected) -> None:
    """The same processes load again, after all of this."""
    for _ in range(2):
        check(share(), expected)
