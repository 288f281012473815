"""Captured steps of layers that share keys, differ in shape, run several times, hold latents, or
attend in chunks.
"""

import copy

import pytest
import torch

from hf_static_kv import GraphDecoder, StaticContiguousCache, exact
from hf_static_kv.program import step as step_module
from hf_static_kv.program.positions import Positions
from hf_static_kv.program.step import DecodeStep
from tests.conftest import WINDOW, tiny_model
from tests.conftest import toy_model as toy_on_cpu
from tests.decoding.conftest import BATCH, CAPACITY, DEVICE, PROMPT, padded, run

_LATENT = {
    "num_hidden_layers": 3, "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 12, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_TYPES = ["sliding_attention", "sliding_attention", "full_attention"]
# Three layers with keys, and three that read those of the last one of their type.
_SHARED = {
    "num_hidden_layers": 6, "layer_types": _TYPES * 2, "num_kv_shared_layers": 3, "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128,
}  # fmt: skip
_SPARSE = {
    "intermediate_size": [64] * 6,
    "activation_sparsity_pattern": [0.9, 0.9, 0.0, 0.0, 0.0, 0.0],
}
# Full layers have larger heads than sliding ones.
_UNLIKE = {"global_head_dim": 32, "initializer_range": 0.3, "tie_word_embeddings": False}
# They also have fewer heads, and one projection for keys and values.
_ONE_PROJECTION = {
    "layer_types": _TYPES, "sliding_window": WINDOW, "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0, "enable_moe_block": True, "top_k_experts": 2,
}  # fmt: skip
# Sliding layers have twice the KV heads that the config says, and sinks. Values are smaller than
# keys.
_DOUBLED = {
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "sliding_window": WINDOW,
    "v_head_dim": 12, "initializer_range": 0.3,
}  # fmt: skip
FAMILIES = {
    "gemma3n": ("gemma3n_text", {**_SHARED, **_SPARSE}),
    "gemma4": ("gemma4_text", {**_SHARED, **_UNLIKE}),
    "gemma4 moe": ("gemma4_text", {**_UNLIKE, **_ONE_PROJECTION}),
    "mimo_v2_flash": ("mimo_v2_flash", _DOUBLED),
    "hrm_text": ("hrm_text", {"num_hidden_layers": 1}),  # two stacks of one layer: 8 runs
    "deepseek_v3": ("deepseek_v3", _LATENT),
    "deepseek_v2": ("deepseek_v2", {**_LATENT, "topk_method": "greedy"}),
    "deepseek_v2 lite": ("deepseek_v2", {**_LATENT, "topk_method": "greedy", "q_lora_rank": None}),
    "glm4_moe_lite": ("glm4_moe_lite", _LATENT),
    "minicpm3": ("minicpm3", _LATENT),
    "llama4": None,
}
UNLIKE = ["gemma4", "gemma4 moe", "mimo_v2_flash"]
MODES = {
    "greedy": {},
    "sampled": {"ids": BATCH, "seed": 42, "do_sample": True, "temperature": 0.7, "top_k": 20},
    "padded": padded(),
    "long": {"max_new_tokens": 20},
}


@pytest.fixture(scope="module")
def models():
    made = {}

    def model_of(family):
        if family not in made:
            known = FAMILIES[family]
            made[family] = (
                toy_on_cpu("llama4") if known is None else tiny_model(known[0], **known[1])
            ).to(DEVICE)
        return made[family]

    return model_of


def decoded(model, sliding="full", **how):
    """The tokens of a captured step, and the steps that made them."""
    decoder, cache = GraphDecoder(), StaticContiguousCache(model.config, CAPACITY, sliding=sliding)
    tokens = run(model, decoder=decoder, cache=cache, **how)
    return (
        tokens,
        decoder.fallback_reason,
        [step for steps in decoder.steps.by_cache.values() for step in steps.values()],
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_are_those_of_no_cache(family, mode, models):
    model, how = models(family), {"max_new_tokens": 10, **MODES[mode]}
    tokens, reason, steps = decoded(model, **how)
    assert reason is None
    assert [step.is_recorded for step in steps] == [True]
    assert torch.equal(tokens, run(model, **how))


@pytest.mark.parametrize("mode", ["sampled", "padded", "long"])
@pytest.mark.parametrize("family", UNLIKE)
def test_compact_layers_of_unlike_shape(family, mode, models, small_spare):
    model, how = models(family), {"max_new_tokens": 20, **MODES[mode]}
    tokens, reason, steps = decoded(model, "compact", **how)
    assert (reason, [step.is_recorded for step in steps]) == (None, [True])
    assert torch.equal(tokens, run(model, **how))


@pytest.mark.parametrize("family", UNLIKE)
def test_the_bits_of_layers_of_unlike_shape(family, models, small_spare):
    """Inside `exact`, with compact layers: those of a pass over all tokens."""
    model = copy.deepcopy(models(family)).to(torch.bfloat16)
    how = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 9}
    with exact(model), torch.no_grad():
        output, reason, steps = decoded(model, "compact", **how)
        expected = model(output.sequences, use_cache=False).logits[:, PROMPT.shape[1] - 1 : -1]
    assert (reason, [step.is_recorded for step in steps]) == (None, [True])
    assert torch.equal(torch.stack(output.logits, dim=1), expected.float())


@pytest.mark.parametrize("family", ["llama4", "hrm_text", *UNLIKE])
def test_one_step_serves_every_call(family, models):
    """A sequence that continues, one that is short again, and a chunk that begins where none began
    before.
    """
    model, decoder = models(family), GraphDecoder()
    cache = StaticContiguousCache.from_model(model, CAPACITY)
    first = run(model, decoder=decoder, cache=cache, max_new_tokens=3)
    longer = torch.cat([first, PROMPT[:, :5]], dim=1)
    assert torch.equal(
        run(model, longer, decoder, cache, max_new_tokens=20), run(model, longer, max_new_tokens=20)
    )
    cache.reset()
    short = PROMPT[:, :2]
    assert torch.equal(
        run(model, short, decoder, cache, max_new_tokens=20), run(model, short, max_new_tokens=20)
    )
    assert (decoder.num_steps, decoder.fallback_reason) == (1, None)


def test_a_prompt_that_is_seen_from_both_sides(models):
    """HRM: the prompt's own mask is not that of a step. Without a cache transformers has it for new
    tokens, too.
    """
    model, how = models("hrm_text"), {"token_type_ids": torch.ones_like(PROMPT)}
    tokens, reason, _ = decoded(model, **how)
    assert reason is None
    assert torch.equal(tokens, run(model, use_cache=True, **how))


def test_queries_that_are_scaled_by_their_position():
    """Llama 4 reads the length in its layers: a step that had one as a constant would be right at
    first.
    """
    model = toy_on_cpu("llama4", floor_scale=20, attn_scale=3.0).to(DEVICE)
    tokens, reason, _ = decoded(model, max_new_tokens=30)
    assert reason is None
    assert torch.equal(tokens, run(model, max_new_tokens=30))


def test_more_latents_than_a_step_should_expand(models, monkeypatch):
    model = models("deepseek_v3")
    monkeypatch.setattr("hf_static_kv.decoding.eligibility._MAX_LATENTS", CAPACITY - 1)
    tokens, reason, _ = decoded(model)
    assert (
        reason == f"a step would expand the latents of all {CAPACITY} positions "
        f"(max_cache_len={CAPACITY - 1} is served)"
    )
    assert torch.equal(tokens, run(model))


# --- faults that verification must see


def lose_the_newest_key(monkeypatch, model):
    own, calls = step_module.write_tokens, []

    def write_tokens(*args):
        calls.append(None)
        if len(calls) % model.config.num_hidden_layers != 1:
            own(*args)

    monkeypatch.setattr(step_module, "write_tokens", write_tokens)


def overlook_the_newest_key(monkeypatch, model):
    own = Positions.place

    def place(self, **how):
        own(self, **how)
        for cursor in (self.full, *self.compact.values()):
            cursor.spans[:, -1, :, 2] -= 1

    monkeypatch.setattr(Positions, "place", place)


def change_the_step(change):
    def patch(monkeypatch, model):
        own = DecodeStep.__init__

        def init(self, *args):
            own(self, *args)
            change(self)

        monkeypatch.setattr(DecodeStep, "__init__", init)

    return patch


def read_another_layer(step):
    step.layers[5] = step.layers[0]


def ignore_chunks(step):
    step.positions.chunks.fill_(torch.iinfo(torch.int64).max // 2)


def shift_chunks(by):
    def shift(step):
        step.positions.chunks += by * (step.positions.chunks == WINDOW)

    return shift


_WITH_KEYS = ["gemma3n", "gemma4", "mimo_v2_flash", "hrm_text", "deepseek_v3", "llama4"]
FAULTS = {
    "a lost key": (lose_the_newest_key, _WITH_KEYS),
    # HRM has spans in its first layers alone, and the fault is in the last.
    "an overlooked key": (
        overlook_the_newest_key,
        [family for family in _WITH_KEYS if family != "hrm_text"],
    ),
    "keys of another type of layer": (change_the_step(read_another_layer), ["gemma3n"]),
    "chunks as windows": (change_the_step(ignore_chunks), ["llama4"]),
    "chunks that are too long": (change_the_step(shift_chunks(1)), ["llama4"]),
    "chunks that are too short": (change_the_step(shift_chunks(-1)), ["llama4"]),
}


@pytest.mark.parametrize("length", [3, PROMPT.shape[1]])
@pytest.mark.parametrize(
    ("fault", "family"), [(name, family) for name in FAULTS for family in FAULTS[name][1]]
)
def test_a_fault_is_caught(fault, family, length, models, monkeypatch):
    model, ids = models(family), PROMPT[:, :length]
    expected = run(model, ids)
    FAULTS[fault][0](monkeypatch, model)
    tokens, reason, _ = decoded(model, ids=ids)
    # On a GPU the step that runs the model itself is tried next, and Gemma 3n copies numbers to the
    # device.
    assert "from those of an ordinary step" in reason or (
        DEVICE == "cuda" and "synchronizes" in reason
    )
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama4"])
def test_no_sound_step_is_refused(family, dtype, models):
    """In the dtypes that round; test_verification.py has Llama 4."""
    model = copy.deepcopy(models(family)).to(dtype)
    _, reason, _ = decoded(model, ids=BATCH, max_new_tokens=3)
    assert reason is None
