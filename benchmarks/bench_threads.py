"""Calls of `generate` from several threads: tokens a second of all together, and how long one waits
beside another.

    python benchmarks/bench_threads.py --model llama-3.2-1b --json threads.json
    python benchmarks/bench_threads.py --model llama --device cpu --threads 1 4 --trials 2

All contenders run in this process, on twins of the model that share its weights. A trial starts all
threads at once; each makes one call. `attach` runs a case five times before it is measured, in which
steps and prompts are captured. The baseline is `DynamicCache` with `--baseline-tokens` new tokens a
call: its speed hardly depends on their number.
  together   `--threads` calls with prompts of one length
  beside     a call streams; after a while another begins: the time to its first token, and the
             longest pause of the stream since then
Exit status 1 if calls of several threads did not decode together on a GPU, 2 for a bad argument.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from typing import Any

import measure as timing
import torch
from bench_first_token import Side, attached_twin
from measure import spread
from outputs import at_least, benchmark_parser, run_benchmark
from records import Record, on_cpu
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer
from workload import Workload, build_workload

_WARM_UP = 5


class Clock(BaseStreamer):
    """Notes when each token comes."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def prompt(model: PreTrainedModel, length: int) -> torch.Tensor:
    vocab_size = model.config.get_text_config().vocab_size
    return torch.randint(vocab_size, (1, length)).to(model.device)


def seconds_together(side: Side, number: int, length: int, new_tokens: int) -> float:
    """From the start of all threads to the end of the last."""
    start = threading.Barrier(number + 1)
    errors: list[BaseException] = []

    def run() -> None:
        ids = prompt(side.model, length)
        start.wait()
        try:
            side.generate(ids, new_tokens)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(number)]
    for thread in threads:
        thread.start()
    start.wait()

    def join() -> None:
        for thread in threads:
            thread.join()

    taken = timing.seconds(join, str(side.model.device))
    if errors:
        raise errors[0]
    return taken


def together(side: Side, number: int, new_tokens: int, args: argparse.Namespace) -> Record:
    """The figures of one contender with so many threads."""
    how = number, args.prompt_len, new_tokens
    for _ in range(_WARM_UP if side.attachment is not None else 1):
        seconds_together(side, *how)
    trials = [seconds_together(side, *how) for _ in range(args.trials)]
    row: Record = {"name": side.name, "threads": number, "new_tokens": new_tokens}
    row |= {"trials_s": trials}
    row["tokens_per_s"] = spread([number * new_tokens / taken for taken in trials])
    if side.attachment is not None:
        loop = side.attachment.decoder.loop_of(side.model)
        row |= {"in_rows": loop.num_tokens, "bytes": loop.memory_bytes}
    return row


def beside(side: Side, args: argparse.Namespace) -> Record:
    """A call that begins while another streams, in ms."""
    first, pauses = [], []
    for trial in range(_WARM_UP + args.trials):
        stream, other = Clock(), Clock()
        ids = prompt(side.model, args.prompt_len)

        def run(ids: torch.Tensor = ids, stream: Clock = stream) -> None:
            side.generate(ids, args.stream, streamer=stream)

        thread = threading.Thread(target=run)
        thread.start()
        while len(stream.times) < 20 and thread.is_alive():
            time.sleep(0.001)
        ids = prompt(side.model, args.prompt_len)
        begin = time.perf_counter()
        side.generate(ids, 8, streamer=other)
        thread.join()
        if trial >= _WARM_UP:
            first.append((other.times[1] - begin) * 1e3)
            since = [at for at in stream.times if at > begin]
            pauses.append(max(b - a for a, b in zip([begin, *since], since, strict=False)) * 1e3)
    return {"name": side.name, "first_token_ms": spread(first), "longest_pause_ms": spread(pauses)}


def measure(args: argparse.Namespace) -> Record:
    workload = chosen(args)
    model = workload.build_model()
    model.generation_config.eos_token_id = None
    ours, default = attached_twin("attach", model), Side("dynamic", model)
    rows = []
    for number in tqdm(args.threads, desc="threads", disable=None, leave=False):
        rows.append(together(ours, number, args.new_tokens, args))
        if number in args.baseline_threads:
            rows.append(together(default, number, args.baseline_tokens, args))
    return {
        **workload.origin(),
        "trials": args.trials,
        "rows": rows,
        "beside": [beside(ours, args)],
    }


def problems(record: Record) -> list[str]:
    ours = [row for row in record["rows"] if row["name"] == "attach" and row["threads"] > 1]
    return [
        f"{row['threads']} threads: calls did not decode together"
        for row in ours
        if not row["in_rows"] and not on_cpu(record)
    ]


def parser() -> argparse.ArgumentParser:
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("--threads", type=int, nargs="+", default=[1, 2, 8, 32, 64], help="%(default)s")
    add("--baseline-threads", type=int, nargs="*", default=[1, 8], help="%(default)s")
    add("--baseline-tokens", type=int, default=32, help="%(default)s")
    add("--stream", type=int, default=400, help="tokens of the call that streams (%(default)s)")
    add("--trials", type=int, default=5, help="%(default)s")
    return parser


def chosen(args: argparse.Namespace) -> Workload:
    at_least(args, threads=1, baseline_threads=1, baseline_tokens=2, stream=40, trials=1)
    return build_workload(args)


def main() -> int:
    return run_benchmark(parser(), measure, problems)


if __name__ == "__main__":
    sys.exit(main())
