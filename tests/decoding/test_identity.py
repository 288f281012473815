"""Whatever changes what a step computes, and is no tensor that it reads, makes another step or is
refused.
"""

import gc
import pickle
import random
import threading
import weakref
from contextlib import nullcontext
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from transformers import DynamicCache
from transformers.models.llama import modeling_llama

from hf_static_kv import GraphDecoder, StaticContiguousCache, attach, exact, served
from hf_static_kv.cache.identity import content_state, pass_state
from hf_static_kv.cache.values import unwrapped
from hf_static_kv.compat import has_hooks
from hf_static_kv.decoding import call as call_module
from hf_static_kv.decoding import steps as steps_module
from hf_static_kv.decoding.call import Call
from hf_static_kv.decoding.eligibility import type_without_address
from hf_static_kv.kernels.persistent_step_cuda import COMPILER
from hf_static_kv.program import quantised
from tests.conftest import COMMON, PROMPT, Collect, toy_model
from tests.decoding.mutations import COUNTERS, MUTATIONS, read_by_forward
from tests.quantised_layers import Linear4bit, layers_of, quantise

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPT = PROMPT.to(DEVICE)


class Decoding:
    """One model, cache and decoder; `steps` runs a call and tells how many steps there are."""

    def __init__(self, name="llama"):
        self.model = toy_model(name).to(DEVICE)
        self.cache, self.decoder = StaticContiguousCache.from_model(self.model, 40), GraphDecoder()

    def tokens(self, **how):
        return self.model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **COMMON, **how)

    def steps(self):
        self.steps_or_fallback()
        assert self.decoder.fallback_reason is None
        return len(self.decoder.steps.by_cache[self.cache])

    def steps_or_fallback(self):
        self.cache.reset()
        got = self.tokens(past_key_values=self.cache, custom_generate=self.decoder)
        assert torch.equal(got, self.tokens(use_cache=False))


@pytest.fixture
def decoding():
    return Decoding()


def test_a_whole_number_on_a_module():
    decoding = Decoding("mixtral")
    assert decoding.steps() == decoding.steps() == 1
    for layer in decoding.model.model.layers:
        layer.mlp.gate.top_k = 1
    assert decoding.steps() == 2


def test_a_forward_that_was_replaced_in_its_class(decoding, monkeypatch):
    assert decoding.steps() == 1
    own = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: -own(self, x))
    assert decoding.steps() == 2
    monkeypatch.undo()
    assert decoding.steps() == 2  # the first one, which is still known


def test_a_function_that_was_replaced_in_its_file(decoding, monkeypatch):
    assert decoding.steps() == 1
    own = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(
        modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: own(q, k, sin, cos)
    )
    assert decoding.steps() == 2


@pytest.mark.parametrize("way", ["in place", "past autograd"])
def test_frequencies_that_were_changed_in_place(decoding, way):
    assert decoding.steps() == 1
    frequencies = decoding.model.model.rotary_emb.inv_freq
    with torch.no_grad():
        (frequencies if way == "in place" else frequencies.data).mul_(3)
    assert decoding.steps() == 2


def test_another_functional_activation(decoding):
    # A function is no part of a module: it is put in its dictionary.
    for layer in decoding.model.model.layers:
        del layer.mlp.act_fn
        layer.mlp.act_fn = torch.nn.functional.silu
    assert decoding.steps() == 1
    for layer in decoding.model.model.layers:
        layer.mlp.act_fn = partial(torch.nn.functional.gelu, approximate="tanh")
    assert decoding.steps() == 2


def test_a_patch_that_takes_the_place_of_one_that_is_gone(decoding):
    """The second function may come to the very address of the first."""
    mlp = decoding.model.model.layers[0].mlp
    for factor in (2, 3, 4):
        mlp.forward = lambda x, factor=factor: factor * type(mlp).forward(mlp, x)
        count = decoding.steps()
        del mlp.forward
        gc.collect()
    assert count == 3


def test_a_tensor_that_is_no_parameter(decoding):
    decoding.model.model.layers[0].scale_of_mine = torch.ones(2, device=DEVICE)
    assert decoding.steps() == 1
    decoding.model.model.layers[0].scale_of_mine = torch.zeros(2, device=DEVICE)
    assert decoding.steps() == 2


def test_a_tensor_that_each_call_leaves_on_the_model(decoding):
    for number in range(3):
        decoding.model.model.offset_of_a_call = torch.full((1,), number, device=DEVICE)
        assert decoding.steps() == 1


def test_hooks_of_all_modules(decoding):
    assert not has_hooks(decoding.model.modules())
    handle = register_module_forward_hook(lambda module, args, output: None)
    try:
        assert has_hooks(decoding.model.modules())
    finally:
        handle.remove()


class Wrapped(torch.Tensor):
    """As torchao's weights: a tensor that is another one, and has no memory of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, meta, size, stride):
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def unwrap(x):
            return x.inner if isinstance(x, Wrapped) else x

        args, kwargs = torch.utils._pytree.tree_map(unwrap, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return cls(out) if func is torch.ops.aten.detach.default else out


class Opaque(Wrapped):
    """The same, and it does not tell what it consists of."""

    def __getattribute__(self, name):
        if name in ("__tensor_flatten__", "__tensor_unflatten__"):
            raise AttributeError(name)
        return super().__getattribute__(name)


def test_weights_that_are_wrapped(decoding):
    linear = decoding.model.model.layers[0].mlp.up_proj
    weights = [linear.weight.detach().clone() for _ in range(2)]
    weights[1].neg_()
    counts = []
    for weight in weights:
        linear.weight = torch.nn.Parameter(Wrapped(weight), requires_grad=False)
        assert linear.weight.data_ptr() == 0
        counts.append(decoding.steps())
    assert counts == [1, 2]
    assert [tensor.data_ptr() for tensor in unwrapped(linear.weight)] == [weights[1].data_ptr()]


def test_weights_that_do_not_tell_their_address(decoding):
    linear = decoding.model.model.layers[0].mlp.up_proj
    linear.weight = torch.nn.Parameter(Opaque(linear.weight.detach()), requires_grad=False)
    assert type_without_address(decoding.model.parameters()) == "Opaque"
    got = decoding.tokens(past_key_values=decoding.cache, custom_generate=decoding.decoder)
    assert torch.equal(got, decoding.tokens(use_cache=False))
    assert decoding.decoder.fallback_reason == "weights of type Opaque have no address of their own"


def test_inside_exact_a_step_is_found_again(decoding):
    counts = []
    for _ in range(2):
        with exact(decoding.model):
            counts.append(decoding.steps())
    assert counts == [1, 1]


def test_a_model_goes_when_it_is_deleted_though_cache_and_decoder_stay():
    decoding = Decoding()
    cache, decoder, model = decoding.cache, decoding.decoder, weakref.ref(decoding.model)
    assert decoding.steps() == 1
    del decoding
    gc.collect()
    assert model() is None
    (step,) = decoder.steps.by_cache[cache].values()
    assert step.is_orphan
    assert not step.is_in_place  # a call on a GPU asks before it runs ahead
    del step
    other = Decoding()
    other.cache, other.decoder = cache, decoder
    assert other.steps() == 1  # the step of the deleted model is dropped


def test_a_pickled_decoder_captures_anew(decoding):
    assert decoding.steps() == 1
    decoding.decoder = pickle.loads(pickle.dumps(decoding.decoder))
    assert len(decoding.decoder.steps.by_cache) == 0
    assert decoding.steps() == 1


def test_memory_of_steps_is_counted(decoding):
    assert decoding.decoder.memory_bytes == 0
    decoding.steps()
    assert decoding.decoder.memory_bytes > 8 * (40 + 1)  # the text of a greedy step, and more


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.int8, torch.bool, torch.float64], ids=str
)
def test_weights_of_any_dtype_are_sampled(dtype):
    model = toy_model("llama")
    model.model.extra = torch.zeros(40).to(dtype)
    before = content_state(model)
    assert content_state(model) == before
    model.model.extra.data.copy_(torch.ones(40))
    assert content_state(model) != before


def generate(model, **how):
    return model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **{**COMMON, **how})


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_step_sees_every_change(name, decoding, monkeypatch):
    before = decoding.tokens(use_cache=False)
    change = MUTATIONS[name](decoding.model, monkeypatch)
    first = decoding.tokens(use_cache=False)
    decoding.steps_or_fallback()
    change()
    assert not torch.equal(decoding.tokens(use_cache=False), first), (
        "the mutation shows in no token"
    )
    decoding.steps_or_fallback()
    assert before.shape == first.shape


INSIDE_EXACT = ("minus one to minus two", "dict in place", "closure", "default_of_a_patch", "partial_forward",
    "class_attribute", "other_method_of_a_class", "control_vector")  # fmt: skip


@pytest.mark.parametrize(
    ("name", "is_exact"), [*((n, False) for n in MUTATIONS), *((n, True) for n in INSIDE_EXACT)]
)
def test_prefix_reuse_sees_every_change(name, is_exact, monkeypatch):
    model = toy_model("llama").to(DEVICE)
    change = MUTATIONS[name](model, monkeypatch)
    info = attach(model, reuse_prefix=True, exact=is_exact)
    generate(model)
    generate(model)
    assert info.reused_tokens or name == "weight_made_in_inference_mode"
    change()
    with exact(model) if is_exact else nullcontext():
        expected = generate(model, use_cache=False)
    assert torch.equal(generate(model), expected)


@pytest.mark.parametrize("name", COUNTERS)
def test_a_pass_that_changes_its_own_state_is_not_captured(name, decoding):
    twin = toy_model("llama").to(DEVICE)
    for model in (decoding.model, twin):
        COUNTERS[name](model)
    got = decoding.tokens(past_key_values=decoding.cache, custom_generate=decoding.decoder)
    assert torch.equal(
        got, generate(twin, past_key_values=StaticContiguousCache.from_model(twin, 40))
    )
    assert "changes" in decoding.decoder.fallback_reason


def test_a_pass_that_draws_from_python_is_not_captured(decoding, monkeypatch):
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    read_by_forward(decoding.model, lambda mlp: 1.0 + random.random())
    tokens = []
    for how in ({}, {"custom_generate": decoding.decoder}):
        random.seed(0)
        decoding.cache.reset()
        tokens.append(decoding.tokens(past_key_values=decoding.cache, **how))
    assert torch.equal(*tokens)
    assert "random" in decoding.decoder.fallback_reason


def test_the_compiler_of_a_kernel_is_no_other_thread(decoding, monkeypatch):
    """It draws nothing, so what is drawn meanwhile is the model's."""
    is_over = threading.Event()
    compiler = threading.Thread(target=is_over.wait, name=COMPILER)
    others = threading.active_count() - 1  # of the test runner
    count = threading.active_count
    monkeypatch.setattr(threading, "active_count", lambda: count() - others)
    compiler.start()
    read_by_forward(decoding.model, lambda mlp: 1.0 + 0 * random.random())
    decoding.tokens(past_key_values=decoding.cache, custom_generate=decoding.decoder)
    is_over.set()
    compiler.join()
    assert "random" in decoding.decoder.fallback_reason


def test_among_threads_its_logits_tell_that_a_pass_draws(decoding, monkeypatch):
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    read_by_forward(decoding.model, lambda mlp: 1.0 + random.random())
    decoding.tokens(past_key_values=decoding.cache, custom_generate=decoding.decoder)
    assert decoding.decoder.fallback_reason is not None


def test_the_numbers_of_another_thread_are_its_own(decoding):
    """It may draw while a step is tried: nothing is taken for the model's, and nothing put back."""
    drawn, is_over = [], threading.Event()

    def draw():
        while not is_over.wait(0.001):
            drawn.append(random.random())

    thread = threading.Thread(target=draw)
    thread.start()
    decoding.tokens(past_key_values=decoding.cache, custom_generate=decoding.decoder)
    is_over.set()
    thread.join()
    assert decoding.decoder.fallback_reason is None
    assert len(set(drawn)) == len(drawn) > 0


@pytest.mark.parametrize("last_token", [0, 6, 77])
@pytest.mark.parametrize("part", ["embed_tokens", "rotary_emb"])
def test_a_scripted_module_is_not_frozen(part, last_token, decoding):
    """The recording does not see inside: its output would be a constant."""
    decoder = decoding.model.model
    example = (torch.tensor([[3]], device=DEVICE),)
    if part == "rotary_emb":
        example = (torch.zeros(1, 1, 48, device=DEVICE), *example)
    setattr(decoder, part, torch.jit.trace(getattr(decoder, part), example, check_trace=False))
    prompt = torch.cat([PROMPT, torch.tensor([[last_token]], device=DEVICE)], dim=1)
    how = {"attention_mask": torch.ones_like(prompt), **COMMON}
    got = decoding.model.generate(
        prompt, past_key_values=decoding.cache, custom_generate=decoding.decoder, **how
    )
    assert torch.equal(got, decoding.model.generate(prompt, use_cache=False, **how))


def test_a_branch_on_the_length_is_not_frozen(decoding, monkeypatch):
    own = modeling_llama.LlamaModel.forward

    def forward(self, *args, past_key_values=None, **kwargs):
        output = own(self, *args, past_key_values=past_key_values, **kwargs)
        length = 0 if past_key_values is None else past_key_values.get_seq_length()
        if length > 20:
            output.last_hidden_state = -output.last_hidden_state
        return output

    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", forward)
    got = decoding.tokens(past_key_values=decoding.cache, custom_generate=decoding.decoder)
    assert torch.equal(
        got, decoding.tokens(past_key_values=DynamicCache(config=decoding.model.config))
    )


def test_a_text_of_a_tensor_is_not_frozen(decoding, monkeypatch):
    own = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(
        modeling_llama.LlamaMLP,
        "forward",
        lambda self, x: own(self, x) * (2 if "7" in f"{x[0, -1, 0]:.3f}" else 1),
    )
    got = decoding.tokens(past_key_values=decoding.cache, custom_generate=decoding.decoder)
    assert torch.equal(
        got, decoding.tokens(past_key_values=DynamicCache(config=decoding.model.config))
    )


def fail(*args):
    raise RuntimeError("on purpose")


class TestAStepThatRunsBeforeTheModelIsLookedAt:
    """On a GPU that waits for the host, a known step runs while the host compares the model."""

    @pytest.fixture(autouse=True)
    def _waiting_device(self, monkeypatch):
        monkeypatch.setattr(Call, "is_device_idle", True)

    @pytest.mark.parametrize("how", ["greedy", "host", "ends", "streamer", "two tokens"])
    def test_tokens_of_a_changed_model(self, how, decoding):
        keywords = {
            "greedy": {},
            "host": {"bad_words_ids": [[7]]},
            "ends": {"eos_token_id": [45], "pad_token_id": 0},
            "streamer": {"streamer": Collect()},
            "two tokens": {"max_new_tokens": 2},
        }[how]
        mlp = read_by_forward(decoding.model, lambda mlp: mlp.own)
        for mlp.own in (1.0, 1.0, 3.0, 3.0, 1.0, -1.0):
            expected = generate(decoding.model, use_cache=False, **keywords | {"streamer": None})
            decoding.cache.reset()
            cache = {"past_key_values": decoding.cache, "custom_generate": decoding.decoder}
            assert torch.equal(generate(decoding.model, **cache, **keywords), expected)
            assert decoding.decoder.fallback_reason is None
            assert decoding.cache.seq_len == expected.shape[1] - 1
            if how == "streamer":
                assert keywords["streamer"].tokens == expected[0].tolist()
                keywords["streamer"].values.clear()
        # One of the sequences ends with its first token, which a GPU tells a step later.
        assert decoding.decoder.num_steps == (2 if how == "ends" and DEVICE == "cpu" else 3)

    @pytest.mark.parametrize("how", ["greedy", "sampled", "host", "streamer"])
    def test_a_changed_model_that_cannot_be_captured(self, how, decoding, monkeypatch):
        """The rest of the call is ordinary passes: the first token is out, and nothing is drawn or
        streamed twice.
        """
        keywords = {
            "greedy": {},
            "sampled": {"do_sample": True, "temperature": 1.5},
            "host": {"do_sample": True, "bad_words_ids": [[7]]},
            "streamer": {"do_sample": True, "streamer": Collect()},
        }[how]
        mlp = read_by_forward(decoding.model, lambda mlp: mlp.own)
        mlp.own, cache = (
            1.0,
            {"past_key_values": decoding.cache, "custom_generate": decoding.decoder},
        )
        generate(decoding.model, **cache, **keywords)
        mlp.own = 3.0
        torch.manual_seed(3)
        expected = generate(decoding.model, use_cache=False, **keywords | {"streamer": None})
        after = torch.rand(1, device=DEVICE)
        torch.manual_seed(3)
        decoding.cache.reset()
        if how == "streamer":
            keywords["streamer"].values.clear()
        monkeypatch.setattr(steps_module, "verify", fail)
        assert torch.equal(generate(decoding.model, **cache, **keywords), expected)
        assert torch.equal(torch.rand(1, device=DEVICE), after)
        assert (
            decoding.decoder.fallback_reason
            == "the step cannot be captured (RuntimeError: on purpose)"
        )
        assert decoding.cache.seq_len == expected.shape[1] - 1
        if how == "streamer":
            assert keywords["streamer"].tokens == expected[0].tolist()

    @pytest.mark.parametrize("how", ["greedy", "sampled", "host", "ends", "streamer", "one token"])
    def test_a_prefix_of_a_changed_model(self, how, monkeypatch):
        monkeypatch.setattr(served, "_DECODER_DEVICES", ("cpu", "cuda"))
        keywords = {
            "greedy": {},
            "sampled": {"do_sample": True, "temperature": 1.5},
            "host": {"bad_words_ids": [[7]]},
            "ends": {"eos_token_id": [45], "pad_token_id": 0},
            "streamer": {"streamer": Collect()},
            "one token": {"max_new_tokens": 1},
        }[how]
        model = toy_model("llama").to(DEVICE)
        mlp = read_by_forward(model, lambda mlp: mlp.own)
        info = attach(model, reuse_prefix=True)
        for mlp.own, reused in ((1.0, 0), (1.0, 12), (3.0, 0), (3.0, 12), (1.0, 12), (1.0, 12)):
            torch.manual_seed(3)
            expected = generate(model, use_cache=False, **keywords | {"streamer": None})
            torch.manual_seed(3)
            before = info.reused_tokens
            assert torch.equal(generate(model, **keywords), expected)
            assert info.reused_tokens - before == reused
            if how == "streamer":
                assert keywords["streamer"].tokens == expected[0].tolist()
                keywords["streamer"].values.clear()

    def test_the_model_is_looked_at_once_a_call(self, decoding, monkeypatch):
        decoding.steps()
        looks = []
        own = call_module.pass_state
        monkeypatch.setattr(
            call_module, "pass_state", lambda model, *how: looks.append(model) or own(model, *how)
        )
        assert decoding.steps() == 1
        assert len(looks) == 1

    def test_memory_that_has_moved(self, decoding):
        """A graph would read memory that is free."""
        decoding.steps()
        (step,) = decoding.decoder.steps.by_cache[decoding.cache].values()
        assert step.is_in_place
        weight = decoding.model.model.layers[0].mlp.up_proj.weight
        weight.data = weight.data.clone()
        assert not step.is_in_place
        assert decoding.steps() == 2


@pytest.mark.parametrize("has_own_loop", [False, True])
def test_a_prefix_of_a_changed_model_is_computed_again(has_own_loop):
    model = toy_model("llama").to(DEVICE)
    if has_own_loop:
        own = type(model)._sample
        model.__class__ = type(
            "OwnLoop", (type(model),), {"_sample": lambda self, *a, **k: own(self, *a, **k)}
        )
    mlp = read_by_forward(model, lambda mlp: mlp.own)
    info = attach(model, reuse_prefix=True)
    for mlp.own, reused in ((1.0, 0), (1.0, 12), (3.0, 0), (3.0, 12), (1.0, 12), (1.0, 12)):
        before = info.reused_tokens
        assert torch.equal(generate(model), generate(model, use_cache=False))
        assert info.reused_tokens - before == reused


def test_what_is_too_large_counts_as_the_object_that_it_is():
    """A pass is not slowed down by all that hangs on a model: a dataset, a trainer."""
    model = toy_model("llama")
    model.model.data = [[number] for number in range(5000)]
    before = pass_state(model)
    model.model.data[0].append(1)
    assert pass_state(model) == before
    model.model.data = list(model.model.data)
    assert pass_state(model) != before


CHANGES = (
    "codes", "other codes", "scales", "other scales", "dequantise", "reload", "adapter",
)  # fmt: skip


class Adapter(torch.nn.Module):
    """Around a layer, and switched by an attribute."""

    def __init__(self, base):
        super().__init__()
        self.base, self.scale = base, torch.nn.Parameter(torch.ones(1))
        self.is_active = True

    def forward(self, x):
        y = self.base(x)
        return y + self.scale * x.mean(-1, keepdim=True) if self.is_active else y


def dequantised(layer):
    if not isinstance(layer, Linear4bit):
        return layer
    linear = torch.nn.Linear(layer.in_features, layer.out_features, False)
    linear.weight.data = layer.unpacked()
    return linear


class TestQuantisedWeights:
    """A step reads the memory of packed weights: what is written there counts, and other memory makes
    another step.
    """

    @pytest.fixture
    def decoding(self, monkeypatch):
        monkeypatch.setattr(quantised, "DEVICES", (DEVICE,))
        decoding = Decoding()
        decoding.model = quantise(
            toy_model("llama", hidden_size=64, intermediate_size=128).to(DEVICE)
        )
        decoding.cache = StaticContiguousCache.from_model(decoding.model, 40)
        assert quantised.packed_weights(decoding.model)
        assert decoding.steps() == 1
        return decoding

    @pytest.mark.parametrize("name", ["weight", "absmax"])
    def test_written_in_place(self, decoding, name):
        for layer in layers_of(decoding.model):
            state = layer.quant_state
            layer.weight.data.bitwise_xor_(3) if name == "weight" else state.absmax.mul_(1.5)
        assert decoding.steps() == 1

    def test_other_codes(self, decoding):
        for layer in layers_of(decoding.model):
            layer.weight.data = layer.weight.data ^ 3
        assert decoding.steps() == 2

    def test_other_scales(self, decoding):
        for layer in layers_of(decoding.model):
            layer.quant_state.absmax = layer.quant_state.absmax * 1.5
        assert decoding.steps() == 2

    def test_another_table(self, decoding):
        for layer in layers_of(decoding.model):
            layer.quant_state.quant_type = "fp4"
        # The layers of the toy compute as before: now they are no longer packed.
        assert not quantised.packed_weights(decoding.model)
        assert decoding.steps() == 2

    def test_dequantised(self, decoding):
        for module in list(decoding.model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, Linear4bit):
                    setattr(module, name, dequantised(child))
        assert decoding.steps() == 2

    def test_adapters_that_are_switched(self, decoding):
        adapters = []
        for layer in decoding.model.model.layers:
            layer.mlp.down_proj = Adapter(layer.mlp.down_proj).to(DEVICE)
            adapters.append(layer.mlp.down_proj)
        assert len(quantised.packed_weights(decoding.model)) == 14
        assert decoding.steps() == 2
        for adapter in adapters:
            adapter.is_active = False
        assert decoding.steps() == 3
        for adapter in adapters:
            adapter.is_active = True
        assert decoding.steps() == 3

    @pytest.mark.parametrize("seed", range(5))
    def test_many_changes(self, decoding, seed):
        """One layer at a time, in random order; `steps` compares the tokens with no cache."""
        choose = random.Random(seed)
        places = [
            (module, name)
            for module in decoding.model.modules()
            for name, child in module.named_children()
            if isinstance(child, Linear4bit)
        ]
        kept = [deepcopy(getattr(*place)) for place in places]
        for _ in range(10):
            number = choose.randrange(len(places))
            change = choose.choice(CHANGES)
            layer = getattr(*places[number])
            inner = layer.base if isinstance(layer, Adapter) else layer
            if change == "reload":
                setattr(*places[number], deepcopy(kept[number]))
            elif change == "adapter":
                if layer is inner:
                    setattr(*places[number], Adapter(layer).to(DEVICE))
                else:
                    layer.is_active = not layer.is_active
            elif change == "dequantise" and layer is inner:
                setattr(*places[number], dequantised(layer))
            elif not isinstance(inner, Linear4bit):
                inner.weight.data.mul_(1.5)
            elif change == "codes":
                inner.weight.data.bitwise_xor_(3)
            elif change == "other codes":
                inner.weight.data = inner.weight.data ^ 5
            elif change == "scales":
                inner.quant_state.absmax.mul_(1.5)
            else:
                inner.quant_state.absmax = inner.quant_state.absmax * 0.5
            assert decoding.steps() >= 1  # and the tokens are those without a cache

    def test_the_memory_of_a_weight_is_noted(self, decoding):
        (step,) = decoding.decoder.steps.by_cache[decoding.cache].values()
        assert step.is_in_place
        layer = layers_of(decoding.model)[0]
        layer.weight.data = layer.weight.data.clone()
        assert not step.is_in_place
