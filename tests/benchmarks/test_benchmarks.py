"""The benchmarks at toy size: what they report, and their arithmetic against numbers made by hand."""

import csv
import importlib
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from hf_static_kv.testing import random_model, tiny_config

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
PROVENANCE = {"hardware", "threads", "torch", "transformers", "commit", "command"}


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def run(monkeypatch, capsys):
    """A script's `main` with these arguments, here: a process of its own takes seconds to import torch."""

    def run_main(script, *args):
        monkeypatch.setattr(sys, "argv", [f"benchmarks/{script}.py", *map(str, args)])
        try:
            status = importlib.import_module(script).main()
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
        assert latency(hundred_and_one) == {"mean": 50, "p50": 50, "p95": 95, "p99": 99, "min": 0, "max": 100}
        assert spread([5.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 5.0}

    def test_the_clock_counts_from_token_to_token(self):
        from measure import Clock

        clock = Clock("cpu", batch_size=2)
        clock.times = [10.0, 10.5, 10.75]
        assert clock.step_ms == [500.0, 250.0]
        go_on = clock(torch.ones(2, 3), None)
        assert go_on.tolist() == [False, False]
        assert len(clock.times) == 4

    def test_a_tied_embedding_is_read_and_an_untied_one_is_not(self):
        from measure import weights_read

        # Per layer: q and o 8 x 8, k and v 8 x 4, gate, up and down 8 x 16, two norms of 8; one more norm at the end.
        layer = 2 * 64 + 2 * 32 + 3 * 128 + 2 * 8
        sizes = {
            "vocab_size": 10,
            "hidden_size": 8,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        }
        for tied in (True, False):
            model = random_model(LlamaConfig(**sizes, tie_word_embeddings=tied))
            assert weights_read(model) == 4 * (2 * layer + 8 + 80)

    def test_a_window_limits_what_a_step_reads(self):
        from measure import bytes_per_step, cache_read, weights_read

        # Six layers, the last one full, the others with a window of 8; one KV head of 16, keys and values, 4 bytes.
        model = random_model(tiny_config("gemma3"))
        position = 2 * 16 * 4
        assert cache_read(model, text=20, batch_size=1) == position * (5 * 8 + 20)
        assert cache_read(model, text=5, batch_size=3) == 3 * position * 6 * 5
        # A prompt of 18 and 3 tokens: the two steps after the first token read texts of 19 and 20.
        mean = position * (5 * 8 + 19.5)
        assert bytes_per_step(model, prompt_len=18, new_tokens=3, batch_size=1) == weights_read(model) + mean

    def test_the_summary_of_one_contender(self):
        from bench_generation import summarize

        row = {
            "new_tokens": 11,
            "cold_start_s": 8.0,
            "trials_s": [[0.5, 2.5], [0.25, 1.25], [1.0, 5.0]],
            "step_ms": [100.0, 300.0],
            "bytes_per_step": 4e9,
        }
        summary = summarize(row, prompt_len=100, batch_size=2, bandwidth=80e9)
        assert summary == {
            "first_token_ms": {"median": 500.0, "min": 250.0, "max": 1000.0},
            "prompt_tokens_per_s": 400.0,
            "decode_ms": {"median": 200.0, "min": 100.0, "max": 400.0},
            "decode_tokens_per_s": {"median": 10.0, "min": 5.0, "max": 20.0},
            "latency_ms": {"mean": 200.0, "p50": 200.0, "p95": 290.0, "p99": 298.0, "min": 100.0, "max": 300.0},
            "cold_start_s": 8.0,
            "cold_share": 1 - 2.5 / 8,
            "gb_per_s": 20.0,
            "bandwidth_share": 0.25,
        }

    def test_speed_up_on_paper_and_from_pass_times(self):
        from bench_speedup import predicted, theoretical

        assert [theoretical(n) for n in (1, 10, 200)] == [1.0, 5.5, 100.5]
        assert predicted(4, {1: 10.0, 3: 30.0, 4: 70.0}) == (10 + 20 + 30 + 70) / (4 * 10)

    def test_the_limit_of_a_step(self):
        from bench_context import limit_ms

        assert limit_ms({"bytes_per_step": 5e9}, {"bandwidth_gb_per_s": 1000.0}) == 5.0

    def test_what_cannot_be_known_is_not_counted(self):
        from measure import bytes_per_step

        from tests.conftest import toy_model

        assert bytes_per_step(toy_model("mixtral"), 8, 4, 1) is None

    def test_passes_add_up(self):
        from bench_speedup import passes_s, reasons

        assert passes_s(4, {1: 10.0, 3: 30.0, 4: 70.0}) == 0.13
        run = {"tokens": 4, "measured": 0.9, "uncached_s": {"median": 0.1, "max": 0.1}, "cached_s": {"min": 0.11}}
        words = " ".join(reasons([run], {1: 10.0, 4: 70.0}))
        assert "it is slower here**, at 4 tokens" in words
        assert "4 passes come to 0.16 s, and the run that makes them took 0.10 s" in words
        run |= {"measured": 1.5, "uncached_s": {"median": 0.2, "max": 0.2}}
        words = " ".join(reasons([run], {1: 10.0, 4: 70.0}))
        assert "slower" not in words
        assert "differ by is the loop" in words

    def test_a_point_that_was_measured_twice_shows_the_drift(self):
        from bench_context import drift

        point = {"contender": "static", "context": 512, "max_cache_len": 1024}
        record = {"context": [{**point, "median_ms": 2.0}], "capacity": [{**point, "median_ms": 3.0}]}
        assert "text of 512 in the room for 1,024: static 2.00 and 3.00." in drift(record)
        assert drift({**record, "capacity": []}) is None

    def test_bytes_held_counts_rooms_and_not_texts(self):
        from contenders import CONTENDERS, bytes_held

        model = random_model(tiny_config("llama"))
        ids = torch.ones(1, 5, dtype=torch.long)
        held = {}
        for name in ("dynamic", "static", "contiguous"):
            keywords = CONTENDERS[name].set_up(model, 32, 1)()
            model.generate(ids, **keywords, max_new_tokens=4, do_sample=False, eos_token_id=999)
            held[name] = bytes_held(keywords["past_key_values"])
        position = 3 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head_dim, bytes
        assert held == {"dynamic": 8 * position, "static": 32 * position, "contiguous": 32 * position}
        assert bytes_held(None) == 0


def summary(name, median, lowest=None, highest=None):
    figures = {"median": median, "min": lowest or median, "max": highest or median}
    return {"name": name, "summary": {"decode_ms": figures}}


class TestWords:
    def test_where_ours_is_behind_it_is_said_with_the_reason(self):
        from generation_report import where_behind

        rows = [summary("contiguous", 10.0), summary("static-compiled", 2.5), summary("dynamic", 11.0)]
        words = where_behind({"contenders": rows})
        assert words.startswith(
            "**Ours is not the fastest here**: static-compiled decodes 4.00 times as fast as contiguous (its step"
        )
        assert "CUDA graph" in words
        assert "within the spread" not in words
        assert "2.00 times as fast" in where_behind({"contenders": [*rows, summary("graph", 5.0)]})
        assert where_behind({"contenders": [*rows, summary("graph", 2.0)]}) is None

    def test_within_the_spread(self):
        from generation_report import where_behind

        rows = [summary("contiguous", 10.0, 9.0, 11.0), summary("dynamic", 9.5, 9.0, 12.0)]
        words = where_behind({"contenders": rows})
        assert words.endswith("dynamic decodes 1.05 times as fast as contiguous (within the spread).")

    def test_nothing_is_said_where_ours_is_ahead_or_absent(self):
        from generation_report import where_behind

        assert where_behind({"contenders": [summary("contiguous", 1.0), summary("dynamic", 2.0)]}) is None
        assert where_behind({"contenders": [summary("static", 1.0), summary("dynamic", 2.0)]}) is None

    def test_every_contender_that_can_be_ahead_has_its_reason(self):
        from contenders import CONTENDERS

        ours = [name for name, contender in CONTENDERS.items() if contender.is_ours]
        assert ours == ["contiguous", "contiguous-kernel", "graph", "graph-layers"]

    def test_where_ours_is_behind_in_a_sweep(self):
        from bench_context import where_behind

        def row(name, context, middle):
            figures = {"median_ms": middle, "p10_ms": middle - 1, "p90_ms": middle + 1}
            return {"contender": name, "context": context, "max_cache_len": 9, **figures}

        rows = [row("contiguous", 1024, 9.0), row("dynamic", 1024, 3.0), row("contiguous", 2048, 5.0)]
        rows += [row("dynamic", 2048, 4.5), row("contiguous", 4096, 6.0), row("dynamic", 4096, 8.0)]
        words = where_behind({"context": rows}, "context")
        assert words.startswith(
            "**Ours is not the fastest everywhere**: dynamic is ahead at 1,024, 2,048 (within the spread): both send"
        )
        assert where_behind({"context": rows[4:]}, "context") is None


class Failing:
    """What a fresh process may have to serve."""

    def __init__(self, how=""):
        if how == "at once":
            raise ValueError("no room\nand a second line")

    def double(self, number):
        return 2 * number

    def fail(self):
        raise RuntimeError("first line\nsecond line")

    def die(self):
        import os

        os._exit(9)


class TestFreshProcess:
    def test_answers_and_goes_on_after_a_failure(self):
        from processes import Failed, FreshProcess

        process = FreshProcess(Failing)
        assert process.call("double", 21) == 42
        with pytest.raises(Failed, match=r"^RuntimeError: first line$"):
            process.call("fail")
        assert process.call("double", 4) == 8
        process.close()
        process.close()
        assert not process.process.is_alive()

    def test_a_failure_at_once_and_a_death_are_reported(self):
        from processes import Failed, FreshProcess

        with pytest.raises(Failed, match=r"^ValueError: no room$"):
            FreshProcess(Failing, "at once")
        process = FreshProcess(Failing)
        with pytest.raises(Failed, match="ProcessDied: exit status 9"):
            process.call("die")
        process.close()


@pytest.fixture(scope="module")
def generation(tmp_path_factory):
    """One small run as a user would start it, with everything that can be written."""
    folder = tmp_path_factory.mktemp("generation")
    sizes = ["--prompt-len", 12, "--new-tokens", 6, "--uncached-tokens", 4, "--trials", 2, "--max-cache-len", 40]
    files = {name: folder / f"report.{name}" for name in ("json", "csv", "markdown", "png")}
    outputs = ["--json", files["json"], "--csv", files["csv"], "--markdown", files["markdown"], "--plot", files["png"]]
    command = [sys.executable, "benchmarks/bench_generation.py", "--model", "gemma3", "--device", "cpu", "--compare"]
    command = [str(part) for part in [*command, *sizes, *outputs]]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    return SimpleNamespace(result=result, files=files)


class TestGeneration:
    def test_the_record(self, generation):
        assert generation.result.returncode == 0, generation.result.stderr
        record = json.loads(generation.files["json"].read_text())
        assert record.keys() >= PROVENANCE
        assert record["bandwidth_gb_per_s"] > 0
        rows = {row["name"]: row for row in record["contenders"]}
        assert list(rows)[:5] == ["no-cache", "dynamic", "static", "static-compiled", "contiguous"]
        not_run = {name: rows.pop(name)["unavailable"] for name in list(rows) if "unavailable" in rows[name]}
        assert not_run.keys() == {"static-compiled", "contiguous-kernel", "graph", "graph-layers"}
        assert not_run["static-compiled"] == "generate compiles on a GPU only"
        from bench_generation import summarize

        for row in rows.values():
            assert row["new_tokens"] == (4 if row["name"] == "no-cache" else 6)
            assert len(row["trials_s"]) == 2
            assert len(row["step_ms"]) == row["new_tokens"] - 1
            assert row["summary"] == summarize(row, 12, 1, record["bandwidth_gb_per_s"] * 1e9)
        assert rows["no-cache"]["cache_bytes"] == 0
        # 40 positions of 6 layers, one KV head of 32, keys and values in float32.
        assert rows["contiguous"]["cache_bytes"] == 40 * 6 * 2 * 32 * 4

    def test_the_table_says_what_was_not_run_and_what_ran_shorter(self, generation):
        text = generation.files["markdown"].read_text()
        assert text.strip() in generation.result.stdout
        assert "static-compiled was not run: generate compiles on a GPU only" in text
        assert "no-cache ran 4 tokens, not 6" in text
        assert text.count("| `Static") == 2
        assert "graph was not run: a CUDA graph needs a GPU" in text

    def test_csv_and_picture(self, generation):
        with generation.files["csv"].open() as file:
            rows = list(csv.DictReader(file))
        ours = next(row for row in rows if row["name"] == "contiguous")
        assert float(ours["decode_ms.min"]) <= float(ours["decode_ms.median"])
        assert generation.files["png"].read_bytes().startswith(b"\x89PNG")

    def test_a_contender_that_fails_is_reported_and_the_others_run(self, monkeypatch):
        import bench_generation
        from processes import Failed
        from workload import Workload

        class Process:
            """Answers at once, from no process; "static" breaks in its second trial."""

            def __init__(self, cls, name, workload, new_tokens):
                self.name, self.trials = name, 0

            def call(self, method):
                self.trials += method == "trial"
                if self.name == "static" and self.trials == 2:
                    raise Failed("OutOfMemoryError", "no room")
                sizes = {"cache_bytes": 1, "peak_bytes": None, "bytes_per_step": 1.0}
                return {"trial": (self.trials, 10), "sizes": sizes}.get(method, 1.0)

            def close(self):
                pass

        monkeypatch.setattr(bench_generation, "FreshProcess", Process)
        workload = Workload("llama", "cpu", "float32", 8, 4, 1, 12)
        static, ours = bench_generation.contest(["static", "contiguous"], workload, 4, 3)
        assert static["error"] == "OutOfMemoryError: no room"
        assert "error" not in ours
        assert ours["trials_s"] == [(1, 10), (2, 10), (3, 10)]

    def test_a_failure_is_in_the_table_and_in_the_exit_status(self, run, monkeypatch):
        import bench_generation

        row = {"name": "contiguous", "new_tokens": 4, "error": "RuntimeError: broken"}
        monkeypatch.setattr(bench_generation, "contest", lambda *args: [row])
        result = run("bench_generation", "--model", "llama", "--device", "cpu")
        assert result.returncode == 1
        assert "contiguous FAILED: RuntimeError: broken" in result.stdout


class TestContext:
    def test_both_sweeps(self, run, tmp_path):
        record, picture = tmp_path / "context.json", tmp_path / "context.png"
        sizes = ["--contexts", 12, 24, "--capacities", 16, 32, "--steps", 4, "--text", 10, "--rounds", 2]
        result = run(
            "bench_context", "--model", "gemma3", "--device", "cpu", *sizes, "--json", record, "--plot", picture
        )
        assert result.returncode == 0, result.stderr
        report = json.loads(record.read_text())
        assert report.keys() >= PROVENANCE | {"model", "dtype", "steps", "bandwidth_gb_per_s"}
        points = [(row["contender"], row["context"], row["max_cache_len"]) for row in report["context"]]
        names = ("dynamic", "static", "contiguous")
        assert points == [(name, context, 24) for context in (12, 24) for name in names]
        assert report["not_run"] == {"static-compiled": "generate compiles on a GPU only"}
        points = [(row["contender"], row["context"], row["max_cache_len"]) for row in report["capacity"]]
        assert points == [
            ("dynamic", 10, 16),
            ("static", 10, 16),
            ("contiguous", 10, 16),
            ("static", 10, 32),
            ("contiguous", 10, 32),
        ]
        ran = [row for row in report["context"] + report["capacity"] if "error" not in row]
        assert all(0 < row["p10_ms"] <= row["median_ms"] <= row["p90_ms"] for row in ran)
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert "generate compiles on a GPU only" in result.stdout

    def test_bad_sizes(self, run):
        result = run("bench_context", "--model", "llama", "--device", "cpu", "--contexts", 64, "--capacities", 60)
        assert result.returncode == 2
        assert "--capacities 60 is less than the text of 64 tokens" in result.stderr
        result = run("bench_context", "--model", "llama", "--device", "cpu", "--contexts", 20)
        assert result.returncode == 2
        assert "--contexts and --text at least 34" in result.stderr


class TestSpeedup:
    def test_the_rows(self, run, tmp_path):
        record, picture = tmp_path / "speedup.json", tmp_path / "speedup.png"
        sizes = ["--tokens", 3, 6, "--trials", 2]
        result = run(
            "bench_speedup", "--model", "llama", "--device", "cpu", *sizes, "--json", record, "--plot", picture
        )
        assert result.returncode == 0, result.stderr
        report = json.loads(record.read_text())
        assert report.keys() >= PROVENANCE
        assert list(report["pass_ms"]) == ["1", "3", "6"]
        assert [(row["tokens"], row["theoretical"]) for row in report["rows"]] == [(3, 2.0), (6, 3.5)]
        for row in report["rows"]:
            assert row["measured"] == row["uncached_s"]["median"] / row["cached_s"]["median"]
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert "a pass over 6 tokens takes" in result.stdout

    def test_bad_sizes(self, run):
        result = run("bench_speedup", "--model", "llama", "--device", "cpu", "--tokens", 512)
        assert result.returncode == 2
        assert "513 tokens: more than the 512" in result.stderr


def test_rows_of_unlike_length():
    from workload import Workload

    workload = Workload("llama", "cpu", "float32", 16, 4, 4, 20, padded=True)
    prompt = workload.prompt()
    assert prompt["attention_mask"].sum(1).tolist() == [16, 14, 12, 10]
    assert (prompt["attention_mask"].diff(dim=1) >= 0).all()  # to the left
    assert workload.mean_prompt_len == 13


class TestExact:
    def test_the_record(self, run, tmp_path):
        record = tmp_path / "exact.json"
        sizes = ["--prompt-len", 56, "--new-tokens", 5, "--prefills", 8, 16]
        result = run("bench_exact", "--model", "llama", "--device", "cpu", *sizes, "--json", record)
        assert result.returncode == 0, result.stderr
        report = json.loads(record.read_text())
        assert report.keys() >= PROVENANCE
        usual, inside = report["differences"]["usual"], report["differences"]["exact"]
        assert set(inside.values()) == {0.0}
        assert usual.keys() == inside.keys()
        assert usual["chunks"] > 0
        names = ["prompt of 8", "prompt of 16", "a decode step of `GraphDecoder`"]
        assert [list(report["ms"][side]) for side in ("usual", "exact")] == [names, names]
        assert all(0 < figures["min"] <= figures["median"] for figures in report["ms"]["exact"].values())
        assert "| a decode step of `GraphDecoder` |" in result.stdout

    def test_without_the_price(self, run, tmp_path):
        record = tmp_path / "exact.json"
        sizes = ["--prompt-len", 56, "--new-tokens", 5, "--prefills", 0]
        result = run("bench_exact", "--model", "llama", "--device", "cpu", *sizes, "--json", record)
        assert result.returncode == 0, result.stderr
        assert "ms" not in json.loads(record.read_text())

    def test_bad_sizes(self, run):
        result = run("bench_exact", "--model", "llama", "--device", "cpu", "--prompt-len", 20)
        assert result.returncode == 2
        assert result.stderr.startswith("bench_exact.py: --prompt-len must be at least 53")

    def test_a_batch_size_is_refused(self, run):
        result = run("bench_exact", "--model", "llama", "--device", "cpu", "--batch-size", 4)
        assert result.returncode == 2
        assert result.stderr == "bench_exact.py: --batch-size 4: the comparisons have batches of their own\n"


class TestStep:
    def test_without_a_gpu_it_says_so_in_a_line(self, run):
        result = run("bench_step", "--model", "llama", "--device", "cpu")
        assert result.returncode == 2
        assert result.stderr == "bench_step.py: --device cpu: a captured step needs a GPU\n"

    def test_every_change_is_switched_off_by_a_name_that_exists(self):
        """A name that is gone would leave the change on, and two rows would be one."""
        import importlib

        from bench_step import CHANGES, variants

        for substitutes in CHANGES.values():
            for name in substitutes:
                home, _, attribute = f"hf_static_kv.{name}".rpartition(".")
                if "triton" in home:
                    pytest.importorskip("triton", reason="triton is not installed")
                assert hasattr(importlib.import_module(home), attribute)
        missing = [len(names) for _, setting, names in variants() if setting == "none"]
        assert missing == list(range(len(CHANGES), -1, -1))

    def test_the_table(self, tmp_path):
        from bench_step import markdown, plot

        kernels = [{"name": "void at::native::add<int>(x)", "times": 16.0, "us": 20.4}]
        row = {"words": "captured", "tokens_per_s": 1234.5, "replay_ms": 0.8, "kernels": 167.0, "busy_us": 790.0}
        record = {
            "workload": {"model": "m", "dtype": "bfloat16", "batch_size": 1, "prompt_len": 512, "new_tokens": 256},
            "hardware": "a GPU",
            "commit": "abc",
            "bandwidth_gb_per_s": 4000.0,
            "variants": [row | {"largest": kernels}],
            "attention": [{"text": 32768, "us": 20.0, "bytes": 64_000_000}],
            "tracing_ms": {when: {"median": 0.81, "min": 0.8, "max": 0.9} for when in ("never", "once")},
        }
        text = markdown(record)
        assert "`trace_attention` takes 0.810 ms (0.800 to 0.900), without one 0.810 ms" in text
        assert "| captured | 1,234 | 0.800 | 167 | 0.790 | 16 x add 20 |" in text
        assert "| 32,768 | 20.0 | 80% |" in text
        plot(record, tmp_path / "step.png")
        assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


class TestRecords:
    """What is committed agrees with itself: raw times with summaries, records with pages."""

    paths = sorted((BENCHMARKS / "results").glob("*.json"))

    @pytest.mark.parametrize("path", paths, ids=lambda path: path.stem)
    def test_has_its_provenance_and_no_foreign_paths(self, path):
        record = json.loads(path.read_text())
        assert record.keys() >= PROVENANCE
        assert record["commit"] != "unknown"
        assert record["command"].startswith("python benchmarks/bench_")
        name = re.sub(r"^rerun\d*", "generation", path.name)  # other runs of the same command
        assert f"--json benchmarks/results/{name}" in record["command"]

    @pytest.mark.parametrize(
        "path", [p for p in paths if p.stem.startswith(("generation", "rerun", "batch"))], ids=lambda path: path.stem
    )
    def test_summaries_are_those_of_the_raw_times(self, path):
        from bench_generation import summarize

        record = json.loads(path.read_text())
        w = record["workload"]
        ran = [row for row in record["contenders"] if "summary" in row]
        # Those that are asked for by name, or all.
        asked = re.search(r"--contenders (\S+)", record["command"])
        assert [row["name"] for row in ran] == asked[1].split(",") if asked else len(ran) >= 4
        # Some records rounded the bandwidth after the summaries were made of it: then one that rounds to the same.
        rounded = record["bandwidth_gb_per_s"]
        near = (math.nextafter(rounded * 1e9, 0), rounded * 1e9, math.nextafter(rounded * 1e9, math.inf))
        summaries = [
            [summarize(row, w["prompt_len"], w["batch_size"], bandwidth) for row in ran]
            for bandwidth in near
            if bandwidth / 1e9 == rounded
        ]
        assert [row["summary"] for row in ran] in summaries

    def test_three_dev_models_with_all_five_contenders_on_the_gpu(self):
        from write_results import generation_records

        records = generation_records("h200")
        assert [record["workload"]["model"] for record in records] == ["llama-3.2-1b", "qwen3-1.7b", "gemma-3-1b"]
        for record in records:
            assert "H200" in record["hardware"]
            assert [row["name"] for row in record["contenders"] if "summary" in row][:5] == [
                "no-cache",
                "dynamic",
                "static",
                "static-compiled",
                "contiguous",
            ]
            assert (record["workload"]["prompt_len"], record["workload"]["new_tokens"]) == (512, 256)

    def test_the_page_is_written_from_the_records(self):
        from write_results import page

        text = page()
        assert (BENCHMARKS / "RESULTS.md").read_text() == text
        for path in self.paths:
            assert json.loads(path.read_text())["command"] in text
        for name in [line.split("](results/")[1].rstrip(")") for line in text.splitlines() if line.startswith("![")]:
            assert (BENCHMARKS / "results" / name).read_bytes().startswith(b"\x89PNG")

    def test_the_readme_shows_the_overview(self):
        from write_results import generation_records, overview, reruns, spread_between_runs

        readme, records = (ROOT / "README.md").read_text(), generation_records("h200")
        assert overview(records) in readme
        decode = [{r["name"]: r["summary"]["decode_ms"]["median"] for r in rec["contenders"]} for rec in records]
        times = [ms["contiguous"] / ms["static-compiled"] for ms in decode]
        words = " ".join(readme.split())
        eager, _, captured = [f"{share * 100:.0f} %" for share in spread_between_runs()]
        assert f"Between runs eager figures moved by up to {eager}, those of the decoder by {captured}." in words
        assert f"goes {min(times):.0f} to {max(times):.0f} times further" in words
        sweep = json.loads((BENCHMARKS / "results/context-smollm2-cpu.json").read_text())["capacity"]
        room = {(row["contender"], row["max_cache_len"]): f"{row['median_ms']:.0f}" for row in sweep}
        ours, theirs = [[room[name, n] for n in (512, 8192)] for name in ("contiguous", "static")]
        assert f"takes {ours[0]} ms in a cache for 512 and {ours[1]} ms in one for 8,192" in words
        assert f"where `StaticCache` takes {theirs[0]} and {theirs[1]}." in words
        pace = [ms["dynamic"] / ms["contiguous"] * 100 for ms in decode]
        earlier = [
            ms["dynamic"] / ms["contiguous"] * 100
            for _, others in reruns()
            for ms in ({r["name"]: r["summary"]["decode_ms"]["median"] for r in rec["contenders"]} for rec in others)
            if "contiguous" in ms
        ]
        apart = [
            record["workload"]["model"]
            for record in records
            for ms in [{row["name"]: row["summary"]["decode_ms"] for row in record["contenders"]}]
            if ms["dynamic"]["max"] < ms["contiguous"]["min"] or ms["contiguous"]["max"] < ms["dynamic"]["min"]
        ]
        assert (
            f"ours ran at {min(pace):.0f} to {max(pace):.0f} % of the pace of `DynamicCache`, outside the spread on "
            f"{_listed(apart)} alone, and at {min(earlier):.0f} to {max(earlier):.0f} % in earlier runs;"
        ) in words

    def test_what_the_readme_says_of_the_decoder(self):
        from write_results import generation_records

        words = " ".join((ROOT / "README.md").read_text().split())
        records = generation_records("h200")
        rows = [{row["name"]: row["summary"] for row in record["contenders"]} for record in records]
        speed = [
            _range([row[name]["decode_ms"]["median"] / row["graph"]["decode_ms"]["median"] for row in rows])
            for name in ("dynamic", "static-compiled")
        ]
        assert f"decodes {speed[0]} times as fast as `DynamicCache` and {speed[1]} times as fast as" in words
        cold = [_range([row[n]["cold_start_s"] for row in rows]) for n in ("graph", "dynamic", "static-compiled")]
        assert f"its first call takes {cold[0]} s where theirs take {cold[1]} and {cold[2]};" in words
        first, others = zip(*(_first_tokens(row) for row in rows), strict=True)
        assert f"after {_listed(first)} ms, where the others took {_listed(others)}." in words
        eight = [
            next(row["summary"] for row in json.loads(path.read_text())["contenders"] if row["name"] == "graph")
            for path in (BENCHMARKS / f"results/batch-{record['workload']['model']}-h200.json" for record in records)
        ]
        rates = [summary["decode_tokens_per_s"]["median"] for summary in eight]
        times = _range(
            [rate / row["graph"]["decode_tokens_per_s"]["median"] for rate, row in zip(rates, rows, strict=True)]
        )
        said = _listed([f"{rate:,.0f}" for rate in rates])
        assert f"go at {said} tokens/s on the three models: {times} times one row" in words

    def test_what_the_readme_says_of_long_texts_and_of_room_on_the_gpu(self):
        words = " ".join((ROOT / "README.md").read_text().split())
        record = json.loads((BENCHMARKS / "results/context-llama-3.2-1b-h200.json").read_text())
        ms = {row["contender"]: row["median_ms"] for row in record["context"] if row["context"] == 32768}
        ours, dynamic, compiled = (_range([ms[name]]) for name in ("graph", "dynamic", "static-compiled"))
        assert f"With a text of 32,768 tokens, llama-3.2-1b takes {ours} ms per token" in words
        assert f"where `DynamicCache` takes {dynamic} and `StaticCache` compiled {compiled}." in words
        room = {row["max_cache_len"]: row["median_ms"] for row in record["capacity"] if row["contender"] == "graph"}
        assert f"takes {room[1024]:.2f} ms in a cache for 1,024 and {room[32768]:.2f} ms in one for 32,768;" in words

    def test_what_the_readme_says_of_exact(self):
        words = " ".join((ROOT / "README.md").read_text().split())
        records = [json.loads(path.read_text()) for path in self.paths if path.stem.startswith("exact")]
        inside, usual = ([d for r in records for d in r["differences"][side].values()] for side in ("exact", "usual"))
        assert set(inside) == {0.0}
        assert f"0.0 in each of {len(inside)} comparisons (" in words
        assert f"where without `exact` it went up to {max(usual):.2g}" in words
        models = [(r["workload"]["model"], r["workload"]["dtype"]) for r in records]
        assert len(models) == 6
        assert sorted(models) == [(m, d) for m in sorted({m for m, _ in models}) for d in ("bfloat16", "float16")]
        assert "comparisons (three models in bf16 and fp16)" in words
        assert "It costs time there:" in words
        times = [r["ms"] for r in records]
        ratios = {
            name: _range([ms["exact"][name]["median"] / ms["usual"][name]["median"] for ms in times], digits)
            for name, digits in zip(times[0]["usual"], (2, 2, 3), strict=True)
        }
        short, long, step = ratios.values()
        assert f"a decode step of `GraphDecoder` took {step} times as long" in words
        assert f"a prompt of 512 tokens {short} times, one of 4,096 {long} times" in words


def _first_tokens(row):
    """Milliseconds to the first token in one run: of the decoder, and of all others but its other setting."""
    ms = {name: summary["first_token_ms"]["median"] for name, summary in row.items()}
    others = [value for name, value in ms.items() if not name.startswith("graph")]
    return f"{ms['graph']:.0f}", f"{min(others):.0f} to {max(others):.0f}"


def _listed(words):
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def _range(figures, digits=2):
    """As the README says it: one figure, or from the least to the greatest."""
    ends = dict.fromkeys(f"{figure:.{digits}g}" if figure < 10 else f"{figure:.0f}" for figure in sorted(figures))
    return " to ".join(list(ends)[:: max(1, len(ends) - 1)])


def test_the_scripts_import_neither_datasets_nor_evaluate():
    scripts = sorted(path.stem for path in BENCHMARKS.glob("*.py"))
    blocked = f"import sys; sys.modules.update(datasets=None, evaluate=None); sys.path.insert(0, {str(BENCHMARKS)!r})"
    code = "\n".join([blocked, *(f"import {name}" for name in scripts), "print('all imported')"])
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == "all imported", result.stderr


def test_a_failure_at_once_does_not_keep_the_program_from_ending():
    code = (
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        "from measure import Bandwidth\nfrom processes import Failed, FreshProcess\n"
        "if __name__ == '__main__':\n    FreshProcess(Bandwidth, 'too', 'many')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert result.returncode == 1
    assert "TypeError" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("script", ["bench_generation", "bench_context", "bench_speedup"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "lama"], "'lama' is no folder, no hub id (owner/name) and no short name"),
        (["--device", "banana"], "--device banana is no device: use cpu, cuda or cuda:0"),
        (["--device", "meta"], "know how to wait for cpu and cuda only"),
        (["--device", "cuda:64"], "--device cuda:64: this machine has"),
        (["--json", "nowhere/x.json"], "--json nowhere/x.json: there is no folder nowhere to write to"),
        (["--plot", "x.foo"], "--plot x.foo: a picture is .png, .svg or .pdf"),
        (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
    ],
)
def test_bad_arguments_of_every_script(run, script, arguments, message):
    result = run(script, *([] if arguments[0] == "--model" else ["--model", "llama"]), *arguments)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith(f"{script}.py: ")
    assert message in result.stderr.splitlines()[-1]


def test_other_kinds_of_model(run, tmp_path):
    from transformers import BloomConfig, T5Config

    T5Config().save_pretrained(tmp_path / "t5")
    result = run("bench_generation", "--model", tmp_path / "t5", "--device", "cpu")
    assert result.returncode == 2
    assert "is an encoder-decoder" in result.stderr
    BloomConfig().save_pretrained(tmp_path / "bloom")  # no limit to its text, and here no weights
    result = run("bench_speedup", "--model", tmp_path / "bloom", "--device", "cpu")
    assert result.returncode == 2
    assert "Cannot load" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_nothing_that_can_run_here(run):
    for script in ("bench_generation", "bench_context"):
        result = run(script, "--model", "llama", "--device", "cpu", "--contenders", "static-compiled,graph")
        assert result.returncode == 2
        assert "nothing can run on cpu (static-compiled: generate compiles on a GPU only; graph:" in result.stderr


def test_a_contender_that_cannot_be_loaded_does_not_stop_a_sweep(run, monkeypatch):
    import bench_context
    from processes import Failed, FreshProcess

    def some_fail(cls, name, *args):
        if name == "static":
            raise Failed("OutOfMemoryError", "no room")
        return FreshProcess(cls, name, *args)

    monkeypatch.setattr(bench_context, "FreshProcess", some_fail)
    sizes = ["--contexts", 12, "--capacities", 16, "--steps", 4, "--rounds", 1, "--contenders", "static,contiguous"]
    result = run("bench_context", "--model", "llama", "--device", "cpu", *sizes)
    assert result.returncode == 1
    assert "static was not run: FAILED, OutOfMemoryError: no room." in result.stdout
    assert "| contiguous |" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "lama"], "'lama' is no folder, no hub id (owner/name) and no short name"),
        (["--contenders", "dynamic,turbo"], "unknown turbo: choose from no-cache, dynamic"),
        (["--prompt-len", 500, "--new-tokens", 13], "513 tokens: more than the 512 of llama's context"),
        (["--new-tokens", 2], "--new-tokens must be at least 3, got 2"),
        (["--trials", 0], "--trials must be at least 1, got 0"),
        (["--max-cache-len", 10], "--max-cache-len 10 is less than 256 + 128 tokens"),
    ],
)
def test_bad_arguments_get_one_line_and_exit_status_2(run, arguments, message):
    result = run("bench_generation", *([] if arguments[0] == "--model" else ["--model", "llama"]), *arguments)
    assert result.returncode == 2
    assert message in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
