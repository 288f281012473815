"""`generate_batch` of many requests of unlike lengths: tokens a second of all answers.

    python benchmarks/bench_batching.py --model llama-3.2-1b --json batching.json
    python benchmarks/bench_batching.py --model llama --device cpu --requests 8 --baseline-requests 4

All contenders run in this process, on twins of the model that share its weights. A prompt has 20 to
`--prompt-len` tokens, an answer 10 to `--new-tokens`, drawn at random, the same for all.
  attach        `generate_batch`'s manager of an attached model
  packed        the same requests by hand: batches of 64 by the length of the answer, padded at the
                left, each as long as its longest answer, by `generate` of an attached model
  transformers  transformers' own manager, with the first `--baseline-requests` of the requests, once,
                after two of them: with all it takes minutes; `attach` has a row with as many, too
`attach` runs `--trials` times after two runs in which steps and prompts are captured.
Exit status 1 if a request got fewer tokens than it asked for, 2 for a bad argument.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from typing import Any, NamedTuple

import measure as timing
import torch
from bench_first_token import attached_twin, twin
from measure import spread
from outputs import at_least, benchmark_parser, run_benchmark
from records import Record
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel
from workload import Workload, build_workload

from hf_static_kv import detach

_WARM_UP = 2
_PACKED = 64
_SECONDS = 120  # without a result


class Asked(NamedTuple):
    ids: list[int]
    new_tokens: int


def requests_of(args: argparse.Namespace, vocab_size: int) -> list[Asked]:
    rng = random.Random(0)
    found = []
    for _ in range(args.requests):
        length, answer = rng.randint(20, args.prompt_len), rng.randint(10, args.new_tokens)
        found.append(Asked([rng.randrange(vocab_size) for _ in range(length)], answer))
    return found


def managed(model: PreTrainedModel, asked: list[Asked]) -> int:
    """Tokens of all answers."""
    how = GenerationConfig(do_sample=False, max_new_tokens=500, eos_token_id=-1, pad_token_id=0)
    model_with_manager: Any = model
    tokens = ended = 0
    with model_with_manager.continuous_batching_context_manager(how) as manager:
        for ids, new_tokens in asked:
            manager.add_request(ids, max_new_tokens=new_tokens, eos_token_id=-1)
        while ended < len(asked):
            result = manager.get_result(timeout=_SECONDS)
            if result is None or result.error:
                raise RuntimeError("no result" if result is None else str(result.error))
            if result.is_finished():
                ended += 1
                tokens += len(result.generated_tokens)
    return tokens


def packed(model: PreTrainedModel, asked: list[Asked]) -> int:
    """Tokens that were asked for."""
    asked = sorted(asked, key=lambda one: one.new_tokens)
    for first in range(0, len(asked), _PACKED):
        batch = asked[first : first + _PACKED]
        longest = max(len(one.ids) for one in batch)
        ids = torch.tensor([[0] * (longest - len(one.ids)) + one.ids for one in batch])
        padding = torch.tensor([[longest - len(one.ids)] for one in batch])
        mask = (torch.arange(longest)[None] >= padding).long()
        how = {"max_new_tokens": batch[-1].new_tokens, "do_sample": False, "eos_token_id": None}
        on = str(model.device)
        run: Any = model.generate
        run(ids.to(on), attention_mask=mask.to(on), pad_token_id=0, **how)
    return sum(one.new_tokens for one in asked)


def case(
    name: str, model: PreTrainedModel, asked: list[Asked], warm_up: int, trials: int
) -> Record:
    run = packed if name == "packed" else managed
    wanted = sum(one.new_tokens for one in asked)
    taken, first = [], 0.0
    for trial in tqdm(range(warm_up + trials), desc=name, disable=None, leave=False):
        start = time.perf_counter()
        got = run(model, asked)
        timing.synchronize(str(model.device))
        seconds = time.perf_counter() - start
        first = first or seconds
        if trial >= warm_up:
            taken.append(seconds)
    return {
        "name": name,
        "requests": len(asked),
        "tokens": got,
        "tokens_wanted": wanted,
        "first_run_s": first,
        "trials_s": taken,
        "tokens_per_s": spread([wanted / seconds for seconds in taken]),
    }


def measured(args: argparse.Namespace) -> Record:
    workload = chosen(args)
    model = workload.build_model()
    model.generation_config.eos_token_id = None
    asked = requests_of(args, model.config.get_text_config().vocab_size)
    few = asked[: args.baseline_requests]
    rows = []
    for name in ("attach", "packed"):
        side = attached_twin(name, model)
        rows.append(case(name, side.model, asked, _WARM_UP, args.trials))
        if few and name == "attach":
            rows.append(case(name, side.model, few, 0, args.trials))
        detach(side.model)
    if few:
        own = twin(model)
        managed(own, few[:2])
        rows.append(case("transformers", own, few, 0, 1))
    return {**workload.origin(), "trials": args.trials, "rows": rows}


def problems(record: Record) -> list[str]:
    return [
        f"{row['name']}: {row['tokens']} of {row['tokens_wanted']} tokens"
        for row in record["rows"]
        if row["tokens"] != row["tokens_wanted"]
    ]


def parser() -> argparse.ArgumentParser:
    parser = benchmark_parser(__doc__)
    parser.set_defaults(prompt_len=1500, new_tokens=500)
    add = parser.add_argument
    add("--requests", type=int, default=256, help="%(default)s")
    add("--baseline-requests", type=int, default=24, help="of transformers' own (%(default)s)")
    add("--trials", type=int, default=3, help="%(default)s")
    return parser


def chosen(args: argparse.Namespace) -> Workload:
    at_least(args, requests=1, baseline_requests=0, trials=1, prompt_len=20, new_tokens=10)
    return build_workload(args)


def main() -> int:
    return run_benchmark(parser(), measured, problems)


if __name__ == "__main__":
    sys.exit(main())
