"""How far apart logits are that should be the same, without and inside `exact`, and its cost.

    python benchmarks/bench_exact.py --model llama-3.2-1b --dtype float16 --json exact.json
    python benchmarks/bench_exact.py --model llama --device cpu --prompt-len 60 --new-tokens 20 --prefills 64

The largest difference of logits in each comparison:
  chunks     one pass without a cache, and the same tokens through the cache in chunks and singly
  decoder    the logits of `GraphDecoder`, and those of one pass without a cache over its tokens
  batch      a batch row among eight through the cache, and alone
  padding    a batch row with left padding beside a longer one, and without padding
  capacity   in a cache of just enough capacity, and of 32 times as much
  crop       after a part of the sequence was cropped and written again
Cost: milliseconds of a prompt and of a decode step of `GraphDecoder`, without and inside `exact`, 5
trials in turns after one for warming up; `--prefills 0` leaves it out. Exit status 1 if a
difference inside `exact` is not zero, 2 for a bad argument.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from measure import TimedGenerate, cost_of_exact, decoded_logits, on_both_sides, seconds
from outputs import at_least, benchmark_parser, run_benchmark
from records import Record, differs_inside_exact
from tqdm import tqdm
from transformers import PreTrainedModel
from workload import BadArgument, Workload, build_workload

from hf_static_kv import StaticContiguousCache

TRIALS = 5
ROWS = 8
PADDING = 37
Pair = tuple[torch.Tensor, torch.Tensor]


class Comparisons:
    """Pairs of computations that should give the same logits."""

    def __init__(self, model: PreTrainedModel, prompt_len: int, new_tokens: int) -> None:
        self.model: Any = model
        self.prompt_len = prompt_len
        self.new_tokens = new_tokens
        self.length = prompt_len + new_tokens
        generator = torch.Generator().manual_seed(0)
        vocab_size = model.config.get_text_config().vocab_size
        ids = torch.randint(vocab_size, (ROWS, self.length), generator=generator)
        self.ids = ids.to(model.device)

    def cached_logits(
        self,
        ids: torch.Tensor,
        singles: int,
        capacity: int | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The logits from the prompt's last token on: two chunks of it, then `singles` tokens."""
        cache = StaticContiguousCache.from_model(self.model, capacity or ids.shape[1], len(ids))
        prompt = ids.shape[1] - singles
        sizes = [prompt // 3, prompt - prompt // 3, *[1] * singles]
        end = 0
        logits = []
        for chunk in ids.split(sizes, dim=1):
            end += chunk.shape[1]
            keywords = {}
            if mask is not None:
                positions = (mask.cumsum(1) - 1).clamp(min=0)[:, end - chunk.shape[1] : end]
                keywords = {"attention_mask": mask[:, :end], "position_ids": positions}
            logits.append(self.model(chunk, past_key_values=cache, **keywords).logits[:, -1:])
        return torch.cat(logits[1:], dim=1)

    def uncached_logits(self, ids: torch.Tensor, singles: int) -> torch.Tensor:
        """The same logits from one pass without a cache."""
        logits: torch.Tensor = self.model(ids, use_cache=False).logits[:, -singles - 1 :]
        return logits

    def chunks(self) -> Pair:
        return self.cached_logits(self.ids[:1], 24), self.uncached_logits(self.ids[:1], 24)

    def decoder(self) -> Pair:
        prompt = {"input_ids": self.ids[:1, : self.prompt_len]}
        ids, logits = decoded_logits(self.model, prompt, self.new_tokens, do_sample=False)
        return logits, self.uncached_logits(ids[:, :-1], self.new_tokens - 1)

    def batch(self) -> Pair:
        alone = [self.cached_logits(self.ids[row : row + 1], 4) for row in range(ROWS)]
        return self.cached_logits(self.ids, 4), torch.cat(alone)

    def padding(self) -> Pair:
        mask = torch.ones_like(self.ids[:2])
        mask[0, :PADDING] = 0
        padded = self.cached_logits(self.ids[:2], 8, mask=mask)[:1]
        return padded, self.cached_logits(self.ids[:1, PADDING:], 8)

    def capacity(self) -> Pair:
        ids = self.ids[:1]
        return self.cached_logits(ids, 8), self.cached_logits(ids, 8, capacity=32 * self.length)

    def crop(self) -> Pair:
        cache = StaticContiguousCache.from_model(self.model, self.length)
        self.model(self.ids[:1, : self.prompt_len], past_key_values=cache)
        cache.crop(-self.prompt_len // 2)
        rest = self.ids[:1, cache.seq_len : self.prompt_len]
        again = self.model(rest, past_key_values=cache).logits
        return again, self.uncached_logits(self.ids[:1, : self.prompt_len], rest.shape[1] - 1)

    def differences(self) -> dict[str, float]:
        largest = {}
        names = ("chunks", "decoder", "batch", "padding", "capacity", "crop")
        for name in tqdm(names, disable=None, leave=False):
            one, other = getattr(self, name)()
            largest[name] = (one.float() - other.float()).abs().max().item()
        return largest


class Cost:
    """Milliseconds of each prompt and of a decode step, of one trial."""

    def __init__(self, model: PreTrainedModel, workload: Workload, prefills: list[int]) -> None:
        self.model: Any = model
        self.device = workload.device
        self.generate = TimedGenerate(model, "graph", workload)
        self.prompts = {length: workload.prompt(length)["input_ids"] for length in prefills}
        self.cache = StaticContiguousCache.from_model(model, max(prefills))

    def trial(self) -> dict[str, float]:
        ms = {f"prompt of {length}": self._prefill_ms(ids) for length, ids in self.prompts.items()}
        return ms | {"a decode step of `GraphDecoder`": self.generate.step_ms()}

    def _prefill_ms(self, ids: torch.Tensor) -> float:
        self.cache.reset()
        how = {"past_key_values": self.cache, "logits_to_keep": 1}
        return seconds(lambda: self.model(ids, **how), self.device) * 1e3


@torch.no_grad()
def measure(args: argparse.Namespace) -> Record:
    workload = chosen(args)
    model = workload.build_model()
    comparisons = Comparisons(model, workload.prompt_len, workload.new_tokens)
    differences = on_both_sides(model, comparisons.differences)
    record = {**workload.origin(), "differences": differences}
    if args.prefills != [0]:
        cost = Cost(model, workload, args.prefills)
        record["ms"] = cost_of_exact(model, cost.trial, TRIALS)
    return record


def parser() -> argparse.ArgumentParser:
    parser = benchmark_parser(__doc__)
    parser.set_defaults(prompt_len=600, new_tokens=256)
    words = "prompts to time; 0: no cost"
    parser.add_argument("--prefills", type=int, nargs="+", default=[512, 4096], help=words)
    return parser


def chosen(args: argparse.Namespace) -> Workload:
    if args.batch_size != 1:
        raise BadArgument(
            f"--batch-size {args.batch_size}: the comparisons have batches of their own"
        )
    at_least(args, prompt_len=PADDING + 16, new_tokens=2)
    if args.prefills != [0]:
        at_least(args, prefills=1)
    return build_workload(args, longest=max(args.prefills))


def main() -> int:
    return run_benchmark(parser(), measure, differs_inside_exact)


if __name__ == "__main__":
    sys.exit(main())
