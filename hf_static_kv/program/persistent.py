"""From the list of a step to the plan of one kernel that computes all of it.

unfused    each call is written as steps of a few kinds, whatever rules have fused
               h, z = add_norm(x, y, n, inner)    ->   p = norm(y, inner)    h = add(x, p)    z = norm(h, n)
               y = run_linear(x, [w], norm)       ->   z = norm(x)           y = linear(z, w)
matched    from the logits back to the embedding: each value must be made by the step that belongs
           there, of the inputs that belong there

A list is taken as a whole or not at all. Every input of every matched step is compared, and every
step must be matched: so nothing else takes a value, and nothing is left out.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_static_kv.kernels.linear import Linear
from hf_static_kv.kernels.norm import STYLES, Norm, NormStyle, add_norm, norm
from hf_static_kv.kernels.persistent_step import Plan, PlannedLayer
from hf_static_kv.kernels.rotary import rotate_and_write
from hf_static_kv.program.record import Operation, Program, Value
from hf_static_kv.program.rotary import lookup
from hf_static_kv.program.rules import found_linear, is_product, is_sum

_ATTEND = torch.ops.hf_static_kv.attend.default
_MOST_INPUTS = 2  # of a sum


class Unplanned(Exception):
    """Why a list has no plan."""


def plan_of(program: Program) -> Plan:
    """The plan of a rewritten list of one token. Raises `Unplanned` with the reason."""
    return _Match(_Unfused(program)).plan()


# --- unfused


class _Step(NamedTuple):
    """One step: what it takes, what it gives, and what it knows beside that."""

    kind: str
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    own: Any = None


class _Unfused:
    """The steps of a list, by the values that they give."""

    def __init__(self, program: Program) -> None:
        self.steps: list[_Step] = []
        self.made_by: dict[Any, _Step] = {}
        self._same: dict[Any, Any] = {}  # of a value in another shape, the first one
        for call in program:
            self._write(call)
        self.output = self.named(program.output)

    def named(self, value: Any) -> Any:
        """A value, whatever its shape."""
        return self._same.get(value, value) if isinstance(value, Value) else value

    def _write(self, call: Operation) -> None:
        if _keeps_elements(call):
            self._same[call.results[0]] = self.named(call.args[0])
            return
        write = _WRITERS.get(call.func)
        if found_linear(call) is not None:
            self._write_linear(call)
        elif is_sum(call):
            self._add("add", call.args, call.results)
        elif is_product(call):
            self._add("mul", call.args, call.results)
        elif write is not None and (not call.kwargs or call.func is F.embedding):
            write(self, call)
        else:
            raise Unplanned(f"the kernel has no {call.name}")

    def _add(self, kind: str, inputs: Any, outputs: Any, own: Any = None) -> Any:
        """Note a step, and return its first output."""
        step = _Step(kind, tuple(map(self.named, inputs)), tuple(outputs), own)
        self.steps.append(step)
        self.made_by |= {value: step for value in outputs if value is not None}
        return outputs[0]

    def _write_linear(self, call: Operation) -> None:
        found = found_linear(call)
        assert found is not None
        x = found.x
        layer: Linear = found.layer
        if layer.norm is not None:
            x = self._add("norm", [x], [object()], layer.norm)
        if layer.is_gated and not layer.biases and layer.residual is None:
            self._add("gate", [x], call.results, layer)
            return
        if layer.activation or layer.is_gated:
            raise Unplanned("the kernel has no such linear layer")
        biases: list[Any] = layer.biases or [None] * len(layer.weights)
        outputs: list[Any] = list(call.results)
        if layer.residual is not None:
            outputs = [object()]
        for y, weight, bias in zip(outputs, layer.weights, biases, strict=True):
            self._add("linear", [x], [y], (weight, bias))
        if layer.residual is not None:
            self._add("add", [layer.residual, *outputs], call.results)

    def _write_norm(self, call: Operation) -> None:
        self._add("norm", call.args[:1], call.results, call.args[1])

    def _write_add_norm(self, call: Operation) -> None:
        x, other, its_norm, *inner = call.args
        total, normed = call.results
        if inner:
            other = self._add("norm", [other], [object()], inner[0])
        self._add("add", [x, other], [total])
        self._add("norm", [total], [normed], its_norm)

    def _write_part(self, call: Operation) -> None:
        self._add("part", call.args[:1], call.results, _rows(call))

    def _write_other(self, call: Operation) -> None:
        self._add(_OTHERS[call.func], call.args, call.results)

    def _write_cast(self, call: Operation) -> None:
        if len(call.args) != 2 or not isinstance(call.args[0], Tensor):
            raise Unplanned("the kernel has no conversion")
        self._add("cast", call.args, call.results)

    def _write_embedding(self, call: Operation) -> None:
        names = ("input", "weight", "padding_idx", "max_norm")
        given = dict(zip(names, call.args, strict=False)) | call.kwargs
        if given.get("max_norm") is not None:
            raise Unplanned("the embedding has a largest norm")
        self._add("embedding", [given["input"], given["weight"]], call.results)


_OTHERS: dict[Any, str] = {rotate_and_write: "rotate", _ATTEND: "attend", lookup: "lookup"}
_WRITERS: dict[Any, Callable[[_Unfused, Operation], None]] = {
    **dict.fromkeys(_OTHERS, _Unfused._write_other),
    norm: _Unfused._write_norm,
    add_norm: _Unfused._write_add_norm,
    Tensor.__getitem__: _Unfused._write_part,
    Tensor.to: _Unfused._write_cast,
    F.embedding: _Unfused._write_embedding,
}


def _keeps_elements(call: Operation) -> bool:
    """Whether a call gives the elements of its first argument in the same order."""
    before, *how = call.args or (None,)
    after = call.results[0] if len(call.results) == 1 else None
    if call.kwargs or not isinstance(before, Value) or after is None:
        return False
    if before.shape.numel() != after.shape.numel() or before.dtype != after.dtype:
        return False
    if call.func is Tensor.transpose:
        first, last = sorted(dim % len(before.shape) for dim in how)
        return sum(size > 1 for size in before.shape[first : last + 1]) <= 1
    if call.func is Tensor.__getitem__:
        return not any(isinstance(one, Tensor | Value | list) for one in _index(call))
    return call.func in (Tensor.view, Tensor.reshape)


def _index(call: Operation) -> tuple[Any, ...]:
    index = call.args[1]
    return index if isinstance(index, tuple) else (index,)


def _rows(call: Operation) -> slice:
    """The part of the last dim that a call takes."""
    if len(index := _index(call)) == 2 and index[0] is ... and isinstance(index[1], slice):
        width = call.args[0].shape[-1]
        first, end, step = index[1].indices(width)
        if step == 1:
            return slice(first, end)
    raise Unplanned("the kernel takes no such part of a tensor")


# --- matched


class _Match:
    """Goes from the logits back to the embedding."""

    def __init__(self, steps: _Unfused) -> None:
        self._steps = steps
        self._taken: set[int] = set()
        self._norms: list[Norm] = []  # of whole hidden states
        self._head_norms: list[Norm] = []
        self._scales: set[float] = set()
        self._activations: set[str] = set()
        self._positions: dict[int, Tensor] = {}

    def plan(self) -> Plan:
        z, (head, bias) = self._linear(self._steps.output)
        _expect(bias is None, "the head has a bias")
        _expect(isinstance(head, Tensor), "the head is packed")
        h, norm_weight = self._norm(z)
        layers = []
        while self._kind(h) == "add":
            h, parts = self._layer(h)
            layers.append(PlannedLayer(**parts))
        _expect(bool(layers), "there are no layers")
        token, embedding, scale = self._embedding(h)
        self._check_all_taken()
        return Plan(
            layers[::-1], embedding, norm_weight, head, token, _only(self._positions.values()),
            self._style(), _only({one.eps for one in self._norms}),
            _only({one.eps for one in self._head_norms or self._norms}),
            _only(self._scales), _only(self._activations), scale,
        )  # fmt: skip

    def _style(self) -> NormStyle:
        style: NormStyle = _only({one.style for one in (*self._norms, *self._head_norms)})
        _expect(style in STYLES, "a norm is no RMS norm")
        return style

    def _check_all_taken(self) -> None:
        left = (step for step in self._steps.steps if id(step) not in self._taken)
        if (step := next(left, None)) is not None:
            raise Unplanned(f"the kernel has no place for '{step.kind}'")

    def _kind(self, value: Any) -> str:
        step = self._steps.made_by.get(self._steps.named(value))
        return "" if step is None else step.kind

    def _take(self, value: Any, kind: str) -> _Step:
        """The step of this kind that gives a value."""
        step = self._steps.made_by.get(self._steps.named(value))
        found = "an input" if step is None else f"'{step.kind}'"
        _expect(
            step is not None and step.kind == kind, f"there is {found} in the place of '{kind}'"
        )
        assert step is not None
        self._taken.add(id(step))
        return step

    # Each returns its input first.

    def _linear(self, y: Any) -> tuple[Any, tuple[Any, Tensor | None]]:
        rows = slice(None)
        if self._kind(y) == "part":
            part = self._take(y, "part")
            (y,) = part.inputs
            rows = part.own
        step = self._take(y, "linear")
        weight, bias = step.own
        if rows == slice(None):
            return step.inputs[0], (weight, bias)
        _expect(isinstance(weight, Tensor), "a packed weight has several parts")
        return step.inputs[0], (weight[rows], None if bias is None else bias[rows])

    def _norm(self, z: Any) -> tuple[Any, Tensor]:
        step = self._take(z, "norm")
        self._norms.append(step.own)
        return step.inputs[0], step.own.weight

    def _branch(self, h: Any) -> tuple[Any, Any, Tensor | None]:
        """x, y and the norm of y of the sum h = x + norm(y)."""
        inputs = self._take(h, "add").inputs
        branches = [n for n in range(_MOST_INPUTS) if self._kind(inputs[n]) in ("linear", "norm")]
        _expect(len(branches) == 1, "a sum is no residual")
        y = inputs[branches[0]]
        x = inputs[1 - branches[0]]
        post = None
        if self._kind(y) == "norm":
            y, post = self._norm(y)
        return x, y, post

    def _layer(self, h: Any) -> tuple[Any, dict[str, Any]]:
        """The hidden state before a layer, and the tensors of the layer."""
        x, y, post2 = self._branch(h)
        before, feed_forward = self._feed_forward(y)
        _expect(before is x, "a layer skips another one")
        h, y, post1 = self._branch(x)
        before, attention = self._attention(y)
        _expect(before is h, "a layer skips another one")
        return h, {**attention, **feed_forward, "post1": post1, "post2": post2}

    def _feed_forward(self, y: Any) -> tuple[Any, dict[str, Any]]:
        m, (down, bias) = self._linear(y)
        _expect(bias is None, "the layer behind the gate has a bias")
        step = self._take(m, "gate")
        self._activations.add(step.own.activation)
        gate, up = step.own.weights
        h, weight = self._norm(step.inputs[0])
        return h, {"gate": gate, "up": up, "down": down, "norm2": weight}

    def _attention(self, y: Any) -> tuple[Any, dict[str, Any]]:
        a, (output, bias) = self._linear(y)
        _expect(bias is None, "the layer behind the attention has a bias")
        query, keys, values, spans, scale, _, softcap, sinks, *exact = self._take(
            a, "attend"
        ).inputs
        _expect(softcap is None, "attention has a soft cap")
        _expect(sinks is None, "attention has sinks")
        _expect(not any(exact), "attention is exact")
        self._scales.add(scale)
        step = self._take(query, "rotate")
        *heads, cos, sin, own_keys, own_values, slots, query_norm, key_norm = step.inputs
        _expect(keys is own_keys and values is own_values, "a layer attends to another one")
        _expect(len(keys) == 1, "there are several rows")
        h, projections = self._projections(heads)
        return h, {
            **projections,
            **self._norms_of_heads([query_norm, key_norm]),
            "o": output,
            "keys": keys[0],
            "values": values[0],
            "table": self._table(cos, sin),
            "slot": slots[0],
            "span": spans[0, 0],
        }

    def _projections(self, heads: list[Any]) -> tuple[Any, dict[str, Any]]:
        """Weights and biases of queries, keys and values, which have one input."""
        found = [self._linear(head) for head in heads]
        _expect(all(z is found[0][0] for z, _ in found), "queries and keys have other inputs")
        h, weight = self._norm(found[0][0])
        parts: dict[str, Any] = {"norm1": weight}
        for name, (_, (own, bias)) in zip("qkv", found, strict=True):
            parts |= {name: own, f"{name}_bias": bias}
        return h, parts

    def _norms_of_heads(self, norms: list[Norm | None]) -> dict[str, Tensor | None]:
        given = [one for one in norms if one is not None]
        _expect(len(given) != 1, "queries or keys alone have norms")
        self._head_norms += given
        weights = [None if one is None else one.weight for one in norms]
        return dict(zip(("q_norm", "k_norm"), weights, strict=True))

    def _table(self, cos: Any, sin: Any) -> Tensor:
        step = self._take(cos, "lookup")
        _expect(step.outputs == (cos, sin), "the angles come from several tables")
        positions, table = step.inputs
        _expect(isinstance(positions, Tensor), "positions are computed")
        self._positions[id(positions)] = positions
        return table  # type: ignore[no-any-return]

    def _embedding(self, h: Any) -> tuple[Tensor, Tensor, float | None]:
        scale = None
        if self._kind(h) == "mul":
            h, factor = self._take(h, "mul").inputs
            scale = self._number(factor)
        token, weight = self._take(h, "embedding").inputs
        _expect(isinstance(token, Tensor) and isinstance(weight, Tensor), "tokens are computed")
        _expect(token.numel() == 1, "there are several tokens")
        return token, weight, scale

    def _number(self, factor: Any) -> float:
        """A factor that is known: a number, a tensor of one, or that in another dtype."""
        if self._kind(factor) == "cast":
            tensor, dtype = self._take(factor, "cast").inputs
            factor = tensor.to(dtype)
        is_number = isinstance(factor, int | float) or (
            isinstance(factor, Tensor) and factor.numel() == 1
        )
        _expect(is_number, "the embedding is multiplied by a tensor")
        return float(factor)


def _expect(holds: bool, reason: str) -> None:
    if not holds:
        raise Unplanned(reason)


def _only(values: Any) -> Any:
    """The one value that all layers share."""
    values = list(values)
    _expect(len(values) == 1, "its layers differ")
    return values[0]
