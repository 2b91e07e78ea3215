"""Start vllm-hotfix from a folder on PYTHONPATH, then run the sitecustomize that this file hides.

For images that cannot be changed: mount the installed packages as a folder and set
``PYTHONPATH=FOLDER/vllm_hotfix/bootstrap``.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

_here = os.path.dirname(os.path.abspath(__file__))
_home = os.path.dirname(os.path.dirname(_here))


def _start() -> None:
    try:
        try:
            import _vllm_hotfix
        except ImportError:
            # Not installed in this environment. The folder comes last, so that it overrides nothing of the image.
            sys.path.append(_home)
            import _vllm_hotfix
    except Exception as error:
        try:
            if sys.stderr is not None:  # print would take stdout
                print(f"vllm-hotfix: not active in this process: {type(error).__name__}: {error}", file=sys.stderr)
        except Exception:
            pass  # closed, or full
    else:
        _vllm_hotfix.start()


def _run_hidden() -> None:
    """Run the next sitecustomize on the path; what it raises is its own, site reports it as ever."""
    entries = [os.path.abspath(entry) for entry in sys.path]
    # Only what comes after this folder: there may be two of them, and each runs the next.
    spec = PathFinder.find_spec("sitecustomize", sys.path[entries.index(_here) + 1 :]) if _here in entries else None
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_start()
_run_hidden()
