"""Why keys and values may be cached at all, and attention over a cache against attention over the
whole text.
"""

import pytest
import torch
from torch import nn

from hf_static_kv import StaticContiguousCache
from tests.conftest import toy_model

# One head, three numbers a token, float32: sums of at most 7 products of numbers below 1 round by
# less than this.
CLOSE = {"rtol": 0, "atol": 1e-6}


def causal_attention(tokens, to_query, to_key, to_value):
    """Plain causal attention. tokens: [n, C]."""
    scores = (tokens @ to_query) @ (tokens @ to_key).T / tokens.shape[1] ** 0.5
    future = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ (tokens @ to_value)


def test_appending_a_token_leaves_what_was_there():
    """Keys, values and outputs of earlier tokens do not change; the new output needs the new query
    alone.
    """
    tokens, weights = torch.rand(7, 3), [torch.rand(3, 3) for _ in range(3)]
    before, after = causal_attention(tokens[:-1], *weights), causal_attention(tokens, *weights)
    torch.testing.assert_close(after[:-1], before, **CLOSE)
    to_query, to_key, to_value = weights
    for projection in (to_key, to_value):
        torch.testing.assert_close((tokens @ projection)[:-1], tokens[:-1] @ projection, **CLOSE)
    row = (tokens[-1:] @ to_query) @ (tokens @ to_key).T / 3**0.5
    torch.testing.assert_close(row.softmax(-1) @ (tokens @ to_value), after[-1:], **CLOSE)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt2"])
def test_in_a_model_too(name):
    """The cached keys and values of a text are those of its continuation, and so are the logits."""
    model = toy_model(name)
    ids = torch.randint(3, 128, (1, 20))
    short, long = (StaticContiguousCache(model.config, 20) for _ in range(2))
    with torch.no_grad():
        short_logits = model(ids[:, :15], past_key_values=short).logits
        long_logits = model(ids, past_key_values=long).logits
    # Float32 through up to 3 layers; the numbers are of size 1 to 10.
    close = {
        "rtol": 1e-4,
        "atol": 1e-4,
    }
    torch.testing.assert_close(long_logits[:, :15], short_logits, **close)
    for one, other in zip(short.layers, long.layers, strict=True):
        torch.testing.assert_close(other.keys[:, :, :15], one.keys, **close)
        torch.testing.assert_close(other.values[:, :, :15], one.values, **close)


class Attention(nn.Module):
    """Grouped-query attention with an optional cache: hidden 32, 4 heads, 2 KV heads of dim 8."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (
            nn.Linear(32, 32),
            nn.Linear(32, 16),
            nn.Linear(32, 16),
            nn.Linear(32, 32),
        )

    def forward(self, x, cache=None):
        batch, tokens, _ = x.shape
        query, key, value = (
            f(x).view(batch, tokens, -1, 8).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        past = 0 if cache is None else cache.seq_len
        if cache is not None:
            key, value = cache.update(key, value, 0)
        mask = torch.ones(tokens, past + tokens, dtype=torch.bool).tril(past)
        out = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, enable_gqa=True
        )
        return self.o(out.transpose(1, 2).reshape(batch, tokens, 32))


@pytest.mark.parametrize("chunks", [(4, 1), (2, 1, 1, 1), (1, 1, 1, 1, 1), (3, 2), (5,)], ids=str)
def test_attention_over_a_cache_is_attention_over_the_text(chunks):
    attention, x = Attention(), torch.randn(1, 5, 32)
    cache = StaticContiguousCache.allocate(
        1, 2, 8, max_cache_len=8, dtype=torch.float32, device="cpu"
    )
    with torch.no_grad():
        whole = attention(x)
        for part in x.split(chunks, dim=1):
            out = attention(part, cache)
            assert list(out.shape) == [1, part.shape[1], 32]
            expected = whole[:, cache.seq_len - part.shape[1] : cache.seq_len]
            torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    assert cache.seq_len == 5


@pytest.mark.parametrize("stop_after", [1, 3])
def test_generate_stops_at_eos(stop_after):
    """With an eos that the run meets: the same tokens, and as many, as without a cache."""
    model = toy_model("qwen3")
    ids = torch.tensor([[17, 93, 5, 64]])
    options = {
        "do_sample": False,
        "max_new_tokens": 12,
        "attention_mask": torch.ones_like(ids),
        "pad_token_id": 0,
    }
    free = model.generate(ids, use_cache=False, eos_token_id=None, **options)
    eos = free[0, ids.shape[1] + stop_after - 1].item()
    cache = StaticContiguousCache(model.config, 32)
    stopped = model.generate(ids, past_key_values=cache, eos_token_id=eos, **options)
    assert stopped.tolist() == free[:, : ids.shape[1] + stop_after].tolist()
    assert cache.seq_len == stopped.shape[1] - 1
