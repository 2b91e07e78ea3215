"""An interpreter that ends in the middle of a load ends as if there were none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WAYS = {"end": 0, "bar": 0, "error": 1, "exit": 3, "interrupt": -2, "cycle": 0, "tensors": 0}
"""How each interpreter ends, and its exit status."""


@pytest.fixture(scope="module")
def left(files, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what came of each."""
    folder = tmp_path_factory.mktemp("left")
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(Path(__file__).parent)])
    subprocess.run(
        [sys.executable, "-P", str(Path(__file__).with_name("leaving.py")), str(folder), files[0], *WAYS],
        env={**os.environ, "PYTHONPATH": path, "VLLM_HOTFIX_STATE_DIR": str(folder)},
        check=True,
        timeout=120,
    )
    return folder


def raised_in(text: str) -> list[str]:
    """The files that the errors of a text were raised in, one for each traceback."""
    found, file = [], None
    for line in text.splitlines():
        if line.lstrip().startswith('File "'):
            file = line.split('"')[1]
        elif file is not None and not line.startswith(" "):
            found.append(file)
            file = None
    return found


@pytest.mark.parametrize("way", WAYS)
def test_exit_in_a_load(left: Path, way: str) -> None:
    """The exit status stays, and no error of this package's is on standard error.

    The streamer, left open so late, may complain of itself, as it does under stock.
    """
    said = (left / f"{way}.err").read_text()
    assert int((left / f"{way}.code").read_text()) == WAYS[way], said
    files = raised_in(said)
    assert len(files) == said.count("Traceback"), said
    assert sum(file.endswith("leaving.py") for file in files) == (way in ("error", "interrupt")), said
    assert not [file for file in files if "vllm_hotfix" in file], said
