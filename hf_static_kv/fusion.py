"""Fewer and better kernels in a captured step, without a compiler: parts of a model replaced for a while.

    norms      each RMS norm as one kernel, with the sum before it where there is one
    angles     cosines and sines of all positions in a table, made once
    rotary     queries and keys turned to their position in one kernel
    gated MLP  gate, up, activation and product in one
    linears    read by our own kernel; those that are given the same input (q, k, v) in one launch

No list of models: a part is taken for one of these when, tried on random numbers, it computes the same to the bit.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import Linear, Module, Parameter
from torch.overrides import TorchFunctionMode

from hf_static_kv.kernels import linear, rotary
from hf_static_kv.kernels.rms_norm import STYLES, NormStyle, rms_norm, rms_norm_plain, sum_and_rms_norm

_EPS_NAMES = ("variance_epsilon", "eps")
_ROTARY_NAME = "apply_rotary_pos_emb"
_TRIED_DTYPES = (torch.float32, torch.bfloat16)  # the second shows where numbers are rounded


@contextmanager
def fused_norms(model: Module) -> Iterator[list[Module]]:
    """The model with its RMS norms as kernels, and afterwards with its own `forward` again; gives those norms."""
    styles: dict[type, NormStyle | None] = {}
    norms: dict[Module, _Norm] = {}
    for module in model.modules():
        if not _looks_like_a_norm(module):
            continue
        if type(module) not in styles:
            styles[type(module)] = norm_style(module)
        if (style := styles[type(module)]) is not None:
            norms[module] = _Norm(module, _eps(module), style)
    with _replaced({module: norm.forward for module, norm in norms.items()}):
        yield list(norms)


class FusedSums(TorchFunctionMode):
    """Around each pass of a model with fused norms: a sum that a norm follows is computed together with it.

    The first pass shows which sums these are; in a later one the n-th sum is taken for the n-th sum of the first. A
    norm looks whether its input is the tensor that it was computed for, so a guess that fails costs time alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.followers: list[_Norm | None] | None = None  # of the n-th sum, known after the first pass
        self.sums: list[torch.Tensor] = []
        self.count = 0

    def __enter__(self) -> FusedSums:
        self.count = 0
        _Norm.watcher = self if self.followers is None else None
        if self.followers is None:
            self.followers, self.sums = [], []
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _Norm.watcher, self.sums = None, []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _SUMS or kwargs or not _are_alike(*args):
            return func(*args, **(kwargs or {}))
        assert self.followers is not None
        self.count += 1
        if _Norm.watcher is self:
            self.followers.append(None)
            self.sums.append(func(*args))
            return self.sums[-1]
        follower = self.followers[self.count - 1] if self.count <= len(self.followers) else None
        return func(*args) if follower is None else follower.of_sum(*args)

    def saw_norm_of(self, x: torch.Tensor, norm: _Norm) -> None:
        assert self.followers is not None
        for n, total in enumerate(self.sums):
            if total is x:
                self.followers[n] = norm


_SUMS = (torch.Tensor.add, torch.Tensor.__add__, torch.add)


def _are_alike(x: Any, other: Any = None, *rest: Any) -> bool:
    return (
        not rest
        and isinstance(x, torch.Tensor)
        and isinstance(other, torch.Tensor)
        and (x.shape, x.dtype, x.device) == (other.shape, other.dtype, other.device)
    )


@contextmanager
def angles_from_tables(model: Module, length: int) -> Iterator[list[torch.Tensor]]:
    """The modules that compute cosines and sines, reading them from tables of `length` positions; gives the tables.

    They are filled at the first pass, and must live as long as a graph that was captured with them.
    """
    modules = [m for m in model.modules() if "RotaryEmbedding" in type(m).__name__ and _is_itself(m)]
    tables: list[torch.Tensor] = []
    with _replaced({module: _Angles(module, length, tables).forward for module in modules}):
        yield tables


@contextmanager
def fused_rotary(model: Module) -> Iterator[list[str]]:
    """The function that turns queries and keys, as one kernel in the files of this model's classes; gives their names.

    For one new token; anything else still runs in the function that stood there.
    """
    homes = {type(module).__module__: sys.modules[type(module).__module__] for module in model.modules()}
    own = {name: getattr(home, _ROTARY_NAME) for name, home in homes.items() if hasattr(home, _ROTARY_NAME)}
    own = {name: function for name, function in own.items() if _is_rotary(function)}
    try:
        for name, function in own.items():
            setattr(homes[name], _ROTARY_NAME, partial(_rotary, function))
        yield list(own)
    finally:
        for name, function in own.items():
            setattr(homes[name], _ROTARY_NAME, function)


@contextmanager
def fused_linears(model: Module, run: Callable[[], object]) -> Iterator[list[list[Linear]]]:
    """The model with its gated MLPs and linear layers as kernels for few rows; gives the groups of linear layers.

    `run` is one pass of the model. In it is seen which linear layers are given the same input, one after the other.
    """
    mlps = {module: activation for module in model.modules() if (activation := mlp_activation(module)) is not None}
    with _replaced({module: _GatedMLP(module, activation).forward for module, activation in mlps.items()}):
        groups = _groups_by_input(model, run)
        forwards: dict[Module, Callable[..., Any]] = {}
        for group in groups:
            shared = _SharedInput(group)
            forwards.update({module: _Part(shared, i).forward for i, module in enumerate(group)})
        with _replaced(forwards):
            yield groups


@contextmanager
def _replaced(forwards: dict[Module, Callable[..., Any]]) -> Iterator[None]:
    try:
        for module, forward in forwards.items():
            module.forward = forward
        yield
    finally:
        for module in forwards:
            module.__dict__.pop("forward", None)


def norm_style(module: Module) -> NormStyle | None:
    """How this module multiplies by its weight, found by trying; None where it is no RMS norm that we know."""
    generator = torch.Generator().manual_seed(0)
    dim = next(module.parameters()).shape[0]
    weight, x = torch.randn(dim, generator=generator), torch.randn(3, dim, generator=generator)
    # In float32 it shows whether this is an RMS norm and what is added to the weight, in bfloat16 where it is rounded.
    trials = [(dtype, _with_weight(module, weight.to(dtype))) for dtype in _TRIED_DTYPES]
    for style in STYLES:
        if all(
            torch.equal(trial(x.to(dtype)), rms_norm_plain(x.to(dtype), weight.to(dtype), _eps(module), style))
            for dtype, trial in trials
        ):
            return style
    return None


def _with_weight(module: Module, weight: torch.Tensor) -> Module:
    """A copy on the CPU, with this weight."""
    trial = copy.deepcopy(module).to("cpu", weight.dtype)
    trial.weight = Parameter(weight, requires_grad=False)
    return trial


def _looks_like_a_norm(module: Module) -> bool:
    weight = getattr(module, "weight", None)
    return (
        "RMSNorm" in type(module).__name__
        and isinstance(weight, Parameter)
        and weight.ndim == 1
        and getattr(module, "bias", None) is None
        and any(hasattr(module, name) for name in _EPS_NAMES)
        and _is_itself(module)
    )


def _is_itself(module: Module) -> bool:
    return "forward" not in module.__dict__  # a hook stands there


def _eps(module: Module) -> float:
    return float(next(getattr(module, name) for name in _EPS_NAMES if hasattr(module, name)))


class _Norm:
    watcher: FusedSums | None = None

    def __init__(self, module: Module, eps: float, style: NormStyle) -> None:
        self.module: Any = module
        self.eps, self.style = eps, style
        self.sum: torch.Tensor | None = None
        self.output: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if _Norm.watcher is not None:
            _Norm.watcher.saw_norm_of(hidden_states, self)
        output, known = self.output, hidden_states is self.sum
        self.sum = self.output = None
        if known and output is not None:
            return output
        return rms_norm(hidden_states, self.module.weight, self.eps, self.style)

    def of_sum(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        self.sum, self.output = sum_and_rms_norm(x, other, self.module.weight, self.eps, self.style)
        return self.sum


class _Angles:
    def __init__(self, module: Module, length: int, tables: list[torch.Tensor]) -> None:
        self.own, self.length, self.tables = module.forward, length, tables
        self.by_arguments: dict[tuple[Any, ...], torch.Tensor | None] = {}

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        key = (*args, *kwargs.items())
        if key not in self.by_arguments:
            self.by_arguments[key] = self._table(x, position_ids, *args, **kwargs)
        table = self.by_arguments[key]
        if table is None:
            return self.own(x, position_ids, *args, **kwargs)
        return F.embedding(position_ids, table).chunk(2, dim=-1)

    def _table(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """[length, 2 D] of cosines and sines side by side; None where these are not its rows."""
        expected = self.own(x, position_ids, *args, **kwargs)
        positions = torch.arange(self.length, device=position_ids.device)[None]
        made = self.own(x, positions, *args, **kwargs)
        if not all(isinstance(part, torch.Tensor) and part.ndim == 3 for part in (*expected, *made)) or len(made) != 2:
            return None
        table = torch.cat(made, dim=-1)[0]
        if not torch.equal(F.embedding(position_ids, table), torch.cat(expected, dim=-1)):
            return None
        self.tables.append(table)
        return table


def _is_rotary(function: Callable[..., Any]) -> bool:
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(2, heads, 1, 8, generator=generator) for heads in (3, 2)]
    angles = [torch.randn(2, 1, 8, generator=generator) for _ in range(2)]
    for dtype in _TRIED_DTYPES:
        arguments = [tensor.to(dtype) for tensor in (*states, *angles)]
        try:
            got = function(*arguments)
        except Exception:  # another function of that name, with other arguments
            return False
        expected = rotary.rotary_plain(*arguments)
        if len(got) != 2 or not all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)):
            return False
    return True


def _rotary(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return rotary.rotary(*args) if len(args) == 4 and not kwargs and rotary.is_served(*args) else own(*args, **kwargs)


def mlp_activation(module: Module) -> str | None:
    """The activation of down(act(gate(x)) * up(x)), where trying shows that this module computes that; or None."""
    parts: dict[str, Any] = {name: getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")}
    if not _is_itself(module) or not all(_is_plain(part) and part.bias is None for part in parts.values()):
        return None
    generator, x = torch.Generator().manual_seed(0), torch.linspace(-3, 3, 24).view(1, 3, 8)
    trial, tiny = copy.copy(module), {}
    trial._modules = dict(module._modules)
    for name, (inputs, outputs) in zip(parts, ((8, 12), (8, 12), (12, 8)), strict=True):
        tiny[name] = Linear(inputs, outputs, bias=False, device="meta")
        tiny[name].weight = Parameter(torch.randn(outputs, inputs, generator=generator), requires_grad=False)
    trial._modules.update(tiny)
    try:
        got = trial(x)
    except Exception:  # it takes other arguments, or needs its own size
        return None
    gate, up, down = tiny.values()
    for activation in linear.ACTIVATIONS:
        if torch.equal(got, down(linear.activate(gate(x), activation) * up(x))):
            return activation
    return None


def _is_plain(module: object) -> bool:
    """A linear layer and nothing more: not an adapter, not a quantised one."""
    return type(module) is Linear and _is_itself(module)


# Methods, not partials: to `torch.compile` a partial is a constant, and every layer with another is compiled again.
class _GatedMLP:
    def __init__(self, module: Module, activation: str) -> None:
        self.module: Any = module
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.module.gate_proj.weight, self.module.up_proj.weight
        output: torch.Tensor = self.module.down_proj(linear.gated_linear(x, gate, up, self.activation))
        return output


def _groups_by_input(model: Module, run: Callable[[], object]) -> list[list[Linear]]:
    """The linear layers that `run` calls, once each; those in a row with the same input tensor together."""
    calls: list[tuple[Any, torch.Tensor]] = []

    def note(module: Module, args: tuple[Any, ...]) -> None:
        calls.append((module, args[0]))  # the tensor is kept, so that no other one can be taken for it

    handles = [module.register_forward_pre_hook(note) for module in model.modules() if _is_plain(module)]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    modules = [module for module, _ in calls]
    groups: list[list[Linear]] = []
    before = None
    for module, x in calls:
        if modules.count(module) > 1:  # called twice in a pass: left alone
            before = None
        elif x is before and len(groups[-1]) < linear.MAX_WEIGHTS and _alike(module, groups[-1][0]):
            groups[-1].append(module)
        else:
            groups.append([module])
            before = x
    return groups


def _alike(a: Linear, b: Linear) -> bool:
    return (a.bias is None) == (b.bias is None) and a.weight.dtype == b.weight.dtype


class _SharedInput:
    """Linear layers that are given the same input, and what was computed for all of them when the first was called."""

    def __init__(self, group: list[Linear]) -> None:
        self.group = group
        self.x: torch.Tensor | None = None
        self.outputs: tuple[torch.Tensor, ...] = ()

    def compute(self, x: torch.Tensor) -> None:
        biases = [] if self.group[0].bias is None else [module.bias for module in self.group]
        y = linear.linears(x, [module.weight for module in self.group], biases)
        self.x, self.outputs = x, y.split([module.out_features for module in self.group], dim=-1)

    def forget(self) -> None:
        self.x, self.outputs = None, ()


class _Part:
    """One of them."""

    def __init__(self, shared: _SharedInput, i: int) -> None:
        self.shared, self.i = shared, i

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared, module = self.shared, self.shared.group[self.i]
        if self.i == 0 and x.numel() <= linear.MAX_ROWS * x.shape[-1]:
            shared.compute(x)
        if shared.x is not x:  # another input than in the pass that was watched, or too many rows
            return F.linear(x, module.weight, module.bias)
        output = shared.outputs[self.i]
        if self.i == len(shared.group) - 1:
            shared.forget()
        return output
