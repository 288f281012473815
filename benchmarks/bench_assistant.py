"""What an assistant (`assistant_model`) gains, by how many of its drafts are right.

    python benchmarks/bench_assistant.py --model llama-3.1-8b --assistant llama-3.2-1b --json assistant.json

All cases run in this process on one pair of models, in turns, greedily; a token is timed as in
bench_drafts.py.
  plain                  `GraphDecoder()` without drafts
  assistant alone        the assistant in the place of the model: the cost `a` of one of its passes
  pass of 16             every pass has 15 drafts, looked up and wrong: the cost `v` of a verification
  forced p               drafts of which each is right with probability p, whatever the models select:
                         they compute all the same
  transformers           transformers' own loop and `DynamicCache` without drafts, `--plain-tokens` only
  transformers forced p  its loop with this assistant and `--baseline-drafts` drafts a round

Costs are in plain steps. A round of k drafts adds (1 - p^(k + 1)) / (1 - p) tokens and costs v + k a.
`expected` is the speed-up by this formula, over the numbers of drafts that the rounds had;
`best_expected` that of the best fixed number, `best_number`.
Exit status 1 if the decoder fell back or had no drafts, 2 for a bad argument.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from bench_drafts import Case, Forced, add_case_arguments, always_wrong, measure_cases, problems
from outputs import at_least, benchmark_parser, run_benchmark
from records import Record
from transformers import PreTrainedModel
from workload import SHAPES, BadArgument, Workload, build_workload, find_config

from hf_static_kv.decoding.drafts import MOST_OF_ASSISTANT
from hf_static_kv.program import drafting

ALONE = "assistant alone"
VERIFICATION = f"pass of {MOST_OF_ASSISTANT + 1}"
CERTAIN = 1e4  # a logit: transformers goes on drafting while the assistant is certain


class ForcedAssistant(Forced):
    """The same with an assistant, whose drafts it replaces."""

    @contextmanager
    def applied(self, always: bool) -> Iterator[None]:
        append = drafting.append_draft

        def append_draft(state: Any, tokens: torch.Tensor) -> None:
            at = (state.lengths + 1 + state.found)[:, None]
            forced = self.drafts.gather(1, at.clamp(max=self.drafts.shape[1] - 1))
            append(state, forced[:, 0])

        with super().applied(always):
            drafting.append_draft = append_draft
            try:
                yield
            finally:
                drafting.append_draft = append

    @contextmanager
    def in_logits(
        self, model: PreTrainedModel, assistant: PreTrainedModel, num_drafts: int
    ) -> Iterator[None]:
        """For transformers' loop, which reads the logits of both models."""
        config: Any = assistant.generation_config
        before = config.num_assistant_tokens
        config.num_assistant_tokens = num_drafts
        with ExitStack() as hooks:
            for one, ids in ((model, self.answer), (assistant, self.drafts)):
                hooks.callback(one.register_forward_hook(select(ids)).remove)
            try:
                yield
            finally:
                config.num_assistant_tokens = before


def select(ids: torch.Tensor) -> Callable[..., Any]:
    """A hook that makes each token of `ids` [B, S] the one that its position selects."""

    def hook(module: object, args: object, output: Any) -> Any:
        end = output.past_key_values.get_seq_length()
        at = torch.arange(end - output.logits.shape[1] + 1, end + 1, device=ids.device)
        chosen = ids[:, at.clamp(max=ids.shape[1] - 1), None]
        output.logits = output.logits.scatter(2, chosen, CERTAIN)
        return output

    return hook


def cases_of(workload: Workload, args: argparse.Namespace) -> Iterator[Case]:
    model = workload.build_model()
    assistant = replace(workload, model=args.assistant).build_model()
    size = model.config.get_text_config().vocab_size
    few = min(args.plain_tokens, workload.new_tokens)
    how = {"assistant_model": assistant}
    graph = partial(Case, contender="graph", new_tokens=workload.new_tokens)
    yield graph("plain", model, how={})
    yield graph(ALONE, assistant, how={})
    yield always_wrong(VERIFICATION, model, workload, MOST_OF_ASSISTANT)
    forced = {p: ForcedAssistant(workload, size, p, MOST_OF_ASSISTANT) for p in args.right}
    for p, one in forced.items():
        yield graph(f"forced {p}", model, how=how, context=partial(one.applied, False))
    yield Case("transformers", model, "dynamic", few, {})
    for p, one in forced.items():
        context = partial(one.in_logits, model, assistant, args.baseline_drafts)
        yield Case(f"transformers forced {p}", model, "dynamic", few, how, context)


# --- the formula


def tokens_of(number: int, p: float) -> float:
    """Of a round with so many drafts, each right with probability p.

    >>> tokens_of(2, 0.5), tokens_of(3, 1.0)
    (1.75, 4.0)
    """
    return sum(p**n for n in range(number + 1))


def cost_of(number: int, costs: dict[str, float]) -> float:
    """Of the same round, in plain steps; without drafts it is one."""
    return costs["verification"] + number * costs["assistant"] if number else 1.0


def expected(rounds: dict[int, int], p: float, costs: dict[str, float]) -> float:
    """The speed-up where so many rounds have so many drafts, by their number.

    >>> expected({0: 3, 2: 1}, 0.5, {"verification": 1.5, "assistant": 0.25})
    0.95
    """
    tokens = sum(times * tokens_of(number, p) for number, times in rounds.items())
    cost = sum(times * cost_of(number, costs) for number, times in rounds.items())
    return tokens / cost


def add_expected(row: Record, p: float, costs: dict[str, float]) -> None:
    drafted = row["numbers_of_drafts"]
    passes, accepted = row["drafted_passes"], row["accepted_drafts"]
    row["accepted_per_pass"] = accepted / max(1, passes)
    without = max(0, row["new_tokens"] - 1 - passes - accepted)
    row["expected"] = expected({0: without, **drafted}, p, costs)
    of_number = {n: expected({n: 1}, p, costs) for n in range(1, MOST_OF_ASSISTANT + 1)}
    row["best_number"] = max(of_number, key=of_number.__getitem__)
    row["best_expected"] = of_number[row["best_number"]]


# --- the benchmark


def measure(args: argparse.Namespace) -> Record:
    at_least(args, prompt_len=2, trials=1, plain_tokens=3, baseline_drafts=1)
    workload = build_workload(args)
    at_least(args, new_tokens=MOST_OF_ASSISTANT + 1)  # a pass is tried with as many
    if workload.batch_size > 1:
        raise BadArgument(
            "transformers' loop for an assistant takes one row: leave --batch-size out"
        )
    sizes = [
        find_config(name).get_text_config().vocab_size for name in (args.model, args.assistant)
    ]
    if sizes[0] != sizes[1]:
        raise BadArgument(
            f"{args.model} and {args.assistant} need the same vocabulary, and have {sizes[0]} and "
            f"{sizes[1]} tokens"
        )
    rows = measure_cases(workload, cases_of(workload, args), args.trials)
    ms = {row["case"]: row["ms"]["median"] for row in rows}
    names = {"verification": VERIFICATION, "assistant": ALONE}
    costs = {name: ms[case] / ms["plain"] for name, case in names.items()}
    for row in rows:
        for p in args.right:
            if row["case"] == f"forced {p}":
                add_expected(row, p, costs)
    how = {"assistant": args.assistant, "baseline_drafts": args.baseline_drafts}
    return {**workload.origin(), **how, "trials": args.trials, "costs": costs, "rows": rows}


def parser() -> argparse.ArgumentParser:
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    default = "llama-3.2-1b" if torch.cuda.is_available() else "llama"
    add("--assistant", default=default, help=f"as --model ({', '.join(SHAPES)}); %(default)s")
    add("--baseline-drafts", type=int, default=5, help="a round of its loop has (%(default)s)")
    add_case_arguments(parser, [0.6, 0.7, 0.8])
    return parser


def main() -> int:
    return run_benchmark(parser(), measure, problems)


if __name__ == "__main__":
    sys.exit(main())
