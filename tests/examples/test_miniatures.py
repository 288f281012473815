"""The trained miniatures: they have learned, they are what they claim, and the cache is exact on
them.
"""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_static_kv import StaticContiguousCache
from hf_static_kv.testing import MINIATURES, load_model

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPT = "MENENIUS:\nThere was a time when all the body's members\n"
# More than twice the window of the Gemma 3 miniature.
NEW_TOKENS = {
    "llama": 20,
    "qwen3": 20,
    "gemma3": 70,
}


@pytest.mark.parametrize(
    "mode",
    [{"do_sample": False}, {"do_sample": True, "temperature": 0.7}],
    ids=["greedy", "seeded"],
)
@pytest.mark.parametrize("name", MINIATURES)
def test_tokens_and_text_equal_use_cache_false(name, mode):
    model, tokenizer = load_model(name)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    cache = StaticContiguousCache.from_model(model, 256)
    runs = []
    for how in ({"use_cache": False}, {"past_key_values": cache}):
        torch.manual_seed(42)
        tokens = model.generate(**inputs, **how, **mode, max_new_tokens=NEW_TOKENS[name])[0]
        runs.append((tokens.tolist(), tokenizer.decode(tokens)))
    assert runs[0] == runs[1]
    assert cache.seq_len == inputs["input_ids"].shape[1] + NEW_TOKENS[name] - 1


@pytest.mark.parametrize("name", MINIATURES)
def test_size_and_architecture(name):
    folder = EXAMPLES / "models" / name
    assert sum(file.stat().st_size for file in folder.iterdir()) < 6_000_000
    model = AutoModelForCausalLM.from_pretrained(folder)
    # A plain transformers model: no code comes with it.
    assert not hasattr(model.config, "auto_map")
    assert 1_000_000 <= model.num_parameters() <= 2_000_000
    config = model.config
    assert config.num_key_value_heads < config.num_attention_heads
    assert hasattr(model.model.layers[0].self_attn, "q_norm") == (name != "llama")
    if name == "gemma3":
        assert config.layer_types == ["sliding_attention"] * 5 + ["full_attention"]
        assert config.sliding_window * 8 <= config.max_position_embeddings


@pytest.fixture
def held_out_score(monkeypatch):
    """A model's bits per byte on the first characters of the held-out text."""
    monkeypatch.syspath_prepend(EXAMPLES)
    from train_miniatures import bits_per_byte, split_text

    def score(name, characters=None):
        held_out = split_text()[1][:characters]
        model, tokenizer = load_model(name)
        return bits_per_byte(
            model, torch.tensor(tokenizer(held_out)["input_ids"]), len(held_out.encode())
        )

    return score


RECORD = json.loads((EXAMPLES / "models" / "training.json").read_text())


@pytest.mark.parametrize("name", MINIATURES)
def test_fewer_bits_per_byte_than_compressors(name, held_out_score):
    assert held_out_score(name, 8_000) < min(RECORD["baselines"].values())


@pytest.mark.slow
@pytest.mark.parametrize("name", MINIATURES)
def test_the_score_is_that_of_the_record(name, held_out_score):
    # The record was scored with TF32, which rounds logits by about 1e-3.
    assert held_out_score(name) == pytest.approx(RECORD["models"][name]["bits_per_byte"], abs=1e-3)


def test_the_tokenizer_gives_every_text_back():
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "models" / "llama")
    for text in ("ROMEO:\n  Ay me!", "naïve café, 東京 🙂\t\n\n", ""):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
