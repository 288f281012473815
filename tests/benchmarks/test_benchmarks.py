"""The benchmarks: their arithmetic, a tiny run of each script, and what the pages take from records."""

import ast
import importlib
import json
import math
import multiprocessing
import re
import subprocess
import sys
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, Qwen3MoeConfig

from hf_static_kv.testing import PARTS, random_model, tiny_config

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# That of `make sanitize` has no times.
RECORDS = sorted(path for path in RESULTS.glob("*.json") if path.stem != "sanitizer")
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
    """Runs a script's `main` with these arguments in this process, with few trials."""
    import bench_exact
    import bench_quantised
    import bench_serve
    import bench_step
    import bench_training
    import contest
    import measure

    monkeypatch.setitem(measure.BANDWIDTH_BYTES, "cpu", 1 << 16)
    for module in (contest, bench_serve):
        monkeypatch.setattr(module, "FreshProcess", InThisProcess)
    for module in (bench_exact, bench_training, bench_step, bench_quantised):
        monkeypatch.setattr(module, "TRIALS", 1)
    monkeypatch.setattr(bench_exact, "ROWS", 2)
    monkeypatch.setattr(bench_step, "REPLAY_TRIALS", 1)
    monkeypatch.setattr(bench_step, "REPLAYS", 2)

    def run_main(script, *args):
        module = importlib.import_module(script)
        monkeypatch.setattr(sys, "argv", [f"benchmarks/{script}.py", *map(str, args)])
        try:
            status = module.main()
        except SystemExit as leaving:  # argparse
            status = leaving.code
        printed = capsys.readouterr()
        return SimpleNamespace(returncode=status, stdout=printed.out, stderr=printed.err)

    return run_main


@pytest.fixture
def record_of(run, tmp_path):
    """The record of a run on a CPU that had no problems."""

    def run_and_read(script, *args, model="llama"):
        path = tmp_path / "record.json"
        result = run(script, "--model", model, "--device", "cpu", *args, "--json", path)
        assert result.returncode == 0, result.stderr + result.stdout
        return json.loads(path.read_text())

    return run_and_read


class TestArithmetic:
    def test_the_clock_counts_from_token_to_token(self):
        from measure import Clock

        clock = Clock("cpu", batch_size=2)
        clock.times = [10.0, 10.5, 10.75]
        assert clock.step_ms == [500.0, 250.0]
        assert clock(torch.ones(2, 3), None).tolist() == [False, False]
        assert len(clock.times) == 4

    def test_each_turn_has_all_contenders_in_another_order(self):
        from measure import shuffled

        orders = [shuffled("abcd", turn) for turn in range(24)]
        assert all(sorted(order) == list("abcd") for order in orders)
        assert {order[0] for order in orders} == set("abcd")

    @pytest.mark.parametrize("tied", [True, False])
    def test_a_tied_embedding_is_read_and_an_untied_one_is_not(self, tied):
        from measure import weights_read

        # Per layer: q and o 8 x 8, k and v 8 x 4, gate, up and down 8 x 16, two norms of 8; one
        # more norm at the end.
        layer = 2 * 64 + 2 * 32 + 3 * 128 + 2 * 8
        sizes = {"vocab_size": 10, "hidden_size": 8, "intermediate_size": 16}
        sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
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
        # The two steps after the first of 3 new tokens read sequences of 19 and 20.
        mean = weights_read(model) + position * (5 * 8 + 19.5)
        assert bytes_per_step(model, prompt_len=18, new_tokens=3, batch_size=1) == mean
        model.config.num_local_experts = 4
        assert bytes_per_step(model, prompt_len=18, new_tokens=3, batch_size=1) is None

    def test_left_padding_of_different_lengths(self):
        from workload import Workload

        workload = Workload("llama", "cpu", "float32", 16, 4, 4, 20, padded=True)
        mask = workload.prompt()["attention_mask"]
        assert mask.sum(1).tolist() == [16, 14, 12, 10]
        assert (mask.diff(dim=1) >= 0).all()
        assert workload.mean_prompt_len == 13

    def test_phases_are_between_the_marks_and_add_up_to_the_step(self):
        """Two blocks, two layers of ten phases of one cycle, then a wait and a head of ten."""
        from bench_one_kernel import LAST_PHASES, PHASES, phases

        marks = torch.zeros(2, 3, 16, dtype=torch.int64)
        for layer in range(2):
            marks[:, layer, :11] = 10 * layer + torch.arange(11)
        marks[:, 2, :3] = torch.tensor([20, 30, 40])
        marks[1] += 1000  # each multiprocessor has a clock of its own
        found = {row["phase"]: row["us"] for row in phases(marks, step_us=80)}
        assert found == dict.fromkeys(PHASES, 4) | dict.fromkeys(LAST_PHASES, 20)
        assert sum(found.values()) == 80

    def test_the_logits_of_steps_are_those_of_a_pass(self):
        from bench_one_kernel import logits_of, steps_of
        from measure import TimedGenerate
        from workload import Workload

        workload = Workload("llama", "cpu", "float32", 8, 4, 1, 12)
        model = workload.build_model()
        side = TimedGenerate(model, "graph", workload)
        side.seconds(4)
        text = workload.prompt(10)["input_ids"]
        got = logits_of(steps_of(side)[0], text)
        expected = model(text, use_cache=False).logits[0]
        torch.testing.assert_close(got, expected)
        assert torch.equal(got, logits_of(steps_of(side)[0], text))

    def test_a_twin_shares_the_weights_and_nothing_else(self):
        from bench_first_token import attached_twin

        from hf_static_kv import attachment

        model = random_model(tiny_config("llama"))
        side = attached_twin("attach", model, reuse_prefix=True)
        weights = zip(side.model.parameters(), model.parameters(), strict=True)
        assert all(one is other for one, other in weights)
        assert side.model.config is not model.config
        assert attachment(side.model) is side.attachment
        with pytest.raises(ValueError, match="not attached"):
            attachment(model)


class TestBlocks:
    def test_blocks_are_filled_and_the_rest_stays(self):
        from write_results import fill

        text = "x <!-- results:word -->{}<!-- /results --> y\n<!-- results:rows -->\n{}\n<!-- /results -->"
        new = ("18 times", "| a |\n|---|")
        figures = dict(zip(("word", "rows"), new, strict=True))
        assert fill(text.format("old", "old"), figures, "page") == text.format(*new)
        assert fill(text.format(*new), figures, "page") == text.format(*new)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("<!-- results:b --><!-- /results -->", "README.md: no block is named 'b'"),
            ("<!-- results:a -->", "README.md: a <!-- results:NAME --> without"),
            ("<!-- results:a -->\n<!-- results:a --><!-- /results -->", "README.md: a <!--"),
        ],
    )
    def test_a_block_that_cannot_be_filled_is_refused(self, text, message):
        from write_results import BadPage, fill

        with pytest.raises(BadPage, match=f"^{message}"):
            fill(text, {"a": ""}, "README.md")


@pytest.fixture(scope="module")
def figures():
    sys.path.insert(0, str(BENCHMARKS))
    from write_results import blocks, load

    sys.path.remove(str(BENCHMARKS))
    return blocks(load())


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
        sizes = [record["workload"][key] for key in ("prompt_len", "batch_size")]
        ran = [row for row in record["contenders"] if "summary" in row]
        # The recorded bandwidth was divided by 1e9 after the summaries were made of it: try its
        # neighbours too.
        bandwidth = record["bandwidth_gb_per_s"] * 1e9
        near = (math.nextafter(bandwidth, 0), bandwidth, math.nextafter(bandwidth, math.inf))
        summaries = [[summarize(row, *sizes, number) for row in ran] for number in near]
        assert [row["summary"] for row in ran] in summaries

    @pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
    def test_the_generated_blocks_are_those_of_the_records(self, page, figures):
        from write_results import fill

        assert fill(page.read_text(), figures, page.name) == page.read_text(), "run `make results`"

    def test_every_block_and_record_is_used(self, figures):
        from write_results import BLOCK, load

        used = {name for page in PAGES for _, name, _, _ in BLOCK.findall(page.read_text())}
        assert used == figures.keys()
        assert sum(map(len, load().values())) == len(RECORDS)

    def test_the_page_is_short(self):
        assert len((ROOT / "docs" / "performance.md").read_text().splitlines()) <= 150

    def test_who_decodes_faster_is_named(self, figures):
        from losses import ahead

        def spreads(**ms):
            return {
                name.replace("_", "-"): {"median": value, "min": value - 1, "max": value + 1}
                for name, value in ms.items()
            }

        line = ahead("here", spreads(contiguous=10.0, static_compiled=2.5, dynamic=12.0))
        assert line == "here: `StaticCache` compiled 2.50 ms, `StaticContiguousCache` 10.0 ms"
        assert ahead("", spreads(contiguous=10.0, dynamic=9.5)).endswith("(within the spread)")
        assert ahead("", spreads(contiguous=10.0, static_compiled=2.5, graph=2.0)) == ""
        assert ahead("", spreads(static=1.0, dynamic=2.0)) == ""
        assert "gemma-3-1b, 2,048 of 32,768 tokens: `StaticCache` 40.4 ms" in figures["losses"]

    def test_the_records_are_listed_with_their_commands(self, run):
        listed = run("write_results", "--records").stdout
        assert all(f"{path.name}: " in listed for path in RECORDS)
        assert "bench_update.py --json benchmarks/results/update.json" in listed
        assert listed.count("# an earlier script") == 3  # two of speed-ups, one of updates


class TestTablesThatMayBeEmpty:
    """Made from synthetic records; without any they leave nothing on their page."""

    WHERE: ClassVar = {"hardware": "H200", "host": "a CPU", "command": ""}
    SIZES: ClassVar = {"dtype": "bfloat16", "batch_size": 1, "prompt_len": 512, "new_tokens": 128}

    def quantised(self, *rows):
        return {**self.WHERE, "workload": {"model": "llama-3.1-8b", **self.SIZES}, "rows": rows}

    def row(self, name="nf4", packed_layers=224, reason="", **fallbacks):
        ways = {
            way: {
                "tokens_per_s": {"median": speed},
                "error": error,
                "fallback_reason": fallbacks.get(way),
            }
            for way, speed, error in (
                ("eager", 31.4, 0.0123),
                ("recorded", 62.0, 0.0123),
                ("packed", 405.2, 0.0119),
                ("one kernel", 500.3, 0.0118),
            )
        }
        own = {"format": name, "packed_layers": packed_layers, "layers": 224, "ways": ways}
        return {**own, "reason_for_list": reason, "model_bytes": 5 << 30, "peak_bytes": 6 << 30}

    def context(self, *names):
        measured = {"dynamic": (9.0, 0), "graph": (2.0, 1024), "graph-int8": (1.5, 544)}
        rows = [
            {"contender": name, "context": n, "max_cache_len": 32768, "bytes_per_step": 1e9}
            | dict.fromkeys(("median_ms", "p10_ms", "p90_ms"), measured[name][0])
            | {"cache_bytes": measured[name][1] << 20}
            for name in names
            for n in (512, 32768)
        ]
        sizes = {"workload": {"model": "llama-3.2-1b"}, "bandwidth_gb_per_s": 4000}
        return {**self.WHERE, **sizes, "context": rows, "capacity": rows}

    def test_without_a_record(self):
        import tables
        from write_results import fill

        empty = "<!-- results:a --><!-- /results -->"
        absent = {"format": "nf4", "unavailable": "ImportError: why"}
        assert tables.quantised([]) == tables.quantised([self.quantised(absent)]) == ""
        assert tables.coded([self.context("dynamic", "graph")]) == ""
        assert fill("<!-- results:a -->\nold\n<!-- /results -->", {"a": ""}, "page") == empty
        assert fill(empty, {"a": ""}, "page") == empty

    def test_formats_as_rows(self):
        import tables

        rows = self.row(), self.row("int8", packed_layers=100, reason="why", packed="why")
        words, _, head, _, *lines = tables.quantised([self.quantised(*rows)]).splitlines()
        assert "bfloat16, batch 1, prompt of 512, 128 new tokens" in words
        assert head.count("|") == lines[0].count("|") == 7
        assert lines == [
            "| Llama-3.1-8B, bitsandbytes NF4 | 31.4; 0.012 | 62.0; 0.012 | 405; 0.012 | 500; 0.012 "
            "| 5,120; 6,144 |",
            "| Llama-3.1-8B, bitsandbytes int8 (100 of 224 layers packed) | 31.4; 0.012 | 62.0; 0.012 "
            "| fell back | - | 5,120; 6,144 |",
        ]

    def test_every_format_and_way_has_words(self):
        import bench_quantised
        import tables

        assert tables.FORMATS.keys() == bench_quantised.FORMATS.keys()
        assert tables.WAYS.keys() == bench_quantised.WAYS.keys()

    def test_codes_beside_states_as_they_are(self):
        import tables

        record = self.context("dynamic", "graph", "graph-int8")
        *_, first, second = tables.coded([record]).splitlines()
        assert first == "| Llama-3.2-1B | 512 | 32,768 | 1,024 → 544 | 2.00 → 1.50, 0.750x |"
        assert second.startswith("| Llama-3.2-1B | 32,768 | 32,768 |")

    def test_the_table_of_contexts_leaves_codes_out(self):
        import tables

        records = [self.context("dynamic", "graph"), self.context("graph", "graph-int8")]
        assert tables.context(records) == tables.context(records[:1])
        both = [self.context("dynamic", "graph", "graph-int8")]
        assert tables.context(both) == tables.context(records[:1])


class TestFreshProcess:
    def test_answers_and_goes_on_after_a_failure_until_it_dies(self, monkeypatch):
        """With a module of the standard library, and nothing imported beforehand."""
        import processes
        from processes import Failed, FreshProcess

        monkeypatch.setattr(processes, "_PRELOADED", [])
        process = FreshProcess(importlib.import_module, "os")
        assert process.call("getpid") == process.process.pid
        with pytest.raises(Failed, match=r"^FileNotFoundError: .*nowhere"):
            process.call("listdir", "nowhere")
        assert process.call("getpid") == process.process.pid
        with pytest.raises(Failed, match="ProcessDied: exit status 9"):
            process.call("_exit", 9)
        process.close()
        process.close()
        with pytest.raises(Failed, match=r"^ModuleNotFoundError: "):
            FreshProcess(importlib.import_module, "no_such_module")
        assert multiprocessing.active_children() == []


TINY = {
    "assistant": "--assistant llama --prompt-len 8 --new-tokens 16 --plain-tokens 4 --right 0.6 --trials 1",
    "codes": "--prompt-len 20 --new-tokens 10",
    "batching": "--requests 3 --baseline-requests 0 --prompt-len 20 --new-tokens 10 --trials 1",
    "first_token": "--lengths 5 9 --batch 2 --batch-len 6 --held 12 --new 4 --answered 3 --trials 2",
    "context": "--contexts 12 24 --capacities 16 32 --steps 4 --sequence 10 --rounds 1",
    "context --updates": "--contexts 8 16 --steps 5",
    "drafts": "--prompt-len 30 --new-tokens 20 --plain-tokens 4 --right 1.0 0.0 --trials 1",
    "exact": "--prompt-len 53 --new-tokens 3 --prefills 8",
    "generation": "--compare --prompt-len 8 --new-tokens 5 --uncached-tokens 4 --trials 2",
    "generation --lengths 3 6": "--trials 2",
    "files": "--tokens 20 --question-tokens 3 --trials 2",
    "quantised": "--formats nf4,torchao-int8 --prompt-len 8 --new-tokens 4 --compared-tokens 3",
    "serve": "--users 1 2 --baseline-users 1 --baseline-tokens 2 --prompt-len 8 --new-tokens 4 --questions 2",
    "sampling": "--prompt-len 8 --new-tokens 4 --plain-tokens 3 --trials 2",
    "step": "--prompt-len 8 --new-tokens 8",
    "threads": "--threads 1 2 --baseline-threads 1 --prompt-len 8 --new-tokens 4 --stream 40 --trials 1",
    "training": "--batch-size 2 --prompt-len 8 --new-tokens 3 --train-len 9",
}


def tiny(name):
    """The script and its arguments."""
    script, *options = f"bench_{name} {TINY[name]}".split()
    return script, *options


def tiny_family(name):
    """Another family at toy size: LayerNorm and Conv1D, or a mixture of experts."""
    sizes = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
    if name == "gpt2-xl":
        return GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=128, **sizes)
    sizes |= {"hidden_size": 32, "num_hidden_layers": 2, "head_dim": 16, "intermediate_size": 32}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "moe_intermediate_size": 16}
    return Qwen3MoeConfig(num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, **sizes)


def tiny_pair(name):
    """A model, and an assistant with the same vocabulary."""
    is_model = name == "llama-3.1-8b"
    sizes = {"vocab_size": 64, "max_position_embeddings": 512, "num_key_value_heads": 1}
    sizes |= {"num_attention_heads": 2, "head_dim": 16, "num_hidden_layers": 4 if is_model else 1}
    width = 64 if is_model else 8
    return LlamaConfig(hidden_size=width, intermediate_size=2 * width, **sizes)


FELL_BACK = {"name": "graph", "contender": "graph", "case": "T", "words": "without `a`"}
FELL_BACK |= {"fallback_reason": "why"}
BY_HOST = {**FELL_BACK, "fallback_reason": None, "on_device": False}
ALONE = {"name": "attach", "users": 8, "first_token_ms": {"p50": 3.0, "p95": 9.0}}
ALONE |= {"tokens_per_s": 800.0, "in_rows": 0}
NO_PASS = {"name": "attach", "case": "turn", "tokens": 24, "passes": 0, "reason": "why"}
DIFFERS = {"exact": {"chunks": 0.0, "crop": 0.25}}


class TestScripts:
    @pytest.mark.parametrize("name", TINY)
    def test_a_tiny_run(self, record_of, name):
        if name == "serve":
            pytest.importorskip(
                "fastapi", reason="fastapi is not installed: see the extra `examples`"
            )
        for package in ("bitsandbytes", "torchao") if name == "quantised" else ():
            pytest.importorskip(
                package, reason=f"{package} is not installed: see the extra `clients`"
            )
        record = record_of(*tiny(name))
        assert record.keys() >= PROVENANCE
        if name == "quantised":
            errors = [way["error"] for row in record["rows"] for way in row["ways"].values()]
            assert len(errors) == 8
            assert max(errors) < 1e-5
        if name in ("exact", "training"):
            assert set(record["differences"]["exact"].values()) == {0}
        if name == "sampling":
            ours = [row for row in record["rows"] if row["contender"] == "graph"]
            assert all(row["on_device"] and row["fallback_reason"] is None for row in ours)

    def test_quantised_layers_that_are_not_packed(self, record_of, run, monkeypatch):
        """A package that is absent is a row; layers that our kernel does not read are a problem."""
        import bench_quantised

        def absent(linear):
            raise ImportError("no module of this name")

        monkeypatch.setitem(bench_quantised.FORMATS, "nf4", absent)
        monkeypatch.setitem(bench_quantised.FORMATS, "fp4", lambda linear: linear)
        sizes = {"--prompt-len": 8, "--new-tokens": 4, "--compared-tokens": 3}
        options = [*(word for size in sizes.items() for word in size), "--formats"]
        (row,) = record_of("bench_quantised", *options, "nf4")["rows"]
        assert row["unavailable"] == "ImportError: no module of this name"
        result = run("bench_quantised", "--model", "llama", "--device", "cpu", *options, "fp4")
        assert result.returncode == 1
        assert "fp4: 0 of 42 layers are packed" in result.stdout

    def test_forced_drafts(self, record_of):
        """All of them right: nine tokens a pass. None, and always tried: one."""
        rows = {row["case"]: row for row in record_of(*tiny("drafts"))["rows"]}
        assert list(rows) == [
            "plain", "lookup", "transformers", "forced 1.0", "forced 0.0", "always 0.0",
        ]  # fmt: skip
        assert rows["forced 1.0"]["accepted_drafts"] > 4 * rows["forced 1.0"]["drafted_passes"] > 0
        assert rows["forced 0.0"]["drafted_passes"] == rows["forced 0.0"]["accepted_drafts"] == 0
        assert rows["always 0.0"]["accepted_drafts"] == 0 < rows["always 0.0"]["drafted_passes"]

    def test_a_forced_assistant(self, record_of, monkeypatch):
        """One layer drafts for four: all drafts are right, or half of them."""
        import workload

        monkeypatch.setattr(workload, "dev_config", tiny_pair)
        options = "--assistant llama-3.2-1b --prompt-len 8 --new-tokens 60 --plain-tokens 30"
        options += " --right 1.0 0.5 --trials 1"
        record = record_of("bench_assistant", *options.split(), model="llama-3.1-8b")
        rows = {row["case"]: row for row in record["rows"]}
        assert list(rows) == [
            "plain", "assistant alone", "pass of 16", "forced 1.0", "forced 0.5",
            "transformers", "transformers forced 1.0", "transformers forced 0.5",
        ]  # fmt: skip
        all_right, half = (rows[f"forced {p}"] for p in (1.0, 0.5))
        assert all_right["accepted_drafts"] + all_right["drafted_passes"] == 59
        assert all_right["accepted_per_pass"] > 6 > 2 > half["accepted_per_pass"] > 0.3
        assert sum(half["numbers_of_drafts"].values()) == half["drafted_passes"]
        assert all(row["expected"] > 0 for row in (all_right, half))
        assert rows["pass of 16"]["numbers_of_drafts"] == {"15": 59}

    @pytest.mark.parametrize("p", [1.0, 0.5])
    def test_transformers_loop_reads_forced_logits(self, p):
        """Its tokens are those of `answer`, and as many drafts are right as we say."""
        from bench_assistant import ForcedAssistant
        from workload import Workload

        workload = Workload("llama", "cpu", "float32", 8, 60, 1, 68)
        model, assistant = (random_model(tiny_pair(name)) for name in ("llama-3.1-8b", "small"))
        forced = ForcedAssistant(workload, 64, p, 4)
        passes = []
        model.register_forward_pre_hook(lambda *_: passes.append(1))
        with forced.in_logits(model, assistant, 4):
            ids = torch.arange(8)[None]
            how = {"assistant_model": assistant, "do_sample": False, "eos_token_id": None}
            tokens = model.generate(ids, max_new_tokens=60, **how)
        assert torch.equal(tokens[:, 8:], forced.answer[:, 8:68])
        assert (len(passes) <= 13) is (p == 1.0)
        assert not model._forward_hooks
        assert not assistant._forward_hooks

    def test_first_tokens_of_prompts_batches_and_turns(self, record_of):
        record = record_of(*tiny("first_token"))
        names = ["attach", "dynamic", "static", "no-cache"]
        cases = [(row["case"], row["tokens"], row["answered"]) for row in record["rows"][:-2:4]]
        assert cases == [("prompt", 5, 1), ("prompt", 9, 1), ("batch", 6, 1), ("turn", 4, 1)]
        assert [row["name"] for row in record["rows"]] == names * 4 + names[:2]
        assert all(len(row["trials_s"]) == 2 for row in record["rows"])
        assert record["rows"][-1]["answered"] == 3

    @pytest.mark.parametrize(
        ("name", "used", "unused"),
        [("gpt2-xl", "conv1d", "write_rotated"), ("qwen3-30b-a3b", "write_rotated", "conv1d")],
    )
    def test_the_rules_of_a_family(self, record_of, monkeypatch, name, used, unused):
        import workload

        from hf_static_kv.program.rules import RULES

        monkeypatch.setattr(workload, "dev_config", tiny_family)
        record = record_of(*tiny("step"), model=name)
        without = [row["without"] for row in record["variants"]]
        assert without == [[], *([rule] for rule in RULES), list(RULES)]
        same = [row["without"][0] for row in record["variants"] if row.get("same_list")]
        assert unused in same
        assert used not in same

    def test_training_of_experts(self, record_of, monkeypatch):
        import workload

        monkeypatch.setattr(workload, "dev_config", tiny_family)
        record = record_of(*tiny("training"), model=next(iter(PARTS)))
        assert record["random_weights"]
        assert record["differences"]["exact"] == {"log-probability": 0, "ratio": 0}
        errors = {side: found["median"] for side, found in record["gradient_errors"].items()}
        assert errors["exact"] < 3 * errors["usual"] < 1e-4

    def test_what_switches_pdl_off_exists(self):
        """A name that is gone would leave PDL on, and two rows would be one."""
        pytest.importorskip("triton", reason="triton is not installed")
        from bench_step import REWRITE, SUPPORTS_PDL

        for name in (REWRITE, SUPPORTS_PDL):
            home, _, attribute = name.rpartition(".")
            assert hasattr(importlib.import_module(home), attribute)

    @pytest.mark.parametrize("script", [*SCRIPTS, "write_results"])
    def test_help(self, run, script):
        result = run(script, "--help")
        assert result.returncode == 0
        assert f"python benchmarks/{script}.py" in result.stdout

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ("generation --model lama", "'lama' is no folder, no hub id (owner/name) and no short"),
            ("generation --device banana", "--device banana is no device: use cpu, cuda or cuda:0"),
            ("generation --device cuda:64", "--device cuda:64: this machine has"),
            ("generation --json nowhere/x.json", "there is no folder nowhere"),
            ("generation --contenders dynamic,turbo", "unknown turbo: choose from no-cache, dyn"),
            ("generation --new-tokens 2", "--new-tokens must be at least 3, got 2"),
            ("generation --max-cache-len 10", "--max-cache-len 10 is less than 256 + 128 tokens"),
            ("generation --contenders graph", "nothing can run on cpu (graph: a CUDA"),
            ("generation --lengths 512", "513 tokens: more than the 512 of llama's context"),
            ("context --contexts 64 --capacities 60", "60 is less than the sequence of 64 tokens"),
            ("first_token --held 500", "more than the 512 of llama's context"),
            ("first_token --batch -1", "--batch must be at least 0, got -1"),
            ("files --tokens 500", "516 tokens: more than the 512 of llama's context"),
            ("files --folder nowhere", "--folder nowhere: there is no such folder"),
            ("exact --batch-size 4", "--batch-size 4: the comparisons have batches of their own"),
            ("training --prompt-len 7", "--prompt-len must be at least 8, got 7"),
            ("serve --questions 0", "--questions must be at least 1, got 0"),
            ("step --new-tokens 1", "--new-tokens must be at least 2, got 1"),
            ("step --profile", "--profile needs a GPU: a CPU launches no kernels"),
            ("one_kernel", "one kernel needs a GPU, and serves one row"),
            (
                "assistant --assistant gpt2-xl",
                "llama and gpt2-xl need the same vocabulary, and have",
            ),
            ("assistant --batch-size 2", "transformers' loop for an assistant takes one row"),
            ("sampling --plain-tokens 2", "--plain-tokens must be at least 3, got 2"),
        ],
    )
    def test_a_bad_argument_gets_one_line_and_exit_status_2(self, run, arguments, message):
        script, *options = f"bench_{arguments}".split()
        result = run(script, "--model", "llama", "--device", "cpu", *options)
        assert result.returncode == 2
        assert message in result.stderr.splitlines()[-1]
        assert "Traceback" not in result.stderr

    @pytest.mark.parametrize(
        ("script", "part", "line"),
        [
            ("generation", {"contenders": [FELL_BACK]}, "graph fell back: why"),
            ("first_token", {"rows": [NO_PASS]}, "turn of 24: no pass was captured: why"),
            ("sampling", {"rows": [FELL_BACK]}, "T fell back: why"),
            ("sampling", {"rows": [BY_HOST]}, "T: the host selected the tokens"),
            ("serve", {"rows": [ALONE]}, "8 users: calls did not decode together"),
            ("step", {"variants": [FELL_BACK]}, "without `a` fell back: why"),
            ("files", {"is_what_was_saved": False}, "the loaded cache is not what was saved"),
            ("exact", {"differences": DIFFERS}, "crop: a difference of 0.25 inside `exact`"),
            ("training", {"differences": DIFFERS}, "crop: a difference of 0.25 inside `exact`"),
        ],
    )
    def test_exit_status_1_if_a_contender_fell_back(self, run, monkeypatch, script, part, line):
        """Or if a result is wrong."""
        record = {"hardware": "a GPU", "command": "", "contenders": [], "chat": [], **part}
        module = importlib.import_module(f"bench_{script}")
        monkeypatch.setattr(module, "measure", lambda args: record)
        result = run(f"bench_{script}")
        assert result.returncode == 1
        assert line in result.stdout.splitlines()

    @pytest.mark.parametrize("script", ["generation", "context"])
    def test_a_contender_that_fails_is_reported_and_the_others_run(self, run, monkeypatch, script):
        from processes import Failed

        runner = importlib.import_module(f"bench_{script}").Runner
        method = {"generation": "trial", "context": "measure"}[script]
        call = getattr(runner, method)

        def failing(self, *args):
            name = self.generate.contender if script == "generation" else self.name
            if name == "static":
                raise Failed("OutOfMemoryError", "no memory")
            return call(self, *args)

        monkeypatch.setattr(runner, method, failing)
        name, *options = tiny(script)
        options = [option for option in options if option != "--compare"]
        who = ["--model", "llama", "--device", "cpu", "--contenders", "static,contiguous"]
        result = run(name, *who, *options)
        assert result.returncode == 1
        assert "static FAILED: OutOfMemoryError: no memory" in result.stdout.splitlines()
        assert re.search(r"(name|contender) contiguous, .*(median|decode)_ms \d", result.stdout)

    def test_a_picture_of_users_from_a_record(self, run, tmp_path):
        pytest.importorskip(
            "matplotlib", reason="matplotlib is not installed: see the extra `examples`"
        )
        record = tmp_path / "record.json"
        picture = tmp_path / "users.png"
        where = {"hardware": "a GPU", "command": "", "workload": {"model": "llama-3.2-1b"}}
        record.write_text(json.dumps({**where, "rows": [{**ALONE, "in_rows": 64}]}))
        result = run("bench_serve", "--read", record, "--plot", picture)
        assert result.returncode == 0, result.stderr
        assert picture.read_bytes().startswith(b"\x89PNG")

    def test_the_scripts_import_no_extras_but_tqdm(self):
        """`datasets`, `evaluate` and matplotlib are not on every machine.

        The picture of the README is drawn where its records are committed.
        """
        own = {path.stem for path in BENCHMARKS.glob("*.py")}
        own |= {"torch", "transformers", "hf_static_kv", "tqdm"}
        own |= {"safetensors", "tokenizers"}  # which transformers brings
        for path in BENCHMARKS.glob("*.py"):
            names = set()
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom):
                    names.add(node.module)
                elif isinstance(node, ast.Import):
                    names |= {alias.name for alias in node.names}
            roots = {name.split(".")[0] for name in names}
            drawn = {"matplotlib"} if path.name == "picture.py" else set()
            assert roots <= own | drawn | sys.stdlib_module_names, path.name

    @pytest.mark.slow
    def test_contenders_run_in_processes_of_their_own(self, tmp_path):
        record = tmp_path / "record.json"
        script, *options = tiny("generation")
        command = [sys.executable, f"benchmarks/{script}.py", "--model", "llama", "--device", "cpu"]
        command += [*options, "--json", str(record)]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        rows = json.loads(record.read_text())["contenders"]
        ran = [row["name"] for row in rows if "summary" in row]
        assert ran == ["no-cache", "dynamic", "static", "contiguous"]
