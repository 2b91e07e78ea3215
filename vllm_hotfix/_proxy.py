"""wrapt's function wrappers, made to copy and pickle as the functions that they stand for do."""

from __future__ import annotations

import copy
import pkgutil
from typing import Any

import wrapt


class _BoundProxy(wrapt.BoundFunctionWrapper):  # type: ignore[type-arg]
    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self if self._self_instance is None else getattr(copy.deepcopy(self._self_instance, memo), self.__name__)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._self_instance is None:
            return pkgutil.resolve_name, (f"{self.__module__}:{self.__qualname__}",)
        return getattr, (self._self_instance, self.__name__)


class Proxy(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """A wrapped function that can be copied and pickled, which wrapt leaves to its users.

    A copy of a function is the function itself, and so is a copy of its proxy; a copied method belongs to the copied
    object, and has stock's function. Pickled by name, as functions are: where it is unpickled, the name decides.
    """

    __bound_function_wrapper__ = _BoundProxy
    _self_wrap: Any  # the Wrap that put it in place

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = copy.deepcopy(self.__wrapped__, memo)
        return self if copied is self.__wrapped__ else copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return pkgutil.resolve_name, (f"{self.__module__}:{self.__qualname__}",)
