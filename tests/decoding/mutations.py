"""Changes of a model that no tensor shows. Each prepares a model and returns what changes its
tokens.

`MUTATIONS` has the functions by name. What they change outside of the model is put back by
`monkeypatch`.
"""

import itertools
from collections import deque
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.models.llama import modeling_llama

MUTATIONS = {}
SCALE = 1.0
LIMITS = {"scale": 1.0}


def mutation(function):
    MUTATIONS[function.__name__] = function
    return function


def mlp_of(model):
    return model.model.layers[0].mlp


def read_by_forward(model, read):
    """The MLP of the first layer times what `read(mlp)` gives."""
    mlp = mlp_of(model)
    own = type(mlp).forward

    class Scaled(type(mlp)):
        def forward(self, x):
            return own(self, x) * read(self)

    mlp.__class__ = Scaled
    return mlp


def attribute(first, second, read):
    """A mutation: an attribute that is `first()`, and then is `second()`."""

    def prepare(model, monkeypatch):
        mlp = read_by_forward(model, lambda mlp: read(mlp.own))
        mlp.own = first()
        return lambda: setattr(mlp, "own", second())

    return prepare


@dataclass
class Options:
    scale: float = 1.0


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale):
        self.scale = scale


class Activation:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, x):
        return torch.nn.functional.silu(x) * self.scale


def constant(value):
    return lambda: value


def first_of(own):
    return own[0]


def scale_of(own):
    return own.scale


MUTATIONS |= {
    "minus one to minus two": attribute(constant(-1.0), constant(-2.0), float),
    "whole minus one to minus two": attribute(constant(-1), constant(-2), float),
    "whole to true": attribute(
        constant(2), constant(True), lambda own: 3.0 if own is True else 1.0
    ),
    "zero to minus zero": attribute(
        constant(0.0), constant(-0.0), lambda own: 1.0 + np.signbit(own)
    ),
    "numpy number": attribute(lambda: np.float32(1), lambda: np.float32(3), float),
    "numpy array": attribute(
        lambda: np.ones(3), lambda: np.full(3, 3.0), lambda own: float(own[1])
    ),
    "tuple": attribute(constant((1.0,)), constant((3.0,)), first_of),
    "list": attribute(lambda: [1.0], lambda: [3.0], first_of),
    "nested list": attribute(lambda: [[1.0]], lambda: [[3.0]], lambda own: own[0][0]),
    "deque": attribute(lambda: deque([1.0]), lambda: deque([3.0]), first_of),
    "dict": attribute(lambda: {"scale": 1.0}, lambda: {"scale": 3.0}, lambda own: own["scale"]),
    "set": attribute(lambda: {1.0}, lambda: {3.0}, lambda own: next(iter(own))),
    "dataclass": attribute(Options, partial(Options, 3.0), scale_of),
    "namespace": attribute(
        partial(SimpleNamespace, scale=1.0), partial(SimpleNamespace, scale=3.0), scale_of
    ),
    "slots": attribute(partial(Slotted, 1.0), partial(Slotted, 3.0), scale_of),
    "bytes": attribute(constant(b"\1"), constant(b"\3"), first_of),
    "tensor that was None": attribute(
        constant(None), lambda: torch.tensor(3.0), lambda own: 1.0 if own is None else own
    ),
    "tensor in a list": attribute(
        lambda: [torch.tensor(1.0)], lambda: [torch.tensor(3.0)], first_of
    ),
}


def _in_place(name, change):
    def mutate(model, monkeypatch):
        MUTATIONS[name](model, monkeypatch)
        own = mlp_of(model).own
        return lambda: change(own)

    MUTATIONS[f"{name} in place"] = mutate


_in_place("list", lambda own: own.__setitem__(0, 3.0))
_in_place("dict", lambda own: own.update(scale=3.0))
_in_place("dataclass", lambda own: setattr(own, "scale", 3.0))
_in_place("namespace", lambda own: setattr(own, "scale", 3.0))
_in_place("slots", lambda own: setattr(own, "scale", 3.0))
_in_place("numpy array", lambda own: own.fill(3.0))
_in_place("tensor in a list", lambda own: own.__setitem__(0, torch.tensor(3.0)))


@mutation
def closure(model, monkeypatch):
    mlp = mlp_of(model)
    own = mlp.forward
    scale = 1.0

    def forward(x):
        return own(x) * scale

    def change():
        nonlocal scale
        scale = 3.0

    mlp.forward = forward
    return change


@mutation
def object_in_a_closure(model, monkeypatch):
    mlp = mlp_of(model)
    own, options = mlp.forward, Options()
    mlp.forward = lambda x: own(x) * options.scale
    return lambda: setattr(options, "scale", 3.0)


@mutation
def default_of_a_patch(model, monkeypatch):
    mlp = mlp_of(model)
    own = mlp.forward

    def forward(x, scale=1.0):
        return own(x) * scale

    mlp.forward = forward
    return lambda: setattr(forward, "__defaults__", (3.0,))


@mutation
def global_number(model, monkeypatch):
    read_by_forward(model, lambda mlp: SCALE)
    return lambda: monkeypatch.setitem(globals(), "SCALE", 3.0)


@mutation
def global_dict(model, monkeypatch):
    read_by_forward(model, lambda mlp: LIMITS["scale"])
    return lambda: monkeypatch.setitem(LIMITS, "scale", 3.0)


@mutation
def partial_forward(model, monkeypatch):
    mlp = mlp_of(model)

    def forward(own, scale, x):
        return own(x) * scale

    own = mlp.forward
    mlp.forward = partial(forward, own, 1.0)
    return lambda: setattr(mlp, "forward", partial(forward, own, 3.0))


@mutation
def class_attribute(model, monkeypatch):
    mlp = read_by_forward(model, lambda mlp: mlp.scale)
    type(mlp).scale = 1.0
    return lambda: setattr(type(mlp), "scale", 3.0)


@mutation
def attribute_of_a_base_class(model, monkeypatch):
    monkeypatch.setattr(modeling_llama.LlamaMLP, "scale", 1.0, raising=False)
    read_by_forward(model, lambda mlp: mlp.scale)
    return lambda: monkeypatch.setattr(modeling_llama.LlamaMLP, "scale", 3.0)


@mutation
def other_method_of_a_class(model, monkeypatch):
    mlp = read_by_forward(model, lambda mlp: mlp.factor())
    type(mlp).factor = lambda self: 1.0
    return lambda: setattr(type(mlp), "factor", lambda self: 3.0)


@mutation
def property_of_a_class(model, monkeypatch):
    mlp = read_by_forward(model, lambda mlp: mlp.factor)
    type(mlp).factor = property(lambda self: 1.0)
    return lambda: setattr(type(mlp), "factor", property(lambda self: 3.0))


@mutation
def method_of_a_torch_class(model, monkeypatch):
    own = torch.nn.Linear.forward
    return lambda: monkeypatch.setattr(
        torch.nn.Linear, "forward", lambda self, input: own(self, input) * 1.5
    )


@mutation
def callable_activation(model, monkeypatch):
    mlp = mlp_of(model)
    del mlp.act_fn
    mlp.act_fn = Activation(1.0)
    return lambda: setattr(mlp.act_fn, "scale", 3.0)


@mutation
def module_beside_the_tree(model, monkeypatch):
    inner = torch.nn.Dropout(0.0)
    inner.scale = 1.0
    mlp = read_by_forward(model, lambda mlp: mlp.aside[0].scale)
    mlp.aside = [inner]
    return lambda: setattr(inner, "scale", 3.0)


@mutation
def scaling_by_adapter(model, monkeypatch):
    """As PEFT's FourierFT keeps its scale."""
    mlp = read_by_forward(model, lambda mlp: mlp.fourierft_scaling["default"])
    mlp.fourierft_scaling = {"default": 1.0}
    return lambda: mlp.fourierft_scaling.update(default=3.0)


@mutation
def control_vector(model, monkeypatch):
    """As repeng: a module around a layer that holds its settings in an object."""

    class Control(torch.nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block, self.params = block, SimpleNamespace(control=None)

        def forward(self, *args, **kwargs):
            output = self.block(*args, **kwargs)
            if self.params.control is None:
                return output
            states = output[0] if isinstance(output, tuple) else output
            moved = states + self.params.control
            return (moved, *output[1:]) if isinstance(output, tuple) else moved

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("block"), name)

    layer = model.model.layers[0] = Control(model.model.layers[0])
    vector = torch.linspace(-2, 2, model.config.hidden_size, device=model.device)
    return lambda: setattr(layer.params, "control", vector)


def _attention(scale):
    def attend(module, query, key, value, mask, **kwargs):
        kwargs["scaling"] = kwargs["scaling"] * scale
        return AttentionInterface()["sdpa"](module, query, key, value, mask, **kwargs)

    return attend


@mutation
def attention_registered_again(model, monkeypatch):
    AttentionInterface.register("mine", _attention(1.0))
    AttentionMaskInterface.register("mine", sdpa_mask)
    model.set_attn_implementation("mine")
    return lambda: AttentionInterface.register("mine", _attention(0.1))


@mutation
def number_of_the_config(model, monkeypatch):
    mlp = read_by_forward(model, lambda mlp: mlp.config.mine["scale"])
    mlp.config.mine = {"scale": 1.0}
    return lambda: mlp.config.mine.update(scale=3.0)


@mutation
def weight_made_in_inference_mode(model, monkeypatch):
    mlp = mlp_of(model)
    with torch.inference_mode():
        mlp.up_proj.weight = torch.nn.Parameter(mlp.up_proj.weight.clone(), requires_grad=False)

    def change():
        with torch.inference_mode():
            mlp.up_proj.weight[1:, 1:3].mul_(-3)  # none of the sampled elements

    return change


COUNTERS = {}


def counter(function):
    COUNTERS[function.__name__] = function
    return function


@counter
def number_that_counts(model):
    def read(mlp):
        mlp.calls += 1
        return 1.0 + mlp.calls

    read_by_forward(model, read).calls = 0


@counter
def iterator_that_counts(model):
    read_by_forward(model, lambda mlp: 1.0 + next(mlp.calls)).calls = itertools.count()


@counter
def closure_that_counts(model):
    mlp = mlp_of(model)
    own, calls = mlp.forward, 0

    def forward(x):
        nonlocal calls
        calls += 1
        return own(x) * (1.0 + calls)

    mlp.forward = forward


@counter
def list_that_grows(model):
    def read(mlp):
        mlp.calls.append(0)
        return float(len(mlp.calls))

    read_by_forward(model, read).calls = []
