"""Inside `exact` a row's bits are its own: every comparison here is `torch.equal`.

On a GPU the dev models run at full size in bfloat16 and float16; on a CPU toy models and
miniatures, in float32 and, at toy size, bfloat16.
"""

import sys
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DynamicCache, StaticCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.llama import modeling_llama

from hf_static_kv import GraphDecoder, StaticContiguousCache, exact
from hf_static_kv.attention import EXACT_ATTENTION_NAME
from hf_static_kv.exactness import linears
from hf_static_kv.exactness.invariant_operations import invariant_operation, is_batch_invariant
from hf_static_kv.exactness.self_check import trial_logits
from hf_static_kv.patching import attention_of
from hf_static_kv.testing import dev_config, load_model, random_model
from tests.conftest import tiny_model, toy_config, toy_model

# Not Llama 4 with its complex numbers: `TestRefusals`.
NAMES = [
    "llama",
    "qwen3",
    "gemma3",
    "gemma2",
    "mistral",
    "gpt2",
    "phi3",
    "gpt_neox",
    "olmo2",
    "cohere2",
]
NAMES += ["mixtral", "qwen3_moe", "gpt_oss"]
LENGTH = 70  # past the windows of the toy models, and past one piece of the attention


def tokens(batch=1, length=LENGTH, vocab_size=90):
    return torch.randint(
        5, vocab_size, (batch, length), generator=torch.Generator().manual_seed(batch)
    )


def cached_logits(model, ids, chunks, capacity=80, mask=None):
    cache, logits, end = StaticContiguousCache.from_model(model, capacity, len(ids)), [], 0
    for chunk in ids.split(chunks, dim=1):
        end += chunk.shape[1]
        part = None if mask is None else mask[:, :end]
        positions = (
            None
            if mask is None
            else (mask.cumsum(1) - 1).clamp(min=0)[:, end - chunk.shape[1] : end]
        )
        logits.append(
            model(chunk, attention_mask=part, position_ids=positions, past_key_values=cache).logits
        )
    return torch.cat(logits, dim=1)


def small_model(name, **fields):
    sizes = {"vocab_size": 128, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 128}
    config = CONFIG_MAPPING[name](
        **sizes | {"initializer_range": 0.4, "tie_word_embeddings": False} | fields
    )
    return random_model(config, attn_implementation="eager")


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_any_chunks_are_the_whole_pass(name, dtype):
    model, ids = toy_model(name, "eager").to(dtype), tokens()
    with exact(model):
        whole = model(ids, use_cache=False).logits
        for chunks in ([62] + [1] * 8, [7, 1, 33, 29], [LENGTH]):
            assert torch.equal(cached_logits(model, ids, chunks), whole)


class TestOtherCaches:
    """`exact` does not ask for our cache: those of transformers are exact too."""

    def test_the_default_cache_in_inference_mode(self):
        model, ids = toy_model("llama", "eager"), tokens(length=20)
        with torch.inference_mode(), exact(model):
            whole, cache = model(ids, use_cache=False).logits, DynamicCache(config=model.config)
            steps = [model(token, past_key_values=cache).logits for token in ids.split(1, dim=1)]
            assert torch.equal(torch.cat(steps, dim=1), whole)

    def test_a_static_cache_with_windows(self):
        model, ids = toy_model("gemma3", "eager"), tokens(length=20)
        with exact(model):
            whole, cache = (
                model(ids, use_cache=False).logits,
                StaticCache(config=model.config, max_cache_len=32),
            )
            steps = [
                model(chunk, past_key_values=cache).logits
                for chunk in ids.split([12] + [1] * 8, dim=1)
            ]
            assert torch.equal(torch.cat(steps, dim=1), whole)


_GROUPED = {"num_key_value_heads": 2}
OTHER_FAMILIES = {
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 48},  # counts positions in float32
    "bert": {"is_decoder": True},
    "diffllama": _GROUPED,
    "ernie4_5": _GROUPED,
    "glm4": {**_GROUPED, "head_dim": 12, "pad_token_id": 0},
    "granite": _GROUPED,
    "nemotron": {**_GROUPED, "head_dim": 12},
    "olmo3": {**_GROUPED, "sliding_window": 8, "pad_token_id": 0},
    "olmoe": {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0},
    "persimmon": {},
    "phi": _GROUPED,
    "smollm3": {**_GROUPED, "pad_token_id": 0},
    "stablelm": {**_GROUPED, "hidden_size": 64},
    "starcoder2": {**_GROUPED, "sliding_window": 8},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OTHER_FAMILIES)
def test_other_families(name, dtype):
    model, ids = small_model(name, **OTHER_FAMILIES[name]).to(dtype), tokens(length=12)
    with exact(model):
        whole, cache = model(ids, use_cache=False).logits, DynamicCache(config=model.config)
        assert torch.equal(cached_logits(model, ids, [9, 1, 1, 1]), whole)
        steps = [
            model(chunk, past_key_values=cache, use_cache=True).logits
            for chunk in ids.split([1, 9, 1, 1], dim=1)
        ]
        assert torch.equal(torch.cat(steps, dim=1), whole)


@pytest.fixture(scope="class")
def model(name):
    return load_model(name)[0]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"], scope="class")
class TestMiniatures:
    CHUNKS = [200, 50] + [
        1
    ] * 10  # past many windows of Gemma, and past four pieces of the attention

    def test_without_it_the_same_comparison_differs(self, model):
        """So that the check can fail."""
        ids = tokens(length=260)
        assert not torch.equal(
            cached_logits(model, ids, self.CHUNKS, 260), model(ids, use_cache=False).logits
        )

    def test_cached_is_uncached(self, model):
        ids = tokens(length=260)
        with exact(model):
            whole = model(ids, use_cache=False).logits
            assert torch.equal(cached_logits(model, ids, self.CHUNKS, 260), whole)

    def test_a_batch_of_eight_is_each_alone(self, model):
        ids = tokens(batch=8)
        with exact(model):
            together = cached_logits(model, ids, [68, 1, 1])
            for row in (0, 7):
                assert torch.equal(
                    cached_logits(model, ids[row : row + 1], [68, 1, 1]), together[row : row + 1]
                )

    def test_left_padded_is_bare(self, model):
        bare = tokens()
        padding = 13
        ids = torch.cat([torch.zeros(1, padding, dtype=torch.long), bare], dim=1)
        mask = torch.cat([torch.zeros(1, padding, dtype=torch.long), torch.ones_like(bare)], dim=1)
        # Beside a row without padding, so that the mask is there.
        ids, mask = torch.cat([ids, tokens(length=83)]), torch.cat([mask, torch.ones_like(mask)])
        with exact(model):
            padded = cached_logits(model, ids, [78] + [1] * 5, 90, mask)[:1, padding:]
            assert torch.equal(padded, cached_logits(model, bare, [65] + [1] * 5))

    def test_any_capacity(self, model):
        ids = tokens()
        with exact(model):
            assert torch.equal(
                cached_logits(model, ids, [60, 10], 70), cached_logits(model, ids, [60, 10], 5000)
            )

    def test_after_crop_and_continue(self, model):
        ids = tokens()
        with exact(model):
            whole = model(ids, use_cache=False).logits
            cache = StaticContiguousCache.from_model(model, 80)
            model(ids[:, :50], past_key_values=cache)
            cache.crop(-20)
            chunks = ids[:, 30:].split([1, 1, 1, 30, 7], dim=1)
            logits = [model(chunk, past_key_values=cache).logits for chunk in chunks]
            assert torch.equal(torch.cat(logits, dim=1), whole[:, 30:])

    @pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
    def test_generation_with_its_scores(self, model, do_sample):
        """Without a cache, with ours, and with ours in the hands of the decoder."""
        ids, decoder, cache = (
            tokens(length=28),
            GraphDecoder(),
            StaticContiguousCache.from_model(model, 64),
        )
        common = {
            "max_new_tokens": 10,
            "do_sample": do_sample,
            "return_dict_in_generate": True,
            "output_logits": True,
        }

        def generate(**how):
            cache.reset()
            torch.manual_seed(42)
            return model.generate(ids, **how, **common)

        with exact(model):
            expected = generate(use_cache=False)
            for how in ({}, {"custom_generate": decoder}):
                got = generate(past_key_values=cache, **how)
                assert torch.equal(got.sequences, expected.sequences)
                assert all(
                    torch.equal(a, b) for a, b in zip(got.logits, expected.logits, strict=True)
                )
        assert decoder.fallback_reason is None

    def test_it_computes_the_model(self, model):
        """And not something else with the same bits everywhere: rounding apart it is the ordinary
        pass.
        """
        ids = tokens()
        ordinary = model(ids).logits
        with exact(model):
            torch.testing.assert_close(model(ids).logits, ordinary, rtol=1e-4, atol=1e-4)


class TestWaysToCallALinearLayer:
    """torch reaches a linear layer by another operation when its input is not contiguous or its
    weight is frozen.
    """

    @pytest.mark.parametrize("frozen", [False, True])
    @pytest.mark.parametrize("name", ["llama", "gpt_neox"])
    def test_the_last_logits_of_a_batch(self, name, frozen):
        model, ids = toy_model(name, "eager").requires_grad_(not frozen), tokens(batch=3)
        with exact(model):
            whole = model(ids, use_cache=False).logits
            assert torch.equal(model(ids, use_cache=False, logits_to_keep=1).logits, whole[:, -1:])
            for row in range(3):
                assert torch.equal(
                    model(ids[row : row + 1], logits_to_keep=1).logits[0], whole[row, -1:]
                )


class TestSelfCheck:
    """Before its first use `exact` compares itself with an ordinary pass: a trial may take a part
    for another one.
    """

    @pytest.fixture
    def wrong_trial(self, monkeypatch):
        """Does not see that a model clamps."""
        monkeypatch.setattr(
            linears,
            "mlp_activation",
            lambda module: "gelu" if hasattr(module, "gate_proj") else None,
        )

    @pytest.fixture
    def model(self):
        return tiny_model("llama", initializer_range=1.0, hidden_act="gelu_10")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_a_part_that_is_taken_for_another(self, model, wrong_trial, dtype):
        model = model.to(dtype)
        before = [dict(module.__dict__) for module in model.modules()]
        for _ in range(2):
            message = r"does not compute what LlamaForCausalLM .* differ by \d+ .* explains [\d.]+"
            with pytest.raises(ValueError, match=message), exact(model):
                pass
        assert [dict(module.__dict__) for module in model.modules()] == before

    @pytest.mark.parametrize(
        ("name", "field"), [("gpt2", "activation_function"), ("llama", "hidden_act")]
    )
    def test_a_clamp_is_computed(self, name, field):
        """The weights of these models reach the limits of gelu_10."""
        model, ids = (
            tiny_model(name, initializer_range=1.0, **{field: "gelu_10"}),
            tokens(length=12),
        )
        ordinary = model(ids, use_cache=False).logits
        with exact(model):
            got = model(ids, use_cache=False).logits
        torch.testing.assert_close(got, ordinary, rtol=0, atol=3e-4 * float(ordinary.abs().max()))

    def test_once_for_a_model_and_again_if_it_has_changed(self, monkeypatch):
        model, ids = toy_model("llama", "eager"), []
        own = type(model).forward
        monkeypatch.setattr(
            type(model), "forward", lambda self, *a, **k: ids.append(a[0]) or own(self, *a, **k)
        )
        for _ in range(2):
            with exact(model):
                pass
        assert len(ids) == 2
        model.extra = torch.nn.Identity()
        with exact(model):
            pass
        assert len(ids) == 4
        assert all(int(tokens.max()) < model.config.vocab_size for tokens in ids)

    def test_it_leaves_no_trace(self):
        """No gradient, no random number, and nothing of a model in train mode."""
        model = toy_model("llama", "eager").train()
        state = torch.get_rng_state()
        with torch.enable_grad(), exact(model):
            pass
        assert torch.equal(torch.get_rng_state(), state)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert model.training

    def test_not_for_a_model_with_hooks(self, model, wrong_trial):
        calls = []
        model.model.layers[1].mlp.register_forward_hook(lambda *args: calls.append(args))
        with exact(model):
            assert not calls

    def test_not_for_a_model_that_is_not_there(self):
        model = toy_model("llama", "eager").to("meta")
        assert trial_logits(model) is None
        with exact(model):
            pass

    def test_not_for_a_model_that_needs_more_than_tokens(self, model, wrong_trial, monkeypatch):
        own = type(model).forward
        monkeypatch.setattr(
            type(model), "forward", lambda self, *args, pixels, **kwargs: own(self, *args, **kwargs)
        )
        assert trial_logits(model) is None
        with exact(model):
            pass


class TestNothingIsLeft:
    def everything(self, model):
        return attention_of(model), [dict(module.__dict__) for module in model.modules()]

    def test_afterwards_the_model_is_as_it_was(self):
        model, ids = toy_model("gemma3", "eager"), tokens()
        before, ordinary = self.everything(model), model(ids).logits
        with exact(model):
            assert attention_of(model) == {"": EXACT_ATTENTION_NAME}
            assert self.everything(model) != before
        assert self.everything(model) == before
        assert torch.equal(model(ids).logits, ordinary)

    def test_after_an_exception_too(self):
        model = toy_model("llama", "eager")
        before = self.everything(model)

        def fail_inside():
            with exact(model):
                model(tokens())
                raise RuntimeError("in the middle")

        with pytest.raises(RuntimeError, match="in the middle"):
            fail_inside()
        assert self.everything(model) == before

    def test_a_forward_that_stood_there_is_back(self):
        model = toy_model("llama", "eager")
        model.forward = own = model.forward  # as a hook of accelerate would
        with exact(model):
            assert model.forward is not own
        assert model.forward is own

    def test_what_runs_beside_the_model_is_not_touched(self):
        model, other, ids = toy_model("llama", "eager"), toy_model("qwen3", "eager"), tokens()
        expected, x = other(ids).logits, torch.randn(2, 3, 4)
        with exact(model):
            model(ids)
            assert torch.equal(other(ids).logits, expected)
            assert torch.bmm(x, x.transpose(1, 2)).shape == (2, 3, 3)

    @pytest.mark.parametrize("part", ["mlp", "mlp.gate_proj", "mlp.act_fn", "input_layernorm"])
    def test_a_hook_inside_the_model_is_called_and_obeyed(self, part):
        model, ids = toy_model("llama", "eager"), tokens()
        shapes = []

        def double(module, args, output):
            shapes.append(args[0].shape[:2])
            return 2 * output

        module = model.model.layers[0].get_submodule(part)
        hook = module.register_forward_hook(double)
        ordinary = model(ids).logits
        with exact(model):
            got = model(ids).logits
        hook.remove()
        assert set(shapes) == {ids.shape}  # and never with random inputs
        assert len(shapes) == 2
        torch.testing.assert_close(got, ordinary, rtol=1e-3, atol=1e-3)

    def test_contexts_that_are_left_in_the_order_in_which_they_were_entered(self):
        models = [toy_model("llama", "eager"), toy_model("llama", "eager")]
        before = modeling_llama.apply_rotary_pos_emb
        contexts = [exact(model) for model in models]
        for context in contexts:
            context.__enter__()
        for context in contexts:
            context.__exit__(None, None, None)
        assert modeling_llama.apply_rotary_pos_emb is before

    def test_two_models_at_once(self):
        models, ids = [toy_model(name, "eager") for name in ("llama", "gemma3")], tokens()
        with exact(models[0]), exact(models[1]):
            for model in models:
                assert torch.equal(
                    cached_logits(model, ids, [50, 1, 19]), model(ids, use_cache=False).logits
                )


def test_a_model_that_is_compiled_is_not_inside():
    """A compiler would trace through the dispatch mode: cached and uncached bits would differ."""
    model, ids = toy_model("gpt_neox", "eager", num_hidden_layers=1), tokens(length=20)
    with exact(model):
        expected = model(ids, use_cache=False).logits
    counter = CompileCounterWithBackend("eager")
    model.compile(backend=counter)
    with exact(model):
        assert torch.equal(model(ids, use_cache=False).logits, expected)
        assert torch.equal(cached_logits(model, ids, [15] + [1] * 5), expected)
    assert counter.frame_count == 0
    torch._dynamo.reset()


class LikePeft(torch.nn.Module):
    """As PEFT calls its model: by `forward`, from a module that has the rest from the model."""

    active_peft_config = SimpleNamespace(is_prompt_learning=False, peft_type="LORA")

    def __init__(self, model):
        super().__init__()
        self.model = model

    def get_base_model(self):
        return self.model

    def forward(self, *args, **kwargs):
        return self.model.forward(*args, **kwargs)


def like_peft(monkeypatch, model):
    monkeypatch.setitem(sys.modules, "peft", SimpleNamespace(PeftModel=LikePeft))
    return LikePeft(model).eval()


def lora(model, **settings):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    names = ["q_proj", "v_proj", "gate_proj", "down_proj"]
    config = peft.LoraConfig(
        r=4, target_modules=names, init_lora_weights=False, lora_dropout=0.1, **settings
    )
    return peft.get_peft_model(model, config)


class TestWrappers:
    """What wraps a model is unwrapped where it is known, and its calls are exact; any other wrapper
    is refused.
    """

    @pytest.mark.parametrize("has_compiled_code", [False, True])
    def test_a_compiled_model(self, has_compiled_code):
        model, ids = toy_model("gpt_neox", "eager", num_hidden_layers=1), tokens(length=20)
        counter = CompileCounterWithBackend("eager")
        with exact(model):
            expected = model(ids, use_cache=False).logits
        compiled = torch.compile(model, backend=counter)
        ordinary = (
            compiled(ids, use_cache=False).logits
            if has_compiled_code
            else model(ids, use_cache=False).logits
        )
        frames = counter.frame_count
        with exact(compiled):
            assert torch.equal(compiled(ids, use_cache=False).logits, expected)
            assert torch.equal(cached_logits(compiled, ids, [15] + [1] * 5), expected)
            common = {"max_new_tokens": 4, "do_sample": False}
            uncached = compiled.generate(ids, use_cache=False, **common)
            assert torch.equal(compiled.generate(ids, **common), uncached)
            assert counter.frame_count == frames
        assert torch.equal(compiled(ids, use_cache=False).logits, ordinary)
        torch._dynamo.reset()

    def test_a_model_compiled_without_breaks(self):
        compiled = torch.compile(toy_model("llama", "eager"), backend="eager", fullgraph=True)
        with pytest.raises(ValueError, match="compiled with fullgraph=True"), exact(compiled):
            pass

    @pytest.mark.parametrize("in_place", [False, True])
    def test_a_compiled_part_is_refused(self, in_place):
        """A compiler looks into it, and chooses its code for it, under `exact` as elsewhere."""
        model = toy_model("llama", "eager")
        if in_place:
            model.model.layers[1].compile(backend="eager")
        else:
            model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
        with (
            pytest.raises(ValueError, match=r"model\.layers\.1 is compiled by torch"),
            exact(model),
        ):
            pass

    @pytest.mark.parametrize("compiles", [False, True])
    def test_an_adapter_of_peft(self, compiles):
        model, ids = toy_model("llama", "eager").bfloat16(), tokens(length=20)
        wrapper = lora(model, task_type="CAUSAL_LM").eval()
        wrapper = torch.compile(wrapper, backend="eager") if compiles else wrapper
        with exact(model):
            expected = model(ids, use_cache=False).logits
        with exact(wrapper):
            assert "forward" in model.__dict__  # `generate` calls the model's own
            assert torch.equal(wrapper(input_ids=ids, use_cache=False).logits, expected)
            cache, common = (
                StaticContiguousCache.from_model(model, 64),
                {"max_new_tokens": 6, "output_logits": True},
            )
            common |= {"return_dict_in_generate": True, "do_sample": False}
            whole = wrapper.generate(input_ids=ids, use_cache=False, **common)
            steps = wrapper.generate(input_ids=ids, past_key_values=cache, **common)
        assert torch.equal(whole.logits[0], expected[:, -1].float())
        assert all(torch.equal(a, b) for a, b in zip(whole.logits, steps.logits, strict=True))
        torch._dynamo.reset()

    def test_what_is_like_peft(self, monkeypatch):
        model, ids = toy_model("llama", "eager"), tokens(length=20)
        wrapper = like_peft(monkeypatch, model)
        with exact(model):
            expected = model(ids, use_cache=False).logits
        with exact(wrapper):
            assert torch.equal(wrapper(ids, use_cache=False).logits, expected)

    def test_an_adapter_with_dropout_that_trains(self):
        model = lora(toy_model("llama", "eager"))
        with (
            pytest.raises(ValueError, match=r"q_proj\.lora_dropout\.default has p = 0\.1"),
            exact(model),
        ):
            pass

    @pytest.mark.parametrize(
        "settings", [{"is_prompt_learning": True}, {"peft_type": "XLORA"}], ids=str
    )
    def test_adapters_that_compute_outside_of_the_model(self, monkeypatch, settings):
        wrapper = like_peft(monkeypatch, toy_model("llama", "eager"))
        wrapper.active_peft_config = SimpleNamespace(**vars(LikePeft.active_peft_config) | settings)
        with (
            pytest.raises(ValueError, match="computes outside of the model that it wraps"),
            exact(wrapper),
        ):
            pass

    def test_prompt_tuning_of_peft(self):
        peft = pytest.importorskip("peft", reason="peft is not installed")
        config = peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
        wrapper = peft.get_peft_model(toy_model("llama", "eager"), config).eval()
        with (
            pytest.raises(ValueError, match="PROMPT_TUNING computes outside of the model"),
            exact(wrapper),
        ):
            pass

    @pytest.mark.parametrize(
        "wrap",
        [
            torch.nn.DataParallel,
            torch.nn.Sequential,
            LikePeft,
            lambda model: SimpleNamespace(model=model),
        ],
        ids=["DataParallel", "Sequential", "LikePeft", "SimpleNamespace"],
    )
    def test_any_other_is_refused_by_its_type(self, wrap, request):
        name, wrapper = request.node.callspec.id, wrap(toy_model("llama", "eager"))
        with (
            pytest.raises(TypeError, match=f"exact takes a transformers model, got {name}: pass"),
            exact(wrapper),
        ):
            pass


def test_a_linear_layer_is_one_operation(monkeypatch):
    """As torch dispatches it by itself it is four, and each takes its time."""
    model, ids, names = toy_model("llama", "eager"), tokens(), []
    home = sys.modules["hf_static_kv.exactness.exact"]  # the package has a function of that name
    monkeypatch.setattr(
        home,
        "invariant_operation",
        lambda func: names.append(str(func)) or invariant_operation(func),
    )
    with exact(model):
        names.clear()  # of the check at the first entry
        model(ids)
    # Q, k, v, o and down in each of two layers, the head.
    assert names.count("hf_static_kv.linears.default") == 11
    assert "aten.mm.default" not in names


class TestRefusals:
    def test_a_layer_of_another_width(self):
        model = toy_model("llama", "eager")
        model.model.layers[0].self_attn.q_proj.weight = torch.nn.Parameter(
            torch.ones(64, 100), requires_grad=False
        )
        with (
            exact(model),
            pytest.raises(
                ValueError, match=r"x \(1, 70, 48\) and weights \[\(64, 100\)\] do not fit"
            ),
        ):
            model(tokens())

    def test_twice(self):
        model = toy_model("llama", "eager")
        with (
            exact(model),
            pytest.raises(RuntimeError, match="exact cannot be entered twice"),
            exact(model),
        ):
            pass
        assert attention_of(model) == {"": "eager"}

    def test_an_operation_without_a_kernel_is_named(self):
        model = toy_model("llama4", "eager")
        with (
            exact(model),
            pytest.raises(
                RuntimeError, match=r"aten\.\w+.* exact has no batch-invariant kernel for it"
            ),
        ):
            model(tokens())

    def test_a_model_that_makes_its_own_mask(self):
        """Doge adds to the scores what it computes from the values."""
        model = small_model("doge", num_key_value_heads=2)
        with (
            pytest.raises(ValueError, match="layers of DogeForCausalLM compute attention masks of"),
            exact(model),
        ):
            pass

    @pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
    @pytest.mark.parametrize("by_layer_type", [False, True])
    def test_frequencies_that_depend_on_the_length(self, rope_type, by_layer_type):
        model = toy_model("llama", "eager")
        own = {"rope_type": rope_type, "factor": 2.0, "rope_theta": 10_000.0}
        plain = {"rope_type": "default", "rope_theta": 10_000.0}
        model.config.rope_parameters = (
            {"sliding_attention": plain, "full_attention": own} if by_layer_type else own
        )
        with pytest.raises(ValueError, match="depend on the length"), exact(model):
            pass

    def test_autocast(self):
        model = toy_model("llama", "eager")
        with (
            exact(model),
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(ValueError, match="under autocast"),
        ):
            model(tokens())

    def test_another_dtype(self):
        model = toy_model("llama", "eager").double()
        with pytest.raises(ValueError, match=r"the model is torch.float64"), exact(model):
            pass

    def test_a_mask_of_ones_own(self):
        model = toy_model("llama", "eager")
        mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
        with exact(model), pytest.raises(ValueError, match="pass no 4-dim mask or bias"):
            model(tokens(), attention_mask=mask)

    def test_a_mask_with_holes(self):
        model, mask = toy_model("llama", "eager"), torch.ones(1, LENGTH, dtype=torch.long)
        mask[0, 9] = 0
        with exact(model), pytest.raises(ValueError, match="this mask has holes"):
            model(tokens(), attention_mask=mask)


@pytest.mark.parametrize(
    ("func", "is_invariant"),
    [
        (torch.ops.aten.add.Tensor, True),
        (torch.ops.aten.view.default, True),
        (torch.ops.aten.cat.default, True),
        (torch.ops.aten.cumsum.default, False),
        (torch.ops.aten.convolution.default, False),
        (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, False),
        (torch.ops.aten.index_add.default, False),
    ],
    ids=str,
)
def test_what_may_run_as_it_is(func, is_invariant):
    numbers = torch.ones(2, 3)
    assert is_batch_invariant(func, (numbers, numbers), {}) == is_invariant


@pytest.mark.parametrize(("args", "kwargs"), [((1, 3), {}), ((1,), {"alpha": 3})])
def test_a_product_inside_a_sum_may_be_rounded_or_not(args, kwargs):
    assert not is_batch_invariant(torch.ops.aten.rsub.Scalar, (torch.ones(3), *args), kwargs)
    assert is_batch_invariant(torch.ops.aten.rsub.Scalar, (torch.ones(3), 1), {})


@pytest.mark.parametrize(("place", "named"), [((True,), {}), ((), {"accumulate": True})])
def test_a_write_by_index_may_not_sum(place, named):
    """Of the values that are summed into one place, the order is open."""
    arguments = (torch.ones(3), [torch.tensor([0, 0])], torch.ones(2))
    for func in (torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default):
        assert is_batch_invariant(func, arguments, {})
        assert not is_batch_invariant(func, (*arguments, *place), named)


class TestCumulativeSums:
    def test_integers_are_exact_anyway(self):
        assert is_batch_invariant(
            torch.ops.aten.cumsum.default, (torch.ones(3, dtype=torch.long), 0), {}
        )

    def test_whole_numbers_are_summed(self):
        x = torch.ones(2, 300)
        assert torch.equal(invariant_operation(torch.ops.aten.cumsum.default)(x, 1), x.cumsum(1))

    @pytest.mark.parametrize(
        "x",
        [
            torch.full((3,), 0.5),
            torch.full((3,), 2.0**23),
            torch.ones(300, dtype=torch.bfloat16),
            torch.ones(2) / 0,
        ],
        ids=["fractions", "too large", "too many for bfloat16", "infinite"],
    )
    def test_what_would_be_rounded_is_refused(self, x):
        with pytest.raises(
            RuntimeError, match=r"aten\.cumsum of values that are not integers, or too large"
        ):
            invariant_operation(torch.ops.aten.cumsum.default)(x, 0)


def test_an_exact_step_is_not_used_outside():
    model, ids, decoder = toy_model("llama", "eager"), tokens(length=8), GraphDecoder()
    cache = StaticContiguousCache.from_model(model, 80)
    common = {"past_key_values": cache, "custom_generate": decoder, "max_new_tokens": 4}
    model.generate(ids, **common)
    cache.reset()
    with exact(model):
        model.generate(ids, **common)
    assert len(decoder.steps.by_cache[cache]) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_step_reads_its_angles_from_tables_too():
    model, ids, decoder = (
        toy_model("gemma3").to("cuda", torch.bfloat16),
        tokens(length=8).cuda(),
        GraphDecoder(),
    )
    cache = StaticContiguousCache.from_model(model, 80)
    with exact(model):
        model.generate(ids, past_key_values=cache, custom_generate=decoder, max_new_tokens=4)
    assert decoder.fallback_reason is None
    (step,) = decoder.steps.by_cache[cache].values()
    assert len(step._tables) == 2  # of layers with a window, and of those without


PROCESSORS = {
    "temperature": 0.8,
    "top_k": 50,
    "top_p": 0.9,
    "min_p": 0.02,
    "repetition_penalty": 1.3,
}
PROCESSORS |= {"min_new_tokens": 40}
NAMES_OF_PAIRS = [names for n in (1, 2) for names in combinations(PROCESSORS, n)]


def sampled(model, names, seed, new_tokens, **how):
    """Three rows with these processors alone."""
    ids = tokens(batch=3, length=8).to(model.device)
    usual = {"do_sample": True, "top_k": 0, "pad_token_id": 0, "eos_token_id": [*range(3, 19)]}
    torch.manual_seed(seed)
    options = usual | {name: PROCESSORS[name] for name in names}
    return model.generate(ids, max_new_tokens=new_tokens, **options, **how)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("seed", "new_tokens"),
    [(0, 67), *(pytest.param(seed, 200, marks=pytest.mark.slow) for seed in (1, 2, 3))],
)
@pytest.mark.parametrize("vocabulary", [128256, 151936, 262144])
def test_sampled_tokens_at_true_vocabularies(vocabulary, seed, new_tokens):
    """In bfloat16 hundreds of tokens have equal logits, also at the edge of top_p."""
    model = random_model(
        toy_config("llama", vocab_size=vocabulary, num_hidden_layers=1), device="cuda"
    )
    model, decoder = model.to(torch.bfloat16), GraphDecoder()
    cache = StaticContiguousCache.from_model(model, 8 + new_tokens, 3)
    with exact(model):
        for names in NAMES_OF_PAIRS:
            cache.reset()
            got = sampled(
                model, names, seed, new_tokens, past_key_values=cache, custom_generate=decoder
            )
            assert torch.equal(got, sampled(model, names, seed, new_tokens, use_cache=False)), names
            assert decoder.fallback_reason is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen3-1.7b", "gemma-3-1b"])
class TestTrueShapes:
    """On a GPU, past the window of Gemma: 600 tokens and 64 more."""

    def test_every_comparison(self, name, dtype, monkeypatch):
        monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
        from bench_exact import Comparisons

        model = random_model(dev_config(name), device="cuda", dtype=dtype)
        model.generation_config.eos_token_id = None
        usual = Comparisons(model, 600, 64).differences()
        with exact(model):
            inside = Comparisons(model, 600, 64).differences()
        assert inside == dict.fromkeys(inside, 0.0)
        assert usual["chunks"] > 0  # so that the comparison can fail
        assert usual["decoder"] > 0

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("new_tokens", "mode"), [(256, {"do_sample": False}), (128, {"temperature": 0.7})], ids=str
    )
    def test_tokens_are_those_of_uncached(self, name, dtype, new_tokens, mode):
        model = random_model(dev_config(name), device="cuda", dtype=dtype)
        ids = torch.randint(10, 100_000, (1, 48), generator=torch.Generator().manual_seed(1)).cuda()
        common = {
            "do_sample": True,
            "eos_token_id": None,
            "pad_token_id": 0,
            "max_new_tokens": new_tokens,
        } | mode
        cache, decoder = StaticContiguousCache.from_model(model, 48 + new_tokens), GraphDecoder()
        with exact(model):
            torch.manual_seed(42)
            uncached = model.generate(ids, use_cache=False, **common)
            for how in ({}, {"custom_generate": decoder}):
                cache.reset()
                torch.manual_seed(42)
                assert torch.equal(
                    model.generate(ids, past_key_values=cache, **how, **common), uncached
                )
        assert decoder.fallback_reason is None
