"""Byte ranges of files, read by the streamer's C library into staging blocks.

While the caller takes the ranges of one block the next is being read, into memory whose copies are done. Blocks are
small to begin with, which makes them quick to pin. If reading one takes longer than pinning a larger one does, they
grow, up to half of the bound: storage that is slow wants more to be asked for at once.
"""

from __future__ import annotations

import importlib
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from ._staging import Block, Staging

_SUCCESS = 0


class Range(NamedTuple):
    """Bytes of a file: ``item`` is what the caller knows them by."""

    item: Any
    path: str
    offset: int
    size: int

    @property
    def end(self) -> int:
        return self.offset + self.size


class Place(NamedTuple):
    """Where in the staging memory a range is read to."""

    range: Range
    block: Block
    start: int

    @property
    def address(self) -> int:
        return self.block.address + self.start

    @property
    def bytes(self) -> torch.Tensor:
        """The range as a uint8 tensor of shape ``(size,)`` on the host."""
        return self.block.bytes[self.start : self.start + self.range.size]


class Reader:
    """Reads ranges through an opened ``FileStreamer``.

    Args:
        streamer: the streamer's ``FileStreamer``, whose C library no one else asks meanwhile.
        staging: with one block, of the size of the largest range at least.
    """

    def __init__(self, streamer: Any, staging: Staging) -> None:
        self._staging = staging
        self._library = _library(streamer)
        self._free: deque[Block] = deque(staging.blocks)

    def read(self, ranges: Iterable[Range]) -> Iterator[Place]:
        """Yield where each range has been read to, in their order.

        A place is valid until the next is asked for, or, if events for copies out of it were added to
        ``block.copies`` by then, until these have passed.

        Raises:
            ValueError: the C library reports an error, or a range is larger than a block.
        """
        waiting = deque(ranges)
        left = sum(one.size for one in waiting)
        align = self._library.alignment([one.path for one in waiting])
        places = self._submit(waiting, align)
        if waiting:  # the second block is pinned while the first is being read
            self._free.extend(self._staging.second(left))
        while places:
            seconds = self._receive(len(places))
            left -= sum(place.range.size for place in places)
            following = self._submit(waiting, align)
            yield from places
            block = places[0].block
            if waiting:
                block = self._staging.enlarge(block, seconds, left)
            self._free.append(block)
            places = following or self._submit(waiting, align)
        if waiting:
            raise ValueError(f"a range of {waiting[0].size} bytes is larger than the staging memory")

    def _submit(self, waiting: deque[Range], align: int) -> list[Place]:
        """Ask for as many of the waiting ranges as a free block takes."""
        places: list[Place] = []
        if not waiting or not self._free:
            return places
        block = self._free.popleft()
        self._staging.wait(block)
        cursor = 0
        while waiting:
            one = waiting[0]
            # Direct reads want the address and the file's offset to be congruent.
            pad = (one.offset - block.address - cursor) % align
            start = cursor + pad if cursor + pad + one.size <= block.size else cursor
            if start + one.size > block.size:
                break
            places.append(Place(waiting.popleft(), block, start))
            cursor = start + one.size
        if places:
            self._library.request(places)
        return places

    def _receive(self, number: int) -> float:
        begin = time.perf_counter()
        for _ in range(number):
            self._library.response()
        return time.perf_counter() - begin


class _Library:
    """The C library of streamers 0.15.7 and 0.16.1.

    One submission at a time. All of it is written to the first destination, file after file: the others are ignored.
    """

    def __init__(self, streamer: Any, functions: Any) -> None:
        self._streamer, self._functions = streamer, functions

    def alignment(self, paths: list[str]) -> int:
        return 1  # without gaps

    def request(self, places: list[Place]) -> None:
        runs: list[list[Place]] = []
        for place in places:
            before = runs[-1][-1].range if runs else None
            if before is not None and before.path == place.range.path and before.end == place.range.offset:
                runs[-1].append(place)
            else:
                runs.append([place])
        sizes = [[place.range.size for place in run] for run in runs]
        begin = places[0].start
        buffers = []
        for size in map(sum, sizes):
            buffers.append(places[0].block.buffer[begin : begin + size])
            begin += size
        self._functions.runai_request(
            self._streamer.streamer,
            [self._streamer.handle_object_store(run[0].range.path, None) for run in runs],
            [run[0].range.offset for run in runs],
            [sum(run) for run in sizes],
            buffers,
            sizes,
            self._streamer.s3_credentials,
        )

    def response(self) -> None:
        if self._functions.runai_response(self._streamer.streamer) is None:
            raise ValueError("the Run:ai streamer ended before every range was read")


class _RangesLibrary(_Library):
    """The C library of streamer 0.17.1: any ranges, each with its own destination."""

    def alignment(self, paths: list[str]) -> int:
        local = list(dict.fromkeys(path for path in paths if "://" not in path))
        if not local:
            return 4096
        return int(self._functions.runai_probe_direct_block_size(self._streamer.streamer, local))

    def request(self, places: list[Place]) -> None:
        streamer = self._streamer.streamer
        paths: list[str] = []
        counts: list[int] = []
        for place in places:
            if not paths or paths[-1] != place.range.path:
                paths.append(place.range.path)
                counts.append(0)
            counts[-1] += 1
        self._functions.runai_request(
            streamer,
            [self._streamer.handle_object_store(path, streamer, None) for path in paths],
            counts,
            [place.range.offset for place in places],
            [place.range.size for place in places],
            [place.address for place in places],
        )

    def response(self) -> None:
        response = self._functions.runai_response(self._streamer.streamer)
        if response is None:
            raise ValueError("the Run:ai streamer ended before every range was read")
        if response[0] != _SUCCESS:
            reason = self._functions.runai_response_str(response[0])
            raise ValueError(f"Could not receive response from libstreamer due to: {reason}")


def _library(streamer: Any) -> _Library:
    functions = importlib.import_module("runai_model_streamer.libstreamer.libstreamer")
    kind = _RangesLibrary if hasattr(functions, "runai_probe_direct_block_size") else _Library
    return kind(streamer, functions)
