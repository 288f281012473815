"""A pass of a model as data: the flat list of the operations that it calls, which can be rewritten
and run.

    h = embedding(token, W)             Operation(embedding, (token, W))        -> Value 0
    q = linear(h, Wq)                   Operation(linear, (Value 0, Wq))        -> Value 1
    q, k = rotary(q, k, cos, sin)       Operation(rotary, (Value 1, ...))       -> Value 7, Value 8

A value is the result of an earlier call. Any other tensor (an input, a weight, the storage) is held
by reference, as is what the pass computes of Python numbers alone. A shape or a setting is a
constant of the recording. A module or function that is decorated with torch's `wrap_torch_function`
is one call, whatever it calls inside.

    with Recorder() as recorder:
        logits = model(token).logits
    program = recorder.program(logits)
    run = program.compiled()            # run() gives the logits for what is in `token` now
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hf_static_kv.compat import inner_tensors, write_count

# What tells the host a value, or makes a tensor whose shape depends on values. On a GPU each of
# them synchronizes.
_READS = {
    "__array__", "__bool__", "__complex__", "__contains__", "__float__", "__format__", "__index__", "__int__",
    "__repr__", "__str__", "allclose", "argwhere", "bincount", "cpu", "equal", "is_nonzero",
    "item", "masked_select",
    "nonzero", "numpy", "tolist", "unique", "unique_consecutive",
}  # fmt: skip


class Value:
    """The tensor that a call gave: its number, and what is known of it before it is computed again."""

    def __init__(self, number: int, tensor: Tensor) -> None:
        self.number = number
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.device = tensor.device

    def __repr__(self) -> str:
        return f"%{self.number}"


class Operation:
    """One operation. `order` says where in the list it stands."""

    def __init__(
        self,
        order: int,
        func: Callable[..., Any],
        args: Any,
        kwargs: Any,
        results: list[Value | None],
        writes: bool,
    ) -> None:
        self.order = order
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.results = results
        self.writes = writes  # into a tensor that was there before

    @property
    def name(self) -> str:
        return getattr(self.func, "__name__", str(self.func))

    @property
    def values(self) -> list[Value]:
        """The values that it takes, in the order of its arguments."""
        return [leaf for leaf in leaves((self.args, self.kwargs)) if isinstance(leaf, Value)]

    def __repr__(self) -> str:
        inputs = [
            str(leaf) if isinstance(leaf, Value) else _brief(leaf)
            for leaf in leaves((self.args, self.kwargs))
        ]
        return f"{', '.join(map(str, self.results))} = {self.name}({', '.join(inputs)})"


class Program:
    """The calls of a pass, by their order, and its output.

    `fuse` puts one call in the place of several.
    """

    def __init__(self, calls: Sequence[Operation], output: Value) -> None:
        self.calls: dict[int, Operation] = {}
        self.output = output
        self.num_positions = 0  # that a token may have; 0 where that is not known
        self.made_by: dict[Value, Operation] = {}
        self.used_by: defaultdict[Value, list[Operation]] = defaultdict(list)
        for call in calls:
            self._add(call)

    def __iter__(self) -> Iterator[Operation]:
        return iter([self.calls[order] for order in sorted(self.calls)])

    def calls_of(self, *functions: Callable[..., Any]) -> list[Operation]:
        """The calls of these functions, in their order."""
        return [call for call in self if call.func in functions]

    def maker(self, value: object) -> Operation | None:
        """The call that gives this value; None for a tensor from outside."""
        return self.made_by.get(value) if isinstance(value, Value) else None

    def only_user(self, value: object) -> Operation | None:
        """The one call that takes this value; None where there are more, or where it is the output."""
        users = self.used_by[value] if isinstance(value, Value) else []
        return users[0] if len(users) == 1 and value is not self.output else None

    def fuse(
        self,
        parts: Sequence[Operation],
        func: Callable[..., Any],
        *args: Any,
        results: list[Value | None],
        **kwargs: Any,
    ) -> bool:
        """Put `results = func(*args, **kwargs)` in the place of `parts`; False, and no change,
        where that is unsafe.
        """
        new = Operation(-1, func, args, kwargs, list(results), any(part.writes for part in parts))
        new.order = self._place(new, parts)
        if new.order < 0 or self._loses_values(new, parts):
            return False
        for part in parts:
            del self.calls[part.order]
            for value in part.values:
                self.used_by[value] = [call for call in self.used_by[value] if call is not part]
        self._add(new)
        return True

    def _place(self, new: Operation, parts: Sequence[Operation]) -> int:
        """The last order of a part where all arguments of the new call are there, no result is
        needed yet, and no part moves across a write; or -1.
        """
        ready = max((self.made_by[value].order for value in new.values), default=-1)
        needed = min(self._uses(new.results, parts), default=sys.maxsize)
        orders = sorted((part.order for part in parts if ready < part.order < needed), reverse=True)
        safe = (order for order in orders if not self._moves_across_writes(order, parts))
        return next(safe, -1)

    def _loses_values(self, new: Operation, parts: Sequence[Operation]) -> bool:
        """Whether something takes a value of the parts that the new call does not give."""
        lost = {value for part in parts for value in part.results} - set(new.results)
        return bool(self._uses(lost, parts)) or not lost.isdisjoint(new.values)

    def _moves_across_writes(self, place: int, parts: Sequence[Operation]) -> bool:
        """Whether, from the first part to the last, there is a write anywhere but at the place of
        the new call.
        """
        orders = [part.order for part in parts]
        writes = [order for order, call in self.calls.items() if call.writes and order != place]
        return any(min(orders) <= order <= max(orders) for order in writes)

    def writes_between(self, first: Operation, last: Operation) -> bool:
        return any(call.writes and first.order < call.order < last.order for call in self)

    def _uses(self, values: Collection[Value | None], parts: Sequence[Operation]) -> list[int]:
        """The orders of the calls outside of `parts` that take these values; the output is taken at
        the end.
        """
        users = [call for value in values if value is not None for call in self.used_by[value]]
        at_the_end = [sys.maxsize] if self.output in values else []
        return [call.order for call in users if call not in parts] + at_the_end

    def _add(self, call: Operation) -> None:
        self.calls[call.order] = call
        self.made_by |= {value: call for value in call.results if value is not None}
        for value in call.values:
            self.used_by[value].append(call)

    def compiled(self) -> Callable[[], Tensor]:
        """A function that runs the calls. It drops each value after its last use."""
        calls = list(self)
        output = self.output
        last_use = {value: call for call in calls for value in (*call.results, *call.values)}
        dropped = [
            [value for value in (*call.results, *call.values) if last_use[value] is call]
            for call in calls
        ]

        def run() -> Tensor:
            values: dict[Any, Any] = {}
            for call, unused in zip(calls, dropped, strict=True):
                args, kwargs = map_leaves(
                    lambda leaf: values.get(leaf, leaf) if type(leaf) is Value else leaf,
                    (call.args, call.kwargs),
                )
                values.update(zip(call.results, leaves(call.func(*args, **kwargs)), strict=True))
                for value in unused:
                    if value is not output:
                        values.pop(value, None)
            return values[output]  # type: ignore[no-any-return]

        return run


_LARGE = 1 << 16  # bytes of a tensor that a recording does not keep


class Recorder(TorchFunctionMode):
    """Writes down the calls of a pass. Raises where the pass asks for a value, since another step
    has another one.

    torch.tensor(2.0)   a number       may be read; made once: copying numbers to a GPU synchronizes
    torch.arange(3)     a constant     may be read, since it is the same in every step; a call
    x + 1               of this step   may not be read; a call
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Operation] = []
        self.value_of: dict[
            int, Value | Tensor
        ] = {}  # by a tensor's id; a view of all of a tensor has that tensor
        self.kept: list[Tensor] = []  # so that no id is used twice
        self.num_values = 0
        self.constants: set[int] = set()  # addresses of memory, which views share
        self.numbers: set[int] = set()  # ids of tensors

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        inputs = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_number = all(id(t) in self.numbers for t in inputs) if inputs else func is torch.tensor
        is_constant = all(map(self._is_constant, inputs))
        is_mask_index = name == "__getitem__" and any(t.dtype == torch.bool for t in inputs[1:])
        # The indices of what is not zero.
        is_where = name == "where" and len(args) + len(kwargs) == 1
        is_read = name in _READS or is_mask_index or is_where
        if (is_read and not is_constant) or not all(
            map(self._is_constant, _slice_bounds((args, kwargs)))
        ):
            raise RuntimeError(
                f"the pass depends on the values of a tensor ({name}), which differ from step to "
                "step"
            )
        before = [write_count(tensor) for tensor in inputs]
        result = func(*args, **kwargs)
        written = [
            tensor
            for tensor, count in zip(inputs, before, strict=True)
            if write_count(tensor) != count
        ]
        if any(id(tensor) in self.numbers for tensor in written):
            raise RuntimeError(
                f"the pass writes into a tensor that it has made of numbers ({name})"
            )
        if not is_constant:
            self.constants -= set(map(_memory, written))
        if is_number:
            made = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
            self.kept += made
            self.numbers |= set(map(id, made))
            return result
        # Before the results get values: a result may be one of the arguments.
        args, kwargs = map_leaves(lambda leaf: self.value_of.get(id(leaf), leaf), (args, kwargs))
        results = [self._new_value(output, inputs, is_constant) for output in leaves(result)]
        if written or any(results):
            self.calls.append(
                Operation(len(self.calls), func, args, kwargs, results, bool(written))
            )
        return result

    def _is_constant(self, tensor: Tensor) -> bool:
        return id(tensor) in self.numbers or _memory(tensor) in self.constants

    def _new_value(self, output: Any, inputs: Sequence[Tensor], is_constant: bool) -> Value | None:
        """A value for this result; None where it is one of the arguments, or a view of all of one."""
        if not isinstance(output, Tensor) or id(output) in self.value_of:
            return None
        self._watch(output, is_constant)
        self.num_values += 1
        if (
            same := next((tensor for tensor in inputs if _is_same(tensor, output)), None)
        ) is not None:
            self.value_of[id(output)] = self.value_of.get(id(same), same)
            return None
        value = self.value_of[id(output)] = Value(self.num_values, output)
        if is_constant:
            self.constants.add(_memory(output))
        return value

    def _watch(self, output: Tensor, is_constant: bool) -> None:
        """No other tensor gets its id: it is kept or, if it is large, forgotten when it goes.

        All those of a long prompt together are larger than the model.
        """
        if is_constant or output.nbytes <= _LARGE:
            self.kept.append(output)
        else:
            finalize(output, self.value_of.pop, id(output), None)

    def program(self, output: Tensor) -> Program:
        value = self.value_of.get(id(output))
        if not isinstance(value, Value):
            raise RuntimeError("the pass gave its logits by no operation of torch")
        return Program(self.calls, value)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """`function` of every leaf of nested lists, tuples and dicts."""
    if isinstance(value, dict):
        return {key: map_leaves(function, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [map_leaves(function, item) for item in value]
        # A named tuple, or not.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return function(value)


def leaves(value: Any) -> list[Any]:
    """Every leaf of nested lists, tuples and dicts."""
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def _slice_bounds(value: Any) -> list[Tensor]:
    """The tensors in slices, as t in `x[:t]`.

    Torch reads them on the host, and no mode sees that.
    """
    slices = [leaf for leaf in leaves(value) if isinstance(leaf, slice)]
    return [
        bound for s in slices for bound in (s.start, s.stop, s.step) if isinstance(bound, Tensor)
    ]


def _memory(tensor: Tensor) -> int:
    """The address of its memory.

    A wrapper, such as a quantised weight, has none: it stands for itself.
    """
    return id(tensor) if inner_tensors(tensor) is not None else tensor.untyped_storage().data_ptr()


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same memory in the same shape."""
    if (
        one.shape != other.shape
        or one.dtype != other.dtype
        or one.device != other.device
        or not one.numel()
    ):
        return False
    return (
        type(one) is type(other) is Tensor
        and one.stride() == other.stride()
        and one.data_ptr() == other.data_ptr()
    )


def _brief(leaf: Any) -> str:
    return f"{type(leaf).__name__}{list(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
