"""`attach(model)`: the tokens of `generate` as it was, in every mode; what it keeps, bounds, and
puts back.
"""

import copy
import gc
import logging
import pickle
import weakref
from contextlib import ExitStack
from threading import Thread
from typing import ClassVar

import pytest
import torch
import transformers
from transformers import DynamicCache, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import hf_static_kv
from hf_static_kv import (
    GraphDecoder,
    StaticContiguousCache,
    attach,
    attached,
    attachment,
    cache_bytes,
    detach,
    exact,
    served,
)
from hf_static_kv.cache import storage
from hf_static_kv.cache.request import is_exact
from hf_static_kv.testing import load_model
from tests.conftest import ARCHITECTURES, COMMON, Collect, shared_toy_model, tiny_model
from tests.decoding.conftest import BATCH, DEVICE, OWN_ATTENTION, PROMPT, padded, toy_model
from tests.fuzz.models import at_least, build_model
from tests.hybrids import hybrid_model

ON_GPU = DEVICE == "cuda"


@pytest.fixture(autouse=True)
def _prompts_of_any_length(monkeypatch):
    monkeypatch.setattr(served, "_MIN_PROMPT_ON_CPU", 0)


def generate(model, ids=PROMPT, seed=0, **how):
    torch.manual_seed(seed)
    return model.generate(ids, **{**COMMON, "attention_mask": torch.ones_like(ids), **how})


MODES = {
    "greedy": {},
    "sampled": {"ids": BATCH, "do_sample": True, "top_k": 20},
    "padded": padded(),
    "beams": {"ids": BATCH, "num_beams": 3},
    "beams, sampled": {"num_beams": 2, "do_sample": True},
    "return sequences": {"do_sample": True, "num_return_sequences": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
    "chunked prefill": {"prefill_chunk_size": 5},
    "processors": {"ids": BATCH, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "one token": {"max_new_tokens": 1},
    "longer than its first capacity": {"max_new_tokens": 300},
    "int32": {"ids": BATCH.int()},
}


ON_EVERY_ARCHITECTURE = ("greedy", "sampled", "padded", "beams")


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        (n, m)
        for n in ARCHITECTURES
        for m in MODES
        if m in ON_EVERY_ARCHITECTURE or n in ("llama", "gemma3")
    ],
)
def test_the_tokens_are_those_of_generate(name, mode):
    model = shared_toy_model(name, OWN_ATTENTION[name], DEVICE)
    expected = generate(model, **MODES[mode])
    with attached(model) as info:
        for _ in range(2):
            assert torch.equal(generate(model, **MODES[mode]), expected)
        assert (info.calls, info.hits) == (2, 1)


@pytest.fixture
def model():
    model = toy_model("llama")
    yield model
    detach(model)


# --- what passes untouched


@pytest.mark.parametrize(
    "own", ["past_key_values", "custom_generate", "cache_implementation", "use_cache"]
)
def test_a_call_with_its_own_way_is_not_touched(model, own):
    value = {
        "past_key_values": DynamicCache(config=model.config),
        "custom_generate": lambda model, input_ids, **kwargs: kwargs["past_key_values"],
        "cache_implementation": "static",
        "use_cache": False,
    }[own]
    info = attach(model)
    output = generate(model, **{own: value})
    assert info.caches == []
    assert info.calls == (1 if own == "use_cache" else 0)
    if own == "past_key_values":
        assert value.get_seq_length() == PROMPT.shape[1] + COMMON["max_new_tokens"] - 1
    if own == "custom_generate":
        assert type(output) is DynamicCache


def test_an_unserved_model_runs_as_before(caplog):
    model = toy_model("llama")
    model.config.model_type = "xlstm"
    try:
        expected = generate(model)
        with caplog.at_level(logging.WARNING), attached(model) as info:
            assert torch.equal(generate(model), expected)
        assert "recurrent state" in info.fallback_reason
        assert "transformers' own cache" in caplog.text
    finally:
        model.config.model_type = "llama"


# --- the model is as without it


def test_copies_pickles_and_state_are_those_of_the_model(model, tmp_path):
    before = type(model), set(model.__dict__), list(model.state_dict())
    attach(model)
    assert type(model).__name__ == before[0].__name__
    assert isinstance(model, before[0])
    assert (set(model.__dict__), list(model.state_dict())) == before[1:]
    for copied in (copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))):
        assert type(copied) is before[0]
        assert torch.equal(generate(copied), generate(model))
        with pytest.raises(ValueError, match="not attached"):
            attachment(copied)
    model.save_pretrained(tmp_path)
    assert before[0].__name__ in (tmp_path / "config.json").read_text()
    assert torch.equal(generate(before[0].from_pretrained(tmp_path).to(DEVICE)), generate(model))
    detach(model)
    assert type(model) is before[0]
    assert set(model.__dict__) == before[1]


def test_torch_save_loads_without_attach(model, tmp_path):
    attach(model)
    torch.save(model, tmp_path / "model.pt")
    assert type(torch.load(tmp_path / "model.pt", weights_only=False)) is type(model).__bases__[1]


def test_attached_after_to_another_dtype(model):
    attach(model)
    generate(model)
    model.to(torch.float64)
    got = generate(model)
    detach(model)
    assert torch.equal(got, generate(model))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 takes another way
def test_a_forward_of_another_dtype(model):
    """As accelerate's mixed precision: the dtype of the states changes, and that of the model does
    not.
    """
    info, own = attach(model), model.forward
    generate(model)
    model.forward = torch.autocast(DEVICE, torch.bfloat16)(own)
    for _ in range(2):
        got = generate(model)
    assert info.caches[0].layers[0].value_dtype == torch.bfloat16
    model.forward = own
    assert torch.equal(generate(model), generate(toy_model("llama")))
    assert (info.calls, info.hits, len(info.caches)) == (4, 3, 1)
    model.forward = torch.autocast(DEVICE, torch.bfloat16)(own)
    detach(model)
    assert torch.equal(got, generate(model))


def test_a_compiled_wrapper_is_unwrapped(model):
    compiled = torch.compile(model, backend="eager")
    info = attach(compiled)
    assert info is attachment(model) is attachment(compiled)
    assert torch.equal(generate(compiled), generate(model))
    assert info.calls == 2


def test_a_second_attach_replaces_the_settings(model):
    first = attach(model)
    assert attach(model) is first
    second = attach(model, max_cache_len=512)
    assert second is attachment(model) is not first
    generate(model)
    assert [cache.max_cache_len for cache in second.caches] == [512]
    with attached(model, reuse_prefix=True) as inner:
        assert attachment(model) is inner
    assert attachment(model) is second
    with attached(model, reuse_prefix=True):
        detach(model)
    generate(model)
    assert (attachment(model), second.calls) == (second, 2)
    detach(model)
    detach(model)  # nothing left to undo


def test_detach_while_a_call_runs(model):
    """As another thread may."""
    expected = generate(model)
    attach(model)
    prepare = model._prepare_model_inputs

    def detach_first(*args, **kwargs):
        detach(model)
        return prepare(*args, **kwargs)

    model._prepare_model_inputs = detach_first  # between the methods that attach replaces
    assert torch.equal(generate(model), expected)


class Registered(transformers.LlamaForCausalLM):
    names: ClassVar[list[str]] = []

    def __init_subclass__(cls, *, task, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.names.append(task)


class Chat(Registered, task="chat"):
    pass


def test_exact_goes_on_after_a_block_of_the_caller():
    """Which ends while a call runs that began in it."""
    model = toy_model("llama")
    attach(model, exact=True)
    seen = []

    class Looks(Collect):
        def put(self, value):
            seen.append(is_exact(model))

    class Leaves(Collect):
        def put(self, value):
            super().put(value)
            if len(self.values) == 3:
                block.close()
                generate(model, streamer=Looks())

    with ExitStack() as block:
        block.enter_context(exact(model))
        generate(model, streamer=Leaves())
    assert len(seen) > 2
    assert all(seen)
    assert not is_exact(model)


def test_reasons_that_differ_in_their_numbers_are_counted_together(model):
    info = attach(model, max_bytes=1)
    for length in (3, 4, 5):
        generate(model, PROMPT[:, :length])
    assert len(info.fallbacks) == 1
    assert info.fallbacks.total() == 3
    assert "5 tokens" in info.fallback_reason


def test_a_class_that_is_told_of_its_subclasses():
    model = Chat(toy_model("llama").config).eval()
    expected = generate(model)
    attach(model)
    assert torch.equal(generate(model), expected)
    assert (type(model).__name__, Registered.names) == ("Chat", ["chat"])
    detach(model)
    assert type(model) is Chat


def test_a_class_on_top_of_ours_is_left_alone(model):
    attach(model)
    outer = type("Sharded", (type(model),), {})
    model.__class__ = outer
    detach(model)
    assert type(model) is outer
    assert torch.equal(generate(model), generate(toy_model("llama")))


def test_bad_arguments(model):
    with pytest.raises(
        TypeError, match=r"got str: load the model first, with AutoModelForCausalLM\.from_"
    ):
        attach("gpt2")
    with pytest.raises(ValueError, match="max_bytes must be a positive int, got 0"):
        attach(model, max_bytes=0)
    with pytest.raises(ValueError, match="no `generate`"):
        attach(model.model)
    with pytest.raises(ValueError, match=r"call model\.eval"):
        attach(toy_model("llama", attention_dropout=0.1).train(), exact=True)
    with pytest.raises(ValueError, match="not attached: call attach"):
        attachment(model)


def test_the_model_and_its_caches_are_freed():
    model = toy_model("llama")
    attach(model)
    generate(model)
    held = weakref.ref(model), weakref.ref(attachment(model).caches[0])
    del model
    gc.collect()
    assert [reference() for reference in held] == [None, None]


# --- what a custom loop is not told


def test_a_streamer_is_given_every_token_once(model):
    expected, streamer = generate(model), Collect()
    attach(model)
    generate(model, streamer=streamer)
    assert streamer.tokens == expected[0].tolist()
    assert streamer.ended


def test_stop_strings_need_the_tokenizer():
    model, tokenizer = load_model("llama", device=DEVICE)
    ids = tokenizer("Enter ROMEO", return_tensors="pt").input_ids.to(DEVICE)
    text = tokenizer.decode(generate(model, ids, max_new_tokens=40)[0, ids.shape[1] :])
    how = {"stop_strings": [text[20:24]], "tokenizer": tokenizer, "max_new_tokens": 40}
    expected = generate(model, ids, **how)
    with attached(model):
        assert torch.equal(generate(model, ids, **how), expected)
    assert expected.shape[1] < ids.shape[1] + 40


def test_an_assistant_runs_on_our_cache(model):
    assistant = copy.deepcopy(model)
    expected = generate(model, assistant_model=assistant)
    attach(model)
    attach(assistant)
    assert torch.equal(generate(model, assistant_model=assistant), expected)
    has_graphs = model.device.type in served._DECODER_DEVICES
    reason = None if has_graphs else f"there are no graphs on {model.device.type}"
    assert attachment(model).fallback_reason == reason
    assert attachment(assistant).calls == 0


def test_a_call_without_a_cache_says_so(model):
    attach(model)
    generate(model, use_cache=False)
    assert attachment(model).fallback_reason == "the call uses no cache"


# --- ownership


def test_a_cache_that_is_returned_leaves_the_pool(model):
    info = attach(model)
    output = generate(model, return_dict_in_generate=True)
    cache = output.past_key_values
    assert isinstance(cache, StaticContiguousCache)
    assert cache.seq_len == PROMPT.shape[1] + COMMON["max_new_tokens"] - 1
    assert info.caches == []
    longer = torch.cat([output.sequences, PROMPT], dim=1)
    detach(model)
    expected = generate(model, longer, max_new_tokens=300)
    # It grows.
    assert torch.equal(generate(model, longer, max_new_tokens=300, past_key_values=cache), expected)
    assert cache.max_cache_len > 256


RETURNED = {"return_dict_in_generate": True}


@pytest.mark.usefixtures("either_loop")
@pytest.mark.parametrize(
    "how", [{}, {"do_sample": True}, {"num_beams": 2}], ids=["greedy", "sampled", "beams"]
)
def test_a_returned_cache_that_is_dropped_serves_the_next_call(model, how):
    expected, info = generate(model, **how), attach(model)
    for _ in range(5):
        output = generate(model, **RETURNED, **how)
        assert torch.equal(output.sequences, expected)
        del output
    assert (info.calls, info.hits, info.captured_steps <= 1) == (5, 4, True)
    assert torch.equal(generate(model, **how), expected)
    assert (info.hits, len(info.caches)) == (5, 1)


def test_a_name_that_is_bound_again_keeps_two_caches(model):
    """As a loop of training does: the last output is alive while the next call runs."""
    info = attach(model)
    for _ in range(6):
        output = generate(model, **RETURNED)
    assert (info.calls, info.hits) == (6, 4)
    assert output.past_key_values.seq_len == PROMPT.shape[1] + COMMON["max_new_tokens"] - 1


HELD = {
    "a view": lambda cache: cache.layers[0].keys,
    "a tuple": lambda cache: next(iter(cache))[1],
    "the storage": lambda cache: cache.value_storage,
    "a layer": lambda cache: cache.layers[0],
    "numpy": lambda cache: cache.layers[0].values.cpu().numpy(),
    "a deep copy": lambda cache: copy.deepcopy(cache.layers[0].keys),
}


@pytest.mark.parametrize("what", HELD)
def test_nothing_that_a_caller_holds_is_written(model, what):
    """The cache is dropped, and something of it is kept."""
    attach(model)
    output = generate(model, **RETURNED)
    held = HELD[what](output.past_key_values)
    tensor = torch.as_tensor(held.keys if what == "a layer" else held)
    before = tensor.clone()
    del output
    for shift in (1, 2):
        generate(model, PROMPT + shift)
    assert torch.equal(tensor, before)


@pytest.mark.usefixtures("either_loop")
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5_text"])
def test_a_returned_cache_goes_on_beside_the_pool(name):
    """Calls of the model neither see nor change it, and it is whole when it outgrows its storage."""
    model = hybrid_model(name).to(DEVICE) if name == "qwen3_5_text" else toy_model(name)
    ids, how = PROMPT.remainder(90), {"max_new_tokens": 300, "eos_token_id": None}
    first = generate(model, ids)
    longer = torch.cat([first, ids], dim=1)
    expected = generate(model, longer, past_key_values=filled(model, first), **how)
    with attached(model):
        output = generate(model, ids, **RETURNED)
        cache = output.past_key_values
        del output
        for shift in (1, 2):
            generate(model, (ids + shift).remainder(90))
        assert isinstance(cache, StaticContiguousCache)
        assert torch.equal(generate(model, longer, past_key_values=cache, **how), expected)
        assert cache.max_cache_len > 256
        assert torch.equal(generate(model, ids), first)


def filled(model, ids):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :13], past_key_values=cache)
        for position in range(13, ids.shape[1] - 1):
            model(ids[:, position : position + 1], past_key_values=cache)
    return cache


def test_returned_caches_are_bounded(model):
    """Those of callers count as long as the pool remembers them; beyond the bound they are the
    callers' alone.
    """
    max_bytes = 600 * hf_static_kv.cache_bytes(model.config, 1)
    info, outputs = attach(model, max_bytes=max_bytes), []
    for shift in range(4):
        outputs.append(generate(model, PROMPT + shift, **RETURNED))
        assert info.pool.num_bytes <= max_bytes
    assert len(info.pool.taken) == 2
    outputs.clear()
    generate(model)
    assert info.hits == 1
    info.pool.clear()
    assert info.pool.num_bytes == 0


class Interrupt(StoppingCriteria):
    def __init__(self, error, after):
        self.error, self.left = error, after

    def __call__(self, input_ids, scores, **kwargs):
        self.left -= 1
        if self.left < 0:
            raise self.error
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


@pytest.mark.parametrize(
    "error", [RuntimeError("boom"), KeyboardInterrupt()], ids=["error", "interrupt"]
)
def test_an_exception_returns_the_cache_clean(model, error):
    expected = generate(model)
    info = attach(model, reuse_prefix=True)
    with pytest.raises(type(error)):
        generate(model, stopping_criteria=StoppingCriteriaList([Interrupt(error, after=3)]))
    assert [cache.seq_len for cache in info.caches] == [0]
    assert torch.equal(generate(model), expected)
    assert (info.hits, info.reused_tokens) == (1, 0)


def test_a_call_inside_a_call_has_its_own_cache(model):
    expected, inner = generate(model), []

    def ask(input_ids, scores):
        inner.append(model.generate(BATCH, **COMMON))
        return scores

    wanted = model.generate(BATCH, **COMMON)
    attach(model)
    assert torch.equal(
        generate(model, max_new_tokens=3, logits_processor=LogitsProcessorList([ask])),
        expected[:, :16],
    )
    assert all(torch.equal(tokens, wanted) for tokens in inner)
    assert len(inner) == 3


def test_two_threads_have_a_cache_each(model):
    prompts = [PROMPT, PROMPT + 1]
    expected = [generate(model, ids, max_new_tokens=40) for ids in prompts]
    info, wrong = attach(model), []

    def work(number):
        for _ in range(4):
            # No seed: it would be shared.
            got = model.generate(prompts[number], **{**COMMON, "max_new_tokens": 40})
            wrong.extend([] if torch.equal(got, expected[number]) else [number])

    threads = [Thread(target=work, args=(number,)) for number in (0, 1)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert wrong == []
    assert info.calls == 8


# --- memory


def test_calls_of_like_size_share_a_cache(model):
    info = attach(model)
    for new_tokens in (
        5,
        100,
        200,
        240,
    ):  # room for so many, though the first token ends the answer
        generate(
            model, max_new_tokens=new_tokens, eos_token_id=list(range(model.config.vocab_size))
        )
    assert (info.calls, info.hits) == (4, 3)
    assert [cache.max_cache_len for cache in info.caches] == [256]


def test_max_bytes_bounds_the_pool(model):
    token_bytes = hf_static_kv.cache_bytes(model.config, 1)
    info = attach(model, max_bytes=600 * token_bytes)
    for rows in (1, 2, 1, 2):
        generate(model, BATCH[:rows])
        assert info.pool.num_bytes <= 600 * token_bytes
    assert sorted(cache.batch_size for cache in info.caches) == [2]


def test_a_call_that_may_outgrow_the_bound_starts_smaller_and_grows(model):
    expected = generate(model, max_new_tokens=120)
    info = attach(model, max_bytes=40 * hf_static_kv.cache_bytes(model.config, 1))
    assert torch.equal(generate(model, max_new_tokens=120), expected)
    assert info.caches == []  # what it grew to is more than the bound
    assert torch.equal(generate(model, max_new_tokens=120, do_sample=True), plain_again(model))


def plain_again(model):
    settings = attachment(model).settings
    detach(model)
    tokens = generate(model, max_new_tokens=120, do_sample=True)
    attach(model, max_bytes=settings.max_bytes)
    return tokens


def test_a_prompt_beyond_the_bound_runs_without_us(model):
    expected = generate(model)
    info = attach(model, max_bytes=hf_static_kv.cache_bytes(model.config, 5))
    assert torch.equal(generate(model), expected)
    assert "a prompt of 13 tokens in 1 rows takes" in info.fallback_reason


def test_out_of_memory_runs_with_transformers_cache(model, monkeypatch, caplog):
    expected = generate(model, do_sample=True)
    info = attach(model)
    generate(model, BATCH)
    error = torch.OutOfMemoryError("CUDA out of memory.")

    def fail(*args, **kwargs):
        torch.rand(5, device=DEVICE)  # a draw that the second attempt must not see
        raise error

    monkeypatch.setattr(StaticContiguousCache, "update", fail)
    monkeypatch.setattr(GraphDecoder, "_decode", fail)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(generate(model, do_sample=True), expected)
    assert caplog.text.count("out of memory") == 1
    assert (info.caches, info.fallback_reason) == ([], "out of memory")


@pytest.mark.skipif(ON_GPU, reason="what the allocators of a host raise")
@pytest.mark.parametrize("kind", ["storage of the cache", "a pass of the model", "numpy"])
def test_out_of_memory_on_a_host_runs_with_transformers_cache(model, monkeypatch, kind):
    """torch's allocator raises a `RuntimeError`, numpy's a `MemoryError`, which is none."""
    expected = generate(model, do_sample=True)
    info = attach(model)

    def fail(*args, **kwargs):
        if kind == "numpy":
            raise MemoryError("Unable to allocate 3.1 GiB")
        raise RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 "
            "bytes."
        )

    if kind == "storage of the cache":
        monkeypatch.setattr(storage, "_zeros", lambda size, dtype, device: fail())
    else:
        monkeypatch.setattr(StaticContiguousCache, "update", fail)
    assert torch.equal(generate(model, do_sample=True), expected)
    assert (info.caches, info.fallback_reason) == ([], "out of memory")


# --- layers that exist and do not run


SKIPPING = {
    "greedy": {},
    "sampled": {"ids": BATCH, "do_sample": True},
    "padded": padded(),
    "streamed": {"streamer": True},
    "chunked prefill": {"prefill_chunk_size": 5},
    "beams": {"num_beams": 2},
    # A DynamicCache of transformers 5.17 cannot be cropped where a layer is empty.
    **({"prompt lookup": {"prompt_lookup_num_tokens": 3}} if at_least("5.22") else {}),
    "one token": {"max_new_tokens": 1},
    "returned": {"return_dict_in_generate": True},
}


def pass_on(hidden_states, *args, **kwargs):
    return hidden_states


@pytest.mark.usefixtures("either_loop")
@pytest.mark.parametrize("mode", SKIPPING)
def test_a_model_that_skips_a_layer_runs_with_transformers_cache(mode, caplog):
    """`DynamicCache` holds what each layer brings. No token is streamed twice."""
    if mode == "prompt lookup" and transformers.__version__.startswith("5.17."):
        pytest.skip("DynamicCache of transformers 5.17 cannot crop a layer without keys")
    model = toy_model("llama", num_hidden_layers=3)
    model.model.layers[1].forward = pass_on
    model.model.layers[2].self_attn.o_proj.register_forward_hook(add_noise)

    def call():
        streamer = Collect() if SKIPPING[mode].get("streamer") else None
        output = generate(model, **{**SKIPPING[mode], "streamer": streamer})
        tokens = output if isinstance(output, torch.Tensor) else output.sequences
        return tokens.tolist(), streamer and streamer.tokens, torch.get_rng_state().tolist()

    expected = call()
    with caplog.at_level(logging.WARNING), attached(model, reuse_prefix=True) as info:
        for _ in range(3):
            assert call() == expected
            assert "ayers [1] of 3 " in info.fallback_reason
        assert (info.hits, info.reused_tokens) == (0, 0)
        assert (
            caplog.text.count("attach: calls of this model run with transformers' own cache") == 1
        )
        del model.model.layers[1].forward
        again = attach(model, reuse_prefix=True)  # forgets why
        call()
        assert "ayers [1]" not in (again.fallback_reason or "")


def add_noise(module, args, output):
    return output + 0.01 * torch.randn_like(output)


@pytest.mark.skipif(
    ON_GPU, reason="the decoder falls back: a step that changes from pass to pass is not captured"
)
def test_a_model_that_skips_a_layer_of_some_tokens(model):
    """Seen when tokens were selected: the call is made again, unless they were streamed."""
    layer = model.model.layers[1]
    own, passes = layer.forward, []

    def forward(hidden_states, *args, **kwargs):
        passes.append(1)
        is_skipped = len(passes) % 20 > 5
        return hidden_states if is_skipped else own(hidden_states, *args, **kwargs)

    layer.forward = forward
    expected = generate(model)
    passes.clear()
    with attached(model):
        with pytest.raises(ValueError, match=r"ayers \[1\] of 2"):
            generate(model, streamer=Collect())
        passes.clear()
        assert torch.equal(generate(model), expected)


# --- where the model computes


# With ids on a device, and a model on none.
@pytest.mark.filterwarnings("ignore:You are calling .generate")
@pytest.mark.parametrize("place", ["cpu_offload", "disk_offload"])
@pytest.mark.parametrize(
    "how", [{}, {"num_beams": 2}, {"do_sample": True}], ids=["greedy", "beams", "sampled"]
)
def test_a_model_whose_weights_are_all_offloaded(model, place, how, tmp_path):
    """Its own device is "meta"; it computes where accelerate's hooks have it compute."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    expected = generate(model, **how)
    extra = {"offload_dir": tmp_path} if place == "disk_offload" else {}
    getattr(accelerate, place)(model, execution_device=torch.device(DEVICE), **extra)
    assert model.device.type == "meta"
    info = attach(model, reuse_prefix=True)
    for _ in range(2):
        assert torch.equal(generate(model, **how), expected)
    assert (info.calls, info.hits) == (2, 1)
    assert info.caches[0].layers[0].device.type == DEVICE


# --- exact


def test_exact_calls_have_the_bits_of_an_uncached_run():
    model = toy_model("gemma3").to(torch.bfloat16)
    few, how = {"max_new_tokens": 6}, {"output_logits": True, "return_dict_in_generate": True}
    with exact(model):
        expected = generate(model, use_cache=False, **few, **how)
    with attached(model, exact=True):
        got = generate(model, **few, **how)
        with exact(model):  # already exact
            again = generate(model, **few)
    assert torch.equal(torch.stack(got.logits), torch.stack(expected.logits))
    assert torch.equal(again, expected.sequences)
    assert model.config._attn_implementation == "sdpa"


# --- prefix reuse


def turns(model, number=4):
    """A chat whose prompt holds all turns again: the prompts and the answers."""
    ids, answers = PROMPT, []
    for turn in range(number):
        answers.append(generate(model, ids, max_new_tokens=8))
        ids = torch.cat([answers[-1], PROMPT + turn], dim=1)
    return answers


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_chat_computes_new_tokens_only(name):
    model = toy_model(name)
    expected = turns(model)
    with attached(model, reuse_prefix=True) as info:
        got = turns(model)
    assert all(map(torch.equal, got, expected))
    # Of each turn but the first, all tokens of the turn before except its last one, which is not in
    # the cache.
    assert info.reused_tokens == sum(answer.shape[1] - 1 for answer in expected[:-1])


def test_reuse_keeps_the_common_part_only(model):
    other = PROMPT.clone()
    other[0, 10] += 1
    how = {"max_new_tokens": 4}
    expected = generate(model, **how), generate(model, other, **how)
    info = attach(model, reuse_prefix=True)
    generate(model, **how)
    assert torch.equal(generate(model, other, **how), expected[1])
    assert info.reused_tokens == 10
    assert torch.equal(generate(model, **how), expected[0])


def test_two_chats_in_turn_share_a_cache(model):
    # A common beginning of two tokens.
    first, second = (
        PROMPT,
        torch.cat([PROMPT[:, :2], PROMPT + 1], dim=1),
    )
    info = attach(model, reuse_prefix=True)
    for _ in range(3):
        first, second = generate(model, first), generate(model, second)
    detach(model)
    expected = PROMPT
    for _ in range(3):
        expected = generate(model, expected)
    assert torch.equal(first, expected)
    assert len(info.caches) == 1
    assert info.reused_tokens == sum(2 * (13 + 14 * turn - 1) + 2 for turn in (1, 2))


@pytest.mark.parametrize(
    ("name", "number", "turns", "length"),
    [("llama", 9, 3, 50), ("gemma3", 9, 3, 50), ("llama", 32, 4, 1000)],
)
def test_many_chats_under_one_system_prompt_compute_new_tokens_only(name, number, turns, length):
    model = toy_model(name)
    system = torch.randint(1, 120, (1, length), device=DEVICE)
    chats = [torch.cat([system, (PROMPT + own) % 100], dim=1) for own in range(number)]
    expected, kept = chats, 0
    info = attach(model, reuse_prefix=True)
    for turn in range(turns):
        asked = [torch.cat([chat, PROMPT + turn], dim=1) for chat in expected]
        expected = [generate(model, chat, max_new_tokens=5, use_cache=False) for chat in asked]
        got = [generate(model, chat, max_new_tokens=5) for chat in asked]
        assert all(map(torch.equal, got, expected))
        # The system prompt is computed once; later all but the last token of the turn before.
        kept += sum(chat.shape[1] - 13 - 1 for chat in asked) if turn else (number - 1) * length
        assert info.reused_tokens == kept
    assert len(info.caches) == 1
    # One of them is an older turn of the chat in the cache.
    assert len(info.pool.histories) == number


def test_a_long_chat_leaves_the_system_prompt_where_windows_drop_it():
    model = toy_model("gemma3")
    system, chat = torch.randint(1, 100, (2, 1, 60), device=DEVICE)
    attach(model, reuse_prefix=True)
    for ids in (system, PROMPT, torch.cat([system, chat, chat, chat], dim=1), PROMPT + 1):
        generate(model, ids, max_new_tokens=1)
    info = attachment(model)
    before, more = info.reused_tokens, torch.cat([system, PROMPT], dim=1)
    assert torch.equal(generate(model, more), generate(model, more, use_cache=False))
    assert info.reused_tokens - before == 60


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_padded_batches_under_one_system_prompt_compute_new_tokens_only(name):
    model = toy_model(name)
    system = torch.randint(1, 100, (40,), device=DEVICE)
    unlike = iter(range(1, 100))  # no two questions begin alike
    info = attach(model, reuse_prefix=True)

    def batch(*lengths):
        """Questions of these lengths after the system prompt, and their mask."""
        rows = [torch.cat([system, torch.randint(1, 100, (n,), device=DEVICE)]) for n in lengths]
        for row in rows:
            row[40] = next(unlike)
        ids = torch.zeros(len(rows), 40 + max(lengths), dtype=torch.long, device=DEVICE)
        for row, own in zip(ids, rows, strict=True):
            row[-len(own) :] = own
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "max_new_tokens": 6}

    for lengths, reused in (
        ((5, 9, 2), 0),
        ((7, 3), 40),  # of the longest row; the other one computes four of them again
        ((20,), 40),
        ((4, 30, 4, 4), 40),
        ((4, 60, 4), 60 - 20),  # their padding is longer than what is computed
    ):
        how, before = batch(*lengths), info.reused_tokens
        expected = model.generate(**how, use_cache=False)
        assert torch.equal(model.generate(**how), expected)
        assert info.reused_tokens - before == reused
        assert torch.equal(model.generate(**how), expected)  # in place
        assert info.reused_tokens - before == reused + how["input_ids"].shape[1] - 1


def test_a_row_of_the_batch_before_is_reused(model):
    ids = torch.randint(1, 100, (2, 40), device=DEVICE)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    info = attach(model, reuse_prefix=True)
    generate(model, ids, attention_mask=mask)
    more = torch.cat([ids[1:, 5:], PROMPT], dim=1)
    assert torch.equal(generate(model, more), generate(model, more, use_cache=False))
    assert info.reused_tokens == 35


def test_the_same_ids_with_other_padding_are_other_tokens(model):
    ids = torch.randint(1, 100, (2, 40), device=DEVICE)
    attach(model, reuse_prefix=True)
    for padding in (0, 3, 17, 3):
        mask = torch.ones_like(ids)
        mask[1, :padding] = 0
        how = {"attention_mask": mask, "max_new_tokens": 6}
        expected = model.generate(ids, **how, use_cache=False)
        assert torch.equal(model.generate(ids, **how), expected)


def test_positions_that_count_the_padding_are_not_reused():
    sizes = {"decoder_attention_heads": 4, "decoder_layers": 2, "decoder_ffn_dim": 48}
    sizes |= {"init_std": 0.4, "encoder_layers": 2, "forced_eos_token_id": None}
    model = tiny_model("bart", is_decoder=True, is_encoder_decoder=False, **sizes).to(DEVICE)
    ids = torch.randint(3, 100, (2, 30), device=DEVICE)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    more = torch.cat([ids[1:, 5:], PROMPT], dim=1)
    expected = generate(model, more, use_cache=False)
    attach(model, reuse_prefix=True)
    generate(model, ids, attention_mask=mask)
    generate(model, ids.flip(1))
    assert torch.equal(generate(model, more), expected)


@pytest.mark.skipif(not at_least("5.22"), reason="Bloom of transformers 5.17 takes no such mask")
def test_a_mask_longer_than_the_prompt_does_not_stand_for_kept_tokens():
    """Bloom is given no positions: those would tell, too."""
    model = tiny_model("bloom", initializer_range=0.4).to(DEVICE)
    ids = torch.randint(3, 100, (1, 40), device=DEVICE)
    more = torch.cat([ids[:, :20], PROMPT], dim=1)
    mask = torch.ones(1, 20 + more.shape[1], dtype=torch.long, device=DEVICE)
    expected = generate(model, more, attention_mask=mask)
    attach(model, reuse_prefix=True)
    generate(model, ids)
    assert torch.equal(generate(model, more, attention_mask=mask), expected)


def test_a_changed_model_finds_no_tokens_with_other_padding(model):
    attention = model.model.layers[0].self_attn
    ids = torch.randint(1, 100, (2, 40), device=DEVICE)
    padded = torch.ones_like(ids)
    padded[1, :5] = 0
    attach(model, reuse_prefix=True)
    for scaling, mask in ((0.5, torch.ones_like(ids)), (0.25, padded), (0.5, padded)):
        attention.scaling = scaling
        how = {"attention_mask": mask, "max_new_tokens": 6}
        expected = model.generate(ids, **how, use_cache=False)
        assert torch.equal(model.generate(ids, **how), expected)


def test_a_history_is_not_copied_to_storage_of_another_dtype(model):
    expected = generate(model, PROMPT.repeat(1, 3), use_cache=False)
    attach(model, reuse_prefix=True)
    generate(model, PROMPT.repeat(1, 2))
    generate(model, PROMPT + 1, max_new_tokens=300)  # in a longer cache
    model.forward = torch.autocast(DEVICE, dtype=torch.bfloat16)(model.forward)
    generate(model, PROMPT + 2)  # in the shorter one
    del model.forward
    generate(model, PROMPT + 3, max_new_tokens=300)
    assert torch.equal(generate(model, PROMPT.repeat(1, 3)), expected)


def test_a_new_cache_with_a_copy_is_no_hit_of_a_changed_model(model):
    info = attach(model, reuse_prefix=True)
    for ids in (PROMPT.repeat(1, 2), PROMPT):
        generate(model, ids)
    model.model.layers[0].self_attn.scaling = 0.5
    before = info.hits
    generate(model, PROMPT.repeat(1, 2), max_new_tokens=300)  # longer than the free cache
    assert info.hits == before


def test_a_bound_that_is_reached_forgets_the_oldest_chat(model):
    system = torch.randint(1, 120, (1, 60), device=DEVICE)
    token = cache_bytes(model.config, 1)
    info = attach(model, reuse_prefix=True, max_bytes=(256 + 200) * token)
    chats = [torch.cat([(system + number) % 100, PROMPT], dim=1) for number in range(5)]
    for chat in chats:
        generate(model, chat, max_new_tokens=2)
        assert info.pool.num_bytes <= (256 + 200) * token
    assert len(info.pool.histories) == 2
    before = info.reused_tokens
    generate(model, chats[0], max_new_tokens=2)
    assert info.reused_tokens == before
    generate(model, chats[4], max_new_tokens=2)
    assert info.reused_tokens == before + 72


def test_a_history_that_does_not_fit_removes_no_others(model):
    token = cache_bytes(model.config, 1)
    info = attach(model, reuse_prefix=True, max_bytes=(256 + 100) * token)
    short, long = PROMPT.repeat(1, 3), torch.randint(1, 120, (1, 150), device=DEVICE)
    for ids in (short, long, PROMPT):
        generate(model, ids, max_new_tokens=2)
    before = info.reused_tokens
    generate(model, short, max_new_tokens=2)
    assert info.reused_tokens - before == 38


def change_weights(model):
    model.lm_head.weight.data.mul_(-1)  # not counted as a write
    model.model.layers[0].self_attn.k_proj.weight.data.mul_(2)


def flip_values(model):
    model.model.layers[1].self_attn.v_proj.register_forward_hook(
        lambda module, args, values: -values
    )


CHANGES = {
    "weights": (change_weights, {}),
    "a hook": (flip_values, {}),
    "a tensor": (lambda model: model.model.layers[0].vector.add_(1), {}),
    "a buffer": (lambda model: model.model.layers[0].shift.add_(1), {}),
    "a written weight": (
        lambda model: torch.nn.init.zeros_(model.model.layers[0].self_attn.v_proj.weight),
        {},
    ),
    "a setting": (lambda model: setattr(model.model.layers[0].self_attn, "scaling", 0.5), {}),
    "a mask": (None, {"attention_mask": torch.tensor([[0, 0] + [1] * 11], device=DEVICE)}),
    "positions": (None, {"position_ids": torch.arange(3, 16, device=DEVICE)[None]}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_reuse_is_refused_where_more_than_the_ids_differs(what):
    model, plain = toy_model("llama"), toy_model("llama")
    for each in (model, plain):
        each.model.layers[0].register_buffer("shift", torch.zeros(1, device=DEVICE))
        each.model.layers[0].vector = torch.zeros(1, device=DEVICE)
    change, how = CHANGES[what]
    info = attach(model, reuse_prefix=True)
    generate(model)
    if change is not None:
        change(model)
        change(plain)
    assert torch.equal(generate(model, **how), generate(plain, **how))
    assert info.reused_tokens == 0


class TokenBefore:
    """As PEFT's prompt tuning: the first pass has one embedding more than the prompt has tokens."""

    def __init__(self, model):
        self.model, self.prepare = model, model.prepare_inputs_for_generation

    def __call__(self, input_ids, past_key_values=None, **kwargs):
        inputs = self.prepare(input_ids, past_key_values=past_key_values, **kwargs)
        embeds = self.model.get_input_embeddings()(inputs.pop("input_ids")).detach()
        if past_key_values.get_seq_length() == 0:
            embeds = torch.cat([torch.ones_like(embeds[:, :1]), embeds], dim=1)
        return {"inputs_embeds": embeds, "past_key_values": past_key_values, "use_cache": True}


def test_a_prompt_that_is_not_its_ids_alone_is_not_reused(model):
    model.prepare_inputs_for_generation = TokenBefore(model)
    expected = generate(model)
    info = attach(model, reuse_prefix=True)
    for _ in range(2):
        assert torch.equal(generate(model), expected)
    assert (info.calls, info.reused_tokens) == (2, 0)


def test_dropout_draws_as_without_reuse():
    model, plain = (toy_model("llama", attention_dropout=0.3).train() for _ in range(2))
    info = attach(model, reuse_prefix=True)
    states = []
    for each in (model, model, plain):
        tokens = generate(each)
        states.append((tokens.tolist(), torch.get_rng_state().tolist()))
    assert states[0] == states[1] == states[2]
    assert info.reused_tokens == 0


ROTARY_BY_LENGTH = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


def test_no_reuse_where_the_length_moves_the_angles_of_earlier_tokens():
    how = {"rope_parameters": ROTARY_BY_LENGTH, "max_position_embeddings": 16}
    model, plain = toy_model("llama", **how), toy_model("llama", **how)
    with attached(model, reuse_prefix=True) as info:
        for ids, new_tokens in (
            (PROMPT, 2),
            (torch.cat([PROMPT, PROMPT + 1, PROMPT + 2], dim=1), 14),
        ):
            got = generate(model, ids, max_new_tokens=new_tokens)
            assert torch.equal(got, generate(plain, ids, max_new_tokens=new_tokens))
    assert info.reused_tokens == 0


def test_a_failed_first_pass_leaves_no_half_of_a_cache():
    model = build_model("mimo_v2_flash", 0, DEVICE)  # layers of two shapes, so two pairs of tensors
    one, two = PROMPT % 64, BATCH % 64
    expected = generate(model, two)

    def fail(*_):
        raise InterruptedError

    with attached(model):
        hook = model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(InterruptedError):
            generate(model, two)
        hook.remove()
        generate(model, one)
        assert torch.equal(generate(model, two), expected)


def test_embeddings_are_not_reused(model):
    embeds = model.get_input_embeddings()(PROMPT).detach()
    expected = model.generate(inputs_embeds=embeds, **COMMON)
    info = attach(model, reuse_prefix=True)
    generate(model)
    assert torch.equal(model.generate(inputs_embeds=embeds, **COMMON), expected)
    assert info.reused_tokens == 0


# --- on a GPU


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_calls_replay_a_captured_step(model):
    info = attach(model)
    for _ in range(3):
        generate(model)
        assert info.fallback_reason is None
    assert (info.captured_steps, info.captured_prompts, info.prompt_reason) == (1, 1, None)


@pytest.mark.skipif(ON_GPU, reason="what a machine without graphs says")
def test_a_cpu_uses_the_cache_alone_where_it_is_no_slower(model, monkeypatch):
    info = attach(model)
    monkeypatch.setattr(served, "_MIN_PROMPT_ON_CPU", 14)
    generate(model)
    assert info.fallback_reason == "on a cpu our cache is no faster for a prompt this short"
    assert info.caches == []
    monkeypatch.setattr(served, "_MIN_PROMPT_ON_CPU", 13)
    generate(model)
    assert len(info.caches) == 1
    assert info.fallback_reason == "there are no graphs on cpu"
    assert "captured_steps=0" in repr(info)


def test_a_layer_that_is_numbered_anew(model):
    """Its number is no position in the cache: the call falls back, as if it had been so at first."""
    info = attach(model, reuse_prefix=True)
    for _ in range(2):
        generate(model)
    model.model.layers[1].self_attn.layer_idx = -1
    got = generate(model)
    assert "no step would be complete without layer 1" in info.fallback_reason
    detach(model)
    assert torch.equal(got, generate(model))
