"""A new step is compared with an ordinary pass: faults are caught in bf16 too, and rounding alone
is no fault.

On a GPU the dev models at their true shapes; elsewhere toys.
"""

import itertools
from contextlib import nullcontext

import pytest
import torch

from hf_static_kv import GraphDecoder, StaticContiguousCache
from hf_static_kv.decoding import steps, verification
from hf_static_kv.program import quantised, rules
from hf_static_kv.program import step as step_module
from hf_static_kv.program.positions import Positions
from hf_static_kv.program.step import DecodeStep
from hf_static_kv.testing import dev_config, random_model, tiny_config
from tests.conftest import ARCHITECTURES, COMMON, PROMPT, tiny_model, toy_model
from tests.quantised_layers import Linear4bit, Linear8bit, quantise

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16
# Length of the prompt and capacity: shorter than the window of Gemma 3, and longer.
SIZES = {"short": (20, 700), "long": (600, 700)} if ON_GPU else {"short": (6, 40), "long": (20, 40)}
SHAPES = ["llama-3.2-1b", "qwen3-1.7b", "gemma-3-1b"] if ON_GPU else ["llama", "qwen3", "gemma3"]


@pytest.fixture(scope="module", params=SHAPES)
def model(request):
    # A toy's weights are larger, so that its attention looks at some tokens more than at others.
    config = (
        dev_config(request.param) if ON_GPU else tiny_config(request.param, initializer_range=0.12)
    )
    return random_model(config, device=DEVICE, dtype=DTYPE)


def lose_the_newest_key(monkeypatch, layer, num_layers):
    own, calls = step_module.write_tokens, []

    def write_tokens(keys, values, *rest):
        calls.append(None)
        if (len(calls) - 1) % num_layers != layer:  # each pass writes one layer after the other
            own(keys, values, *rest)

    monkeypatch.setattr(step_module, "write_tokens", write_tokens)


def overlook_the_newest_key(monkeypatch, layer, num_layers):
    own = Positions.place

    def place(self, **how):
        own(self, **how)
        for cursor in (self.full, *self.compact.values()):
            cursor.spans[:, layer, :, 2] -= 1

    monkeypatch.setattr(Positions, "place", place)


def shift_the_positions(monkeypatch, layer, num_layers):
    own = Positions.place

    def place(self, **how):
        own(self, **how)
        self.position_ids += 1

    monkeypatch.setattr(Positions, "place", place)


def change_the_window(by):
    def change(monkeypatch, layer):
        own = Positions.__init__

        def init(self, *args, **how):
            own(self, *args, **how)
            self.windows[layer] += by

        monkeypatch.setattr(Positions, "__init__", init)

    return change


FAULTS = {
    "a lost key": lose_the_newest_key,
    "an overlooked key": overlook_the_newest_key,
    "a wrong position": shift_the_positions,
}
WINDOW_FAULTS = {
    "too wide by one": change_the_window(+1),
    "too narrow by one": change_the_window(-1),
}


def run(model, cache, decoder, length):
    ids = torch.randint(
        3, model.config.vocab_size, (2, length), generator=torch.Generator().manual_seed(0)
    ).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    how = {
        **COMMON,
        "max_new_tokens": 4,
        "attention_mask": mask,
        "past_key_values": cache,
        "custom_generate": decoder,
    }
    model.generate(ids, **how)
    return decoder.fallback_reason


def reason_of(model, size):
    length, capacity = SIZES[size]
    cache = StaticContiguousCache.from_model(model, capacity, batch_size=2)
    return run(model, cache, GraphDecoder(), length)


@pytest.mark.parametrize("size", SIZES)
def test_a_sound_step_is_taken(model, size):
    assert reason_of(model, size) is None


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("fault", "layer"),
    [
        *itertools.product(["a lost key", "an overlooked key"], ["first", "middle", "last"]),
        ("a wrong position", "every"),
    ],
)
def test_a_fault_is_caught(model, fault, layer, size, monkeypatch):
    layers = model.config.num_hidden_layers
    FAULTS[fault](
        monkeypatch,
        {"first": 0, "middle": layers // 2, "last": layers - 1, "every": None}[layer],
        layers,
    )
    assert "from those of an ordinary step" in reason_of(model, size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("which", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("fault", WINDOW_FAULTS)
@pytest.mark.parametrize("model", SHAPES[-1:], indirect=True)
def test_another_window_is_caught(model, fault, which, size, monkeypatch):
    sliding = [n for n, kind in enumerate(model.config.layer_types) if kind == "sliding_attention"]
    WINDOW_FAULTS[fault](monkeypatch, sliding[which])
    assert "from those of an ordinary step" in reason_of(model, size)


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_a_mask_that_layers_compute_from_the_values_is_caught(weight):
    """Doge adds to the score of a key what it computes from the value. A step has spans and no
    mask.

    With a weight of zero all keys get the same, which changes no softmax.
    """
    model = tiny_model("doge").to(DEVICE)
    for module in model.modules():
        if hasattr(module, "dt_proj"):
            module.A.data.fill_(weight)
    reason = reason_of(model, "short")
    assert reason is None if weight == 0 else "from those of an ordinary step" in reason


def test_an_interrupt_in_a_verification_leaves_the_prompt_and_nothing_else(model, monkeypatch):
    cache, own, calls = (
        StaticContiguousCache.from_model(model, 40, batch_size=2),
        verification._ordinary_logits,
        [],
    )

    def interrupted(*args):
        calls.append(None)
        own(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(verification, "_ordinary_logits", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(model, cache, GraphDecoder(), 6)
    assert calls
    assert cache.seq_len == 6


def test_an_interrupt_in_the_middle_of_the_ordinary_pass(monkeypatch):
    model = toy_model("gemma3").to(DEVICE)
    cache = StaticContiguousCache.from_model(model, 40)
    own, calls = StaticContiguousCache.mark_written, []

    def interrupted(self, n):
        own(self, n)
        calls.append(n)
        raise KeyboardInterrupt

    with monkeypatch.context() as patches:
        patches.setattr(StaticContiguousCache, "mark_written", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.generate(
                PROMPT.to(DEVICE), **COMMON, past_key_values=cache, custom_generate=GraphDecoder()
            )
    assert calls
    assert cache.seq_len == PROMPT.shape[1]
    text = [layer.keys.clone() for layer in cache.layers]
    cache.reset()
    with torch.no_grad():
        model(PROMPT.to(DEVICE), past_key_values=cache)
    assert all(torch.equal(a, layer.keys) for a, layer in zip(text, cache.layers, strict=True))


def test_the_tokens_are_as_before_after_a_verification():
    """Positions that the case across a window changes are put back."""
    model = toy_model("gemma3").to(DEVICE)
    ids = torch.randint(3, 128, (1, 30), device=DEVICE)
    plain, ours = (StaticContiguousCache.from_model(model, 40) for _ in range(2))
    how = {**COMMON, "max_new_tokens": 3, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        model(ids, past_key_values=plain)
    model.generate(ids, **how, past_key_values=ours, custom_generate=GraphDecoder())
    for expected, got in zip(plain.layers, ours.layers, strict=True):
        assert torch.equal(got.keys[:, :, :30], expected.keys)
        assert torch.equal(got.values[:, :, :30], expected.values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_sound_step_is_refused(name, dtype):
    """On every architecture, in the dtypes that round."""
    model = toy_model(name, "eager" if name in ("gemma2", "gpt_oss") else "sdpa").to(DEVICE, dtype)
    for seed in range(3 if ON_GPU else 1):  # half precision is slow on a CPU
        ids = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(seed)).to(
            DEVICE
        )
        decoder, cache = GraphDecoder(), StaticContiguousCache.from_model(model, 40, batch_size=2)
        how = {**COMMON, "max_new_tokens": 3, "attention_mask": torch.ones_like(ids)}
        model.generate(ids, **how, past_key_values=cache, custom_generate=decoder)
        assert decoder.fallback_reason is None


# --- planted faults: none of them reaches a token


def change_what_is_written(change):
    """`change` maps the new key, the new value and their slot to others."""

    def plant(patch):
        own = step_module.write_tokens
        patch.setattr(
            step_module, "write_tokens", lambda keys, values, *new: own(keys, values, *change(*new))
        )

    return plant


def shift_the_beginnings(by):
    def plant(patch):
        own = Positions.place

        def place(self, **how):
            own(self, **how)
            for cursor in (self.full, *self.compact.values()):
                cursor.spans[..., :2] += by

        patch.setattr(Positions, "place", place)

    return plant


def mix_the_output(name):
    """Of a fused operation: 1 % of each number goes to its neighbour. A norm behind it would undo
    another scale.
    """

    def plant(patch):
        own = getattr(rules, name)

        def mixed(*args):
            output = own(*args)
            if isinstance(output, tuple):
                return tuple(part + 0.01 * part.roll(1, -1) for part in output)
            return output + 0.01 * output.roll(1, -1)

        patch.setattr(rules, name, mixed)

    return plant


PLANTED = {
    "keys and values in each other's place": change_what_is_written(
        lambda key, value, at: (value, key, at)
    ),
    # Not before the storage: a captured prompt would write there, over anything.
    "one slot too early": change_what_is_written(
        lambda key, value, at: (key, value, (at - 1).clamp(min=0))
    ),
    "a value in another order": change_what_is_written(
        lambda key, value, at: (key, value.flip(-1), at)
    ),
    "a key that is 1 % too large": change_what_is_written(
        lambda key, value, at: (1.01 * key, value, at)
    ),
    "padding that is seen": shift_the_beginnings(-1),
    "a first token that is not seen": shift_the_beginnings(1),
    "mixed outputs of gated layers": mix_the_output("gated_linear"),
    "mixed sums and norms": mix_the_output("add_norm"),
}


def test_what_a_refused_recording_has_overwritten_is_computed_again(monkeypatch):
    """The step that runs the model itself is right, but the cache no longer is."""
    own = rules.rotate_and_write

    def too_early(*args):
        return own(*args[:7], (args[7] - 1).clamp(min=0), *args[8:])

    monkeypatch.setattr(rules, "rotate_and_write", too_early)
    model, how = toy_model("llama").to(DEVICE), {**COMMON, "max_new_tokens": 6}
    ids = PROMPT.to(DEVICE)
    mask = torch.ones_like(ids)
    plain, ours = (StaticContiguousCache.from_model(model, 40) for _ in range(2))
    expected = model.generate(ids, attention_mask=mask, past_key_values=plain, **how)
    decoder = GraphDecoder()
    got = model.generate(
        ids, attention_mask=mask, past_key_values=ours, custom_generate=decoder, **how
    )
    assert torch.equal(got, expected)
    assert "overwritten" in decoder.fallback_reason
    for one, other in zip(plain.layers, ours.layers, strict=True):
        torch.testing.assert_close(one.keys, other.keys)


def test_a_trial_that_overwrites_the_cache_is_seen_though_it_verifies(monkeypatch):
    """Both passes of a verification read the cache as it is then."""
    own = steps.verify

    def verify(step, call):
        own(step, call)
        call.cache.layers[0].keys[:, :, 2] += 1

    monkeypatch.setattr(steps, "verify", verify)
    model, ids = toy_model("llama").to(DEVICE), PROMPT.to(DEVICE)
    how = {**COMMON, "max_new_tokens": 6, "attention_mask": torch.ones_like(ids)}
    decoder, cache = GraphDecoder(), StaticContiguousCache.from_model(model, 40)
    got = model.generate(ids, **how, past_key_values=cache, custom_generate=decoder)
    assert torch.equal(got, model.generate(ids, **how, use_cache=False))
    assert "overwritten" in decoder.fallback_reason


@pytest.mark.parametrize("fault", PLANTED)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_planted_fault_reaches_no_token(name, fault):
    """The step is refused, or its program is and the model itself runs: the tokens are those of no
    cache.
    """
    model = toy_model(name).to(DEVICE)
    ids = torch.cat([PROMPT, PROMPT.flip(1)]).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    how = {**COMMON, "max_new_tokens": 6, "attention_mask": mask}
    expected = model.generate(ids, **how, use_cache=False)
    decoder, cache = GraphDecoder(), StaticContiguousCache.from_model(model, 40, batch_size=2)
    with pytest.MonkeyPatch.context() as patch:
        PLANTED[fault](patch)
        got = model.generate(ids, **how, past_key_values=cache, custom_generate=decoder)
    assert torch.equal(got, expected)
    steps = [
        step for step in decoder.steps.by_cache[cache].values() if isinstance(step, DecodeStep)
    ]
    assert decoder.fallback_reason is not None or not any(step.is_recorded for step in steps)


class TestQuantisedWeights:
    """A package rounds the inputs of its layers to eight bits, and the step does not: it is compared with
    ordinary passes that do not either.
    """

    def is_recorded(self, kind, monkeypatch):
        """Whether the step of a call is a list: one that is not verified is the model itself."""
        monkeypatch.setattr(quantised, "DEVICES", (DEVICE,))
        model = quantise(toy_model("llama", hidden_size=64, intermediate_size=128).to(DEVICE), kind)
        decoder, cache = GraphDecoder(), StaticContiguousCache.from_model(model, 40)
        ids = PROMPT.to(DEVICE)
        model.generate(ids, past_key_values=cache, custom_generate=decoder, **COMMON)
        assert decoder.fallback_reason is None
        (step,) = decoder.steps.by_cache[cache].values()
        return step.is_recorded

    @pytest.mark.parametrize("kind", [Linear4bit, Linear8bit])
    def test_a_sound_step_is_used(self, kind, monkeypatch):
        assert self.is_recorded(kind, monkeypatch)

    def test_an_ordinary_pass_that_rounds_inputs_is_too_far(self, monkeypatch):
        monkeypatch.setattr(verification, "unrounded_inputs", lambda model: nullcontext())
        assert not self.is_recorded(Linear8bit, monkeypatch)

    def test_a_scale_that_the_step_does_not_apply_is_seen(self, monkeypatch):
        own = quantised.read

        def read(module, dtype):
            weight = own(module, dtype)
            return None if weight is None else weight._replace(factor=1.01)

        monkeypatch.setattr(quantised, "read", read)
        monkeypatch.setattr(quantised, "agrees", lambda module, weight: True)
        assert not self.is_recorded(Linear4bit, monkeypatch)
