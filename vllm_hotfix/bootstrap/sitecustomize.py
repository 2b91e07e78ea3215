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
        import _vllm_hotfix
    except ImportError:
        # Not installed in this environment. The folder comes last, so that it overrides nothing of the image.
        sys.path.append(_home)
        try:
            import _vllm_hotfix
        except ImportError:
            return
    _vllm_hotfix.start()


def _run_hidden() -> None:
    """Run the next sitecustomize on the path; what it raises is its own, site reports it as ever."""
    path = [entry for entry in sys.path if os.path.abspath(entry) != _here]
    spec = PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_start()
_run_hidden()
