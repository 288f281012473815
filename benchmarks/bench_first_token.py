"""How long the first token of a call takes: by the length of its prompt, in a batch, in a chat.

    python benchmarks/bench_first_token.py --model llama-3.2-1b --json first-token.json
    python benchmarks/bench_first_token.py --model llama --device cpu --lengths 16 40 --held 100 --trials 3

All contenders run in this process; attached ones on twins of the model, which share its weights. The
prompts of a case differ from trial to trial, and have one length. Each case runs four times before
it is measured: `attach` lets the model compute the first prompt of a size, and captures a pass for
the second. These calls are in the record as `warm_up_s`. Then the trials of each contender follow
one another (`trials_s`). `among_others_s` are trials in turns with the other contenders: a call
finds the caches of the CPU full of what they have left there, as in a busy process.
  prompt   `generate(max_new_tokens=1)` with a prompt of each of `--lengths`
  batch    the same with `--batch` rows of `--batch-len` tokens
  turn     `--held` tokens that an earlier call has read, and `--new` others in each trial, answered
           with one token and with `--answered`; `attach` keeps the prefix (`reuse_prefix=True`)
Exit status 1 if a pass was not captured on a GPU, 2 for a bad argument.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import measure as timing
import torch
from contenders import NextKeywords
from measure import in_turns, spread
from outputs import at_least, benchmark_parser, run_benchmark
from records import Record, on_cpu
from tqdm import tqdm
from transformers import PreTrainedModel, StaticCache
from workload import Workload, build_workload

from hf_static_kv import Attachment, attach

_WARM_UP = 4


class Side:
    """One contender: an instance of the model, and the keywords of each of its calls."""

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        next_keywords: NextKeywords = dict,
        attachment: Attachment | None = None,
    ) -> None:
        self.name = name
        self.model: Any = model
        self.next_keywords = next_keywords
        self.attachment = attachment

    def generate(self, ids: torch.Tensor, new_tokens: int, **more: Any) -> torch.Tensor:
        """The prompt and its new tokens. A cache is reset here, as its user would do."""
        prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        how = {"do_sample": False, "max_new_tokens": new_tokens, **self.next_keywords(), **more}
        tokens: torch.Tensor = self.model.generate(**prompt, **how)
        return tokens

    def seconds(self, ids: torch.Tensor, new_tokens: int) -> float:
        taken = timing.seconds(lambda: self.generate(ids, new_tokens), str(self.model.device))
        if self.attachment is not None:
            self.attachment.decoder.steps.wait_for_kernels()
        return taken


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """Another instance of the model, with the same tensors as weights."""
    return copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})


def attached_twin(name: str, model: PreTrainedModel, **settings: Any) -> Side:
    instance = twin(model)
    return Side(name, instance, attachment=attach(instance, **settings))


class Case(NamedTuple):
    name: str
    rows: int
    held: int  # tokens of the call before
    tokens: int
    answered: int = 1


def cases(args: argparse.Namespace) -> list[Case]:
    prompts = [Case("prompt", 1, 0, length) for length in args.lengths]
    batch = [Case("batch", args.batch, 0, args.batch_len)] if args.batch else []
    turns = [Case("turn", 1, args.held, args.new, answered) for answered in (1, args.answered)]
    return prompts + batch + (turns if args.held else [])


class Contestant:
    """One side in one case."""

    def __init__(self, side: Side, case: Case, device: str) -> None:
        self.side = side
        self.case = case
        self.device = device
        self.generator = torch.Generator().manual_seed(0)
        self.held = self.ids(case.held)

    def ids(self, length: int) -> torch.Tensor:
        vocab_size = self.side.model.config.get_text_config().vocab_size
        shape = (self.case.rows, length)
        return torch.randint(vocab_size, shape, generator=self.generator).to(self.device)

    def seconds(self) -> float:
        ids = torch.cat([self.held, self.ids(self.case.tokens)], dim=1)
        return self.side.seconds(ids, self.case.answered)


def sides_of(model: PreTrainedModel, case: Case) -> list[Side]:
    longest = case.held + case.tokens + case.answered

    def static() -> dict[str, Any]:
        return {"past_key_values": StaticCache(model.config, max_cache_len=longest)}

    settings = {"reuse_prefix": True} if case.held else {}
    sides = [attached_twin("attach", model, **settings), Side("dynamic", model)]
    if case.answered == 1:
        sides.append(Side("static", model, static))
        sides.append(Side("no-cache", model, lambda: {"use_cache": False}))
    return sides


def run(case: Case, model: PreTrainedModel, args: argparse.Namespace) -> list[Record]:
    """A row for each contender."""
    sides = sides_of(model, case)
    calls: dict[str, Callable[[], float]] = {}
    warm_up: dict[str, list[float]] = {}
    reserved: dict[str, int] = {}
    for side in sides:
        contestant = Contestant(side, case, args.device)
        calls[side.name] = contestant.seconds
        if case.held:
            side.generate(contestant.held, 1)
        before = reserved_bytes(args.device)
        warm_up[side.name] = [calls[side.name]() for _ in range(_WARM_UP)]
        reserved[side.name] = reserved_bytes(args.device) - before
    found = {name: [call() for _ in range(args.trials)] for name, call in calls.items()}
    among_others = in_turns(calls, args.trials) if case.answered == 1 else {}
    rows = []
    for name, trials in found.items():
        attachment = sides[0].attachment if name == "attach" else None
        row = case._asdict() | {"case": case.name, "name": name, "trials_s": trials}
        row |= {"warm_up_s": warm_up[name], "reserved_bytes": reserved[name]}
        if name in among_others:
            row["among_others_s"] = among_others[name]
        if attachment is not None:
            passes = attachment.decoder.prompts
            row |= {"passes": len(passes.steps), "reason": passes.reason}
        rows.append(row | {"ms": spread([taken * 1e3 for taken in trials])})
    return rows


def reserved_bytes(device: str) -> int:
    """What torch holds for tensors and graphs, without what it keeps for later tensors."""
    if not device.startswith("cuda"):
        return 0
    timing.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def measure(args: argparse.Namespace) -> Record:
    workload = chosen(args)
    model = workload.build_model()
    rows = []
    for case in tqdm(cases(args), desc="cases", disable=None, leave=False):
        rows += run(case, model, args)
        timing.synchronize(args.device)
    return {**workload.origin(), "trials": args.trials, "rows": rows}


def problems(record: Record) -> list[str]:
    ours = [row for row in record["rows"] if row["name"] == "attach"]
    missing = [row for row in ours if not row["passes"] and not on_cpu(record)]
    return [
        f"{row['case']} of {row['tokens']}: no pass was captured: {row['reason']}"
        for row in missing
    ]


def parser() -> argparse.ArgumentParser:
    parser = benchmark_parser(__doc__, lengths=False)
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", default=[16, 128, 512, 2048], help="%(default)s")
    add("--batch", type=int, default=8, help="rows (%(default)s); 0: no batch")
    add("--batch-len", type=int, default=512, help="%(default)s")
    add("--held", type=int, default=2000, help="%(default)s; 0: no chat")
    add("--new", type=int, default=24, help="%(default)s")
    add("--answered", type=int, default=32, help="%(default)s")
    add("--trials", type=int, default=20, help="%(default)s")
    return parser


def chosen(args: argparse.Namespace) -> Workload:
    at_least(args, lengths=1, batch=0, batch_len=1, held=0, new=1, answered=2, trials=1)
    args.prompt_len = max(case.held + case.tokens for case in cases(args))
    args.new_tokens = args.answered
    return build_workload(args)


def main() -> int:
    return run_benchmark(parser(), measure, problems)


if __name__ == "__main__":
    sys.exit(main())
