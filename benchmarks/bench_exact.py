"""How far apart logits are that should be the same, without and inside `exact`, and what `exact`
costs.

    python benchmarks/bench_exact.py --model llama-3.2-1b --dtype float16 --json exact.json
    python benchmarks/bench_exact.py --model llama --device cpu --prompt-len 60 --new-tokens 20 --prefills 64

The largest difference of logits in each comparison:
  chunks     one pass without a cache, and the same tokens through the cache in chunks and single tokens
  decoder    the logits of `GraphDecoder`, and those of one pass without a cache over its tokens
  batch      a batch row among eight through the cache, and alone
  padding    a batch row with left padding beside a longer one, and without padding
  capacity   in a cache of just enough capacity, and of 32 times as much
  crop       after a part of the sequence was cropped and written again
Cost: milliseconds of a prompt and of a decode step of `GraphDecoder`, without and inside `exact` in
turns; the median (minimum to maximum) of 5 trials after one for warming up. `--prefills 0` leaves
the cost out. Exit status 1 when a difference inside `exact` is not zero, 2 for a bad argument.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tables
import torch
from measure import TimedGenerate, seconds, spread
from outputs import at_least, benchmark_parser, run_benchmark
from provenance import provenance
from record_figures import conditions, differs_inside_exact
from tqdm import tqdm
from transformers import PreTrainedModel
from workload import BadArgument, Workload, check_workload_arguments

from hf_static_kv import GraphDecoder, StaticContiguousCache, exact

Record = dict[str, Any]
TRIALS = 5
SIDES = ("usual", "exact")
ROWS, PADDING = 8, 37


class Comparisons:
    """Pairs of computations that should give the same logits, over `prompt_len` + `new_tokens`
    tokens.
    """

    def __init__(self, model: PreTrainedModel, prompt_len: int, new_tokens: int) -> None:
        self.model: Any = model
        self.prompt_len, self.new_tokens, self.length = (
            prompt_len,
            new_tokens,
            prompt_len + new_tokens,
        )
        generator = torch.Generator().manual_seed(0)
        vocab_size = model.config.get_text_config().vocab_size
        self.ids = torch.randint(vocab_size, (ROWS, self.length), generator=generator).to(
            model.device
        )

    def cached_logits(
        self,
        ids: torch.Tensor,
        singles: int,
        capacity: int | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Two chunks of a prompt, then `singles` tokens:

        the logits from the prompt's last token on.
        """
        cache = StaticContiguousCache.from_model(self.model, capacity or ids.shape[1], len(ids))
        prompt = ids.shape[1] - singles
        sizes, end, logits = [prompt // 3, prompt - prompt // 3, *[1] * singles], 0, []
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

    def chunks(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cached_logits(self.ids[:1], 24), self.uncached_logits(self.ids[:1], 24)

    def decoder(self) -> tuple[torch.Tensor, torch.Tensor]:
        cache, decoder = StaticContiguousCache.from_model(self.model, self.length), GraphDecoder()
        output = self.model.generate(
            self.ids[:1, : self.prompt_len],
            past_key_values=cache,
            custom_generate=decoder,
            max_new_tokens=self.new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        if decoder.fallback_reason is not None:
            raise BadArgument(f"GraphDecoder falls back on this model: {decoder.fallback_reason}")
        return torch.stack(output.logits, dim=1), self.uncached_logits(
            output.sequences[:, :-1], self.new_tokens - 1
        )

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        alone = [self.cached_logits(self.ids[row : row + 1], 4) for row in range(ROWS)]
        return self.cached_logits(self.ids, 4), torch.cat(alone)

    def padding(self) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.ones_like(self.ids[:2])
        mask[0, :PADDING] = 0
        padded = self.cached_logits(self.ids[:2], 8, mask=mask)[:1]
        return padded, self.cached_logits(self.ids[:1, PADDING:], 8)

    def capacity(self) -> tuple[torch.Tensor, torch.Tensor]:
        ids = self.ids[:1]
        return self.cached_logits(ids, 8), self.cached_logits(ids, 8, capacity=32 * self.length)

    def crop(self) -> tuple[torch.Tensor, torch.Tensor]:
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
        self.device, self.generate = workload.device, TimedGenerate(model, "graph", workload)
        self.prompts = {length: workload.prompt(length)["input_ids"] for length in prefills}
        self.cache = StaticContiguousCache.from_model(model, max(prefills))

    def trial(self) -> dict[str, float]:
        ms = {f"prompt of {length}": self._prefill_ms(ids) for length, ids in self.prompts.items()}
        return ms | {"a decode step of `GraphDecoder`": self.generate.step_ms()}

    def _prefill_ms(self, ids: torch.Tensor) -> float:
        self.cache.reset()
        return (
            seconds(
                lambda: self.model(ids, past_key_values=self.cache, logits_to_keep=1), self.device
            )
            * 1e3
        )


def costs(model: PreTrainedModel, workload: Workload, prefills: list[int]) -> dict[str, Record]:
    """Both sides in turns, each with its spread over the trials."""
    cost = Cost(model, workload, prefills)
    trials: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for _ in tqdm(range(TRIALS + 1), disable=None, leave=False):
        for side in SIDES:
            with _side(model, side):
                trials[side].append(cost.trial())
    warm = {side: rows[1:] for side, rows in trials.items()}
    return {
        side: {name: spread([row[name] for row in rows]) for name in rows[0]}
        for side, rows in warm.items()
    }


def _side(model: PreTrainedModel, name: str) -> AbstractContextManager[None]:
    return exact(model) if name == "exact" else nullcontext()


@torch.no_grad()
def measure(args: argparse.Namespace) -> Record:
    workload, prefills = chosen(args), [length for length in args.prefills if length]
    model, differences = workload.build_model(), {}
    for side in SIDES:
        with _side(model, side):
            differences[side] = Comparisons(
                model, workload.prompt_len, workload.new_tokens
            ).differences()
    shown = {key: getattr(workload, key) for key in ("model", "dtype", "prompt_len", "new_tokens")}
    record = {**provenance(workload.device), "workload": shown, "differences": differences}
    return {**record, "ms": costs(model, workload, prefills)} if prefills else record


def report(record: Record) -> str:
    return f"{conditions(record)}\n\n{tables.exact([record], spread=True)}"


def parser() -> argparse.ArgumentParser:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--prompt-len", type=int, default=600)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument(
        "--prefills", type=int, nargs="+", default=[512, 4096], help="prompts to time; 0: no cost"
    )
    return parser


def chosen(args: argparse.Namespace) -> Workload:
    if args.batch_size != 1:
        raise BadArgument(
            f"--batch-size {args.batch_size}: the comparisons have batches of their own"
        )
    at_least(prompt_len=(args.prompt_len, PADDING + 16), new_tokens=(args.new_tokens, 2))
    at_least(prefills=(min(args.prefills), 0))
    capacity = args.prompt_len + args.new_tokens
    check_workload_arguments(args, max([capacity, *args.prefills]))
    sizes = (args.prompt_len, args.new_tokens, 1, capacity, args.real_weights)
    return Workload(args.model, args.device, args.dtype, *sizes)


def main() -> int:
    return run_benchmark(parser(), measure, report, failed=differs_inside_exact)


if __name__ == "__main__":
    sys.exit(main())
