"""Rewrite rules of a recorded pass: each puts one call in the place of several, and its docstring
is the picture.

A rule says what belongs together. `Program.fuse` looks whether it is safe, and leaves the list as
it is where it is not: where a value in between goes somewhere else, too, or someone writes in
between.
"""

import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from hf_static_kv.kernels.linear import (
    MAX_TOKENS,
    MAX_TOKENS_FUSED,
    MAX_TOKENS_OF_ONE,
    MAX_WEIGHTS,
    Linear,
    activated_product,
    activation_name,
    fused_linears,
    gated_linear,
    is_packed,
    linear_add_norm,
    linears,
)
from hf_static_kv.kernels.norm import LAYER_NORM, STYLES, Norm, add_norm, norm
from hf_static_kv.kernels.packed import layout_of
from hf_static_kv.kernels.rope_attention import is_joined, rotate_and_attend
from hf_static_kv.kernels.rotary import rotary, rotate_and_write
from hf_static_kv.program.activations import activated
from hf_static_kv.program.quantised import packed_linear
from hf_static_kv.program.record import Operation, Program, Value
from hf_static_kv.program.rotary import angle_table, angles, lookup

_Rewrite = Callable[[Program], None]
_SUMS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
_PRODUCTS = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)
_LINEARS = torch.ops.hf_static_kv.linears.default
_GATED_LINEAR = torch.ops.hf_static_kv.gated_linear.default
_ATTEND = torch.ops.hf_static_kv.attend.default
_WRITE_TOKENS = torch.ops.hf_static_kv.write_tokens.default

# Weights of linear layers that compute their norm. SmolLM2-135M (2 million in the largest) gains 14
# % of a step, and Llama-3.2-1B (6 to 33 million) would lose 5 % (H200, 2026-11-16).
_MAX_NORMED = 1 << 22
# Of several tokens. Gate and up of Llama-3.2-1B are that large, and larger ones are not measured but
# its head (263 million), with which a step was 1 % slower (8 rows, H200, 2026-11-19).
_MAX_NORMED_OF_SEVERAL = 1 << 25


class Rule(NamedTuple):
    """A rewrite, and whether it keeps the bits of the list without it.

    Inside `exact` only such rules apply.
    """

    apply: _Rewrite
    keeps_bits: bool


RULES: dict[str, Rule] = {}  # in the order in which they apply


def rule(keeps_bits: bool) -> Callable[[_Rewrite], _Rewrite]:
    """Register a function of a program as a rule under its name."""

    def register(function: _Rewrite) -> _Rewrite:
        RULES[function.__name__] = Rule(function, keeps_bits)
        return function

    return register


def rewrite(program: Program, without: Collection[str] = (), keeps_bits: bool = False) -> None:
    """Apply all rules but those named in `without`; only those that keep the bits, where that is
    asked for.
    """
    for name, (apply, keeps) in RULES.items():
        if name not in without and (keeps or not keeps_bits):
            apply(program)


# --- angles, rotations, and the write into the storage


@rule(keeps_bits=True)
def angles_from_table(program: Program) -> None:
    """
    cos, sin = angles(position_ids)         ->   cos, sin = lookup(position_ids, table)
    """
    for call in program.calls_of(angles) if program.num_positions else []:
        positions, x, *others = call.args
        if len(positions.shape) == 2:
            like: Any = None if x is None else torch.empty(1, dtype=x.dtype, device=x.device)
            first = torch.zeros(positions.shape, dtype=torch.int64, device=positions.device)
            table = angle_table(program.num_positions, first, like, *others, **call.kwargs)
            if table is not None:
                program.fuse([call], lookup, positions, table, results=call.results)


@rule(keeps_bits=True)
def transpose_first(program: Program) -> None:
    """
    y = transpose(norm(x), 1, 2)            ->   y = norm(transpose(x, 1, 2))        next to the rotation of y
    """
    for call in program.calls_of(Tensor.transpose):
        between = call.args[0]
        before = _own_norm(program, between, call)
        # The norm reads x later than it did.
        if before is None or program.writes_between(before, call):
            continue
        if call.args[1:] == (1, 2) and len(between.shape) == 4:  # the last dim stays the last
            x, its_norm = before.args
            before.func = call.func
            before.args = (x, 1, 2)
            call.func = norm
            call.args = (between, its_norm)
            between.shape = call.results[0].shape  # type: ignore[union-attr]


def _own_norm(program: Program, x: Any, user: Operation) -> Operation | None:
    """The norm that gives x, where no other call takes x."""
    before = program.maker(x)
    if before is not None and before.func is norm and program.only_user(x) is user:
        return before
    return None


@rule(keeps_bits=True)
def write_rotated(program: Program) -> None:
    """
    q, k = norm(q), norm(k)  (some models)   ->   q = rotate_and_write(q, k, v, cos, sin,
    q, k = rotary(q, k, cos, sin)                                      storage, slots, norms)
    write_tokens(storage, k, v, slots)
    """
    for call in program.calls_of(_WRITE_TOKENS):
        keys, values, rotated_key, value, position = call.args
        rotation = program.maker(rotated_key)
        if (
            rotation is None
            or rotation.func is not rotary
            or rotated_key is not rotation.results[1]
        ):
            continue
        before = [_own_norm(program, x, rotation) for x in rotation.args[:2]]
        states = [
            one.args[0] if one else x for x, one in zip(rotation.args[:2], before, strict=True)
        ]
        norms = [one.args[1] if one else None for one in before]
        arguments = *states, value, *rotation.args[2:], keys, values, position, *norms
        parts = [rotation, call, *filter(None, before)]
        program.fuse(parts, rotate_and_write, *arguments, results=rotation.results[:1])


@rule(keeps_bits=False)
def attend_rotated(program: Program) -> None:
    """
    q = rotate_and_write(q, k, v, ...)       ->   y = rotate_and_attend(q, k, v, ..., spans)       some rows
    y = attend(q, storage, spans)
    """
    for call in program.calls_of(_ATTEND):
        query, keys, values, *others = call.args
        before = program.maker(query)
        if before is None or before.func is not rotate_and_write or before.kwargs:
            continue
        spans, scale, max_span, softcap, sinks, *in_order = others
        is_storage = before.args[5] is keys and before.args[6] is values
        if is_storage and not any(in_order) and is_joined(query, keys, max_span, *before.args[8:]):
            arguments = *before.args, spans, scale, max_span, softcap, sinks
            program.fuse([before, call], rotate_and_attend, *arguments, results=call.results)


# --- linear layers


def run_linear(x: Tensor, layer: Linear) -> Any:
    """The output; where several weights share the input, a tuple of outputs."""
    weights = layer.weights
    is_plain = layer.norm is None and layer.residual is None and not is_packed(layer)
    # As inside `exact`.
    if is_plain and (layer.is_gated or not layer.activation):
        y = (
            gated_linear(x, *weights, layer.activation)
            if layer.is_gated
            else linears(x, weights, layer.biases)
        )
    else:
        y = fused_linears(x, layer)
    if layer.is_gated or len(weights) == 1:
        return y
    return y.split([weight.shape[0] for weight in weights], dim=-1)


class Found(NamedTuple):
    """Linear layers in a list."""

    call: Operation
    x: Any
    layer: Linear

    @property
    def tokens(self) -> int:
        return int(self.x.shape.numel() // self.x.shape[-1])

    @property
    def is_fused(self) -> bool:
        """Whether one launch computes what is around the products, too: of one token, or of few in
        bfloat16.

        In float16 an input times the weight of its norm may overflow.
        """
        if self.tokens == 1:
            return True
        is_served = self.x.dtype == torch.bfloat16 and not is_packed(self.layer)
        has_few = self.tokens <= MAX_TOKENS_FUSED
        return has_few and is_served and all(map(Tensor.is_contiguous, self.layer.weights))

    @property
    def takes_more(self) -> bool:
        """Whether few tokens go through one weight, or a gate, and nothing is added yet."""
        gives_one = len(self.layer.weights) == 1 or self.layer.is_gated
        return self.is_fused and self.layer.residual is None and gives_one


def found_linear(call: Operation | None) -> Found | None:
    """The linear layers that a call computes, by our kernels; None for any other call."""
    if call is None or call.func not in (run_linear, _LINEARS, _GATED_LINEAR):
        return None
    x, *rest = call.args
    if call.func is run_linear:
        return Found(call, x, rest[0])
    return Found(
        call,
        x,
        Linear(*rest) if call.func is _LINEARS else Linear(rest[:2], [], None, rest[2], True),
    )


@rule(keeps_bits=False)
def few_tokens(program: Program) -> None:
    """
    y = linear(x, w, b)                     ->   y = run_linear(x, [w], [b])
    """
    for call in [call for call in program.calls_of(F.linear) if not call.kwargs]:
        x, weight, bias = (*call.args, None)[:3]
        if _is_plain_linear(x, weight, bias):
            layer = Linear([weight], [] if bias is None else [bias])
            program.fuse([call], run_linear, x, layer, results=call.results)


@rule(keeps_bits=False)
def packed_weights(program: Program) -> None:
    """
    y = packed_linear(x, w, b)              ->   y = run_linear(x, [w], [b])         (four or eight bits)

    Without this rule quantised layers are recorded as their package computes them.
    """
    for call in program.calls_of(packed_linear):
        x, weight, bias = call.args
        layer = Linear([weight], [] if bias is None else [bias])
        program.fuse([call], run_linear, x, layer, results=call.results)


@rule(keeps_bits=False)
def conv1d(program: Program) -> None:
    """
    y = view(addmm(b, view(x), w))          ->   y = run_linear(x, [w^T], [b])       (GPT-2's Conv1D)
    """
    for call in [call for call in program.calls_of(torch.addmm) if not call.kwargs]:
        bias, x, weight = call.args
        before = program.maker(x)
        after = program.only_user(call.results[0])
        if before is None or after is None or not (before.func is after.func is Tensor.view):
            continue
        parts = [before, call, after] if program.only_user(x) is call else [call, after]
        is_same = before.args[0].shape[:-1] == after.results[0].shape[:-1]  # type: ignore[union-attr]
        if (
            is_same
            and before.args[0].shape[-1] == x.shape[-1]
            and _is_plain_linear(x, weight, bias)
        ):
            layer = Linear([weight.t()], [bias])
            program.fuse(parts, run_linear, before.args[0], layer, results=after.results)


def _is_plain_linear(x: Any, weight: Any, bias: Any) -> bool:
    """Few tokens, and weights of torch itself in one dtype: not quantised, not computed."""
    tensors = [weight] if bias is None else [weight, bias]
    is_own = all(
        type(tensor) in (Tensor, Parameter) and tensor.dtype == x.dtype for tensor in tensors
    )
    tokens = x.shape.numel() // max(1, x.shape[-1])
    return is_own and weight.ndim == 2 and x.dtype.is_floating_point and 1 <= tokens <= MAX_TOKENS


def _activation(call: Operation) -> str:
    """The name of the activation that a call computes; "" for any other call."""
    if call.func is activated:
        return str(call.args[1].name)
    return activation_name(call.func, call.kwargs) if len(call.args) == 1 else ""


@rule(keeps_bits=False)
def gate(program: Program) -> None:
    """
    g = run_linear(x, [gate])   ->   y = run_linear(x, [gate, up], activation, is_gated)
    u = run_linear(x, [up])
    y = activation(g) * u
    """
    for call in [call for call in program.calls_of(*_PRODUCTS) if len(call.args) == 2]:
        for active, up in (call.args, call.args[::-1]):
            activates = program.maker(active)
            if activates is None or not (name := _activation(activates)):
                continue
            gates = found_linear(program.maker(activates.args[0])), found_linear(program.maker(up))
            if (
                found := _gate_and_up(*gates) or _halves(program, activates.args[0], up)
            ) is not None:
                x, weights, parts = found
                layer = Linear(weights, [], None, name, True)
                program.fuse([*parts, activates, call], run_linear, x, layer, results=call.results)
                break


@rule(keeps_bits=False)
def product(program: Program) -> None:
    """
    y = activation(g) * u                   ->   y = activated_product(g, u, activation)      many tokens
    """
    for call in [call for call in program.calls_of(*_PRODUCTS) if len(call.args) == 2]:
        for active, up in (call.args, call.args[::-1]):
            activates = program.maker(active)
            if activates is None or not (name := _activation(activates)):
                continue
            g = activates.args[0]
            shapes = {(x.shape, x.dtype) for x in (g, up) if isinstance(x, Value)}
            if len(shapes) == 1 and math.prod(g.shape[:-1]) > MAX_TOKENS:
                parts = [activates, call]
                if program.fuse(parts, activated_product, g, up, name, results=call.results):
                    break


def _gate_and_up(
    gate: Found | None, up: Found | None
) -> tuple[Any, list[Any], list[Operation]] | None:
    """Input, weights and calls where these are two linear layers without biases that fit each
    other.
    """
    if gate is None or up is None or gate.call is up.call or gate.x is not up.x:
        return None
    if any(one.layer[1:] != Linear([], [])[1:] for one in (gate, up)):
        return None
    weights = [*gate.layer.weights, *up.layer.weights]
    kinds = {(weight.shape, weight.stride(), layout_of(weight)) for weight in weights}
    return (
        (gate.x, weights, [gate.call, up.call]) if len(weights) == 2 and len(kinds) == 1 else None
    )


def _halves(program: Program, gate: Any, up: Any) -> tuple[Any, list[Any], list[Operation]] | None:
    """The same where gate and up are the halves of the output of one linear layer (Phi 3, GLM 4)."""
    split = program.maker(gate)
    if (
        split is None
        or split.func not in (Tensor.chunk, torch.chunk)
        or split.results != [gate, up]
    ):
        return None
    found = found_linear(program.maker(split.args[0]))
    dims = (*split.args[1:], *split.kwargs.values())
    if found is None or dims not in ((2, -1), (2, len(split.args[0].shape) - 1)):
        return None
    if found.layer.biases or is_packed(found.layer):
        return None
    return (found.x, list(found.layer.weights[0].chunk(2)), [found.call, split])


@rule(keeps_bits=False)
def activation(program: Program) -> None:
    """
    y = activation(run_linear(x, [w], [b])) ->   y = run_linear(x, [w], [b], activation)          few tokens
    """
    for call in [call for call in program if _activation(call)]:
        found = found_linear(program.maker(call.args[0]))
        if found is not None and found.takes_more and not found.layer.activation:
            layer = found.layer._replace(activation=_activation(call))
            program.fuse([found.call, call], run_linear, found.x, layer, results=call.results)


@rule(keeps_bits=True)
def shared_input(program: Program) -> None:
    """
    q = run_linear(x, [wq])                 ->   q, k, v = run_linear(x, [wq, wk, wv])
    k = run_linear(x, [wk])
    v = run_linear(x, [wv])
    """
    groups: dict[Any, list[Found]] = {}
    for found in filter(None, map(found_linear, program)):
        weights, biases, *around = found.layer
        if len(weights) == 1 and around == [None, "", False, None] and found.tokens <= MAX_TOKENS:
            kind = id(found.x), len(biases), layout_of(weights[0])
            groups.setdefault(kind, []).append(found)
    for group in groups.values():
        for i in range(0, len(group), MAX_WEIGHTS):
            some = group[i : i + MAX_WEIGHTS]
            layer = Linear(
                [one.layer.weights[0] for one in some],
                [b for one in some for b in one.layer.biases],
            )
            results = [value for one in some for value in one.call.results]
            if len(some) > 1:
                program.fuse(
                    [one.call for one in some], run_linear, some[0].x, layer, results=results
                )


# --- norms


@rule(keeps_bits=False)
def layer_norm(program: Program) -> None:
    """
    y = layer_norm(x, [D], weight, bias)    ->   y = norm(x, norm)
    """
    names = ("input", "normalized_shape", "weight", "bias", "eps")
    for call in program.calls_of(F.layer_norm):
        given = {
            "bias": None,
            "eps": 1e-5,
            **dict(zip(names, call.args, strict=False)),
            **call.kwargs,
        }
        x = given["input"]
        weight = given.get("weight")
        if len(given["normalized_shape"]) == 1 and weight is not None and weight.dtype == x.dtype:
            its_norm = Norm(weight, given["eps"], LAYER_NORM, given["bias"])
            program.fuse([call], norm, x, its_norm, results=call.results)


@rule(keeps_bits=False)
def residual(program: Program) -> None:
    """
    h = x + run_linear(y, [w], [b])         ->   h = run_linear(y, [w], [b], residual=x)          few tokens

    Not where the norm of h has a launch of its own, which adds as well (`norm_of_sum`) while
    nothing waits for x.
    """
    normed = [
        program.maker(call.args[0])
        for call in program.calls_of(norm)
        if _normed(program, call) is None
    ]
    for call in [call for call in program if is_sum(call) and call not in normed]:
        for x, output in (call.args, call.args[::-1]):
            found = found_linear(program.maker(output))
            if found is not None and found.takes_more and not found.layer.is_gated:
                layer = found.layer._replace(residual=x)
                if program.fuse(
                    [found.call, call], run_linear, found.x, layer, results=call.results
                ):
                    break


def is_sum(call: Operation) -> bool:
    """Whether it adds two tensors of one shape and dtype."""
    if (
        call.func not in _SUMS
        or call.kwargs
        or not all(isinstance(x, Value | Tensor) for x in call.args)
    ):
        return False
    kinds = {(x.shape, x.dtype, x.device) for x in call.args}
    return len(kinds) == 1 and len(call.args) == 2 and call.args[0].dtype.is_floating_point


def is_product(call: Operation) -> bool:
    """Whether it multiplies two things."""
    return call.func in _PRODUCTS and not call.kwargs and len(call.args) == 2


@rule(keeps_bits=True)
def norm_of_sum(program: Program) -> None:
    """
    h = x + y                               ->   h, z = add_norm(x, y, norm)
    z = norm(h)

    h = x + inner(y)                        ->   h, z = add_norm(x, y, norm, inner)               (Gemma)
    z = norm(h)
    """
    for call in program.calls_of(norm):
        h, its_norm = call.args
        total = program.maker(h)
        results = [h, *call.results]
        if total is None or not is_sum(total) or its_norm.weight.dtype != h.dtype:
            continue
        inner = next(
            (one for one in map(program.maker, total.args) if one is not None and one.func is norm),
            None,
        )
        if inner is not None and inner.args[0].shape == h.shape:
            x = total.args[1] if inner.results[0] is total.args[0] else total.args[0]
            arguments = x, inner.args[0], its_norm, inner.args[1]
            if program.fuse([inner, total, call], add_norm, *arguments, results=results):
                continue
        program.fuse([total, call], add_norm, *total.args, its_norm, results=results)


@rule(keeps_bits=False)
def sum_of_parts(program: Program) -> None:
    """
    y = run_linear(x, [w])                  ->   h, z = linear_add_norm(x, w, r, norm, inner)     some tokens
    h, z = add_norm(r, y, norm, inner)
    """
    for call in program.calls_of(add_norm):
        r, y, *norms = call.args
        orders = [(r, y)] if len(norms) > 1 else [(r, y), (y, r)]
        for other, output in orders:
            found = found_linear(program.maker(output))
            if found is None or not MAX_TOKENS_OF_ONE < found.tokens <= MAX_TOKENS:
                continue
            weights, *around = found.layer
            if len(weights) == 1 and around == list(Linear([], [])[1:]):
                arguments = found.x, weights[0], other, *norms
                parts = [found.call, call]
                if program.fuse(parts, linear_add_norm, *arguments, results=call.results):
                    break


@rule(keeps_bits=False)
def norm_before(program: Program) -> None:
    """
    y = run_linear(norm(x), ...)   ->   y = run_linear(x, ..., norm)

    For few tokens, RMS norms and weights that are not large.

    Every instance of the linear kernel computes the norm again: with many of them a launch of its own
    is faster.
    """
    for call in program.calls_of(norm):
        if (found := _normed(program, call)) is not None:
            x, its_norm = call.args
            layer = found.layer._replace(norm=its_norm)
            program.fuse([call, found.call], run_linear, x, layer, results=found.call.results)


def _normed(program: Program, call: Operation) -> Found | None:
    """The linear layers that can compute this norm of their input: of few tokens, with weights that
    are not large.
    """
    found = found_linear(program.only_user(call.results[0]))
    x, its_norm = call.args
    if (
        found is None
        or found.x is not call.results[0]
        or found.layer.norm is not None
        or not found.is_fused
    ):
        return None
    size = sum(weight.numel() for weight in found.layer.weights)
    most = _MAX_NORMED if found.tokens == 1 else _MAX_NORMED_OF_SEVERAL
    is_served = its_norm.weight.dtype == x.dtype and its_norm.style in STYLES and size <= most
    return found if is_served else None
