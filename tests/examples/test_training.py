"""`examples/train_miniatures.py`: a stopped run goes on as if it had not been; the score counts
every token once.
"""

import argparse
import math
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def training(monkeypatch):
    """The script, with a text of some thousand tokens."""
    monkeypatch.syspath_prepend(EXAMPLES)
    import train_miniatures

    train, held_out = train_miniatures.split_text()
    monkeypatch.setattr(train_miniatures, "split_text", lambda: (train[:20_000], held_out[:1_000]))
    return train_miniatures


def new_run(training, tokenizer, out):
    settings = {
        "device": "cpu",
        "steps": 3,
        "batch_size": 1,
        "lr": 3e-3,
        "weight_decay": 1.0,
        "warm_up": 2,
    }
    args = argparse.Namespace(out=out, evaluate_every=1, seed=0, **settings)
    return training.Run("gemma3", args, tokenizer)


def test_a_stopped_run_goes_on_as_if_it_had_not_been(training, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "CONTEXT", 64)
    tokenizer = training.train_tokenizer(training.split_text()[0])
    whole = new_run(training, tokenizer, tmp_path / "whole")
    whole.train()

    stopped = new_run(training, tokenizer, tmp_path / "stopped")
    train_step = stopped.train_step

    def interrupted():
        if stopped.step == 2:
            raise KeyboardInterrupt
        return train_step()

    monkeypatch.setattr(stopped, "train_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    resumed = new_run(training, tokenizer, tmp_path / "stopped")
    resumed.train()

    assert [step for step, _ in resumed.history["held_out"]] == [1, 2, 3]
    assert resumed.history == whole.history
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], weight)
    record = resumed.save(tokenizer)
    assert record["bits_per_byte"] == round(whole.best["bits_per_byte"], 4)
    assert not resumed.checkpoint.exists()


@pytest.mark.parametrize("num_tokens", [513, 514, 769, 800, 1500])
def test_every_token_but_the_first_is_scored_once(training, num_tokens):
    """A model that knows nothing needs log2(vocabulary) bits for each: windows must not overlap or
    leave gaps.
    """

    class Uniform(torch.nn.Module):
        def forward(self, ids, use_cache):
            return argparse.Namespace(logits=torch.zeros(*ids.shape, training.VOCAB))

    ids = torch.randint(training.VOCAB, (num_tokens,))
    score = training.bits_per_byte(Uniform(), ids, num_bytes=1)
    assert score == pytest.approx((num_tokens - 1) * math.log2(training.VOCAB))
