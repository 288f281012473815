"""The benchmarks:

their arithmetic, a tiny run of each script, and what is generated from the committed records.
"""

import ast
import importlib
import json
import math
import multiprocessing
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise, product
from pathlib import Path
from threading import Lock
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, Qwen3MoeConfig

from hf_static_kv.testing import FAMILIES, PARTS, random_model, tiny_config

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
BENCHMARKS = ROOT / "benchmarks"
# That of `make sanitize` has no times.
RECORDS = sorted(
    path for path in (BENCHMARKS / "results").glob("*.json") if path.stem != "sanitizer"
)
SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob("bench_*.py"))
PROVENANCE = {"hardware", "threads", "torch", "transformers", "commit", "command"}


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


class InThisProcess:
    """Stands in for `FreshProcess`: importing torch in a new process takes seconds.

    One after the other: two threads in `from_pretrained` leave transformers with weights untied for
    good.
    """

    LOADING = Lock()

    def __init__(self, cls, *args):
        with self.LOADING:
            self.served = cls(*args)

    def call(self, method, *args):
        return getattr(self.served, method)(*args)

    def close(self):
        pass


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a script's `main` with these arguments in this process."""
    import bench_generation
    import measure

    monkeypatch.setitem(measure.BANDWIDTH_BYTES, "cpu", 1 << 16)

    def run_main(script, *args):
        module = importlib.import_module(script)
        for owner in (module, bench_generation, measure):
            if hasattr(owner, "FreshProcess"):
                monkeypatch.setattr(owner, "FreshProcess", InThisProcess)
        monkeypatch.setattr(sys, "argv", [f"benchmarks/{script}.py", *map(str, args)])
        try:
            status = module.main()
        except SystemExit as leaving:  # argparse
            status = leaving.code
        printed = capsys.readouterr()
        return SimpleNamespace(returncode=status, stdout=printed.out, stderr=printed.err)

    return run_main


class TestArithmetic:
    def test_percentiles_and_spread(self):
        from measure import latency, percentile, spread

        assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
        hundred_and_one = [float(i) for i in range(101)]
        assert latency(hundred_and_one) == {
            "mean": 50,
            "p50": 50,
            "p95": 95,
            "p99": 99,
            "min": 0,
            "max": 100,
        }
        assert spread([5.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 5.0}

    def test_the_clock_counts_from_token_to_token(self):
        from measure import Clock

        clock = Clock("cpu", batch_size=2)
        clock.times = [10.0, 10.5, 10.75]
        assert clock.step_ms == [500.0, 250.0]
        assert clock(torch.ones(2, 3), None).tolist() == [False, False]
        assert len(clock.times) == 4

    def test_a_step_is_timed_without_the_first_token(self, monkeypatch):
        from measure import TimedGenerate
        from workload import Workload

        timed = TimedGenerate(None, "graph", Workload("llama", "cpu", "float32", 8, 5, 1, 13))
        monkeypatch.setattr(timed, "seconds", {1: 0.5, 5: 0.9}.__getitem__)
        assert timed.step_ms() == pytest.approx(100.0)

    def test_a_tied_embedding_is_read_and_an_untied_one_is_not(self):
        from measure import weights_read

        # Per layer: q and o 8 x 8, k and v 8 x 4, gate, up and down 8 x 16, two norms of 8; one
        # more norm at the end.
        layer = 2 * 64 + 2 * 32 + 3 * 128 + 2 * 8
        sizes = {
            "vocab_size": 10,
            "hidden_size": 8,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
        }
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
        for tied in (True, False):
            model = random_model(LlamaConfig(**sizes, tie_word_embeddings=tied))
            assert weights_read(model) == 4 * (2 * layer + 8 + 80)

    def test_a_window_limits_what_a_step_reads(self):
        from measure import bytes_per_step, cache_read, weights_read

        # Six layers, the last one full, the others with a window of 8; one KV head of 16, keys and
        # values, 4 bytes.
        model = random_model(tiny_config("gemma3"))
        position = 2 * 16 * 4
        assert cache_read(model, seq_len=20, batch_size=1) == position * (5 * 8 + 20)
        assert cache_read(model, seq_len=5, batch_size=3) == 3 * position * 6 * 5
        # A prompt of 18 and 3 new tokens: the two steps after the first token read sequences of 19
        # and 20.
        mean = position * (5 * 8 + 19.5)
        assert (
            bytes_per_step(model, prompt_len=18, new_tokens=3, batch_size=1)
            == weights_read(model) + mean
        )
        model.config.num_local_experts = 4
        assert bytes_per_step(model, prompt_len=18, new_tokens=3, batch_size=1) is None

    def test_the_summary_of_one_contender(self):
        from bench_generation import summarize

        row = {
            "new_tokens": 11,
            "cold_start_s": 8.0,
            "trials_s": [[0.5, 2.5], [0.25, 1.25], [1.0, 5.0]],
            "step_ms": [100.0, 300.0],
            "bytes_per_step": 4e9,
        }
        assert summarize(row, prompt_len=100, batch_size=2, bandwidth=80e9) == {
            "first_token_ms": {"median": 500.0, "min": 250.0, "max": 1000.0},
            "prompt_tokens_per_s": 400.0,
            "decode_ms": {"median": 200.0, "min": 100.0, "max": 400.0},
            "decode_tokens_per_s": {"median": 10.0, "min": 5.0, "max": 20.0},
            "latency_ms": {
                "mean": 200.0,
                "p50": 200.0,
                "p95": 290.0,
                "p99": 298.0,
                "min": 100.0,
                "max": 300.0,
            },
            "cold_start_s": 8.0,
            "cold_share": 1 - 2.5 / 8,
            "gb_per_s": 20.0,
            "bandwidth_share": 0.25,
        }

    def test_speed_up_on_paper_and_from_pass_times(self):
        from bench_speedup import predicted, theoretical

        assert [theoretical(n) for n in (1, 10, 200)] == [1.0, 5.5, 100.5]
        assert predicted(4, {1: 10.0, 3: 30.0, 4: 70.0}) == (10 + 20 + 30 + 70) / (4 * 10)

    def test_bytes_held_counts_the_capacity(self):
        from contenders import CONTENDERS, bytes_held

        model, held = random_model(tiny_config("llama")), {}
        for name in ("dynamic", "static", "contiguous"):
            keywords = CONTENDERS[name].set_up(model, 32, 1)()
            model.generate(
                torch.ones(1, 5, dtype=torch.long),
                **keywords,
                max_new_tokens=4,
                do_sample=False,
                eos_token_id=999,
            )
            held[name] = bytes_held(keywords["past_key_values"])
        position = 3 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head_dim, bytes
        assert held == {
            "dynamic": 8 * position,
            "static": 32 * position,
            "contiguous": 32 * position,
        }
        assert bytes_held(None) == 0

    def test_left_padding_of_different_lengths(self):
        from workload import Workload

        workload = Workload("llama", "cpu", "float32", 16, 4, 4, 20, padded=True)
        mask = workload.prompt()["attention_mask"]
        assert mask.sum(1).tolist() == [16, 14, 12, 10]
        assert (mask.diff(dim=1) >= 0).all()
        assert workload.mean_prompt_len == 13


def generation_record(**decode_ms):
    """A record of contenders with these medians; the spread is one millisecond to each side."""
    rows = []
    for name, ms in decode_ms.items():
        figures = {"median": ms, "min": ms - 1, "max": ms + 1}
        summary = {"decode_ms": figures, "first_token_ms": figures, "cold_start_s": 1.0}
        rows.append({"name": name.replace("_", "-"), "new_tokens": 8, "summary": summary})
    workload = {"model": "llama-3.2-1b", "dtype": "bfloat16", "batch_size": 1, "prompt_len": 4}
    where = {"hardware": "a GPU", "torch": "2", "transformers": "5", "commit": "abc"}
    command = "python benchmarks/bench_generation.py"
    return {**where, "command": command, "workload": workload, "trials": 3, "contenders": rows}


class TestLosses:
    def test_who_decodes_faster_is_named(self):
        from losses import behind

        (line,) = behind(generation_record(contiguous=10.0, static_compiled=2.5, dynamic=12.0))
        assert (
            line
            == "Llama-3.2-1B: `StaticCache` compiled decodes 4.00 times as fast as `StaticContiguousCache`."
        )
        (line,) = behind(generation_record(contiguous=10.0, dynamic=9.5))
        assert line.endswith("(within the spread).")

    def test_nothing_is_said_where_ours_is_ahead_or_absent(self):
        from losses import behind

        assert behind(generation_record(contiguous=10.0, static_compiled=2.5, graph=2.0)) == []
        assert behind(generation_record(static=1.0, dynamic=2.0)) == []

    def test_points_of_a_sweep(self):
        from losses import context_behind

        def row(name, context, ms):
            figures = {"median_ms": ms, "p10_ms": ms - 1, "p90_ms": ms + 1}
            return {"contender": name, "context": context, "max_cache_len": 4096, **figures}

        rows = [
            row("contiguous", 1024, 9.0),
            row("dynamic", 1024, 3.0),
            row("contiguous", 2048, 5.0),
        ]
        rows += [row("dynamic", 2048, 4.5), row("contiguous", 4096, 6.0), row("dynamic", 4096, 8.0)]
        record = {"model": "m", "hardware": "a GPU", "command": "", "context": rows, "capacity": []}
        (line,) = context_behind(record)
        assert (
            "1,024 of 4,096 tokens: `DynamicCache` 3.00 ms, `StaticContiguousCache` 9.00 ms;"
            in line
        )
        assert (
            "2,048 of 4,096 tokens: `DynamicCache` 4.50 ms, `StaticContiguousCache` 5.00 ms (within"
            in line
        )
        assert "4,096 of 4,096" not in line


def attach_record(**changes):
    """A record of `bench_attach.py` in which `attach` takes 1 % and 0.5 ms more, and a reused
    prefix costs nothing.
    """
    from bench_attach import compare, summarize

    seconds = {
        "graph": (0.020, 0.275),
        "decoder": (0.020, 0.275),
        "attach": (0.0205, 0.27805),
        "dynamic": (0.02, 0.33),
    }
    rows = [
        {
            "name": name,
            "new_tokens": 32 if name == "dynamic" else 256,
            "trials_s": [both] * 2,
            "fallback_reason": None,
        }
        for name, both in seconds.items()
    ]
    for row in rows:
        row["summary"] = summarize(row)
    chat = [
        {
            "contender": name,
            "history": history,
            "first_token_ms": {"median": ms, "min": ms - 1, "max": ms + 1},
        }
        | {
            "fallback_reason": None,
            "reused_tokens": [history] * 5 if name == "attach-reuse" else [0] * 5,
        }
        for history in (2048, 4096, 8192, 16384)
        for name, ms in (
            ("dynamic", history / 100),
            ("attach", history / 100),
            ("attach-reuse", 15.0),
        )
    ]
    figures = {"contenders": rows, "overhead": compare(rows, "attach", "graph"), "chat": chat}
    shared = {key: value for key, value in generation_record().items() if key != "contenders"}
    shared["command"] = "python benchmarks/bench_attach.py --model llama-3.2-1b"
    return {**shared, "threads": 16, "turns": 6, "turn_tokens": 64, **figures, **changes}


class TestAttach:
    def test_a_twin_shares_the_weights_and_nothing_else(self):
        from bench_attach import attached_twin

        from hf_static_kv import attachment

        model = random_model(tiny_config("llama"))
        side = attached_twin("attach", model, reuse_prefix=True)
        assert all(
            one is other
            for one, other in zip(side.model.parameters(), model.parameters(), strict=True)
        )
        assert side.model.config is not model.config
        assert attachment(side.model) is side.attachment
        with pytest.raises(ValueError, match="not attached"):
            attachment(model)

    def test_none_follows_another_more_often(self):
        from bench_attach import in_turns, parser

        orders = [in_turns(["graph", "decoder", "attach", "dynamic"], turn) for turn in range(24)]
        assert parser().parse_args([]).trials == len(orders)
        pairs = Counter(pair for order in orders for pair in pairwise(order))
        assert set(pairs.values()) == {6}
        assert len({tuple(in_turns(["a", "b", "c"], turn)) for turn in range(6)}) == 6

    def test_the_overhead_is_that_of_the_same_trial(self):
        from bench_attach import compare

        # A token takes 10 and 20 ms, then 11 and 20; the first one 500 and 900 ms, then 502 and
        # 900.
        rows = [{"name": "graph", "new_tokens": 11, "trials_s": [(0.5, 0.6), (0.9, 1.1)]}]
        rows.append({"name": "attach", "new_tokens": 11, "trials_s": [(0.502, 0.612), (0.9, 1.1)]})
        found = compare(rows, "attach", "graph")
        assert found["token_percent"] == pytest.approx({"median": 5.0, "min": 0.0, "max": 10.0})
        assert found["first_token_ms"] == pytest.approx({"median": 1.0, "min": 0.0, "max": 2.0})

    def test_the_sentences(self):
        import losses
        import record_figures

        record = attach_record()
        cost = "+1.00 % per token (+1.00 to +1.00) and +0.50 ms to the first token (+0.50 to +0.50)"
        assert record_figures.attach_cost(record) == cost
        (line,) = losses.cost_of_attach([record, record])
        assert line.endswith(f": {cost} on Llama-3.2-1B; {cost} on Llama-3.2-1B.")
        assert losses.cost_of_attach([]) == []
        growth = record_figures.chat_growth(record)
        assert "against 2,048: 8.00 times as long with plain `generate`" in growth
        assert "1.00 times as long with `attach(model, reuse_prefix=True)`." in growth
        assert record_figures.chat_growth(attach_record(chat=[])) == ""

    def test_what_did_not_run_as_its_name_says(self):
        from bench_attach import problems

        record = attach_record()
        assert problems(record) == []
        record["contenders"][2]["fallback_reason"] = "out of memory"
        record["chat"][2]["reused_tokens"][1] = 0
        expected = [
            "attach fell back: out of memory",
            "attach-reuse, history 2048: no tokens were reused",
        ]
        assert problems(record) == expected
        assert problems({**record, "host": record["hardware"]}) == expected[1:]

    def test_a_turn_computes_what_is_new(self, run, tmp_path):
        """Timed calls find the history and the answer; the last token of an answer is not in the
        cache.
        """
        path = tmp_path / "report.json"
        result = run(
            "bench_attach",
            "--model",
            "llama",
            "--device",
            "cpu",
            *TINY["bench_attach"],
            "--json",
            path,
        )
        assert result.returncode == 0, result.stderr
        record = json.loads(path.read_text())
        assert [row["name"] for row in record["contenders"]] == ["contiguous", "attach", "dynamic"]
        for row in record["chat"]:
            assert row["prompt_tokens"] == [row["history"] + 5 * turn for turn in (1, 2)]
            computed = [
                n - reused
                for n, reused in zip(row["prompt_tokens"], row["reused_tokens"], strict=True)
            ]
            assert computed == (
                [4] * 2 if row["contender"] == "attach-reuse" else row["prompt_tokens"]
            )

    def test_the_pages_have_its_section_when_there_is_a_record(self):
        """As many lines as three models need."""
        import history
        from write_results import BLOCKS, load, results_page

        records = {**load(), "attach": []}
        assert "## `attach`" not in results_page(records, history.read())
        assert BLOCKS["attach"](records) == "Not measured yet."
        records["attach"] = [attach_record(commit=commit) for commit in ("a", "b", "c")]
        page = results_page(records, history.read())
        assert (
            "| `attach(model)`: per token; first token | 1.01 (1.01 to 1.01); 20.5 (20.5 to 20.5) |"
            in page
        )
        assert len(page.splitlines()) <= 200
        assert "| `attach(model)`: per token; first token | 1.01; 20.5 | 1.01; 20.5 |" in BLOCKS[
            "attach"
        ](records)


def tiny_family(name):
    """Another family at toy size: LayerNorm and Conv1D, or a mixture of experts."""
    sizes = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
    if name == "gpt2-xl":
        return GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=128, **sizes)
    sizes |= {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    experts = {
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }
    return Qwen3MoeConfig(head_dim=16, intermediate_size=32, **sizes, **experts)


def step_record(model="llama-3.2-1b", **changes):
    """A record of `bench_step.py` in which each rule but `gate` saves a tenth of the step."""
    rows = [
        {
            "words": "all rules",
            "without": [],
            "step_ms": [1.0],
            "replay_ms": [1.0, 0.9, 1.2],
            "kernels": 100.0,
        }
    ]
    rows += [
        rows[0] | {"words": f"without `{name}`", "without": [name], "replay_ms": [1.1]}
        for name in ("a", "b")
    ]
    rows += [{"words": "without `gate`", "without": ["gate"], "same_list": True}]
    rows = [row if "same_list" in row else row | {"tokens_per_s": 900.0} for row in rows]
    shared = {
        key: value
        for key, value in generation_record().items()
        if key not in ("contenders", "trials")
    }
    shared |= {"command": f"python benchmarks/bench_step.py --model {model}", "threads": 16}
    shared["workload"] = {**shared["workload"], "model": model}
    attention = [{"seq_len": 1024, "us": 5.0, "bytes": 1 << 20}]
    record = {**shared, "bandwidth_gb_per_s": 4000.0, "rules": ["a", "b", "gate"], "variants": rows}
    return {**record, "attention": attention, **changes}


class TestStep:
    def test_a_row_for_each_rule_and_the_same_list_is_said(self):
        import tables

        record, other = step_record(), step_record("gemma-3-1b")
        other["variants"][2] = {"words": "without `b`", "without": ["b"], "same_list": True}
        lines = tables.step([record, other]).splitlines()
        assert lines[0] == "| ms per step (kernels) | Llama-3.2-1B | gemma-3-1b |"
        assert lines[2:] == [
            "| all rules | 1.000 (100) | 1.000 (100) |",
            "| without `a` | 1.100 (100) | 1.100 (100) |",
            "| without `b` | 1.100 (100) | same list |",
            "| without `gate` | same list | same list |",
        ]
        lines = tables.step([record], spread=True).splitlines()
        assert "| all rules | 1.000 (0.900 to 1.200); 100; 900 |" in lines
        assert "| without `a` | 1.100 (1.100 to 1.100), +10.0 %; 100; 900 |" in lines

    def test_a_variant_that_fell_back(self):
        import tables
        from bench_step import fell_back

        record = step_record()
        assert fell_back(record) == []
        record["variants"][1] = {
            "words": "without `a`",
            "without": ["a"],
            "fallback_reason": "out of memory",
        }
        assert len(fell_back(record)) == 1
        assert "| without `a` | fell back |" in tables.step([record])

    def test_older_records_have_their_own_table(self):
        """Until the rules are measured on a GPU the page shows one change after the other."""
        import tables

        row = {
            "words": "captured",
            "tokens_per_s": 464.0,
            "step_ms": [2.1],
            "replay_ms": 2.1,
            "kernels": 679.2,
        }
        old = {key: value for key, value in step_record(variants=[row]).items() if key != "rules"}
        assert "| captured | 464 (679) |" in tables.step([old])
        assert tables.step_caption([old]) == tables.STEP_BY_CHANGE
        assert tables.step_caption([old, step_record()]) == tables.STEP_BY_RULE
        assert "captured" not in tables.step([old, step_record()])

    @pytest.mark.parametrize(
        ("name", "used", "unused"),
        [("gpt2-xl", "conv1d", "write_rotated"), ("qwen3-30b-a3b", "write_rotated", "conv1d")],
    )
    def test_the_rules_of_a_family(self, run, tmp_path, monkeypatch, name, used, unused):
        import bench_step
        import workload

        from hf_static_kv.program.rules import RULES

        for size, number in (("REPLAYS", 2), ("REPLAY_TRIALS", 1), ("TRIALS", 1)):
            monkeypatch.setattr(bench_step, size, number)
        monkeypatch.setattr(workload, "dev_config", tiny_family)
        path = tmp_path / "report.json"
        result = run(
            "bench_step", "--model", name, "--device", "cpu", *TINY["bench_step"], "--json", path
        )
        assert result.returncode == 0, result.stderr
        rows = json.loads(path.read_text())["variants"]
        assert [row["without"] for row in rows] == [[], *([rule] for rule in RULES), list(RULES)]
        same = [row["without"][0] for row in rows if row.get("same_list")]
        assert unused in same
        assert used not in same

    def test_what_switches_pdl_off_exists(self):
        """A name that is gone would leave PDL on, and two rows would be one."""
        pytest.importorskip("triton", reason="triton is not installed")
        from bench_step import REWRITE, SUPPORTS_PDL, variants

        for name in (REWRITE, SUPPORTS_PDL):
            home, _, attribute = name.rpartition(".")
            assert hasattr(importlib.import_module(home), attribute)
        assert [variant.words for variant in variants(on_gpu=True) if not variant.has_pdl] == [
            "without PDL"
        ]


def sampling_record(model="llama-3.2-1b", **changes):
    """A record of `bench_sampling.py` in which sampling takes a tenth more than greedy decoding."""
    from bench_sampling import CASES, CONTENDERS

    rows = []
    for contender in CONTENDERS:
        for case in CASES:
            ms = 1.0 if case == "greedy" else 1.1
            figures = {"trials_s": [[0.5, 0.8]], "ms": {"median": ms, "min": ms, "max": ms}}
            ran = {"fallback_reason": None, "on_device": True} if contender == "graph" else {}
            rows.append({"contender": contender, "case": case, "new_tokens": 4, **figures, **ran})
    shared = {key: value for key, value in generation_record().items() if key != "contenders"}
    shared |= {"command": f"python benchmarks/bench_sampling.py --model {model}", "threads": 16}
    shared["workload"] = {**shared["workload"], "model": model}
    return {**shared, "rows": rows, **changes}


def assert_the_step_selects(rows):
    """Each case is another step; the warm-up shows that the step itself selects."""
    from bench_sampling import CASES

    assert [(row["contender"], row["case"]) for row in rows] == list(
        product(["graph", "dynamic"], CASES)
    )
    assert all(
        row["on_device"] and row["fallback_reason"] is None
        for row in rows
        if row["contender"] == "graph"
    )


class TestSliding:
    def test_a_row_compares_full_with_compact_layers(self):
        from tables import sliding
        from write_results import BLOCKS, NOT_MEASURED, load

        ms = {"graph": 1.0, "graph-compact": 1.02}
        rows = [
            {
                "name": name,
                "cache_bytes": mib << 20,
                "summary": {"decode_ms": dict.fromkeys(("median", "min", "max"), t)},
            }
            for (name, t), mib in zip(ms.items(), (832, 153), strict=True)
        ]
        workload = {"model": "gemma-3-1b", "prompt_len": 512, "max_cache_len": 32768}
        record = {
            "workload": workload,
            "hardware": "NVIDIA H200",
            "command": "",
            "contenders": rows,
        }
        assert sliding([record]).endswith(
            "| gemma-3-1b | 512 | 32,768 | 832 → 153 | 1.00 → 1.02, 1.020x |"
        )
        assert BLOCKS["sliding"]({**load(), "sliding": []}) == NOT_MEASURED


class TestSampling:
    def test_what_did_not_run_as_its_name_says(self):
        from bench_sampling import problems

        record = sampling_record()
        assert problems(record) == []
        record["rows"][0]["fallback_reason"] = "out of memory"
        for row in record["rows"][
            2:6
        ]:  # of the same decoder, after the first step that does not select
            row["on_device"] = False
        assert problems(record) == [
            "greedy fell back: out of memory",
            "T, top-k 50: the host selected the tokens",
        ]

    def test_the_table(self):
        import tables

        rows = tables.sampling([sampling_record()]).splitlines()
        assert rows[0].startswith("| ms per token, over greedy | greedy | T | T, top-k 50 |")
        assert rows[2].startswith(
            "| Llama-3.2-1B, **`GraphDecoder()`** | 1.00 | 1.10, 1.10x | 1.10, 1.10x |"
        )
        assert len(rows) == 4

    def test_the_pages_have_room_for_all_records(self):
        """As many lines as three dev models, four families and all kinds of records need."""
        import history
        from write_results import BLOCKS, NOT_MEASURED, load, results_page

        records, models = load(), ["llama-3.2-1b", "qwen3-1.7b", "gemma-3-1b"]
        assert "## Sampling" not in results_page({**records, "sampling": []}, history.read())
        for kind in ("sampling", "families"):
            assert BLOCKS[kind]({**records, kind: []}) == NOT_MEASURED
        records["step"] = [rules_record(model) for model in models]
        records["sampling"] = [sampling_record(model) for model in models]
        records["families"] = [family_record(records, name) for name in FAMILIES]
        records["files"] = [files_record()] * 3
        page = results_page(records, history.read())
        assert len(page.splitlines()) <= 200
        assert "## Sampling" in page
        assert "Qwen3-30B-A3B" in page
        assert "GPT-2 XL" in BLOCKS["families"](records)


def rules_record(model):
    """A record with a row for each rule, none of them without effect."""
    from bench_step import variants

    row = step_record()["variants"][0]
    rows = [
        row | {"words": one.words, "without": list(one.without)} for one in variants(on_gpu=True)
    ]
    return step_record(model, variants=rows)


def family_record(records, name):
    record = records["generation"][0]
    return {
        **record,
        "workload": {**record["workload"], "model": name},
        "command": f"bench_generation.py --model {name}",
    }


class TestHistory:
    def test_a_new_run_is_added_once_and_the_old_one_stays(self, tmp_path):
        import history

        path, old, new = (
            tmp_path / "history.csv",
            generation_record(graph=4.0),
            generation_record(graph=5.0),
        )
        for record in (old, old, new):
            history.add([record], path)
        decode = [row for row in history.read(path) if row["case"].startswith("decode step")]
        assert [row["ms_median"] for row in decode] == ["4", "5"]
        assert history.missing(history.read(path), [old, new]) == []
        assert history.between_runs(history.read(path), "graph") == pytest.approx(0.2)

    def test_a_contender_that_is_gone_stays_in_history_alone(self):
        import history
        import record_figures

        record = generation_record(graph=1.0, turbo=3.0)
        assert list(record_figures.measured(record)) == ["graph"]
        assert {row["contender"] for row in history.rows(record)} == {"graph", "turbo"}


class TestFamilies:
    """Shapes of other families: measured under their names, apart from the dev models."""

    def test_a_family_by_name(self, run, tmp_path, monkeypatch):
        import workload

        monkeypatch.setattr(workload, "dev_config", tiny_family)
        path = tmp_path / "report.json"
        sizes = [
            "--contenders",
            "dynamic,contiguous",
            "--prompt-len",
            8,
            "--new-tokens",
            3,
            "--trials",
            1,
        ]
        result = run(
            "bench_generation",
            "--model",
            "qwen3-30b-a3b",
            "--device",
            "cpu",
            *sizes,
            "--json",
            path,
        )
        assert result.returncode == 0, result.stderr
        record = json.loads(path.read_text())
        assert record["random_weights"]
        assert [row["bytes_per_step"] for row in record["contenders"]] == [
            None,
            None,
        ]  # a mixture of experts

    def test_training_of_experts(self, run, tmp_path, monkeypatch):
        import bench_training
        import workload

        monkeypatch.setattr(workload, "dev_config", tiny_family)
        monkeypatch.setattr(bench_training, "TRIALS", 1)
        (name,), path = PARTS, tmp_path / "report.json"
        result = run(
            "bench_training",
            "--model",
            name,
            "--device",
            "cpu",
            *TINY["bench_training"],
            "--json",
            path,
        )
        assert result.returncode == 0, result.stderr
        assert "8 layers of Qwen3-30B-A3B with 16 experts, float32" in result.stdout
        record = json.loads(path.read_text())
        assert record["differences"]["exact"] == {"log-probability": 0, "ratio": 0}
        errors = {side: found["median"] for side, found in record["gradient_errors"].items()}
        assert errors["exact"] < 3 * errors["usual"] < 1e-4

    def test_their_records_are_no_dev_models(self, monkeypatch, tmp_path):
        """The headline is that of the dev models."""
        import write_results

        records = write_results.load()
        for i, record in enumerate([*records["generation"], family_record(records, "gpt2-xl")]):
            (tmp_path / f"generation-{i}.json").write_text(json.dumps(record))
        monkeypatch.setattr(write_results, "RESULTS", tmp_path)
        again = write_results.load()
        assert [record["workload"]["model"] for record in again["families"]] == ["gpt2-xl"]
        assert len(again["generation"]) == len(records["generation"])
        assert write_results.headline(again) == write_results.headline(records)


class TestBlocks:
    def test_blocks_are_filled_and_the_rest_stays(self, monkeypatch):
        import write_results

        blocks = {"rows": lambda records: "| a |\n|---|", "word": lambda records: "18 times"}
        monkeypatch.setattr(write_results, "BLOCKS", blocks)
        text = "x <!-- results:word -->old<!-- /results --> y\n<!-- results:rows -->\nold\n<!-- /results -->\n"
        filled = write_results.fill(text, {}, "page")
        expected = "x <!-- results:word -->18 times<!-- /results --> y\n"
        assert filled == expected + "<!-- results:rows -->\n| a |\n|---|\n<!-- /results -->\n"
        assert write_results.fill(filled, {}, "page") == filled

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (
                "<!-- results:nonsense --><!-- /results -->",
                "README.md: no block is named 'nonsense'. Choose from",
            ),
            ("<!-- results:speed -->", "without its <!-- /results -->"),
            (
                "<!-- results:speed -->\n<!-- results:speed --><!-- /results -->",
                "without its <!-- /results -->",
            ),
        ],
    )
    def test_a_block_that_cannot_be_filled_is_refused(self, text, message):
        from write_results import BadPage, fill, load

        with pytest.raises(BadPage, match=re.escape(message)):
            fill(text, load(), "README.md")


class TestRecords:
    """What is committed agrees with itself."""

    @pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
    def test_has_its_provenance(self, path):
        record = json.loads(path.read_text())
        assert record.keys() >= PROVENANCE
        assert record["commit"] != "unknown"
        assert record["command"].startswith("python benchmarks/bench_")
        assert f"--json benchmarks/results/{path.name}" in record["command"]

    @pytest.mark.parametrize(
        "path", [path for path in RECORDS if path.stem.startswith(("generation", "batch"))]
    )
    def test_summaries_are_those_of_the_raw_times(self, path):
        from bench_generation import summarize

        record = json.loads(path.read_text())
        w, ran = record["workload"], [row for row in record["contenders"] if "summary" in row]
        # The recorded bandwidth was divided by 1e9 after the summaries were made of it: try its
        # neighbours too.
        bandwidth = record["bandwidth_gb_per_s"] * 1e9
        near = (math.nextafter(bandwidth, 0), bandwidth, math.nextafter(bandwidth, math.inf))
        summaries = [
            [summarize(row, w["prompt_len"], w["batch_size"], number) for row in ran]
            for number in near
        ]
        assert [row["summary"] for row in ran] in summaries

    def test_the_generated_blocks_are_those_of_the_records(self):
        from write_results import fill, load, pages

        records = load()
        for page in pages():
            assert fill(page.read_text(), records, page.name) == page.read_text(), (
                f"{page.name}: run `make results`"
            )

    def test_the_results_page_is_that_of_the_records(self):
        import history
        from write_results import KINDS, RESULTS, load, pictures, results_page

        records, page = load(), (BENCHMARKS / "RESULTS.md").read_text()
        assert page == results_page(records, history.read()), "run `make results`"
        assert len(page.splitlines()) <= 200
        assert sum(len(records[kind]) for kind in KINDS) == len(RECORDS)
        assert sorted(pictures(records)) == sorted(RESULTS.glob("*.png"))

    def test_history_has_the_rows_of_every_record(self):
        import history

        assert (
            history.missing(history.read(), [json.loads(path.read_text()) for path in RECORDS])
            == []
        )


class TestFreshProcess:
    """With a module of the standard library in the process, and nothing imported beforehand."""

    @pytest.fixture(autouse=True)
    def _quick(self, monkeypatch):
        import processes

        monkeypatch.setattr(processes, "_PRELOADED", [])

    def test_answers_and_goes_on_after_a_failure_until_it_dies(self):
        from processes import Failed, FreshProcess

        process = FreshProcess(importlib.import_module, "os")
        assert process.call("getpid") == process.process.pid
        with pytest.raises(Failed, match=r"^FileNotFoundError: .*nowhere"):
            process.call("listdir", "nowhere")
        assert process.call("getpid") == process.process.pid
        with pytest.raises(Failed, match="ProcessDied: exit status 9"):
            process.call("_exit", 9)
        process.close()
        process.close()
        assert not process.process.is_alive()

    def test_a_failure_at_once_leaves_no_process_behind(self):
        from processes import Failed, FreshProcess

        with pytest.raises(Failed, match=r"^ModuleNotFoundError: "):
            FreshProcess(importlib.import_module, "no_such_module")
        assert multiprocessing.active_children() == []


TINY = {
    "bench_attach": [
        *("--prompt-len", 8, "--new-tokens", 4, "--plain-tokens", 3, "--trials", 2),
        *("--histories", 9, 16, "--turn-tokens", 3, "--answer-tokens", 2, "--turns", 2),
    ],
    "bench_context": [
        "--contexts",
        12,
        24,
        "--capacities",
        16,
        32,
        "--steps",
        4,
        "--sequence",
        10,
        "--rounds",
        1,
    ],
    "bench_exact": ["--prompt-len", 53, "--new-tokens", 3, "--prefills", 8],
    "bench_generation": [
        "--compare",
        "--prompt-len",
        8,
        "--new-tokens",
        5,
        "--uncached-tokens",
        4,
        "--trials",
        2,
    ],
    "bench_files": ["--tokens", 20, "--question-tokens", 3, "--trials", 2],
    "bench_sampling": ["--prompt-len", 8, "--new-tokens", 4, "--plain-tokens", 3, "--trials", 2],
    "bench_step": ["--prompt-len", 8, "--new-tokens", 8],
    "bench_speedup": ["--tokens", 3, 6, "--trials", 2],
    "bench_training": ["--batch-size", 2, "--prompt-len", 8, "--new-tokens", 3, "--train-len", 9],
    "bench_update": ["--lengths", 8, 16, "--capacities", 80, "--repeats", 5],
}


def files_record(**changes):
    """A record of `bench_files.py`:

    1 GB, saved at 4 of 5 GB/s, loaded at 10 of 5, the first token 3 times sooner.
    """
    from bench_files import factors
    from measure import spread

    seconds = {
        ("save", "plain"): 0.2,
        ("save", "flushed"): 0.25,
        ("save", "ours"): 0.25,
        ("load", "plain"): 0.2,
    }
    seconds |= {("load", "ours"): 0.1, ("first token", "ids"): 0.45, ("first token", "file"): 0.15}
    seconds |= {("next token", "ids"): 0.4, ("next token", "file"): 0.1}
    rows = [
        {"case": case, "contender": name, "trials_s": [own] * 3, "ms": spread([own * 1e3] * 3)}
        for (case, name), own in seconds.items()
    ]
    workload = {"model": "llama-3.2-1b", "dtype": "bfloat16", "batch_size": 1, "prompt_len": 32768}
    shared = {
        "hardware": "NVIDIA H200",
        "host": "x",
        "threads": 8,
        "torch": "2.11",
        "transformers": "5.17",
    }
    shared |= {
        "commit": "a",
        "command": "python benchmarks/bench_files.py --model llama-3.2-1b",
        "workload": workload,
    }
    figures = {
        "trials": 3,
        "question_tokens": 16,
        "file_bytes": 10**9,
        "is_what_was_saved": True,
        "rows": rows,
    }
    return {**shared, **figures, "factors": factors(rows), **changes}


class TestFiles:
    def test_rates_shares_and_factors(self):
        import losses
        import tables

        record = files_record()
        page = tables.files([record])
        assert "| tokens of the file + the question; MB | 32,768 + 16; 1,000 |" in page
        assert "| save, GB/s: safetensors → then fsync → `save` | 5.00 → 4.00 → 4.00 |" in page
        assert "| load, GB/s: safetensors → `load` | 5.00 → 10.0 |" in page
        assert (
            "| first token, ms: from the ids → from the file | 450 → 150, 3.00 times sooner |"
            in page
        )
        next_token = "| the same after one new token, ms: from the ids → from the file"
        assert f"{next_token} | 400 → 100, 4.00 times sooner |" in page
        del record["factors"]["next_token"]  # a record from before it was measured
        assert f"{next_token} | - |" in tables.files([record])
        (line,) = losses.files_behind([record])
        assert (
            line
            == "A cache file, in shares of the rate of safetensors alone: saving 80% on Llama-3.2-1B."
        )
        assert losses.files_behind([]) == []

    def test_a_cache_that_comes_back_changed_is_an_error(self):
        from bench_files import problems

        assert problems(files_record()) == []
        assert problems(files_record(is_what_was_saved=False)) == [
            "the loaded cache is not what was saved"
        ]

    def test_the_page_has_a_section_when_there_is_a_record(self):
        import history
        from write_results import BLOCKS, load, results_page

        records = {**load(), "files": []}
        assert "## Files" not in results_page(records, history.read())
        assert BLOCKS["files"](records) == "Not measured yet."
        records["files"] = [files_record()]
        assert "→ 150 (150 to 150), 3.00 (3.00 to 3.00) times sooner |" in results_page(
            records, history.read()
        )


class TestScripts:
    @pytest.mark.parametrize("script", TINY)
    def test_a_tiny_run(self, run, tmp_path, monkeypatch, script):
        import bench_exact
        import bench_step
        import bench_training
        import history

        monkeypatch.setattr(bench_exact, "TRIALS", 1)
        monkeypatch.setattr(bench_training, "TRIALS", 1)
        monkeypatch.setattr(bench_exact, "ROWS", 2)
        for name, size in (("REPLAYS", 2), ("REPLAY_TRIALS", 1), ("TRIALS", 1)):
            monkeypatch.setattr(bench_step, name, size)
        model = [] if script == "bench_update" else ["--model", "llama", "--device", "cpu"]
        files = {name: tmp_path / f"report.{name}" for name in ("json", "csv", "markdown")}
        without_plot = ("attach", "exact", "files", "sampling", "step", "training")
        has_no_plot = script.removeprefix("bench_") in without_plot
        plot = [] if has_no_plot else ["--plot", tmp_path / "report.png"]
        outputs = [part for name, path in files.items() for part in (f"--{name}", path)]
        result = run(script, *model, *TINY[script], *outputs, *plot)
        assert result.returncode == 0, result.stderr
        record = json.loads(files["json"].read_text())
        assert record.keys() >= PROVENANCE
        assert files["markdown"].read_text().strip() in result.stdout
        assert history.read(files["csv"]) == history.rows(record)
        figures = [float(row["ms_median"]) for row in history.rows(record) if row["ms_median"]]
        assert figures
        assert min(figures) > 0
        if plot:
            assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
        if script == "bench_training":
            rows = [line for line in result.stdout.splitlines() if line.startswith("|")]
            assert len({row.count("|") for row in rows}) == 1
            assert record["differences"]["exact"] == {"log-probability": 0, "ratio": 0}
        if script == "bench_sampling":
            assert_the_step_selects(record["rows"])

    @pytest.mark.parametrize("script", SCRIPTS)
    def test_help(self, run, script):
        result = run(script, "--help")
        assert result.returncode == 0
        assert f"python benchmarks/{script}.py" in result.stdout

    @pytest.mark.parametrize(
        ("script", "arguments", "message"),
        [
            (
                "bench_generation",
                ["--model", "lama"],
                "'lama' is no folder, no hub id (owner/name) and no short name",
            ),
            (
                "bench_generation",
                ["--device", "banana"],
                "--device banana is no device: use cpu, cuda or cuda:0",
            ),
            ("bench_generation", ["--device", "cuda:64"], "--device cuda:64: this machine has"),
            (
                "bench_generation",
                ["--json", "nowhere/x.json"],
                "--json nowhere/x.json: there is no folder nowhere",
            ),
            (
                "bench_generation",
                ["--plot", "x.foo"],
                "--plot x.foo: a picture is .png, .svg or .pdf",
            ),
            ("bench_generation", ["--batch-size", 0], "--batch-size must be at least 1, got 0"),
            (
                "bench_generation",
                ["--contenders", "dynamic,turbo"],
                "unknown turbo: choose from no-cache, dynamic",
            ),
            ("bench_generation", ["--new-tokens", 2], "--new-tokens must be at least 3, got 2"),
            (
                "bench_generation",
                ["--max-cache-len", 10],
                "--max-cache-len 10 is less than 256 + 128 tokens",
            ),
            (
                "bench_generation",
                ["--device", "cpu", "--contenders", "graph"],
                "nothing can run on cpu (graph: a CUDA",
            ),
            (
                "bench_context",
                ["--contexts", 64, "--capacities", 60],
                "--capacities 60 is less than the sequence of 64",
            ),
            ("bench_attach", ["--turns", 0], "--turns must be at least 1, got 0"),
            ("bench_attach", ["--histories", 500], "more than the 512 of llama's context"),
            ("bench_attach", ["--histories", 0, 64], "--histories 0 is no chat: pass it alone"),
            ("bench_files", ["--tokens", 500], "516 tokens: more than the 512 of llama's context"),
            ("bench_files", ["--folder", "nowhere"], "--folder nowhere: there is no such folder"),
            (
                "bench_speedup",
                ["--tokens", 512],
                "513 tokens: more than the 512 of llama's context",
            ),
            (
                "bench_exact",
                ["--batch-size", 4],
                "--batch-size 4: the comparisons have batches of their own",
            ),
            ("bench_training", ["--prompt-len", 7], "--prompt-len must be at least 8, got 7"),
            ("bench_step", ["--new-tokens", 49], "--new-tokens must be at least 50, got 49"),
            ("bench_sampling", ["--plain-tokens", 2], "--plain-tokens must be at least 3, got 2"),
            ("bench_update", ["--capacities", 64], "--capacities must be at least 194, got 64"),
        ],
    )
    def test_a_bad_argument_gets_one_line_and_exit_status_2(self, run, script, arguments, message):
        model = [] if script == "bench_update" or "--model" in arguments else ["--model", "llama"]
        result = run(script, *model, *arguments)
        assert result.returncode == 2
        assert message in result.stderr.splitlines()[-1]
        assert "Traceback" not in result.stderr

    def test_a_contender_that_fails_is_reported_and_the_others_run(self, run, monkeypatch):
        import bench_generation
        from processes import Failed

        trial = bench_generation.Runner.trial

        def failing_trial(runner):
            if runner.generate.contender == "static":
                raise Failed("OutOfMemoryError", "no memory")
            return trial(runner)

        monkeypatch.setattr(bench_generation.Runner, "trial", failing_trial)
        sizes = [
            "--contenders",
            "static,contiguous",
            "--prompt-len",
            8,
            "--new-tokens",
            3,
            "--trials",
            1,
        ]
        result = run("bench_generation", "--model", "llama", "--device", "cpu", *sizes)
        assert result.returncode == 1
        assert "- static FAILED: OutOfMemoryError: no memory" in result.stdout
        assert "| `StaticContiguousCache` |" in result.stdout

    def test_full_against_compact_layers(self, run):
        sizes = ["--contexts", 12, 160, "--capacities", 160, "--steps", 4, "--rounds", 1]
        result = run("bench_context", "--model", "gemma3", "--device", "cpu", "--sliding", *sizes)
        assert result.returncode == 0
        assert (
            '| `StaticContiguousCache` | `StaticContiguousCache`, `sliding="compact"` |'
            in result.stdout
        )
        assert "Cache: contiguous 0." in result.stdout

    def test_the_scripts_import_no_extras_but_tqdm(self):
        """Pictures import matplotlib when they are drawn; `datasets` and `evaluate` are not on
        every machine.
        """
        own = {path.stem for path in BENCHMARKS.glob("*.py")} | {
            "torch",
            "transformers",
            "hf_static_kv",
            "tqdm",
        }
        own.add("safetensors")  # which transformers brings
        for path in BENCHMARKS.glob("*.py"):
            nodes = ast.parse(path.read_text()).body
            names = [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
            names += [
                alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
            ]
            roots = {name.split(".")[0] for name in names}
            assert roots <= own | sys.stdlib_module_names, path.name

    @pytest.mark.slow
    def test_contenders_run_in_processes_of_their_own(self, tmp_path):
        record = tmp_path / "report.json"
        command = [
            sys.executable,
            "benchmarks/bench_generation.py",
            "--model",
            "llama",
            "--device",
            "cpu",
            "--json",
        ]
        command += [str(record), *map(str, TINY["bench_generation"])]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        rows = json.loads(record.read_text())["contenders"]
        ran = [row["name"] for row in rows if "summary" in row]
        assert ran == ["no-cache", "dynamic", "static", "contiguous"]
