"""What drafted tokens (`prompt_lookup_num_tokens`) gain, by how many of them are right.

    python benchmarks/bench_drafts.py --model llama-3.2-1b --json drafts.json
    python benchmarks/bench_drafts.py --model llama --device cpu --trials 2

All cases run in this process on one model, in turns, greedily. After a call for one token and a call
for all N as warm-up, each trial is a call for one token (T1) and a call for N (TN): a token takes
(TN - T1) / (N - 1).
  plain          `GraphDecoder()` without drafts
  lookup         with drafts from the text itself: of a miniature or another model with weights its
                 corpus, else random tokens
  transformers   the same with transformers' own loop and `DynamicCache`, `--plain-tokens` only
  forced p       drafts of which each is right with probability p, whatever the model selects: it
                 computes all the same. Expected: (1 - p^(K + 1)) / (1 - p) tokens in a pass
  always 0.0     all drafts are wrong, and every pass has them: what such a pass costs
Exit status 1 if the decoder fell back or had no drafts, 2 for a bad argument.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measure import TimedGenerate, in_turns, spread, token_ms
from outputs import at_least, benchmark_parser, run_benchmark
from records import Record
from transformers import PreTrainedModel
from workload import Workload, build_workload

from hf_static_kv import testing
from hf_static_kv.decoding import speculation
from hf_static_kv.program import drafting

CORPUS = Path(__file__).parents[1] / "examples" / "data" / "tinyshakespeare.txt"


class Forced:
    """Takes the place of what a model selects, and of what is looked up, inside `applied`."""

    def __init__(self, workload: Workload, vocab_size: int, right: float, num_drafts: int) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = workload.batch_size, workload.max_cache_len + num_drafts + 2
        self.answer = torch.randint(vocab_size, shape, generator=generator).to(workload.device)
        is_wrong = torch.rand(shape, generator=generator) >= right
        self.drafts = (self.answer + is_wrong.to(workload.device)) % vocab_size
        self.ahead = torch.arange(num_drafts, device=workload.device) + 1

    @contextmanager
    def applied(self, always: bool) -> Iterator[None]:
        names = [(drafting, "end_pass"), (drafting.DraftedStep, "_select"), (speculation, "_PAYS")]
        before = [(*name, getattr(*name)) for name in names]
        end, select, pays = (value for *_, value in before)

        def end_pass(state: Any, size: int, drafted: Any = None) -> None:
            if drafted is None:
                torch.gather(self.answer, 1, state.lengths[:, None], out=state.selection.token)
            end(state, size, drafted)
            if size:  # else an assistant drafts
                torch.gather(self.drafts, 1, state.lengths[:, None] + self.ahead, out=state.drafts)
                state.found.fill_(len(self.ahead))

        def forced_selection(step: Any, logits: torch.Tensor) -> torch.Tensor:
            select(step, logits)
            at = step.positions.full.slots + 1
            return self.answer.gather(1, at.clamp(max=self.answer.shape[1] - 1))

        replaced = [end_pass, forced_selection, -1.0 if always else pays]
        for (owner, name), value in zip(names, replaced, strict=True):
            setattr(owner, name, value)
        try:
            yield
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)


def text_of(workload: Workload, length: int) -> torch.Tensor:
    """The first tokens [1, length] of the corpus, if the model has weights and a tokenizer."""
    _, tokenizer = testing.load_model(workload.model, device="cpu", dtype=torch.float32)
    ids = tokenizer(CORPUS.read_text()[: 20 * length], return_tensors="pt").input_ids
    return ids[:, :length].to(workload.device)


class Case(NamedTuple):
    """What is measured: calls of a contender for so many tokens, in a context."""

    name: str
    model: PreTrainedModel
    contender: str
    new_tokens: int
    how: dict[str, Any]  # keywords of its calls
    context: Callable[[], AbstractContextManager[None]] = nullcontext


def cases_of(workload: Workload, args: argparse.Namespace) -> Iterator[Case]:
    model = workload.build_model()
    lookup = {"prompt_lookup_num_tokens": args.drafts}
    few = min(args.plain_tokens, workload.new_tokens)
    size = model.config.get_text_config().vocab_size
    graph = partial(Case, model=model, contender="graph", new_tokens=workload.new_tokens)
    yield graph("plain", how={})
    yield graph("lookup", how=lookup)
    yield Case("transformers", model, "dynamic", few, lookup)
    for right in args.right:
        forced = Forced(workload, size, right, args.drafts)
        yield graph(f"forced {right}", how=lookup, context=partial(forced.applied, False))
    yield always_wrong("always 0.0", model, workload, args.drafts)


def always_wrong(name: str, model: PreTrainedModel, workload: Workload, drafts: int) -> Case:
    """Every pass has drafts, and adds one token."""
    size = model.config.get_text_config().vocab_size
    forced = Forced(workload, size, 0.0, drafts)
    lookup = {"prompt_lookup_num_tokens": drafts}
    context = partial(forced.applied, True)
    return Case(name, model, "graph", workload.new_tokens, lookup, context)


def measure_cases(
    workload: Workload, cases: Iterable[Case], trials: int, text: torch.Tensor | None = None
) -> list[Record]:
    """A row of each case; the first is the plain one. `text`: the prompt, in the place of random tokens."""
    rows: dict[str, Record] = {}
    calls = {}
    for case in cases:
        side = TimedGenerate(case.model, case.contender, workload)
        if text is not None:
            side.prompt = {"input_ids": text, "attention_mask": torch.ones_like(text)}
        calls[case.name] = partial(timed_trial, side, case)
        calls[case.name]()
        decoder = side.keywords.get("custom_generate")
        row: Record = {"case": case.name, "new_tokens": case.new_tokens}
        row["fallback_reason"] = decoder and decoder.fallback_reason
        if decoder is not None and case.how:
            row["draft_reason"] = decoder.draft_reason
            row |= {"drafted_passes": decoder.accepted.passes}
            row |= {"accepted_drafts": decoder.accepted.tokens}
            row |= {"numbers_of_drafts": dict(sorted(decoder.accepted.numbers.items()))}
        rows[case.name] = row
        calls[case.name]()  # a kernel may take over
    times = in_turns(calls, trials)
    first = next(iter(rows.values()))
    for name, row in rows.items():
        row["trials_s"] = times[name]
        row["ms"] = spread(token_ms(row["trials_s"], row["new_tokens"]))
        row["times_plain"] = first["ms"]["median"] / row["ms"]["median"]
    return list(rows.values())


def timed_trial(side: TimedGenerate, case: Case) -> list[float]:
    """Seconds of a call for one token, and of a call for all."""
    with case.context():
        return [side.seconds(length, **case.how) for length in (1, case.new_tokens)]


def measure(args: argparse.Namespace) -> Record:
    at_least(args, prompt_len=1, new_tokens=3, trials=1, plain_tokens=3, drafts=1)
    workload = build_workload(args)
    text = None if workload.has_random_weights else text_of(workload, workload.prompt_len)
    rows = measure_cases(workload, cases_of(workload, args), args.trials, text)
    return {**workload.origin(), "trials": args.trials, "drafts": args.drafts, "rows": rows}


def problems(record: Record) -> list[str]:
    reasons = [(row["case"], row.get("fallback_reason")) for row in record["rows"]]
    reasons += [(row["case"], row.get("draft_reason")) for row in record["rows"]]
    return [f"{case}: {reason}" for case, reason in reasons if reason]


def parser() -> argparse.ArgumentParser:
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("--drafts", type=int, default=8, help="in a pass (%(default)s)")
    add_case_arguments(parser, [1.0, 0.8, 0.7, 0.6, 0.3, 0.0])
    return parser


def add_case_arguments(parser: argparse.ArgumentParser, right: list[float]) -> None:
    """Those of forced cases, with the shares of right drafts."""
    add = parser.add_argument
    add("--right", type=float, nargs="*", default=right, help="%(default)s")
    add("--plain-tokens", type=int, default=64, help="limit for transformers' loop (%(default)s)")
    add("--trials", type=int, default=5, help="%(default)s")


def main() -> int:
    return run_benchmark(parser(), measure, problems)


if __name__ == "__main__":
    sys.exit(main())
