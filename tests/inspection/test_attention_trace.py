"""Traced rows are those of eager attention's `output_attentions`, in every kind of pass, and
nothing else changes.
"""

import functools

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_static_kv import GraphDecoder, StaticContiguousCache, exact, full_attention, trace_attention
from hf_static_kv.inspection.attention_trace import traced_attention
from hf_static_kv.patching import attention_of
from hf_static_kv.testing import random_model
from tests.conftest import calls_in, shared_toy_model, toy_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ["llama", "qwen3", "gemma3", "mistral", "gpt2", "phi3"]
PROMPT, NEW = 21, 14  # past the windows of the toy models, which the decoding crosses
TOLERANCE = {"rtol": 0, "atol": 1e-5}


def toy(name):
    return toy_model(name, "eager").to(DEVICE)


def prompt(batch=1):
    ids = torch.randint(5, 90, (batch, PROMPT), generator=torch.Generator().manual_seed(3)).to(
        DEVICE
    )
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[0, :6] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, inputs, **keywords):
    return model.generate(
        **inputs, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0, **keywords
    )


@functools.cache
def expected_rows(name, batch):
    """The tokens; for each pass and layer the last query's weights, [B, heads, text], from one
    eager pass over all.
    """
    model, inputs = shared_toy_model(name, "eager", DEVICE), prompt(batch)
    generated = generate(model, inputs)
    tokens = generated[:, :-1]
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(tokens[:, PROMPT:])], dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        attentions = model(
            tokens,
            attention_mask=mask,
            position_ids=positions,
            output_attentions=True,
            use_cache=False,
        ).attentions
    rows = [
        [weights[:, :, n] for weights in attentions] for n in range(PROMPT - 1, tokens.shape[1])
    ]
    return generated, rows


@pytest.mark.parametrize("batch", [1, 3], ids=["one row", "left-padded rows"])
@pytest.mark.parametrize("how", ["no cache", "our cache", "GraphDecoder"])
@pytest.mark.parametrize("name", NAMES)
def test_the_rows_are_those_of_eager_attention(name, how, batch):
    model, inputs = shared_toy_model(name, "eager", DEVICE), prompt(batch)
    tokens, expected = expected_rows(name, batch)
    cache, decoder = StaticContiguousCache.from_model(model, 64, batch), GraphDecoder()
    keywords = {
        "no cache": {"use_cache": False},
        "our cache": {"past_key_values": cache},
        "GraphDecoder": {"past_key_values": cache, "custom_generate": decoder},
    }[how]
    with trace_attention(model) as trace:
        traced = generate(model, inputs, **keywords)
    assert decoder.fallback_reason is None
    assert torch.equal(traced, tokens)
    layers = model.config.num_hidden_layers
    assert [row.layer for row in trace.rows] == list(range(layers)) * NEW
    for n, row in enumerate(trace.rows):
        whole = expected[n // layers][row.layer]
        laid = torch.zeros_like(whole)
        kept = row.positions[row.positions < whole.shape[-1]]
        laid[:, :, kept] = row.weights[..., : len(kept)]
        torch.testing.assert_close(
            laid[..., : PROMPT + n // layers], whole[..., : PROMPT + n // layers], **TOLERANCE
        )
        assert ((row.weights >= 0) & (row.weights <= 1)).all()
        torch.testing.assert_close(
            row.weights.sum(-1), torch.ones_like(row.weights[..., 0]), rtol=0, atol=1e-4
        )


def test_a_row_of_a_sliding_layer_begins_where_its_window_does():
    model, inputs = toy("gemma3"), prompt()
    cache = StaticContiguousCache.from_model(model, 64)
    with trace_attention(model) as trace:
        generate(model, inputs, past_key_values=cache)
    window = model.config.sliding_window
    end = PROMPT + NEW - 1
    for layer, kind in enumerate(model.config.layer_types):
        last = trace.of_layer(layer)[-1]
        first = end - window if kind == "sliding_attention" else 0
        assert last.positions.tolist() == list(range(first, end))


def test_layers_and_heads_are_chosen():
    model, inputs = toy("llama"), prompt()
    with trace_attention(model) as everything:
        generate(model, inputs)
    with trace_attention(model, layers=[1], heads=[2, 0]) as trace:
        generate(model, inputs)
    assert {row.layer for row in trace.rows} == {1}
    for row, whole in zip(trace.rows, everything.of_layer(1), strict=True):
        # Layer 0, which is not traced now, runs in SDPA and rounds otherwise.
        torch.testing.assert_close(row.weights, whole.weights[:, [2, 0]], **TOLERANCE)


def test_the_matrix_lies_on_the_text():
    model, inputs = toy("gemma3"), prompt()
    with trace_attention(model) as trace:
        generate(model, inputs, past_key_values=StaticContiguousCache.from_model(model, 64))
    matrix = trace.matrix(layer=0)
    assert matrix.shape == (model.config.num_attention_heads, NEW, PROMPT + NEW - 1)
    torch.testing.assert_close(matrix.sum(-1), torch.ones_like(matrix[..., 0]), rtol=0, atol=1e-4)
    assert (matrix[:, 0, PROMPT:] == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_the_whole_matrix(name):
    model, ids = toy(name), prompt()["input_ids"]
    with torch.no_grad():
        expected = model(ids, output_attentions=True).attentions[1]
    before = attention_of(model)
    torch.testing.assert_close(full_attention(model, ids, layer=1), expected, **TOLERANCE)
    assert attention_of(model) == before


def test_a_decoder_that_could_attend_to_another_text():
    """Its cross-attention has the layer's number too."""
    sizes = {
        "vocab_size": 128,
        "d_model": 48,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 64,
    }
    config = CONFIG_MAPPING["bart"](**sizes, is_decoder=True, is_encoder_decoder=False)
    model, ids = random_model(config, attn_implementation="eager"), torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        expected = model(ids, output_attentions=True).attentions[1]
    torch.testing.assert_close(full_attention(model, ids, layer=1), expected, **TOLERANCE)


class TestNothingElseChanges:
    def test_an_sdpa_model_has_its_attention_back(self):
        model = toy_model("llama", "sdpa").to(DEVICE)
        with trace_attention(model):
            assert attention_of(model) == {"": "static_contiguous_traced"}
        assert attention_of(model) == {"": "sdpa"}

    def test_also_after_an_exception(self):
        model = toy_model("llama", "sdpa").to(DEVICE)

        def fail_inside():
            with trace_attention(model):
                raise RuntimeError("in the middle")

        with pytest.raises(RuntimeError, match="in the middle"):
            fail_inside()
        assert attention_of(model) == {"": "sdpa"}

    def test_after_it_nothing_is_recorded(self):
        model, inputs = toy("llama"), prompt()
        with trace_attention(model) as trace:
            generate(model, inputs)
        count = len(trace.rows)
        generate(model, inputs)
        assert len(trace.rows) == count

    def test_a_run_after_it_does_what_one_before_did(self):
        model, inputs, decoder = toy("llama"), prompt(), GraphDecoder()
        cache = StaticContiguousCache.from_model(model, 64)

        def run():
            cache.reset()
            generate(model, inputs, past_key_values=cache, custom_generate=decoder)

        before = calls_in(run)
        with trace_attention(model):
            run()
        assert calls_in(run) == before

    def test_a_step_of_a_trace_is_not_used_outside(self):
        model, inputs, decoder = toy("llama"), prompt(), GraphDecoder()
        cache = StaticContiguousCache.from_model(model, 64)
        keywords = {"past_key_values": cache, "custom_generate": decoder}
        with trace_attention(model):
            generate(model, inputs, **keywords)
        cache.reset()
        generate(model, inputs, **keywords)
        assert len(decoder.steps.by_cache[cache]) == 2


@pytest.mark.parametrize("has_compiled_code", [False, True])
def test_a_compiled_model(has_compiled_code):
    model, ids = toy_model("llama", "eager", num_hidden_layers=1).to(DEVICE), prompt()["input_ids"]
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        with trace_attention(model) as expected:
            model(ids, use_cache=False)
        if has_compiled_code:
            compiled(ids, use_cache=False)
        with trace_attention(compiled) as trace:
            compiled(ids, use_cache=False)
        compiled(ids, use_cache=False)
    assert [row.layer for row in trace.rows] == [0]
    for row, own in zip(trace.rows, expected.rows, strict=True):
        assert torch.equal(row.weights, own.weights)
    torch.testing.assert_close(
        full_attention(compiled, ids, layer=0)[:, :, -1], expected.rows[0].weights, **TOLERANCE
    )
    torch._dynamo.reset()


class TestRefusals:
    @pytest.mark.parametrize(
        ("keywords", "message"),
        [
            ({"layers": [2]}, "Layer 2 has no attention to trace: layers 0, 1 have"),
            ({"heads": [9]}, r"heads are 0 to \d, got \[9\]"),
        ],
    )
    def test_what_is_not_there(self, keywords, message):
        with pytest.raises(ValueError, match=message), trace_attention(toy("llama"), **keywords):
            pass

    def test_a_layer_that_was_not_traced(self):
        with trace_attention(toy("llama"), layers=[1]) as trace:
            pass
        with pytest.raises(ValueError, match="Layer 0 was not traced: 1 were"):
            trace.of_layer(0)
        with pytest.raises(ValueError, match="Nothing was recorded"):
            trace.matrix(1)

    def test_inside_another_context(self):
        model = toy("llama")
        with (
            exact(model),
            pytest.raises(RuntimeError, match="traced or exact already"),
            trace_attention(model),
        ):
            pass
        with (
            trace_attention(model),
            pytest.raises(RuntimeError, match="traced or exact already"),
            trace_attention(model),
        ):
            pass
        with (
            trace_attention(model),
            pytest.raises(RuntimeError, match="The model is traced"),
            exact(model),
        ):
            pass
        assert attention_of(model) == {"": "eager"}

    @pytest.mark.parametrize("name", ["bloom", "codegen", "gpt_neo", "mpt"])
    def test_a_model_without_the_attention_interface(self, name):
        sizes = {
            "vocab_size": 128,
            "hidden_size": 48,
            "num_layers": 2,
            "num_heads": 4,
            "rotary_dim": 8,
        }
        sizes |= (
            {"attention_types": [[["global", "local"], 1]]}
            if name == "gpt_neo"
            else {"n_layer": 2, "n_head": 4}
        )
        model, ids = random_model(CONFIG_MAPPING[name](**sizes)), torch.ones(1, 3, dtype=torch.long)
        name = type(model).__name__
        message = f"{name} does not use transformers' attention interface.*output_attentions=True"
        with pytest.raises(ValueError, match=message), trace_attention(model):
            pass
        with pytest.raises(ValueError, match=message):
            full_attention(model, ids, layer=0)

    def test_attention_that_goes_past_the_interface(self, monkeypatch):
        """Transformers looks whether a file calls the interface, which not all of its layers need
        to do.
        """
        model, ids = toy("llama"), prompt()["input_ids"]
        layer = model.model.layers[0].self_attn
        monkeypatch.setattr(layer, "forward", lambda hidden_states, **_: (hidden_states, None))
        with pytest.raises(
            ValueError, match="LlamaAttention of layer 0 did not call transformers' attention"
        ):
            full_attention(model, ids, layer=0)
        with trace_attention(model) as trace:
            model(ids)
        with pytest.raises(
            ValueError, match="the layer does not call transformers' attention interface"
        ):
            trace.matrix(0)

    def test_a_bias_of_the_scores(self):
        model, states = toy("llama"), torch.ones(1, 4, 3, 16)
        layer = model.model.layers[0].self_attn
        with (
            trace_attention(model),
            pytest.raises(ValueError, match="LlamaAttention adds a bias to its scores"),
        ):
            traced_attention(
                layer, states, states, states, None, position_bias=torch.ones(1, 4, 3, 3)
            )

    def test_what_is_no_model(self):
        wrapper = torch.nn.Sequential(toy("llama"))
        with pytest.raises(
            TypeError, match="trace_attention takes a transformers model, got Sequential"
        ):
            full_attention(wrapper, prompt()["input_ids"], layer=0)

    def test_several_texts(self):
        with pytest.raises(ValueError, match=r"takes one sequence, \[1, n\], got \[2, 3\]"):
            full_attention(toy("llama"), torch.ones(2, 3, dtype=torch.long), layer=0)


def test_the_whole_matrix_of_one_token():
    """On a GPU the decode kernel could serve such a pass, and it keeps no whole matrix."""
    model = toy_model("llama").to("cuda" if torch.cuda.is_available() else "cpu")
    weights = full_attention(model, torch.tensor([[5]], device=model.device), layer=0)
    assert weights.shape[2:] == (1, 1)
    assert torch.equal(weights, torch.ones_like(weights))
