"""Ray: a worker that has imported vLLM before its variables arrive, as real workers of Ray do."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from engine import checkpoints
from engine.launch import Command, environment

import vllm_hotfix

pytest.importorskip("ray", reason="needs Ray")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run the driver with no gate set in its environment; a cluster of one machine, which calls nobody."""
    folder = tmp_path_factory.mktemp("ray")
    plan = [checkpoints.write(folder / "A", 1), checkpoints.write(folder / "B", 2), folder / "result.json"]
    env = {
        **environment({}),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # its address is the loopback one
        "TMPDIR": str(folder),
    }
    driver = Path(__file__).with_name("ray_driver.py")
    with Command([sys.executable, driver, *plan], folder / "log", env) as command:
        command.wait(240)
    found = json.loads((folder / "result.json").read_text())
    found["log"] = (folder / "log").read_text(errors="replace")
    return found


def test_variables_that_arrive_late_are_honoured(result: Any) -> None:
    """The actor has imported vLLM and the targets with no gate; vLLM's plugins, loaded after its variables, activate.

    Then the functions are wrapped, and so are the names that vLLM's own modules had taken of them.
    """
    stages = result["stages"]
    assert [stages[name]["gate"] for name in stages] == [None, "1", "1", "1"]
    for name in ("imported", "variables"):
        assert stages[name]["vllm"]
        assert stages[name]["states"] == {}
        assert stages[name]["wrapped"] == stages[name]["taken"] == []
        assert stages[name]["finders"] == 0
    for name in ("worker", "loaded"):
        assert stages[name]["states"]["measured_totals"] == "active"
        assert {"finalize_layerwise_processing", "initialize_layerwise_reload"} <= {*stages[name]["wrapped"]}
        assert {"finalize_layerwise_processing", "initialize_layerwise_reload"} <= {*stages[name]["taken"]}
        assert stages[name]["finders"] == 1
    assert stages["loaded"]["from"] == vllm_hotfix.__file__, "not the installed package"
    assert {stage["pid"] for stage in stages.values()} == {stages["loaded"]["pid"]}


def test_the_status_lists_the_worker(result: Any) -> None:
    """With what it did in a real load and reload; when Ray has ended it, it is not listed any more."""
    (worker,) = (process for process in result["live"] if process["pid"] == result["stages"]["loaded"]["pid"])
    assert worker["patches"]["measured_totals"]["state"] == "active"
    assert worker["counters"]["measured_totals"]["reloads"] == 1
    assert worker["counters"]["measured_totals"]["layers_measured"] > 0
    assert result["after"] == []


def test_the_cluster_stays_on_this_machine(result: Any) -> None:
    """Its address is the loopback one, and the package has nothing to warn of."""
    assert result["address"].startswith("127.0.0.1:")
    assert [line for line in result["log"].splitlines() if "vllm-hotfix: " in line and "INFO" not in line] == []
