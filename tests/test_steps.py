"""What was chosen at each step, and the debug log."""

import json
import logging
import math
import os
import subprocess
import sys

import pytest
import torch
from architectures import toy_model

from hf_static_kv import GraphDecoder, StaticContiguousCache, StepRecorder, debug
from hf_static_kv.testing import load_model

PROMPT, NEW = torch.tensor([[5, 6, 7, 8], [9, 3, 5, 6]]), 7
COMMON = {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture
def model():
    return toy_model("llama")


@pytest.fixture
def clean_logger():
    yield
    debug.logger.setLevel(logging.NOTSET)
    debug.logger.handlers = [h for h in debug.logger.handlers if not getattr(h, "is_ours", False)]
    debug.traced_layer = None


class TestSteps:
    @pytest.mark.parametrize("do_sample", [False, True])
    @pytest.mark.parametrize("how", ["plain", "GraphDecoder"])
    def test_against_the_logits_of_generate(self, model, how, do_sample):
        torch.manual_seed(7)
        expected = model.generate(
            PROMPT, do_sample=do_sample, return_dict_in_generate=True, output_logits=True, top_k=0, **COMMON
        )
        torch.manual_seed(7)
        if how == "plain":
            recorder = StepRecorder(best=3)
            tokens = model.generate(PROMPT, do_sample=do_sample, top_k=0, logits_processor=[recorder], **COMMON)
            steps = recorder.steps(tokens)
        else:
            decoder, cache = GraphDecoder(record_steps=3), StaticContiguousCache.from_model(model, 32, 2)
            tokens = model.generate(
                PROMPT, do_sample=do_sample, top_k=0, past_key_values=cache, custom_generate=decoder, **COMMON
            )
            assert decoder.fallback_reason is None
            steps = decoder.steps
        assert torch.equal(tokens, expected.sequences)
        assert [len(row) for row in steps] == [NEW, NEW]
        for row in range(2):
            for n, step in enumerate(steps[row]):
                probabilities = expected.logits[n][row].double().softmax(-1)
                assert step["token"] == tokens[row, 4 + n]
                assert step["probability"] == pytest.approx(probabilities[step["token"]].item(), rel=1e-4)
                assert [b["token"] for b in step["best"]] == probabilities.topk(3).indices.tolist()
                assert step["entropy"] == pytest.approx(-(probabilities * probabilities.log()).sum().item(), rel=1e-4)
        assert json.loads(json.dumps(steps)) == steps

    def test_text_comes_from_the_tokenizer(self):
        model, tokenizer = load_model("llama")
        inputs, recorder = tokenizer("ROMEO:", return_tensors="pt"), StepRecorder(best=2, tokenizer=tokenizer)
        tokens = model.generate(**inputs, max_new_tokens=5, do_sample=False, logits_processor=[recorder])
        (steps,) = recorder.steps(tokens)
        new = tokens[0, inputs["input_ids"].shape[1] :]
        assert [step["text"] for step in steps] == [tokenizer.decode([token]) for token in new]
        assert steps[0]["best"][0] == {
            "token": steps[0]["token"],
            "text": steps[0]["text"],
            "probability": steps[0]["probability"],
        }

    def test_tokens_that_cannot_be_chosen_do_not_make_the_entropy_undefined(self):
        recorder = StepRecorder(best=2)
        recorder(torch.tensor([[1]]), torch.tensor([[0.0, 0.0, -torch.inf]]))
        ((step,),) = recorder.steps(torch.tensor([[1, 0]]))
        assert step["entropy"] == pytest.approx(math.log(2))
        assert step["probability"] == pytest.approx(0.5)

    def test_refusals(self, model):
        with pytest.raises(ValueError, match="best must be at least 1, got 0"):
            StepRecorder(best=0)
        with pytest.raises(ValueError, match="got -1"):
            GraphDecoder(record_steps=-1)
        with pytest.raises(ValueError, match="0 steps were recorded and the sequences hold 2 new tokens"):
            StepRecorder().steps(torch.ones(1, 2, dtype=torch.long))


class TestDebugLog:
    def test_every_step_of_plain_generate(self, model, caplog):
        cache = StaticContiguousCache.from_model(model, 32, 2)
        with caplog.at_level(logging.DEBUG, "hf_static_kv"):
            model.generate(PROMPT, past_key_values=cache, do_sample=False, **COMMON | {"max_new_tokens": 3})
        assert caplog.messages == [
            "step at 0: 4 new tokens in 2 rows, 4 of 32 positions filled",
            "step at 4: 1 new token in 2 rows, 5 of 32 positions filled",
            "step at 5: 1 new token in 2 rows, 6 of 32 positions filled",
        ]

    def test_every_step_of_the_decoder_and_what_it_runs(self, model, caplog):
        cache, decoder = StaticContiguousCache.from_model(model, 32, 2), GraphDecoder()
        with caplog.at_level(logging.DEBUG, "hf_static_kv"):
            for _ in range(2):
                cache.reset()
                caplog.clear()
                keywords = {"past_key_values": cache, "custom_generate": decoder, "do_sample": False}
                model.generate(PROMPT, **keywords, **COMMON | {"max_new_tokens": 3})
        assert [message for message in caplog.messages if "known" in message] == [
            "a known step for 2 rows: without a graph"
        ]
        assert "step at 5: 1 new token in 2 rows, 6 of 32 positions filled" in caplog.messages

    def test_the_views_of_a_layer(self, caplog, clean_logger):
        model = toy_model("gemma3")
        cache = StaticContiguousCache.from_model(model, 64)
        debug.turn_on(layer=0)
        window = model.config.sliding_window
        with caplog.at_level(logging.DEBUG, "hf_static_kv"), torch.no_grad():
            model(torch.ones(1, 30, dtype=torch.long), past_key_values=cache)
            model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache)
        layers = [message for message in caplog.messages if message.startswith("layer")]
        assert layers == [
            "layer 0 wrote [0, 30) and hands out [0, 30)",
            f"layer 0 wrote [30, 31) and hands out [{31 - window}, 31)",
        ]

    def test_the_environment_turns_it_on(self):
        code = (
            "import torch\n"
            "from hf_static_kv import StaticContiguousCache\n"
            "cache = StaticContiguousCache.allocate(2, 1, 4, 8, batch_size=1, dtype=torch.float32, device='cpu')\n"
            "for layer in range(2):\n"
            "    cache.update(torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4), layer)\n"
        )
        environment = {**os.environ, "HF_STATIC_KV_DEBUG": "1", "HF_STATIC_KV_DEBUG_LAYER": "1"}
        result = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120
        )
        assert result.stderr.splitlines() == [
            "hf_static_kv: layer 1 wrote [0, 3) and hands out [0, 3)",
            "hf_static_kv: step at 0: 3 new tokens in 1 row, 3 of 8 positions filled",
        ]
