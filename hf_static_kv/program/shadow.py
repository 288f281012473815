"""A shadow of a model: copies of its modules and configs over the same weights, which can be
changed unseen.

    model    LlamaForCausalLM -> LlamaModel -> ... -> q_proj -> {weight}
    shadow   LlamaForCausalLM -> LlamaModel -> ... -> q_proj -----^

Steps are recorded, captured and verified on a shadow. No other thread runs it, and nothing has to
be put back.

What modules hold of each other is bound to the copies: attributes, lists, tuples, dicts, bound
methods, partials, and closures and defaults of functions. What an object of another type holds is
not: it runs the model's own modules, which is right if they do not attend, and which
`_StepCache.update` refuses if they do.

What a pass may change (lists, dicts, sets, variables of closures, namespaces, counters) is copied
as well: passes of a shadow leave the model as it was.
"""

import copy
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from itertools import count
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any

from torch.nn import Module
from transformers import PreTrainedConfig

from hf_static_kv import compat

_ORIGINAL = "_shadow_of"  # the attribute of a copy that refers to its module, weakly


def shadow_of(model: Any) -> Any:
    """The shadow of a model, with its present hooks and patches."""
    return _Binder().bound(model)


def original_of(module: Module) -> Module:
    """The module that a module of a shadow is copied from; any other module itself."""
    reference = vars(module).get(_ORIGINAL)
    return module if reference is None else reference() or module


class _Binder:
    """Makes the copies of one shadow."""

    def __init__(self) -> None:
        # By `id`: a value, so that its id is not used again, and what takes its place.
        self.known: dict[int, tuple[Any, Any]] = {}

    def bound(self, value: Any) -> Any:
        """The value with copies in the place of modules and configs; the same object if it holds
        none of them.
        """
        if isinstance(value, Module):
            make: Any = _Binder._module
        elif isinstance(value, PreTrainedConfig) or hasattr(type(value), "__dataclass_fields__"):
            make = _Binder._copy
        elif (make := _MAKERS.get(type(value))) is None:
            return value
        if id(value) not in self.known:
            # What a container or function that holds itself finds.
            self.known[id(value)] = (
                value,
                value,
            )
            self.known[id(value)] = value, make(self, value)
        return self.known[id(value)][1]

    def _module(self, module: Module) -> Any:
        if not compat.has_plain_stores(module):
            return module
        # Hooks watch or change what they are given: they are the same, in dicts of the copy's own.
        stores = compat.shared_stores(module) | compat.copied_stores(module)
        return self._copy(module, **stores, **{_ORIGINAL: weakref.ref(module)})

    def _copy(self, holder: Any, **own: Any) -> Any:
        """A module or config with these attributes, and with the bound ones of the original for all
        others.
        """
        clone = object.__new__(type(holder))
        self.known[id(holder)] = holder, clone
        for name, value in vars(holder).copy().items():
            if name not in own:
                own[name] = self.bound(value)
        vars(clone).update(own)
        return clone

    def _tuple(self, items: tuple[Any, ...]) -> tuple[Any, ...]:
        new = tuple(self.bound(item) for item in items)
        return new if _differ(new, items) else items

    def _items(self, items: Any) -> Any:
        return type(items)(self.bound(item) for item in tuple(items))

    def _dict(self, items: Any) -> Any:
        return type(items)((key, self.bound(item)) for key, item in items.copy().items())

    def _namespace(self, names: SimpleNamespace) -> SimpleNamespace:
        return SimpleNamespace(**self._dict(vars(names)))

    def _counter(self, counter: Any) -> Any:
        return copy.copy(counter)

    def _method(self, method: MethodType) -> MethodType:
        parts = method.__func__, method.__self__
        new = [self.bound(part) for part in parts]
        return MethodType(*new) if _differ(new, parts) else method

    def _partial(self, function: Any) -> Any:
        parts = function.func, function.args, function.keywords, vars(function)
        func, args, keywords, attributes = new = [self.bound(part) for part in parts]
        if not _differ(new, parts):
            return function
        clone = partial(func, *args, **keywords)
        vars(clone).update(attributes)
        return clone

    def _function(self, function: FunctionType) -> FunctionType:
        parts = function.__closure__, function.__defaults__, function.__kwdefaults__, vars(function)
        closure, defaults, keywords, attributes = new = [self.bound(part) for part in parts]
        if not _differ(new, parts):
            return function
        clone = FunctionType(
            function.__code__, function.__globals__, function.__name__, defaults, closure
        )
        clone.__kwdefaults__ = keywords
        vars(clone).update(attributes)
        return clone

    def _cell(self, cell: CellType) -> CellType:
        try:
            return CellType(self.bound(cell.cell_contents))
        except ValueError:  # nothing is assigned to this variable
            return cell


def _differ(new: Any, old: Any) -> bool:
    return any(one is not other for one, other in zip(new, old, strict=True))


_MAKERS: dict[type[Any], Callable[[_Binder, Any], Any]] = {
    list: _Binder._items,
    set: _Binder._items,
    deque: _Binder._items,
    tuple: _Binder._tuple,
    dict: _Binder._dict,
    SimpleNamespace: _Binder._namespace,
    count: _Binder._counter,
    OrderedDict: _Binder._dict,
    MethodType: _Binder._method,
    partial: _Binder._partial,
    FunctionType: _Binder._function,
    CellType: _Binder._cell,
}
