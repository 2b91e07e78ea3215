"""Start vllm-hotfix in an interpreter: the .pth line, the .start file, the sitecustomize and the vLLM plugin call this.

Standard library only, and the environment comes first: with no gate set, nothing else is imported and
nothing is hooked. It stands beside the package because importing a submodule would run the package's
own ``__init__``.
"""

import os
import sys
from _thread import get_ident

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

#: Upstream's own names for two of the gates; every other gate begins with ``VLLM_HOTFIX_``.
ALIASES = ("VLLM_LAYERWISE_RELOAD_MEASURED_TOTALS", "VLLM_RELOAD_KEEP_MOE_KERNEL")


def asked() -> bool:
    """Say whether any variable of this package is set; one that says off is to be made known to vLLM all the same."""
    return any(name.startswith("VLLM_HOTFIX_") or name in ALIASES for name in os.environ)


class Finder:
    """A meta path finder that calls back when a module is executed; looking it up calls nobody.

    ``before[name]`` is called with the module just before its code runs, ``after[name]`` just after.
    Callbacks stay registered, so a module that is executed again (a failed import, a reload) is seen again.
    No module inside a package in ``waiting`` is executed before the package's ``before`` has been called: Python
    lets another thread do that as soon as the package is in ``sys.modules``.
    """

    def __init__(self) -> None:
        self.before: dict[str, Callable[[Any], None]] = {}
        self.after: dict[str, Callable[[Any], None]] = {}
        self.waiting: set[str] = set()
        self._looking: set[tuple[int, str]] = set()
        self._beginning: set[tuple[int, str]] = set()

    def install(self) -> None:
        """Put this finder first on ``sys.meta_path``, once."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        """Find the module as the other finders do, with a loader that calls back."""
        # Python holds a lock of all imports here, so what must be waited for is left to the loader.
        if name not in self.after and name not in self.before and name.partition(".")[0] not in self.waiting:
            return None
        # Another such finder (wrapt's, say) asks the whole meta path again: be invisible then.
        key = (get_ident(), name)
        if key in self._looking:
            return None
        self._looking.add(key)
        try:
            for finder in list(sys.meta_path):
                find_spec = None if finder is self else getattr(finder, "find_spec", None)
                spec = find_spec(name, path, target) if find_spec else None
                if spec is not None:
                    if hasattr(spec.loader, "exec_module"):
                        spec.loader = Loader(spec.loader, self, name)
                    return spec
        finally:
            self._looking.discard(key)
        return None

    def begin(self, name: str, module: "Any") -> None:
        """Call back before a module's code runs, unless this thread is at it."""
        key = (get_ident(), name)
        if key not in self._beginning:
            self._beginning.add(key)
            try:
                call(self.before.get(name), name, module)
            finally:
                self._beginning.discard(key)
            self.waiting.discard(name)


class Loader:
    """The real loader with callbacks around ``exec_module``; it takes itself out of the module it loads."""

    def __init__(self, loader: "Any", finder: Finder, name: str) -> None:
        self.loader = loader
        self.finder = finder
        self.name = name

    def __getattr__(self, name: str) -> "Any":
        if name == "loader":  # not there yet, as in a copy being made
            raise AttributeError(name)
        return getattr(self.loader, name)

    def exec_module(self, module: "Any") -> None:
        """Execute the module with its own loader in place again."""
        for owner, attribute in ((module.__spec__, "loader"), (module, "__loader__")):
            if getattr(owner, attribute, None) is self:
                setattr(owner, attribute, self.loader)
        package = self.name.partition(".")[0]
        if package != self.name and package in self.finder.waiting:
            self.finder.begin(package, sys.modules.get(package))
        self.finder.begin(self.name, module)
        self.loader.exec_module(module)
        call(self.finder.after.get(self.name), self.name, module)


def call(callback: "Callable[[Any], None] | None", name: str, module: "Any") -> None:
    """Call back; an error is a warning, because raising here would fail the host's import."""
    try:
        if callback is not None:
            callback(module)
    except Exception as error:
        warn(f"while {name} was imported: {describe(error)}")


def describe(error: BaseException) -> str:
    """An exception in words, whatever its own words do."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def strict() -> bool:
    """Say whether a patch that is asked for and not active is to stop an engine."""
    return os.environ.get("VLLM_HOTFIX_STRICT", "").strip().lower() in ("1", "true", "yes", "on")


def settings() -> str:
    """What the environment asks for, as ``NAME=VALUE`` with commas."""
    others = ("VLLM_HOTFIX_STRICT", "VLLM_HOTFIX_STATE_DIR")
    names = [name for name in os.environ if name.startswith("VLLM_HOTFIX_") or name in ALIASES]
    return ", ".join(f"{name}={os.environ[name]}" for name in names if name not in others)


def warn(message: str) -> None:
    """Print one line on stderr, once: the last resort where nothing of the package is imported yet."""
    if message in WARNED:
        return
    WARNED.add(message)
    try:
        if sys.stderr is not None:  # print would take stdout
            print(f"vllm-hotfix: {message}", file=sys.stderr)
    except Exception:
        pass  # closed, or full


FINDER = Finder()
WARNED: "set[str]" = set()


def start() -> None:
    """Wait for vLLM if the environment asks for a patch. Never raises an Exception."""
    try:
        if asked():
            if "vllm" in sys.modules:
                _activate()
            else:
                wait_for_vllm()
    except Exception as error:
        warn(f"not active in this process: {describe(error)}")


def wait_for_vllm() -> None:
    """Activate when ``vllm`` is executed, before any module of it is."""
    FINDER.before["vllm"] = _activate
    FINDER.waiting.add("vllm")
    FINDER.install()


def _activate(module: "Any" = None) -> None:
    try:
        import vllm_hotfix
    except Exception as error:
        if strict():
            check_at_start(plugin)
        warn(f"not active in this process: {describe(error)}")
    else:
        vllm_hotfix.activate()


#: What ``check_at_start`` has wrapped: the module, stock's function, the wrapper.
CHECKED: "list[tuple[Any, Any, Any]]" = []


def uncheck() -> None:
    """Undo ``check_at_start``."""
    while CHECKED:
        module, stock, mine = CHECKED.pop()
        if module.load_general_plugins is mine:
            module.load_general_plugins = stock


def check_at_start(check: "Callable[[], None]") -> None:
    """Call back when an engine starts, also without the plugin; what that raises stops the engine."""

    def on_plugins(module: "Any") -> None:
        stock = module.load_general_plugins

        def load_general_plugins() -> None:
            stock()
            check()

        module.load_general_plugins = load_general_plugins
        CHECKED.append((module, stock, load_general_plugins))

    FINDER.after["vllm.plugins"] = on_plugins
    FINDER.install()
    if "vllm.plugins" in sys.modules:
        call(on_plugins, "vllm.plugins", sys.modules["vllm.plugins"])


def plugin() -> None:
    """Entry point of the group ``vllm.general_plugins``, called by vLLM in each of its processes.

    Raises:
        RuntimeError: under ``VLLM_HOTFIX_STRICT=1``, when a patch that was asked for cannot be active; a
            ``vllm_hotfix.HotfixError`` where the package can be imported.
    """
    if not asked():
        return
    try:
        import vllm_hotfix
    except Exception as error:
        if strict():
            words = f"VLLM_HOTFIX_STRICT is set, but not active: {settings()}; {describe(error)}"
            raise RuntimeError(f"vllm-hotfix: {words}") from error
        warn(f"not active in this process: {describe(error)}")
    else:
        vllm_hotfix.activate()
        vllm_hotfix.check_strict()
