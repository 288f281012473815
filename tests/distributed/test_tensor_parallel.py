"""Tensor parallelism: two and four processes, each with its own KV heads, give the tokens of one
process.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_static_kv.testing import random_model, tiny_config
from tests.conftest import PROMPT, toy_model
from tests.distributed import scenarios
from tests.distributed.processes import run_ranks
from tests.test_documentation import HUB_ID, MINIATURE, ROOT, code_blocks

FAMILIES = ("llama", "qwen3", "gemma3")
SPLIT = "the model is split over processes"
# Far above the usual 0.02, so that a wrong key shows in the tokens. Four KV heads, for two and for
# four ranks.
SIZES = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "initializer_range": 0.4,
}
SIZES |= {"num_hidden_layers": 2, "sliding_window_pattern": 2}
WHOLE_ATTENTION = {"q_proj": "colwise_gather_output", "k_proj": "colwise_gather_output"}
WHOLE_ATTENTION |= {"v_proj": "colwise_gather_output", "o_proj": "rowwise_split_input"}


@pytest.fixture
def saved(tmp_path):
    """A function that saves a model and gives (the model, its folder)."""

    def save(model):
        model.save_pretrained(tmp_path / "model")
        return model, str(tmp_path / "model")

    return save


def on_ranks(scenario, ranks, folder, *args):
    return run_ranks(scenario, ranks, Path(folder).parent, folder, ranks, *args)


def check_tokens(model, found):
    expected = {call: scenarios.generate(model, call, use_cache=False) for call in scenarios.CALLS}
    for rank, tokens in enumerate(found):
        assert {key for key, value in tokens.items() if value != expected[key[0]]} == set(), rank


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_all_ranks_give_the_tokens_of_one_process(name, ranks, saved):
    model, folder = saved(random_model(tiny_config(name, **SIZES)))
    found = on_ranks(scenarios.all_ways, ranks, folder)
    check_tokens(model, [one["tokens"] for one in found])
    whole = scenarios.cache_bytes(model.config, scenarios.CAPACITY, 2, torch.float32)
    for one in found:
        assert one["heads"] == {4 // ranks}
        assert one["bytes"] == {whole // ranks}
        assert one["reason"].startswith(SPLIT)
        assert one["attached"] == found[0]["attached"]
    assert found[0]["attached"] == (3, 2, PROMPT.shape[1] - 1)


def whole_attention(model):
    """The plan of a model with all heads on every rank: for fewer KV heads than ranks."""
    return {
        name: WHOLE_ATTENTION.get(name.rsplit(".", 1)[-1], style)
        for name, style in model.tp_plan.items()
    }


REPLICATED = {
    # By its own plan, as its norm of the keys spans all heads.
    "olmo2": (2, lambda: toy_model("olmo2"), lambda model: None),
    "fewer heads than ranks": (4, lambda: toy_model("llama"), whole_attention),
}


@pytest.mark.parametrize("case", REPLICATED)
def test_a_rank_may_hold_all_heads(case, saved):
    ranks, build, plan = REPLICATED[case]
    model, folder = saved(build())
    found = on_ranks(scenarios.all_ways, ranks, folder, plan(model))
    check_tokens(model, [one["tokens"] for one in found])
    whole = scenarios.cache_bytes(model.config, scenarios.CAPACITY, 2, torch.float32)
    assert all((one["heads"], one["bytes"]) == ({2}, {whole}) for one in found)


def test_heads_that_cannot_be_split_are_refused_before_any_pass(saved):
    _, folder = saved(toy_model("llama", num_key_value_heads=1))
    found = on_ranks(scenarios.heads_that_do_not_divide, 2, folder)
    assert found[0] == found[1]
    assert found[0][0] == "ValueError"
    assert "1 KV heads cannot be split over tp_size=2 ranks" in found[0][1]


# --- all ranks decide the same: else the test ends with "no answer" from those that wait


def test_where_one_rank_is_out_of_memory_all_raise_and_the_call_can_be_retried(saved):
    model, folder = saved(toy_model("llama"))
    expected = scenarios.generate(model, "greedy", use_cache=False)
    for rank, (errors, left, tokens) in enumerate(
        on_ranks(scenarios.one_rank_out_of_memory, 2, folder)
    ):
        reason = (
            "this rank is full" if rank == 1 else "Another rank is out of memory for the cache."
        )
        assert set(errors.values()) == {("OutOfMemoryOnAllRanks", reason)}
        assert left == (0, 0, 16, PROMPT.shape[1])
        assert tokens == [expected, expected]


def test_attached_all_ranks_fall_back_where_one_is_out_of_memory(saved):
    model, folder = saved(toy_model("llama"))
    expected = scenarios.generate(model, "sampled", use_cache=False)
    for first, second in on_ranks(scenarios.attached_and_out_of_memory, 2, folder):
        assert first == (expected, "out of memory")
        assert second == (expected, 0, 1)


def test_out_of_memory_inside_the_model_is_raised_and_the_call_not_begun_again(saved):
    _, folder = saved(toy_model("llama"))
    found = on_ranks(scenarios.out_of_memory_inside_the_model, 2, folder)
    assert found == [(("OutOfMemoryError", "this rank is full"), 1)] * 2


def test_attached_ranks_agree_on_the_least_of_their_bounds(saved):
    model, folder = saved(toy_model("llama"))
    found = on_ranks(scenarios.bounds_that_differ, 2, folder)
    assert found[0] == found[1]
    tokens, max_bytes, reason = found[0]
    assert (tokens, max_bytes) == (scenarios.generate(model, "greedy", use_cache=False), 1)
    assert "1 of max_bytes are left" in reason


def test_a_prefix_is_reused_by_all_ranks_or_by_none(saved):
    model, folder = saved(toy_model("llama"))
    expected = scenarios.generate(model, "greedy", use_cache=False)
    assert on_ranks(scenarios.weights_that_differ, 2, folder) == [([expected] * 3, 0)] * 2


def test_a_refused_call_is_refused_by_all_ranks_and_leaves_the_model_usable(saved):
    model, folder = saved(toy_model("llama"))
    found = on_ranks(scenarios.errors_of_a_call, 2, folder)
    assert found[0] == found[1]
    errors, tokens = found[0]
    assert {kind for kind, _ in errors.values()} == {"ValueError"}
    assert "split over processes" in errors["exact"][1]
    assert tokens == scenarios.generate(model, "greedy", use_cache=False)


# --- a world of one: the same modules and sums, through gloo here and through NCCL on a GPU

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    ("name", "device"),
    [("llama", "cpu"), *(pytest.param(name, "cuda", marks=ON_GPU) for name in FAMILIES)],
)
def test_a_world_of_one(name, device, tmp_path):
    backend = "gloo" if device == "cpu" else "nccl"
    ((are_equal, reasons, reused),) = run_ranks(
        scenarios.world_of_one, 1, tmp_path, name, device, backend=backend
    )
    assert are_equal == [True] * 4
    assert reasons[0].startswith(SPLIT)
    assert reasons[1].startswith("there are no graphs on cpu" if device == "cpu" else SPLIT)
    assert reused == PROMPT.shape[1] - 1


@pytest.mark.slow
def test_the_page_runs_under_torchrun(tmp_path):
    page = ROOT / "docs" / "several-gpus.md"
    script = tmp_path / "generate.py"
    code = "\n".join(code_blocks(page)).replace(HUB_ID, MINIATURE)
    script.write_text(re.sub(r"max_new_tokens=\d+", "max_new_tokens=8", code))
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        script,
    ]
    result = subprocess.run(launch, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
