"""`pass_state` looks at what it has seen before by identity: it must see every change all the same."""

import copy
import functools
import gc
import types
import weakref
from collections import deque

import numpy as np
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


def added(model, value):
    """The value, as an attribute of a module."""
    model.model.layers[1].mlp.added = value
    return value


def an_object(model):
    box = added(model, types.SimpleNamespace(inside=types.SimpleNamespace(number=1)))
    yield
    box.inside.number = 2


def an_object_with_slots(model):
    own = type("Own", (), {"__slots__": ("number",), "__module__": "a_users_module"})
    box = added(model, own())
    box.number = 1
    yield
    box.number = 2


def a_dict_and_its_keys(model):
    box = added(model, {"a": 1, 2: "b"})
    yield
    box[3] = box.pop(2)


def an_array(model):
    box = added(model, np.zeros(3))
    yield
    box[1] = 1


def a_method_of_an_object(model):
    box = types.SimpleNamespace(number=1)
    added(model, types.MethodType(lambda own: own.number, box))
    yield
    box.number = 2


def a_partial(model):
    numbers = [1]
    added(model, functools.partial(sum, numbers))
    yield
    numbers.append(2)


def an_attribute_that_goes(model):
    added(model, 1)
    yield
    del model.model.layers[1].mlp.added


def an_attribute_with_another_name(model):
    mlp = model.model.layers[1].mlp
    mlp.added = number = 123456
    yield
    del mlp.added
    mlp.other = number


def a_tensor(model):
    box = added(model, [torch.zeros(3)])
    yield
    box[0] = torch.zeros(3)


def a_module_in_a_list(model):
    box = added(model, [Linear(2, 2)])
    yield
    box[0].bias.data = torch.zeros(2)


def an_object_after_an_equal_one(model):
    """New in every call, and then changed."""
    for _ in range(3):
        box = added(model, [[1]])
        pass_state(model)
    yield
    box[0].append(2)


def an_object_that_two_have(model):
    """One of them has a tensor beside it, and gives it up."""
    box = types.SimpleNamespace(number=1)
    first = model.model.layers[0].added = {"tensor": torch.ones(1), "box": box}
    model.model.layers[1].added = box
    pass_state(model)
    del first["box"]
    yield
    box.number = 2


def a_config_that_layers_still_have(model):
    own = model.config
    other = copy.deepcopy(own)
    for config in (other, own, other):
        pass_state(model)
        own.added = len(vars(own))
        model.config = config
    yield
    own.added = 0


def another_name_in_the_place_of_a_skipped_one(model):
    yield
    del model._tp_plan
    model.scale = 2


def a_forward_in_the_place_of_an_attribute_of_torch(model):
    mlp = model.model.layers[0].mlp
    yield
    del mlp.__dict__["_is_full_backward_hook"]
    mlp.forward = lambda x: x


class Proxy:
    """Says that it is an instance of the class of what it wraps."""

    __class__ = property(lambda self: type(self.wrapped))

    def __init__(self, wrapped):
        self.wrapped = wrapped

    def __getattr__(self, name):
        return getattr(self.__dict__["wrapped"], name)


def a_proxy_of_a_dict(model):
    box = type(model.model.layers[0].mlp).added = Proxy({"a": 1})
    yield
    box.wrapped["a"] = 2


def a_proxy_of_a_class(model):
    type(model.model.layers[0].mlp).added = box = Proxy(Linear)
    yield
    box.wrapped = Parameter


class Some(list):
    """As long as a number says."""

    number = 1

    def __iter__(self):
        return iter(self[: Some.number])


def what_a_list_gives(model):
    type(model.model.layers[0].mlp).added = Some([1, 2])
    Some.number = 1
    yield
    Some.number = 2


def a_global_that_was_none(model):
    function, names = followed("def f(self): return factor", factor=None)
    type(model.model.layers[0].mlp).added = function
    yield
    del names["factor"]


def subclassed(kind, *values):
    def change(model):
        own = type("Own", (kind,), {"__module__": "a_users_module"})
        added(model, own(values[0]))
        yield
        added(model, own(values[1]))

    change.__name__ = f"a_subclass_of_{kind.__name__}"
    return change


CHANGES = [
    an_object_that_two_have, a_config_that_layers_still_have,
    another_name_in_the_place_of_a_skipped_one, a_forward_in_the_place_of_an_attribute_of_torch,
    a_proxy_of_a_dict, a_proxy_of_a_class, what_a_list_gives, a_global_that_was_none,
    subclassed(float, 1.0, 2.0), subclassed(str, "a", "b"), subclassed(bytearray, b"a", b"b"),
    subclassed(deque, [1], [2]),
    an_object, an_object_with_slots, a_dict_and_its_keys, an_array, a_method_of_an_object, a_partial,
    an_attribute_that_goes, an_attribute_with_another_name, a_tensor, a_module_in_a_list,
    an_object_after_an_equal_one,
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


def test_an_equal_object_is_the_same_state(model):
    states = []
    for _ in range(4):
        added(model, [1, {"a": 2.5}])
        states.append(pass_state(model))
    assert states[0] == states[1] == states[2] == states[3]


def test_two_models_of_one_class(model):
    other = toy_model("llama").eval()
    states = [pass_state(one) for one in (model, other, model, other)]
    assert states[0] == states[2] != states[1] == states[3]


def the_model_itself(model):
    added(model, [types.SimpleNamespace(owner=model.model)])
    yield


def a_method_of_the_model(model):
    model.model.layers[1].mlp.added = types.MethodType(len, model.model)
    yield


HELD = [None, a_list_of_a_class, fill_a_cell, a_list, an_object, a_tensor, a_module_in_a_list]


@pytest.mark.parametrize("change", HELD)
def test_what_was_seen_keeps_no_model_alive(change, model):
    """Neither until the next collection."""
    if change is not None:
        next(change(model))
    alive = weakref.ref(toy_model("llama"))
    assert alive() is None, "a toy model goes by itself"
    gone = weakref.ref(model.model)
    gc.disable()
    try:
        before = pass_state(model)
        assert pass_state(model) == before
        model.model = None
        assert gone() is None
    finally:
        gc.enable()


def an_object_that_all_layers_have(model):
    box = types.SimpleNamespace(owner=model.model)
    for layer in model.model.layers:
        layer.added = box
    yield


@pytest.mark.parametrize(
    "change",
    [the_model_itself, a_method_of_the_model, an_object_that_all_layers_have],
)
def test_an_attribute_that_holds_its_model_keeps_no_model_alive(change, model):
    next(change(model))
    for _ in range(2):
        pass_state(model)
    gone = weakref.ref(model.model)
    model.model = None
    gc.collect()
    assert gone() is None


def test_a_config_that_gets_the_model_after_the_last_look(model):
    for _ in range(2):
        pass_state(model)
    model.config.owner = model.model
    gone = weakref.ref(model.model)
    del model.model
    for module in model.modules():
        module.config = None
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("value", [torch.ones(2), Linear(2, 2)])
def test_a_config_that_holds_a_tensor_or_a_module(value, model):
    model.config.added = [value]
    states = [pass_state(model) for _ in range(3)]
    assert states[0] == states[1] == states[2]
    model.config.added[0] = copy.deepcopy(value)
    assert pass_state(model) != states[2]


def test_a_list_that_gets_the_model_after_the_last_look(model):
    box = added(model, [])
    for _ in range(2):
        pass_state(model)
    box.append(model.model)
    gone = weakref.ref(model.model)
    del model.model, box
    gc.collect()
    assert gone() is None


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
