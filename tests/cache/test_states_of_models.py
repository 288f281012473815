"""`pass_state` looks at what it has seen before by identity: it must see every change all the same."""

import gc
import types
import weakref

import pytest
import torch
from torch.nn import Linear, Parameter

from hf_static_kv.cache.identity import pass_state
from tests.conftest import toy_model


def followed(source, **given):
    """A function of a user's own module."""
    names = {"__name__": "a_users_module", **given}
    exec(source, names)
    return names["f"], names


def swap_code(model):
    function, _ = followed("def f(self, x): return x")
    other, _ = followed("def f(self, x): return -x")
    type(model.model.layers[0].mlp).added = function
    yield
    function.__code__ = other.__code__


def swap_defaults(model):
    function, _ = followed("def f(self, x=1): return x")
    type(model.model.layers[0].mlp).added = function
    yield
    function.__defaults__ = (2,)


def swap_keyword_defaults(model):
    function, _ = followed("def f(self, *, x=1): return x")
    type(model.model.layers[0].mlp).added = function
    yield
    function.__kwdefaults__["x"] = 2


def fill_a_cell(model):
    number = 1

    def f():
        return number

    type(model.model.layers[0].mlp).added = f
    yield
    f.__closure__[0].cell_contents = 2


def a_global_that_a_function_names(model):
    function, names = followed("def f(self): return factor", factor=1)
    type(model.model.layers[0].mlp).added = function
    yield
    names["factor"] = 2


def a_global_that_was_not_there(model):
    function, names = followed("def f(self): return factor")
    type(model.model.layers[0].mlp).added = function
    yield
    names["factor"] = 2


def an_attribute_of_a_function(model):
    function, _ = followed("def f(self): return f.factor")
    type(model.model.layers[0].mlp).added = function
    yield
    function.factor = 2


def a_list_of_a_class(model):
    own = type(model.model.layers[0].mlp)
    own.added = [1, [2]]
    yield
    own.added[1].append(3)


def a_set_of_a_class(model):
    own = type(model.model.layers[0].mlp)
    own.added = {1}
    yield
    own.added.add(3)


def an_object_of_a_class(model):
    own = type(model.model.layers[0].mlp)
    own.added = types.SimpleNamespace(factor=1)
    yield
    own.added.factor = 2


def a_renamed_attribute_of_an_object(model):
    own = type(model.model.layers[0].mlp)
    own.added = types.SimpleNamespace(factor=1)
    yield
    del own.added.factor
    own.added.divisor = 1


def a_method(model):
    own = type(model.model.layers[0].mlp)
    own.added = lambda self: 1
    yield
    own.added = lambda self: 2


def a_number(model):
    yield
    model.model.layers[0].self_attn.scaling = 0.123


def a_number_many_times(model):
    """The address of the first number may be that of the last."""
    attention = model.model.layers[0].self_attn
    attention.scaling = float("0.5")
    yield
    for n in range(1000):
        attention.scaling = float(f"0.{n + 6}1")


def a_number_of_another_type(model):
    model.model.layers[0].mlp.added = 1
    yield
    model.model.layers[0].mlp.added = True


def the_sign_of_zero(model):
    model.model.layers[0].mlp.added = 0.0
    yield
    model.model.layers[0].mlp.added = -0.0


def a_name(model):
    model.model.layers[0].mlp.added = 1
    yield
    del model.model.layers[0].mlp.added
    model.model.layers[0].mlp.other = 1


def a_list(model):
    model.model.layers[0].mlp.added = [1, {"a": 2}]
    yield
    model.model.layers[0].mlp.added[1]["a"] = 3


def the_config(model):
    yield
    model.config.rms_norm_eps = 0.5


def a_list_in_the_config(model):
    model.config.added = [[1]]
    yield
    model.config.added[0].append(2)


def the_class_of_a_module(model):
    class Other(Linear):
        pass

    yield
    model.model.layers[0].mlp.up_proj.__class__ = Other


def a_weight(model):
    yield
    linear = model.model.layers[0].mlp.up_proj
    linear.weight = Parameter(linear.weight.detach().clone())


def the_strides_of_a_weight(model):
    linear = model.model.layers[0].self_attn.o_proj
    yield
    linear.weight.data = linear.weight.data.t()


def a_bias_that_moves(model):
    first, second = (model.model.layers[0].mlp.gate_proj, model.model.layers[0].mlp.up_proj)
    first.bias = Parameter(torch.zeros(first.out_features))
    yield
    second.bias, first.bias = first.bias, None


def a_rotary_frequency(model):
    yield
    model.model.rotary_emb.inv_freq.data[1] *= 2


def train_mode(model):
    yield
    model.model.layers[1].train()


CHANGES = [
    swap_code, swap_defaults, swap_keyword_defaults, fill_a_cell, a_global_that_a_function_names,
    a_global_that_was_not_there, an_attribute_of_a_function, a_list_of_a_class, a_set_of_a_class,
    an_object_of_a_class, a_renamed_attribute_of_an_object, a_method, a_number, a_number_many_times,
    a_number_of_another_type, the_sign_of_zero, a_name, a_list, the_config, a_list_in_the_config,
    the_class_of_a_module, a_weight, the_strides_of_a_weight, a_bias_that_moves, a_rotary_frequency,
    train_mode,
]  # fmt: skip


@pytest.fixture
def model():
    """One whose MLP is of a class of this test."""
    model = toy_model("llama").eval()
    kind = type(model.model.layers[0].mlp)
    own = type("OwnMLP", (kind,), {"__module__": "a_users_module"})
    for layer in model.model.layers:
        layer.mlp.__class__ = own
    return model


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_every_change_is_seen(change, model):
    changing = change(model)
    next(changing)
    before = [pass_state(model) for _ in range(3)]
    assert before[0] == before[1] == before[2]
    next(changing, None)
    after = [pass_state(model) for _ in range(3)]
    assert before[2] != after[0]
    assert after[0] == after[1] == after[2]


def test_two_models_of_one_class(model):
    other = toy_model("llama").eval()
    states = [pass_state(one) for one in (model, other, model, other)]
    assert states[0] == states[2] != states[1] == states[3]


@pytest.mark.parametrize("change", [None, a_list_of_a_class, fill_a_cell, a_list])
def test_what_was_seen_keeps_no_model_alive(change, model):
    """Neither until the next collection."""
    if change is not None:
        next(change(model))
    before = pass_state(model)
    assert pass_state(model) == before
    alive = weakref.ref(toy_model("llama"))
    assert alive() is None, "a toy model goes by itself"
    gone = weakref.ref(model.model)
    gc.disable()
    try:
        model.model = None
        assert gone() is None
    finally:
        gc.enable()


def test_a_class_that_holds_a_model_keeps_it_no_longer(model):
    other = toy_model("llama")
    own = type(model.model.layers[0].mlp)
    own.added = [other]
    for _ in range(2):
        pass_state(model)
    gone = weakref.ref(other)
    own.added = None
    del other
    gc.collect()
    assert gone() is None
