"""Inside `exact` a pass with gradients has the bits of a generation, and its gradients are as good
as ordinary ones.

Comparisons of passes are `torch.equal`. Gradients are compared with float64, and with the ordinary
pass's own error.
"""

import copy
import re
import sys
import threading
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from hf_static_kv import (
    GraphDecoder,
    StaticContiguousCache,
    exact,
    selected_logprobs,
    token_logprobs,
)
from hf_static_kv.attention import exact_attention
from hf_static_kv.exactness import logprobs
from hf_static_kv.exactness.invariant_operations import invariant_operation
from hf_static_kv.kernels import linear, rotary
from hf_static_kv.kernels.gradients import differentiable
from hf_static_kv.kernels.invariant_linear import expert_linear, expert_linear_plain
from hf_static_kv.kernels.norm import LAYER_NORM, STYLES, Norm, norm, norm_plain
from hf_static_kv.testing import load_model
from tests.cache.test_threads import in_thread
from tests.conftest import ARCHITECTURES, toy_model
from tests.exactness.test_exact import OTHER_FAMILIES, small_model

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
EXPERTS = ["mixtral", "qwen3_moe", "olmoe", "gpt_oss"]
ROUTER = r"\.(gate|router)\.weight"
NO_DROPOUT = {"gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}}
PADDING = 3  # of the second batch row; windows are 8
PROMPT_LEN, NEW_TOKENS = 12, 6


def training_model(name, dtype=torch.float32, **own):
    if name in ARCHITECTURES:
        return toy_model(name, "eager", **NO_DROPOUT.get(name, {}), **own).to(dtype).train()
    return small_model(name, **OTHER_FAMILIES[name], **own).to(dtype).train()


def in_float64(model):
    """A copy; of transformers' experts implementations only "eager" computes in float64."""
    model = copy.deepcopy(model).double()
    model.set_experts_implementation("eager")
    return model


def batch(length=PROMPT_LEN, padding=PADDING):
    ids = torch.randint(5, 90, (2, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    return ids * mask, mask


def with_positions(mask):
    return {
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "use_cache": False,
    }


def loss(model, ids, mask):
    logits = model(ids, **with_positions(mask)).logits[:, :-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return -(logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0] * mask[:, :-1]).sum()


def gradients(model, *batches):
    model.zero_grad()
    for inputs in batches:
        loss(model, *inputs).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def relative_error(got, expected):
    difference = sum((got[name].double() - expected[name]).square().sum() for name in expected)
    return (
        (difference / sum(gradient.square().sum() for gradient in expected.values())).sqrt().item()
    )


class TestModels:
    @pytest.mark.parametrize("name", [*NAMES, *EXPERTS])
    def test_gradients_are_those_of_the_model(self, name):
        """Two passes that sum in other orders have errors of one size: within a factor of three of
        each other.
        """
        model, inputs = training_model(name), batch(length=24)
        ids, mask = inputs
        rows = [(ids[:1], mask[:1]), (ids[1:, PADDING:], mask[1:, PADDING:])]
        expected = gradients(in_float64(model), *rows)
        ordinary = gradients(model, inputs)
        with exact(model):
            inside = gradients(model, inputs)
        assert relative_error(inside, expected) < 3 * relative_error(ordinary, expected) < 1e-4
        if name in EXPERTS:  # a router learns by the weights of the experts that it has chosen
            for part in (ROUTER, r"\.experts\."):
                own = {key: gradient for key, gradient in expected.items() if re.search(part, key)}
                assert relative_error(inside, own) < 3 * relative_error(ordinary, own) < 1e-4

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize(
        "name", ["llama", "qwen3", "gemma3", "gemma2", "gpt2", "mistral", *EXPERTS]
    )
    def test_a_training_pass_has_the_bits_of_the_generation(self, name, dtype):
        """The whole distribution of each sampled token: sampled in a padded batch, trained on in
        other batches.
        """
        model, (ids, mask) = training_model(name, dtype), batch()
        cache, decoder = (
            StaticContiguousCache.from_model(model, PROMPT_LEN + NEW_TOKENS, 2),
            GraphDecoder(),
        )
        with exact(model):
            output = model.generate(
                ids, attention_mask=mask, past_key_values=cache, custom_generate=decoder, do_sample=True,
                max_new_tokens=NEW_TOKENS, eos_token_id=None, return_dict_in_generate=True,
                output_logits=True,
            )  # fmt: skip
            assert decoder.fallback_reason is None
            sampled = torch.stack(output.logits, dim=1)
            mask = F.pad(mask, (0, NEW_TOKENS), value=1)
            together = model(output.sequences, **with_positions(mask)).logits
            alone = model(output.sequences[1:, PADDING:], use_cache=False).logits
            trained = token_logprobs(model, output.sequences, mask, prompt_len=PROMPT_LEN)
            assert together.requires_grad
            assert torch.equal(together[:, -NEW_TOKENS - 1 : -1].float(), sampled)
            assert torch.equal(alone[:, -NEW_TOKENS - 1 : -1].float(), sampled[1:])
            assert torch.equal(
                trained, selected_logprobs(sampled, output.sequences[:, PROMPT_LEN:])
            )
            trained.sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())

    def test_without_it_the_same_comparison_differs(self):
        """So that the check can fail."""
        (model, _), (ids, mask) = load_model("llama"), batch(length=60)
        together, alone = (
            model(ids, **with_positions(mask)).logits,
            model(ids[1:, PADDING:], use_cache=False).logits,
        )
        assert not torch.equal(together[1:, PADDING:], alone)
        with exact(model):
            together, alone = (
                model(ids, **with_positions(mask)).logits,
                model(ids[1:, PADDING:]).logits,
            )
        assert torch.equal(together[1:, PADDING:], alone)

    def test_a_loss_inside_the_model(self):
        model, (ids, mask) = training_model("qwen3"), batch(padding=0)
        with exact(model):
            inside = model(ids, labels=ids, use_cache=False).loss
        torch.testing.assert_close(inside, model(ids, labels=ids, use_cache=False).loss)
        torch.testing.assert_close(inside, loss(model, ids, mask) / (2 * (PROMPT_LEN - 1)))

    @pytest.mark.parametrize("name", EXPERTS)
    def test_a_balancing_loss_is_ordinary(self, name):
        """It is over all tokens; the logits of a token stay its own."""
        model, (ids, mask) = (
            training_model(name, output_router_logits=True, router_aux_loss_coef=0.5),
            batch(),
        )
        labels = ids.masked_fill(mask.cumsum(1) <= 1, -100)  # the first token follows on padding
        expected = model(ids, labels=labels, **with_positions(mask))
        with exact(model):
            found = model(ids, labels=labels, **with_positions(mask))
            without = model(ids, **with_positions(mask), output_router_logits=False)
            alone = token_logprobs(model, ids[1:, PADDING:])
            assert torch.equal(token_logprobs(model, ids, mask)[1:, PADDING:], alone)
        assert torch.equal(found.logits, without.logits)
        torch.testing.assert_close((found.aux_loss, found.loss), (expected.aux_loss, expected.loss))
        routers = [
            parameter for part, parameter in model.named_parameters() if re.search(ROUTER, part)
        ]
        one, other = (torch.autograd.grad(output.aux_loss, routers) for output in (found, expected))
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def heads(*shape):
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape))
    ).requires_grad_()


class TestOperations:
    """float64: the forward pass of an operation and the formula of its gradient are two
    computations.
    """

    @pytest.mark.parametrize("window", [5, 2], ids=["full", "window"])
    @pytest.mark.parametrize("softcap", [None, 1.5], ids=["", "softcap"])
    @pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
    @pytest.mark.parametrize("padding", [0, 2], ids=["", "padded"])
    def test_attention(self, window, softcap, has_sinks, padding):
        query, key, value = heads(2, 4, 5, 6), heads(2, 2, 5, 6), heads(2, 2, 5, 3)
        sinks = heads(4) if has_sinks else None
        end = torch.arange(1, 6).expand(2, 5)
        start = torch.tensor([[0], [padding]]).expand(2, 5)
        first = torch.maximum(end - window, start)
        # [B, 3, q, 1]
        mask = torch.stack([start, torch.minimum(first, end), end], dim=1)[..., None]
        mask[1, 2, :padding] = mask[1, 1, :padding]  # padding attends to nothing

        def attend(query, key, value, sinks):
            keywords = {"scaling": 0.4, "softcap": softcap, "s_aux": sinks}
            return exact_attention(torch.nn.Module(), query, key, value, mask, **keywords)[0]

        assert gradcheck(attend, (query, key, value, sinks), fast_mode=True)

    @pytest.mark.parametrize("activation", linear.ACTIVATIONS)
    def test_gated_linear(self, activation):
        operation, plain = (
            partial(f, activation=activation)
            for f in (linear.gated_linear, linear.gated_linear_plain)
        )
        assert gradcheck(
            partial(differentiable, operation, plain),
            (heads(2, 3, 4), heads(5, 4), heads(5, 4) + 1),
        )

    @pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
    # As gpt-oss keeps its weights.
    @pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
    def test_expert_linear(self, transposed, has_bias):
        """Tokens in no order, and the third expert has none."""
        experts = torch.tensor([3, 0, 1, 3, 0, 3])

        def by_expert(function, x, weight, bias):
            return function(x, weight.mT if transposed else weight, experts, bias)

        operation, plain = (partial(by_expert, f) for f in (expert_linear, expert_linear_plain))
        inputs = (
            heads(6, 5),
            heads(4, 5, 2) if transposed else heads(4, 2, 5),
            heads(4, 2) if has_bias else None,
        )
        assert gradcheck(partial(differentiable, operation, plain), inputs)

    @pytest.mark.parametrize("size", [1, 127, 5000])
    def test_log_softmax(self, size):
        """The subtraction, the sum of size / 16 terms and its logarithm, and the last subtraction
        are rounded.
        """
        x = 10 * heads(3, size).detach().float()
        found = invariant_operation(torch.ops.aten._log_softmax.default)(x, -1, False)
        error = (found - x.double().log_softmax(-1)).abs().max().item()
        largest = (x.amax(-1) - x.amin(-1)).max().item()
        assert error <= torch.finfo(torch.float32).eps * (2 * largest + size / 16 + 16)
        with pytest.raises(RuntimeError, match=r"aten\.log_softmax over dim 0 of \(3, \d+\)"):
            invariant_operation(torch.ops.aten._log_softmax.default)(x, 0, False)

    def test_selected_logprobs_does_not_use_torchs_own(self, monkeypatch):
        """On a CPU no case is known where that shows in the bits."""
        # The package has a function of that name.
        names, home = (
            [],
            sys.modules["hf_static_kv.exactness.exact"],
        )
        monkeypatch.setattr(
            home, "invariant_operation", lambda f: names.append(str(f)) or invariant_operation(f)
        )
        selected_logprobs(torch.zeros(2, 3), torch.tensor([0, 1]))
        assert "aten._log_softmax.default" in names

    def test_inputs_that_need_no_gradient_and_outputs_that_are_not_used(self):
        x, y = heads(2, 3), heads(2, 3).detach()

        def both(x, y, nothing):
            return x * y, x + y

        product, _ = differentiable(both, both, x, y, None)
        product.sum().backward()
        assert torch.equal(x.grad, y)
        assert y.grad is None
        with torch.no_grad():
            assert not differentiable(both, both, x, y, None)[0].requires_grad

    def test_a_second_derivative_is_refused(self):
        """It would lack what flows through the operation."""
        x = heads(2, 3)
        (gradient,) = torch.autograd.grad(
            differentiable(torch.exp, torch.exp, x).square().sum(), x, create_graph=True
        )
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestKernels:
    """On a GPU norms and rotations are kernels: what torch does not see would be cut from the
    graph.
    """

    @pytest.mark.parametrize("style", [*STYLES, LAYER_NORM], ids=str)
    def test_norm(self, style):
        x, weight = heads(2, 3, 64).detach().float().cuda(), heads(64).detach().float().cuda()
        bias = weight.flip(0) if style == LAYER_NORM else None
        found = []
        for function in (norm, norm_plain):
            leaves = [
                leaf.clone().requires_grad_() for leaf in (x, weight, bias) if leaf is not None
            ]
            function(leaves[0], Norm(leaves[1], 1e-6, style, *leaves[2:])).pow(3).sum().backward()
            found.append([leaf.grad for leaf in leaves])
        torch.testing.assert_close(*found)

    def test_rotary(self):
        shapes = (2, 4, 3, 8), (2, 2, 3, 8), (2, 3, 8), (2, 3, 8)
        tensors, found = [heads(*shape).detach().float().cuda() for shape in shapes], []
        for function in (rotary.rotary, rotary.rotary_plain):
            leaves = [tensor.clone().requires_grad_() for tensor in tensors]
            sum(output.pow(3).sum() for output in function(*leaves)).backward()
            found.append([leaf.grad for leaf in leaves])
        torch.testing.assert_close(*found)


class TestRandomNumbers:
    @pytest.mark.parametrize(
        ("name", "rates", "part"),
        [
            ("gpt2", {}, r"transformer\.drop has p = 0\.1"),
            (
                "llama",
                {"attention_dropout": 0.25},
                r"model\.layers\.0\.self_attn has attention_dropout = 0\.25",
            ),
            (
                "mixtral",
                {"router_jitter_noise": 0.5},
                r"model\.layers\.0\.mlp has jitter_noise = 0\.5",
            ),
        ],
    )
    def test_what_draws_in_training_is_refused_by_its_name(self, name, rates, part):
        model = toy_model(name, "eager", **rates).train()
        with (
            pytest.raises(ValueError, match=rf"^{part}, .* set it to 0, or call model\.eval\(\)"),
            exact(model),
        ):
            pass
        with exact(model.eval()):
            assert model(batch()[0]).logits.requires_grad

    def test_a_dropout_of_attention_after_a_change_to_training(self):
        model = toy_model("llama", "eager", attention_dropout=0.25)
        with (
            exact(model),
            pytest.raises(
                ValueError, match=r"attention drops out 0.25: set attention_dropout to 0"
            ),
        ):
            model.train()(batch()[0])

    def test_a_dropout_that_is_a_function(self):
        model = training_model("llama")
        model.model.norm.register_forward_hook(lambda module, args, output: F.dropout(output, 0.5))
        with (
            exact(model),
            pytest.raises(
                ValueError, match="draws no random numbers: set every dropout and jitter to"
            ),
        ):
            model(batch()[0])

    def test_a_jitter_after_a_change_to_training(self):
        model = toy_model("mixtral", "eager", router_jitter_noise=0.5)
        with (
            exact(model),
            pytest.raises(
                ValueError, match="draws no random numbers: set every dropout and jitter to"
            ),
        ):
            model.train()(batch()[0])


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "qwen3_moe"])
class TestGradientCheckpointing:
    def test_it_changes_no_bit(self, name, use_reentrant):
        model, inputs = training_model(name), batch()
        with exact(model):
            expected = gradients(model, inputs)
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads() if use_reentrant else None
            found = gradients(model, inputs)
            assert all(torch.equal(found[parameter], expected[parameter]) for parameter in expected)
        before = gradients(model, inputs)
        assert (
            relative_error(before, {name: gradient.double() for name, gradient in expected.items()})
            < 1e-4
        )

    def test_a_backward_pass_outside_is_refused(self, name, use_reentrant):
        model, inputs = training_model(name), batch()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.enable_input_require_grads() if use_reentrant else None
        with exact(model):
            outside = loss(model, *inputs)
        with pytest.raises(RuntimeError, match=r"call backward\(\) inside exact"):
            outside.backward()


def lora(model):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    names = ["q_proj", "v_proj", "gate_proj", "down_proj"]
    config = peft.LoraConfig(
        r=4, target_modules=names, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, config).train()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
class TestAdapters:
    def test_only_the_adapter_learns(self, dtype):
        model, (ids, mask) = lora(training_model("llama", dtype)), batch()
        prompt = {
            "input_ids": ids,
            "attention_mask": mask,
            "max_new_tokens": NEW_TOKENS,
            "eos_token_id": None,
        }
        with exact(model):
            output = model.generate(**prompt, return_dict_in_generate=True, output_logits=True)
            trained = token_logprobs(model, output.sequences, mask, prompt_len=PROMPT_LEN)
            sampled = selected_logprobs(
                torch.stack(output.logits, dim=1), output.sequences[:, PROMPT_LEN:]
            )
            assert torch.equal(trained, sampled)
            trained.sum().backward()
        has_gradient = {
            name for name, parameter in model.named_parameters() if parameter.grad is not None
        }
        assert has_gradient == {name for name, _ in model.named_parameters() if "lora_" in name}

    def test_gradients_are_those_of_the_adapter(self, dtype):
        if dtype != torch.float32:
            pytest.skip("compared with float64")
        model, inputs = lora(training_model("llama")), batch()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        expected = torch.autograd.grad(loss(model, *inputs), trained)
        with exact(model):
            found = torch.autograd.grad(loss(model, *inputs), trained)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)

    def test_a_merged_adapter(self, dtype):
        model, inputs = lora(training_model("llama", dtype)).merge_and_unload(), batch()
        with exact(model):
            assert all(
                gradient.isfinite().all()
                for gradient in gradients(model.requires_grad_(), inputs).values()
            )


class TestTokenLogprobs:
    # Soft caps and scales after the head, too.
    @pytest.mark.parametrize("name", ["llama", "gemma2", "cohere2", "gpt2"])
    def test_it_is_log_softmax_of_the_logits(self, name):
        model, (ids, mask) = training_model(name), batch()
        for temperature in (1.0, 0.7):
            found = token_logprobs(model, ids, mask, prompt_len=4, temperature=temperature)
            logits = model(ids, **with_positions(mask)).logits[:, 3:-1]
            expected = (logits / temperature).log_softmax(-1).gather(-1, ids[:, 4:, None])[..., 0]
            torch.testing.assert_close(found, expected)
            parameters = list(model.parameters())
            torch.testing.assert_close(
                torch.autograd.grad(found.sum(), parameters), torch.autograd.grad(expected.sum(), parameters),
                rtol=1e-3, atol=1e-4,
            )  # fmt: skip

    @pytest.mark.parametrize("name", ["opt", "granite", "bert"])
    def test_other_heads(self, name):
        """OPT's layers are inside its base model, Granite divides logits, BERT's head has layers of
        its own.
        """
        model, (ids, mask) = small_model(name, **OTHER_FAMILIES[name]), batch()
        with exact(model):
            found, alone = (
                token_logprobs(model, ids, mask),
                token_logprobs(model, ids[1:, PADDING:]),
            )
            assert torch.equal(found[1:, PADDING:], alone)
        logits = model(ids, **with_positions(mask)).logits[:, :-1]
        expected = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        torch.testing.assert_close(
            found * mask[:, :-1], expected * mask[:, :-1], rtol=1e-4, atol=1e-4
        )

    def test_chunks_have_the_same_bits_and_bound_the_logits(self, monkeypatch):
        model, (ids, mask) = training_model("llama"), batch()
        sizes = []
        hook = model.lm_head.register_forward_hook(
            lambda module, args, output: sizes.append(args[0].shape[1])
        )
        with exact(model):
            expected = token_logprobs(model, ids, mask)
            monkeypatch.setattr(logprobs, "_MAX_LOGITS_BYTES", 4 * 4 * model.config.vocab_size)
            found = token_logprobs(model, ids, mask)
            assert torch.equal(found, expected)
            one, other = (
                torch.autograd.grad(x.sum(), model.model.norm.weight) for x in (found, expected)
            )
        torch.testing.assert_close(one, other)
        hook.remove()
        chunks = [1, *[4] * 5, 2]  # the pass itself, and 2 x 11 tokens
        assert sizes == [1, 22, *chunks, *chunks[:0:-1], 22]

    @pytest.mark.parametrize("is_exact", [False, True], ids=["", "exact"])
    def test_another_thread_in_the_middle(self, is_exact):
        """It begins and ends while the head of the first one runs: both have their own numbers and
        gradients.
        """
        model, (ids, mask), thread = training_model("llama"), batch(), threading.current_thread()
        other, found, before = ids.flip(1), [], [dict(vars(module)) for module in model.modules()]

        def numbers(ids, mask=None):
            logprobs = token_logprobs(model, ids, mask)
            return logprobs.tolist(), torch.autograd.grad(logprobs.sum(), model.lm_head.weight)[
                0
            ].tolist()

        def interrupt(*args):
            if threading.current_thread() is thread:
                found.append(in_thread(lambda: numbers(other)))

        with exact(model) if is_exact else nullcontext():
            expected = numbers(ids, mask), numbers(other)
            hook = model.lm_head.register_forward_hook(interrupt)
            assert numbers(ids, mask) == expected[0]
        hook.remove()
        assert len(found) == 3  # in the pass itself, in the head, and in the head again
        assert all(numbers == expected[1] for numbers in found)
        assert [dict(vars(module)) for module in model.modules()] == before

    def test_two_threads_that_end_in_the_order_in_which_they_began(self):
        model, (ids, _) = training_model("llama"), batch()
        expected, both_are_in, first_is_out = (
            token_logprobs(model, ids),
            threading.Barrier(2),
            threading.Event(),
        )
        results, order = [], []

        def hook(*args):
            order.append(threading.current_thread())
            both_are_in.wait(60)
            if threading.current_thread() is not order[0]:
                first_is_out.wait(60)

        def work():
            results.append(token_logprobs(model, ids))
            first_is_out.set()

        own = model.lm_head.forward
        model.lm_head.forward = lambda x: (x.shape[1] > 1 and hook()) or own(x)
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert "forward" not in vars(model.model)
        assert all(torch.equal(result, expected) for result in results)

    @pytest.mark.parametrize("change", ["in place", "another parameter"])
    @pytest.mark.parametrize("is_tied", [False, True], ids=["", "tied"])
    def test_a_head_that_is_changed_before_the_backward_pass(self, is_tied, change):
        """Its logits are computed again: autograd would not see that they are others."""
        model, (ids, mask) = training_model("llama", tie_word_embeddings=is_tied), batch()
        logprobs = token_logprobs(model, ids, mask).sum()
        with torch.no_grad():
            if change == "in place":
                model.lm_head.weight.mul_(2)
            else:
                model.lm_head.weight = torch.nn.Parameter(2 * model.lm_head.weight)
        with pytest.raises(RuntimeError, match=r"lm_head\.weight .* call backward\(\) before"):
            logprobs.backward()

    def test_a_layer_that_is_changed_and_needs_no_gradient(self):
        model, (ids, mask) = training_model("llama"), batch()
        model.model.requires_grad_(False)
        expected = torch.autograd.grad(token_logprobs(model, ids, mask).sum(), model.lm_head.weight)
        logprobs = token_logprobs(model, ids, mask).sum()
        model.model.norm.weight.mul_(2)
        assert torch.equal(torch.autograd.grad(logprobs, model.lm_head.weight)[0], expected[0])

    def test_a_mask_of_the_prompt_alone(self):
        model, (ids, mask) = training_model("llama"), batch()
        whole = token_logprobs(model, ids, mask, prompt_len=7)
        assert torch.equal(token_logprobs(model, ids, mask[:, :7], prompt_len=7), whole)

    def test_of_logits_with_another_shape_or_temperature(self):
        logits, tokens = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.long)
        torch.testing.assert_close(
            selected_logprobs(logits.bfloat16(), tokens), -torch.full((2, 3), 5.0).log()
        )
        with pytest.raises(ValueError, match=r"logits \(2, 3, 5\) and tokens \(2, 2\) do not fit"):
            selected_logprobs(logits, tokens[:, :2])
        with pytest.raises(ValueError, match="temperature must be positive, got 0"):
            selected_logprobs(logits, tokens, temperature=0)

    def test_bad_arguments(self):
        model, (ids, _) = training_model("llama"), batch()
        for prompt_len in (0, PROMPT_LEN):
            with pytest.raises(
                ValueError, match=rf"\(2, 12\) and prompt_len {prompt_len} do not fit"
            ):
                token_logprobs(model, ids, prompt_len=prompt_len)
        for shape in ((2, 5), (2, 13), (1, 12), (12,)):
            with pytest.raises(
                ValueError, match=r"must be \(2, 12\), or that of the prompts, \(2, 4\), got \("
            ):
                token_logprobs(model, ids, torch.ones(shape, dtype=torch.long), prompt_len=4)
        with pytest.raises(
            ValueError,
            match="takes a model with a head, such as AutoModelForCausalLM, got LlamaModel",
        ):
            token_logprobs(model.model, ids)
