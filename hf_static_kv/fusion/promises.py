"""Results that are computed when something needs them, so that what comes next can take them into its own kernel.

A promise is a tensor without numbers. It stands where the result would stand, as far as the operation that knows how to
use it; any other operation of torch that is handed it is given the result. What is no operation of torch cannot use it
by mistake: there is nothing in it to read.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import local
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_TRANSPOSES = (torch.Tensor.transpose, torch.transpose)


class Promise:
    """A result that has not been computed: what stands in for it, and what it would be made from."""

    def __init__(self, like: torch.Tensor, make: Callable[[], torch.Tensor], *made_from: torch.Tensor) -> None:
        self.stand_in = torch.empty_like(like, device="meta")
        self.make, self.made_from = make, [(x, version(x)) for x in made_from]
        self.value: torch.Tensor | None = None

    def transposed(self, dim0: int, dim1: int) -> Promise | None:
        """A promise of the result transposed, or None."""
        return None

    def is_open(self) -> bool:
        """Whether it is still to be kept, and can be: what it is made from is as it was."""
        if self.value is not None:
            return False
        if any(version(x) != before for x, before in self.made_from):
            raise RuntimeError("What a result is made from was written before the result was used.")
        return True

    def keep(self) -> torch.Tensor:
        """The result, computed once: whoever writes into it means the same one."""
        if self.is_open():
            self.value = self.make()
        assert self.value is not None
        return self.value


class _ThisThread(local):
    promises: Promises | None = None  # what is around the pass that runs


_THIS_THREAD = _ThisThread()


class Promises(TorchFunctionMode):
    """Around a pass: the promises that are given in it, each kept by the operation that is handed it."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[int, Promise] = {}  # in this pass, by the identity of what stands in

    def __enter__(self) -> Promises:
        _THIS_THREAD.promises = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _THIS_THREAD.promises, self.given = None, {}

    def give(self, promise: Promise) -> torch.Tensor:
        self.given[id(promise.stand_in)] = promise
        return promise.stand_in

    def of(self, value: Any) -> Promise | None:
        """The promise that this stands for."""
        return self.given.get(id(value))

    def kept(self, value: Any) -> Any:
        """The value, or what was promised by it; lists of such too."""
        if isinstance(value, list | tuple | dict) and self.given:
            return tree_map(self._kept_one, value)
        return self._kept_one(value)

    def _kept_one(self, value: Any) -> Any:
        promise = self.of(value)
        return value if promise is None else promise.keep()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func in _TRANSPOSES and not kwargs and (promise := self.of(args[0])) is not None and promise.is_open():
            promise = promise.transposed(*args[1:])
            if promise is not None:
                return self.give(promise)
        return self.call(func, args, kwargs)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One operation, none of whose arguments is left a promise."""
        return func(*[self.kept(arg) for arg in args], **{name: self.kept(arg) for name, arg in kwargs.items()})


def promises_around() -> Promises | None:
    """Those of the pass that runs in this thread, if there are any. A compiler is not shown them."""
    return None if torch.compiler.is_compiling() else _THIS_THREAD.promises


def version(x: torch.Tensor) -> int:
    """How often a tensor was written in place. One of inference mode does not say."""
    return 0 if x.is_inference() else x._version
