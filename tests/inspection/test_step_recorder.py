"""What was chosen at each step, and the debug log."""

import importlib
import json
import logging
import math

import pytest
import torch

from hf_static_kv import GraphDecoder, StaticContiguousCache, StepRecorder
from hf_static_kv.cache import debug
from hf_static_kv.testing import load_model
from tests.conftest import toy_model

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
    debug.logged_layer = None


class TestSteps:
    @pytest.mark.parametrize("do_sample", [False, True])
    @pytest.mark.parametrize("how", ["plain", "GraphDecoder"])
    def test_against_the_logits_of_generate(self, model, how, do_sample):
        torch.manual_seed(7)
        expected = model.generate(
            PROMPT,
            do_sample=do_sample,
            return_dict_in_generate=True,
            output_logits=True,
            top_k=0,
            **COMMON,
        )
        torch.manual_seed(7)
        recorder, decoder, keywords = StepRecorder(best=3), GraphDecoder(), {}
        if how == "GraphDecoder":
            cache = StaticContiguousCache.from_model(model, 32, 2)
            keywords = {"past_key_values": cache, "custom_generate": decoder}
        tokens = model.generate(
            PROMPT, do_sample=do_sample, top_k=0, logits_processor=[recorder], **keywords, **COMMON
        )
        steps = recorder.steps(tokens)
        assert decoder.fallback_reason is None
        assert torch.equal(tokens, expected.sequences)
        assert [len(row) for row in steps] == [NEW, NEW]
        for row in range(2):
            for n, step in enumerate(steps[row]):
                probabilities = expected.logits[n][row].double().softmax(-1)
                assert step["token"] == tokens[row, 4 + n]
                assert step["probability"] == pytest.approx(
                    probabilities[step["token"]].item(), rel=1e-4
                )
                assert [b["token"] for b in step["best"]] == probabilities.topk(3).indices.tolist()
                assert step["entropy"] == pytest.approx(
                    -(probabilities * probabilities.log()).sum().item(), rel=1e-4
                )
        assert json.loads(json.dumps(steps)) == steps

    def test_text_comes_from_the_tokenizer(self):
        model, tokenizer = load_model("llama")
        inputs, recorder = (
            tokenizer("ROMEO:", return_tensors="pt"),
            StepRecorder(best=2, tokenizer=tokenizer),
        )
        tokens = model.generate(
            **inputs, max_new_tokens=5, do_sample=False, logits_processor=[recorder]
        )
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
        with pytest.raises(
            ValueError, match="0 steps were recorded and the sequences hold 2 new tokens"
        ):
            StepRecorder().steps(torch.ones(1, 2, dtype=torch.long))


def record(model, recorder, ids, **keywords):
    """A generation, what of it is checked, and its logits: [steps, B, V]."""
    common = {
        "logits_processor": [recorder],
        "return_dict_in_generate": True,
        "output_logits": True,
        "top_k": 0,
    }
    output = model.generate(
        ids, **common | {"do_sample": False, "max_new_tokens": 5, "pad_token_id": 0} | keywords
    )
    return output.sequences, torch.stack(output.logits)


def check(steps, sequences, logits):
    new = sequences[:, -len(logits) :]
    assert [[step["token"] for step in row] for row in steps] == new.tolist()
    for row, n in ((row, n) for row in range(len(new)) for n in range(len(logits))):
        expected = logits[n, row].float().softmax(-1)[new[row, n]].item()
        assert steps[row][n]["probability"] == pytest.approx(expected, rel=1e-4)


class TestOneRecorderInManyCalls:
    @pytest.mark.parametrize(
        "second",
        [PROMPT, PROMPT.flip(1), PROMPT[:1], PROMPT[:, :2], torch.arange(5, 25).view(2, 10)],
        ids=["the same", "another", "of other rows", "shorter", "longer"],
    )
    def test_another_prompt_begins_another_record(self, model, second):
        recorder = StepRecorder(best=2)
        record(model, recorder, PROMPT, max_new_tokens=NEW)
        sequences, logits = record(model, recorder, second)
        check(recorder.steps(sequences), sequences, logits)

    @pytest.mark.parametrize("more", [0, 1, 3], ids="{} more tokens".format)
    def test_a_text_goes_on_once_its_steps_were_read(self, model, more):
        recorder = StepRecorder(best=2)
        first, logits = record(model, recorder, PROMPT)
        check(recorder.steps(first), first, logits)
        check(recorder.steps(first), first, logits)  # and can be read again
        sequences, logits = record(model, recorder, torch.cat([first, PROMPT[:, :more]], dim=1))
        check(recorder.steps(sequences), sequences, logits)

    def test_a_text_that_goes_on_unread_is_refused(self, model):
        """It could be the same call, with several tokens at once."""
        recorder = StepRecorder(best=2)
        first, _ = record(model, recorder, PROMPT)
        with pytest.raises(
            ValueError, match="a new StepRecorder for each call, or read `steps` before the next"
        ):
            record(model, recorder, torch.cat([first, PROMPT], dim=1))

    def test_a_prompt_that_is_one_token_longer_than_the_last_text_is_refused(self, model):
        recorder = StepRecorder(best=2)
        record(model, recorder, PROMPT, max_new_tokens=1)
        sequences, _ = record(model, recorder, torch.cat([PROMPT.flip(1), PROMPT[:, :1]], dim=1))
        with pytest.raises(ValueError, match="a new StepRecorder for each call"):
            recorder.steps(sequences)

    def test_of_what_another_call_returned(self, model):
        recorder = StepRecorder(best=2)
        sequences, _ = record(model, recorder, PROMPT)
        sequences[0, 5] = 17
        with pytest.raises(ValueError, match="pass what the same call of generate returned"):
            recorder.steps(sequences)


class TestOtherWaysToDecode:
    @pytest.mark.parametrize("best_of", [1, 3])
    def test_beams(self, model, best_of):
        """They put other rows in the place of a row."""
        recorder = StepRecorder(best=2)
        sequences = model.generate(
            PROMPT,
            logits_processor=[recorder],
            num_beams=3,
            num_return_sequences=best_of,
            do_sample=False,
            **COMMON,
        )
        with pytest.raises(ValueError, match=r"Beam search .* Record greedy decoding or sampling"):
            recorder.steps(sequences)

    @pytest.mark.parametrize("do_sample", [False, True])
    @pytest.mark.parametrize("how", ["prompt lookup", "assistant"])
    def test_several_tokens_at_once(self, model, how, do_sample):
        """Candidates that are not accepted are no part of the text: records are right or refused."""
        ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
        assistant = {"assistant_model": toy_model("llama", seed=1)}
        keywords = {"prompt_lookup_num_tokens": 3} if how == "prompt lookup" else assistant
        recorder = StepRecorder(best=2)

        def records():
            sequences, logits = record(
                model, recorder, ids, do_sample=do_sample, max_new_tokens=12, **keywords
            )
            check(recorder.steps(sequences), sequences, logits)

        with pytest.raises(
            ValueError, match=r"assisted decoding .* Record greedy decoding or sampling"
        ):
            records()

    @pytest.mark.parametrize("do_sample", [False, True])
    def test_rows_that_end_early_and_several_sequences(self, model, do_sample):
        torch.manual_seed(3)
        free, _ = record(
            model,
            StepRecorder(),
            PROMPT,
            do_sample=do_sample,
            eos_token_id=None,
            max_new_tokens=NEW,
        )
        torch.manual_seed(3)
        recorder, end = StepRecorder(best=2), int(free[0, 6])
        keywords = {"do_sample": do_sample, "eos_token_id": end, "max_new_tokens": NEW}
        keywords |= {"num_return_sequences": 3} if do_sample else {}
        sequences, logits = record(model, recorder, PROMPT, **keywords)
        check(recorder.steps(sequences), sequences, logits)

    def test_turn_by_turn_with_the_decoder(self, model):
        recorder, decoder = StepRecorder(best=2), GraphDecoder()
        cache = StaticContiguousCache.from_model(model, 32, 2)
        ids, common = (
            PROMPT,
            {"past_key_values": cache, "custom_generate": decoder, "do_sample": False, **COMMON},
        )
        for _ in range(3):
            ids = model.generate(ids, logits_processor=[recorder], **common)
            assert [[step["token"] for step in row] for row in recorder.steps(ids)] == ids[
                :, -NEW:
            ].tolist()
        assert decoder.fallback_reason is None


class TestDebugLog:
    def test_every_step_of_plain_generate(self, model, caplog):
        cache = StaticContiguousCache.from_model(model, 32, 2)
        with caplog.at_level(logging.DEBUG, "hf_static_kv"):
            model.generate(
                PROMPT, past_key_values=cache, do_sample=False, **COMMON | {"max_new_tokens": 3}
            )
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
                keywords = {
                    "past_key_values": cache,
                    "custom_generate": decoder,
                    "do_sample": False,
                }
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
            "layer 0 wrote [0, 30) and returned [0, 30)",
            f"layer 0 wrote [30, 31) and returned [{31 - window}, 31)",
        ]

    def test_the_environment_turns_it_on(self, monkeypatch, capsys, clean_logger):
        monkeypatch.setenv("HF_STATIC_KV_DEBUG", "1")
        monkeypatch.setenv("HF_STATIC_KV_DEBUG_LAYER", "1")
        importlib.reload(debug)
        cache = StaticContiguousCache.allocate(
            2, 1, 4, 8, batch_size=1, dtype=torch.float32, device="cpu"
        )
        for layer in range(2):
            cache.update(torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4), layer)
        assert capsys.readouterr().err.splitlines() == [
            "hf_static_kv: layer 1 wrote [0, 3) and returned [0, 3)",
            "hf_static_kv: step at 0: 3 new tokens in 1 row, 3 of 8 positions filled",
        ]
