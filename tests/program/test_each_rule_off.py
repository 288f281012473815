"""Each rule switched off gives the tokens that all rules give: no other rule needs it, and none is
wrong without it.
"""

from functools import cache

import pytest
import torch

from hf_static_kv import GraphDecoder, StaticContiguousCache
from hf_static_kv.decoding import prompts
from hf_static_kv.program import quantised, rules
from hf_static_kv.program import step as step_module
from hf_static_kv.program.rules import RULES
from tests.conftest import BATCH, COMMON, PROMPT, shared_toy_model, toy_model
from tests.quantised_layers import quantise

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# RoPE with norms of queries and keys, windows and norms after layers, Conv1D with LayerNorm, weights
# with four bits.
TOYS = ("qwen3", "gemma3", "gpt2", "quantised llama")
PROMPTS = {"one row": PROMPT, "two rows": BATCH}
SIZES = {"one row": (128,), "two rows": (16,)}  # there are rules for many tokens, and for some


@cache
def model_of(toy):
    if toy != "quantised llama":
        return shared_toy_model(toy, device=DEVICE)
    return quantise(toy_model("llama", hidden_size=64, intermediate_size=128).to(DEVICE))


def tokens(model, ids, **how):
    ids = ids.to(DEVICE)
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), **{**COMMON, "max_new_tokens": 6}, **how
    )


@cache
def expected(toy, rows):
    return tokens(model_of(toy), PROMPTS[rows], use_cache=False)


@cache
def decoded(toy, rows, *without):
    """The tokens of the decoder, and the recorded lists that they come from: of a step and of a
    prompt.
    """
    model, lists = model_of(toy), []
    rewrite = step_module.rewrite

    def noting(program, *args, **kwargs):
        rewrite(program, *args, **kwargs)
        lists.append([call.name for call in program])

    ids = PROMPTS[rows]
    decoder = GraphDecoder(without=without)
    storage = StaticContiguousCache.from_model(model, 40, len(ids))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_module, "rewrite", noting)
        patch.setattr(prompts, "SIZES", SIZES[rows])
        patch.setattr(rules, "is_joined", lambda *args: rows == "two rows")  # too few for a GPU
        for module in (prompts, quantised):
            patch.setattr(module, "DEVICES", (DEVICE,))
        for _ in range(2):
            storage.reset()
            got = tokens(model, ids, past_key_values=storage, custom_generate=decoder)
    assert decoder.fallback_reason is None
    assert len(lists) == 2, decoder.prompts.reason
    return got, lists


@pytest.mark.parametrize("rows", PROMPTS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("toy", TOYS)
def test_the_tokens_are_the_same_without_a_rule(toy, rule, rows):
    got, _ = decoded(toy, rows, rule)
    assert torch.equal(got, expected(toy, rows))


def test_every_rule_rewrites_the_list_of_some_toy():
    """Otherwise a test above would switch off what is not there."""
    used = {
        rule
        for rule in RULES
        for toy in TOYS
        for rows in PROMPTS
        if decoded(toy, rows, rule)[1] != decoded(toy, rows)[1]
    }
    assert used == set(RULES)
