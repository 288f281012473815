"""How long `generate` takes with each cache: first token, decode, cold start, memory, share of the bandwidth.

    python benchmarks/bench_generation.py --model gemma3 --device cpu --compare
    python benchmarks/bench_generation.py --model llama-3.2-1b --compare --json llama.json --plot llama.png
    python benchmarks/bench_generation.py --model qwen3-1.7b --contenders dynamic,contiguous --trials 5

Each contender has a process of its own (and there its own copy of the model). In it:
  cold start   the first call of `generate`, cache included, from the loaded model to the last token, with no compiled
               code on disk; this is also the warm-up of what follows
  trials       in turns with the others; a call for one token (the time to first token, T1) and a plain call for all N
               (TN): a decode step takes (TN - T1) / (N - 1), the loop's own cost included
  latencies    one more call in the last turn, with a clock that waits for the device after each token
Median (least to greatest) over the trials; percentiles over the steps of the clocked call. Greedy, random prompts.
Exit status 1 when a contender failed, 2 for a bad argument.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from contenders import CONTENDERS, OURS, Keywords, bytes_held, contender_names, refuse_gpu_only
from generation_report import markdown, plot
from measure import Clock, bytes_per_step, latency, measure_bandwidth, seconds, spread
from outputs import benchmark_parser, check_outputs, write_outputs
from processes import Failed, FreshProcess
from tqdm import tqdm
from workload import BadArgument, Workload, check_workload_arguments, context_length

from hf_static_kv.testing import provenance

Record = dict[str, Any]


class Runner:
    """One contender with its model, in a process of its own."""

    def __init__(self, name: str, workload: Workload, new_tokens: int) -> None:
        self.name, self.workload, self.new_tokens = name, workload, new_tokens
        self.model, self.prompt = workload.build_model(), workload.prompt()
        self.next_keywords: Callable[[], Keywords] | None = None
        self.keywords: Keywords = {}
        self.loaded_bytes = 0
        # Known beforehand, so that a model whose bytes are not is told apart from one that does not run.
        self.bytes_per_step = bytes_per_step(self.model, workload.mean_prompt_len, new_tokens, workload.batch_size)

    def cold_start(self) -> float:
        """Seconds from the loaded model to the last token, the cache's own set-up included."""
        if self.workload.on_gpu:
            self.loaded_bytes = torch.cuda.memory_allocated(self.workload.device)
            torch.cuda.reset_peak_memory_stats(self.workload.device)
        return self._seconds(self.new_tokens)

    def trial(self) -> tuple[float, float]:
        """Seconds to the first token alone, and to the last one."""
        return self._seconds(1), self._seconds(self.new_tokens)

    def step_ms(self) -> list[float]:
        clock = Clock(self.workload.device, self.workload.batch_size)
        self._seconds(self.new_tokens, stopping_criteria=[clock])
        return [round(ms, 4) for ms in clock.step_ms]

    def sizes(self) -> Record:
        w, peak = self.workload, None
        if w.on_gpu:
            peak = torch.cuda.max_memory_allocated(w.device) - self.loaded_bytes
        return {
            "cache_bytes": bytes_held(self.keywords.get("past_key_values")),
            "peak_bytes": peak,
            "bytes_per_step": self.bytes_per_step,
        }

    def _seconds(self, tokens: int, **more: Any) -> float:
        return seconds(lambda: self._generate(tokens, **more), self.workload.device)

    def _generate(self, tokens: int, **more: Any) -> None:
        if self.next_keywords is None:
            set_up = CONTENDERS[self.name].set_up
            self.next_keywords = set_up(self.model, self.workload.max_cache_len, self.workload.batch_size)
        self.keywords = self.next_keywords()
        self.model.generate(**self.prompt, **self.keywords, **more, max_new_tokens=tokens, do_sample=False)


class Entry:
    """A contender's process and what it has measured; after a failure it is asked no more."""

    def __init__(self, name: str, workload: Workload, new_tokens: int, bar: tqdm) -> None:
        self.row: Record = {"name": name, "new_tokens": new_tokens}
        self.bar, self.process = bar, None
        if CONTENDERS[name].gpu_only and not workload.on_gpu:
            self.row["unavailable"] = CONTENDERS[name].gpu_only
            return
        with self._reporting("loading"):
            self.process = FreshProcess(Runner, name, workload, new_tokens)

    def measure(self, method: str) -> Any:
        """The result of this method of the `Runner`, or None where the contender has failed."""
        with self._reporting(method):
            return self.process.call(method) if self.process else None

    def close(self) -> None:
        if self.process:
            self.process.close()
            self.process = None

    @contextmanager
    def _reporting(self, words: str) -> Iterator[None]:
        self.bar.set_description(f"{self.row['name']}: {words.replace('_', ' ')}")
        try:
            yield
        except Failed as failure:
            self.row["error"] = str(failure)
            self.close()
        self.bar.update()


def contest(names: list[str], workload: Workload, uncached_tokens: int, trials: int) -> list[Record]:
    """A row for each contender: cold starts one by one, then trials in turns, each round with another first."""
    with tqdm(total=len(names) * (trials + 4), leave=False, disable=None) as bar, ExitStack() as stack:

        def load(name: str) -> Entry:
            tokens = workload.new_tokens if CONTENDERS[name].cached else min(uncached_tokens, workload.new_tokens)
            entry = Entry(name, workload, tokens, bar)
            stack.callback(entry.close)
            return entry

        with ThreadPoolExecutor() as pool:  # all at once: nothing is measured before the last one is there
            entries = list(pool.map(load, names))
        for entry in entries:
            entry.row["cold_start_s"] = entry.measure("cold_start")
            entry.row["trials_s"] = []
        for i in range(trials):
            for entry in _rotated(entries, i):
                entry.row["trials_s"].append(entry.measure("trial"))
                if i == trials - 1:
                    entry.row["step_ms"] = entry.measure("step_ms")
        for entry in entries:
            entry.row |= entry.measure("sizes") or {}
    return [entry.row for entry in entries]


def _rotated(entries: list[Entry], first: int) -> list[Entry]:
    first %= len(entries)
    return entries[first:] + entries[:first]


def summarize(row: Record, prompt_len: int, batch_size: int, bandwidth: float) -> Record:
    """The figures of one contender's raw times; `bandwidth` in bytes per second."""
    steps = row["new_tokens"] - 1
    step_s = [(total - first) / steps for first, total in row["trials_s"]]
    first_token = spread([first for first, _ in row["trials_s"]])
    warm = statistics.median(total for _, total in row["trials_s"])
    bytes_per_second = None if row["bytes_per_step"] is None else row["bytes_per_step"] / statistics.median(step_s)
    return {
        "first_token_ms": {key: value * 1e3 for key, value in first_token.items()},
        "prompt_tokens_per_s": batch_size * prompt_len / first_token["median"],
        "decode_ms": spread([s * 1e3 for s in step_s]),
        "decode_tokens_per_s": spread([batch_size / s for s in step_s]),
        "latency_ms": latency(row["step_ms"]),
        "cold_start_s": row["cold_start_s"],
        "cold_share": max(0.0, 1 - warm / row["cold_start_s"]),
        "gb_per_s": None if bytes_per_second is None else bytes_per_second / 1e9,
        "bandwidth_share": None if bytes_per_second is None else bytes_per_second / bandwidth,
    }


def measure_all(names: list[str], workload: Workload, uncached_tokens: int, trials: int) -> Record:
    """The whole record: every contender that ran with its summary, every one that did not with the reason."""
    bandwidth = measure_bandwidth(workload.device) / 1e9
    rows = contest(names, workload, uncached_tokens, trials)
    for row in rows:
        if "error" not in row and "unavailable" not in row:
            row["summary"] = summarize(row, workload.prompt_len, workload.batch_size, bandwidth * 1e9)
    return {
        **provenance(workload.device),
        "workload": asdict(workload),
        "random_weights": workload.has_random_weights,
        "trials": trials,
        "bandwidth_gb_per_s": bandwidth,
        "contenders": rows,
    }


def write_csv(record: Record, path: Path) -> None:
    """One line for each contender that ran; nested figures as columns like `decode_ms.median`."""
    rows = []
    for row in record["contenders"]:
        flat = {key: row.get(key) for key in ("name", "new_tokens", "cache_bytes", "peak_bytes", "bytes_per_step")}
        for key, value in row.get("summary", {}).items():
            flat |= {f"{key}.{part}": v for part, v in value.items()} if isinstance(value, dict) else {key: value}
        rows.append(flat)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def parse_args() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--prompt-len", type=int, help="default: 512, or half of a context below 1024")
    parser.add_argument("--new-tokens", type=int, help="default: 256, or a quarter of a context below 1024")
    parser.add_argument(
        "--max-cache-len", type=int, help="room of a static cache; default: just enough, at which StaticCache is best"
    )
    who = parser.add_mutually_exclusive_group()
    who.add_argument("--kv-cache", action="store_true", help="our cache alone; this is the default")
    who.add_argument("--no-kv-cache", action="store_true", help="use_cache=False alone")
    who.add_argument("--compare", action="store_true", help="every contender")
    who.add_argument("--contenders", type=contender_names, help=f"by commas, of {', '.join(CONTENDERS)}")
    parser.add_argument("--uncached-tokens", type=int, default=32, help="at most so many without a cache (%(default)s)")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--padded", action="store_true", help="rows of unlike length, padded to the left")
    parser.add_argument("--csv", type=Path, help="write the figures here")
    return parser.parse_args()


def chosen(args: argparse.Namespace) -> tuple[list[str], Workload]:
    """Who runs what, by the arguments; `BadArgument` where they cannot be met."""
    check_outputs(args)
    context = context_length(args) or 1024
    prompt_len = args.prompt_len if args.prompt_len is not None else min(512, context // 2)
    new_tokens = args.new_tokens if args.new_tokens is not None else min(256, context // 4)
    lowest = {"--prompt-len": (prompt_len, 1), "--new-tokens": (new_tokens, 3), "--trials": (args.trials, 1)}
    lowest |= {"--uncached-tokens": (args.uncached_tokens, 3)}
    for option, (value, least) in lowest.items():
        if value < least:
            raise BadArgument(f"{option} must be at least {least}, got {value}")
    check_workload_arguments(args, prompt_len + new_tokens)
    room = args.max_cache_len if args.max_cache_len is not None else prompt_len + new_tokens
    if room < prompt_len + new_tokens:
        raise BadArgument(f"--max-cache-len {room} is less than {prompt_len} + {new_tokens} tokens")
    names = ["no-cache"] if args.no_kv_cache else list(CONTENDERS) if args.compare else args.contenders or [OURS]
    refuse_gpu_only(names, args.device)
    sizes = (prompt_len, new_tokens, args.batch_size, room, args.real_weights, args.padded)
    return names, Workload(args.model, args.device, args.dtype, *sizes)


def main() -> int:
    args = parse_args()
    try:
        names, workload = chosen(args)
        record = measure_all(names, workload, args.uncached_tokens, args.trials)
    except (BadArgument, Failed) as error:
        print(f"bench_generation.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, BadArgument) else 1
    write_outputs(args, record, markdown, lambda record, path: plot([record], path))
    if args.csv:
        write_csv(record, args.csv)
    return 1 if any("error" in row for row in record["contenders"]) else 0


if __name__ == "__main__":
    sys.exit(main())
