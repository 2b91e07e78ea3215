"""One release of vLLM per process: its real Python sources stand first on `PYTHONPATH`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.version import Version

from vllm_hotfix._catalog import CATALOG

if TYPE_CHECKING:
    from devices import FakeDevice
    from layers import Host
    from vllm.config import VllmConfig

RELEASE = os.environ.get("HOTFIX_RELEASE")

if RELEASE is None:
    collect_ignore_glob = ["test_*.py"]
else:
    if os.environ.get("HOTFIX_WHOLE") == "0":
        collect_ignore = [f"test_{name}.py" for name in ("faults", "faults_at_work", "neighbours", "strangers", "undo")]
    sys.path.insert(0, str(Path(__file__).parent))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import devices
    import layers
    import patching


def pytest_report_header() -> str:
    """Name the release under test."""
    if RELEASE is None:
        return "vLLM release: none, set HOTFIX_RELEASE and PYTHONPATH to run tests/upstream"
    streamer = os.environ.get("HOTFIX_STREAMER", "the one that is installed")
    return f"vLLM release: {RELEASE}, Run:ai streamer: {streamer}"


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmConfig]:
    """The release's configuration, in a distributed group of one rank."""
    assert layers.release() == RELEASE, "PYTHONPATH does not lead to the release under test"
    folder = tmp_path_factory.mktemp("model")
    config = layers.make_config(folder)
    with layers.single_rank(config, folder):
        yield config


@pytest.fixture
def host(config: VllmConfig) -> Host:
    """What loads and reloads models in a test."""
    return layers.Host(config)


@pytest.fixture(autouse=True)
def zeroed() -> Iterator[None]:
    """Memory that a layer materializes reads as zero until it is loaded, so wrong values are exact."""
    with layers.Unwritten(0):
        yield


@pytest.fixture(params=["stock", "patched"])
def side(request: pytest.FixtureRequest) -> str:
    """Run a test with vLLM as it is and with a patch applied."""
    if request.param == "patched":
        request.getfixturevalue("patched")
    return request.param


@pytest.fixture
def patched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Apply the patch that a module names (`NAME`), measured_totals if none, and undo it afterwards.

    Where a release has the fix, the patch stays out.
    """
    name = getattr(request.module, "NAME", "measured_totals")
    fixed_in = next(patch.fixed_in for patch in CATALOG if patch.name == name)
    fixed = fixed_in is not None and Version(layers.release()) >= Version(fixed_in)
    with patching.switched_on(monkeypatch, tmp_path, name):
        state, reason = patching.state_of(name)
        assert state == ("not-needed" if fixed else "active"), reason
        yield


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """Show a CUDA device to the loads of one test; afterwards nothing of it is page-locked or in use."""
    from vllm.model_executor.model_loader import weight_utils

    from vllm_hotfix._patches.pinned_staging import _cuda

    fake = devices.FakeDevice()
    monkeypatch.setattr(_cuda, "open_device", fake.open)
    monkeypatch.setattr(weight_utils, "current_platform", devices.Cuda())
    yield fake
    assert fake.registered == {}
    assert fake.allocated == {}
