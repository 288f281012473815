"""`examples/compare.py` and its metric: equal is said when it is so, a difference is found,
measured and explained.
"""

import json
import statistics
from pathlib import Path

import pytest
import torch

from hf_static_kv import StaticContiguousCache

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def compare(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import compare

    return compare


def run(compare, *args):
    return compare.main([str(arg) for arg in args])


def test_equal_on_all_miniatures_and_against_every_cache(compare, capsys, tmp_path):
    record, picture = tmp_path / "compare.json", tmp_path / "compare.png"
    options = [
        "--max-new-tokens",
        10,
        "--against",
        "no-cache,dynamic,static",
        "--json",
        record,
        "--plot",
        picture,
    ]
    assert run(compare, *options, "--prompt", "ROMEO:\n") == 0
    report = json.loads(record.read_text())
    cases = [(c["model"], c["mode"], c["against"]) for c in report["comparisons"]]
    modes, caches = ("greedy", "sampled"), ("no-cache", "dynamic", "static")
    assert cases == [
        (m, mode, c) for m in ("llama", "qwen3", "gemma3") for mode in modes for c in caches
    ]
    for comparison in report["comparisons"]:
        assert comparison["equal"]
        assert comparison["common_prefix"] == 10
        assert len(comparison["ours"]["tokens"]) == len(comparison["ours"]["seconds"]) == 10
        rate = 1 / statistics.median(comparison["ours"]["seconds"][1:])
        assert comparison["ours"]["tokens_per_second"] == pytest.approx(rate)
        assert comparison["speed_up"] == pytest.approx(
            rate / comparison["theirs"]["tokens_per_second"]
        )
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "ROMEO:" in out
    assert "DIFF" not in out


class WrongCache(StaticContiguousCache):
    """Forgets the sign of the keys from the 24th token on."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        return super().update(
            -key_states if self.seq_len > 23 else key_states, value_states, layer_idx
        )


def test_a_wrong_cache_is_found_out(compare, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(compare.CACHES, compare.OURS, WrongCache.from_model)
    record = tmp_path / "compare.json"
    options = [
        "--model",
        "llama",
        "--max-new-tokens",
        40,
        "--prompt",
        "JULIET:\nO Romeo",
        "--json",
        record,
    ]
    assert run(compare, *options) == 1
    comparison = json.loads(record.read_text())["comparisons"][0]
    assert not comparison["equal"]
    at, difference = comparison["common_prefix"], comparison["difference"]
    assert comparison["theirs"]["tokens"][:at] == comparison["ours"]["tokens"][:at]
    assert difference["position"] == at
    assert (difference["their_token"], difference["our_token"]) == (
        comparison["theirs"]["tokens"][at],
        comparison["ours"]["tokens"][at],
    )
    assert difference["gap"] > difference["rounding"]
    out = capsys.readouterr().out
    assert f"DIFFERENT from no-cache at new token {at}" in out
    assert "NOT within" in out


def test_a_near_tie_is_called_rounding(compare):
    """Two equal rows in the head give two equal logits: whichever token comes, rounding explains
    it.
    """
    model, tokenizer = compare.load_model("qwen3")
    inputs = dict(tokenizer("ROMEO:\n", return_tensors="pt"))
    with torch.no_grad():
        best = model(**inputs).logits[0, -1].argmax().item()
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
        model.lm_head.weight[7] = model.lm_head.weight[best]
    difference = compare.explain_difference(model, inputs, [best], [7], 0)
    assert difference["gap"] == 0
    assert difference["within_rounding"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "nosuch"], "'nosuch' is no folder"),
        (["--model", "/no/such.gguf"], "There is no file /no/such.gguf"),
        (["--model", "llama", "--max-new-tokens", 510], "more than the context of 512"),
        (["--model", "llama", "--prompt", ""], "the prompt is empty"),
    ],
)
def test_bad_arguments_are_one_line_and_status_2(compare, capsys, options, message):
    assert run(compare, *options) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-new-tokens", 0], "--max-new-tokens must be at least 1, got 0"),
        (["--against", "paged"], "unknown paged: choose from no-cache, dynamic, static"),
    ],
)
def test_bad_options_are_status_2(compare, capsys, options, message):
    with pytest.raises(SystemExit) as exit_info:
        run(compare, *options)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_token_agreement_alone(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from token_agreement import TokenAgreement

    result = TokenAgreement().compute(
        predictions=[[5, 6, 7], [1, 2], [3]], references=[[5, 6, 8], [1, 2], [3, 4]]
    )
    assert result == {"exact_match": pytest.approx(1 / 3), "common_prefix": [2, 2, 1]}
