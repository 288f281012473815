"""What `attach(model)` costs over the explicit objects, and the first token of a turn as a chat
grows.

    python benchmarks/bench_attach.py --model llama-3.2-1b --json benchmarks/results/attach-llama-3.2-1b-h200.json
    python benchmarks/bench_attach.py --model llama --device cpu --trials 3 --histories 64 128 --turns 3

All contenders run in this process, in turns of changing order. The model has twins: instances that
share its weights, so that all read the same memory. `detach` would free the pool and the captured
steps: a twin stays attached, and the model itself never is.
  overhead   after a call for all N tokens and a call for one as warm-up, each trial is a call for one token (T1, the
             time to first token) and a call for N (TN): a token takes (TN - T1) / (N - 1). The overhead is that of
             `attach` over the explicit objects in the same trial. Plain `generate` makes `--plain-tokens` only.
             On a CPU the explicit object is the cache alone, because `attach` uses no decoder there, and a prompt of
             fewer than 512 tokens is left to transformers.
  chat       the first call is a history of random tokens, in the place of the earlier turns. Then each turn adds
             `--turn-tokens` random tokens, a call for one token is timed, and `attach(model, reuse_prefix=True)`
             answers with `--answer-tokens`. The others are timed on the same prompts, and answer nothing: they keep
             nothing for the next turn. The warm-up is a whole chat of the same lengths with other tokens: a new length
             costs more the first time, and in one process the first contender would pay for the others.
Median (minimum to maximum) over the trials, or over the turns. Greedy, random prompts. Exit status
1 when a contender fell back on a GPU or reused no tokens in a chat, 2 for a bad argument.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from dataclasses import asdict
from itertools import permutations
from typing import Any

import measure as timing
import tables
import torch
from contenders import CONTENDERS, Keywords
from measure import spread
from outputs import at_least, benchmark_parser, run_benchmark
from provenance import provenance
from record_figures import ATTACH, attach_cost, chat_growth, conditions, on_cpu
from tqdm import tqdm
from transformers import PreTrainedModel
from workload import BadArgument, Workload, check_workload_arguments, context_length

from hf_static_kv import Attachment, GraphDecoder, attach

Record = dict[str, Any]
HISTORIES = [2048, 4096, 8192, 16384]


class Side:
    """One contender: an instance of the model, and the keywords of each of its calls."""

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        next_keywords: Callable[[], Keywords] = dict,
        attachment: Attachment | None = None,
    ) -> None:
        self.name, self.next_keywords, self.attachment = name, next_keywords, attachment
        self.model: Any = model

    def generate(self, ids: torch.Tensor, new_tokens: int) -> torch.Tensor:
        """The prompt and its new tokens.

        A cache that must be reset is reset here, as its user would.
        """
        prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        tokens: torch.Tensor = self.model.generate(
            **prompt, **self.next_keywords(), max_new_tokens=new_tokens, do_sample=False
        )
        return tokens

    def seconds(self, ids: torch.Tensor, new_tokens: int) -> float:
        return timing.seconds(lambda: self.generate(ids, new_tokens), str(self.model.device))

    @property
    def reused_tokens(self) -> int:
        return 0 if self.attachment is None else self.attachment.reused_tokens

    @property
    def fallback_reason(self) -> str | None:
        """Why the last call did not run as a captured step; None also where none was asked for."""
        asked = self.attachment or self.next_keywords().get("custom_generate")
        return getattr(asked, "fallback_reason", None)


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """Another instance of the model, with the same tensors as weights."""
    return copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})


def attached_twin(name: str, model: PreTrainedModel, **settings: Any) -> Side:
    instance = twin(model)
    return Side(name, instance, attachment=attach(instance, **settings))


def in_turns(sides: list[Side], turn: int) -> list[Side]:
    """Every order once before one comes again:

    none follows a slow contender more often than another does.
    """
    orders = list(permutations(sides))
    return list(
        orders[5 * turn % len(orders)]
    )  # 5 divides neither 6 nor 24, and few turns are unlike each other too


# --- the overhead


def overhead_sides(model: PreTrainedModel, workload: Workload) -> list[Side]:
    """The explicit objects first."""
    name = "graph" if workload.on_gpu else "contiguous"
    explicit = CONTENDERS[name].set_up(model, workload.max_cache_len, workload.batch_size)
    sides = [Side(name, model, explicit)]
    if workload.on_gpu:
        decoder = GraphDecoder()
        sides.append(Side("decoder", model, lambda: {"custom_generate": decoder}))
    return [*sides, attached_twin("attach", model), Side("dynamic", model)]


def overhead(model: PreTrainedModel, workload: Workload, plain_tokens: int, trials: int) -> Record:
    """The contenders with their times, and what `attach` adds to those of the explicit objects."""
    sides, ids = overhead_sides(model, workload), workload.prompt()["input_ids"]
    tokens = {side.name: workload.new_tokens for side in sides}
    tokens["dynamic"] = min(plain_tokens, workload.new_tokens)
    for side in sides:
        side.generate(ids, tokens[side.name])
        side.generate(ids, 1)
    times: dict[str, list[tuple[float, float]]] = {side.name: [] for side in sides}
    for trial in tqdm(range(trials), desc="overhead", disable=None, leave=False):
        for side in in_turns(sides, trial):
            times[side.name].append((side.seconds(ids, 1), side.seconds(ids, tokens[side.name])))
    rows = [
        {"name": side.name, "new_tokens": tokens[side.name], "trials_s": times[side.name]}
        | {"fallback_reason": side.fallback_reason}
        for side in sides
    ]
    for row in rows:
        row["summary"] = summarize(row)
    held = next(side.attachment for side in sides if side.attachment is not None)
    figures = {
        key: getattr(held, key) for key in ("calls", "hits", "captured_steps", "memory_bytes")
    }
    return {
        "contenders": rows,
        "overhead": compare(rows, "attach", sides[0].name),
        "attachment": figures,
    }


def token_ms(row: Record) -> list[float]:
    """Milliseconds of a token after the first, of each trial."""
    return [(total - first) / (row["new_tokens"] - 1) * 1e3 for first, total in row["trials_s"]]


def first_token_ms(row: Record) -> list[float]:
    return [first * 1e3 for first, _ in row["trials_s"]]


def summarize(row: Record) -> Record:
    return {"first_token_ms": spread(first_token_ms(row)), "decode_ms": spread(token_ms(row))}


def compare(rows: list[Record], name: str, base: str) -> Record:
    """What one contender takes more than another in the same trial:

    the host's speed changes between trials.
    """
    ours, theirs = (next(row for row in rows if row["name"] == wanted) for wanted in (name, base))
    percent = [
        100 * (one / other - 1) for one, other in zip(token_ms(ours), token_ms(theirs), strict=True)
    ]
    added = [
        one - other for one, other in zip(first_token_ms(ours), first_token_ms(theirs), strict=True)
    ]
    return {
        "of": name,
        "over": base,
        "token_percent": spread(percent),
        "first_token_ms": spread(added),
    }


# --- the chat


def chat(sides: list[Side], history: int, seed: int, args: argparse.Namespace) -> list[Record]:
    """A row for each contender; the first of them answers."""
    generator = torch.Generator().manual_seed(seed)
    vocab_size = sides[0].model.config.get_text_config().vocab_size

    def random_ids(length: int) -> torch.Tensor:
        return torch.randint(vocab_size, (args.batch_size, length), generator=generator).to(
            args.device
        )

    rows: dict[str, Record] = {
        side.name: {"first_token_s": [], "reused_tokens": []} for side in sides
    }
    ids, prompt_tokens = random_ids(history), []
    for side in sides[1:]:
        side.generate(ids, 1)
    for turn in range(args.turns):
        ids = torch.cat(
            [sides[0].generate(ids, args.answer_tokens), random_ids(args.turn_tokens)], dim=1
        )
        prompt_tokens.append(ids.shape[1])
        for side in in_turns(sides, turn):
            before = side.reused_tokens
            rows[side.name]["first_token_s"].append(side.seconds(ids, 1))
            rows[side.name]["reused_tokens"].append(side.reused_tokens - before)
    for side in sides:
        ms = spread([seconds * 1e3 for seconds in rows[side.name]["first_token_s"]])
        rows[side.name] |= {"first_token_ms": ms, "fallback_reason": side.fallback_reason}
    shared = {"history": history, "prompt_tokens": prompt_tokens}
    return [{"contender": side.name, **shared, **rows[side.name]} for side in sides]


def chats(model: PreTrainedModel, args: argparse.Namespace) -> list[Record]:
    reusing = attached_twin("attach-reuse", model, reuse_prefix=True)
    sides = [reusing, attached_twin("attach", model), Side("dynamic", model)]
    rows = []
    for i, history in enumerate(tqdm(args.histories, desc="chat", disable=None, leave=False)):
        chat(sides, history, 2 * i, args)  # warm-up; no chat begins with the tokens of another
        rows += chat(sides, history, 2 * i + 1, args)
    return rows


def measure(args: argparse.Namespace) -> Record:
    workload = chosen(args)
    model = workload.build_model()
    return {
        **provenance(workload.device),
        "workload": asdict(workload),
        "random_weights": workload.has_random_weights,
        "trials": args.trials,
        **overhead(model, workload, args.plain_tokens, args.trials),
        **{key: getattr(args, key) for key in ("turns", "turn_tokens", "answer_tokens")},
        "chat": chats(model, args),
    }


def report(record: Record) -> str:
    cost = f"`attach(model)` over {ATTACH[record['overhead']['over']]}: {attach_cost(record)}."
    lines = [f"- {line}" for line in (cost, chat_growth(record), *problems(record)) if line]
    return "\n\n".join([conditions(record), tables.attach([record], spread=True), "\n".join(lines)])


def problems(record: Record) -> list[str]:
    """Contenders that did not run as their name says."""
    named = [(row["name"], row) for row in record["contenders"]]
    named += [(f"{row['contender']}, history {row['history']}", row) for row in record["chat"]]
    fell_back = [] if on_cpu(record) else [(name, row["fallback_reason"]) for name, row in named]
    lines = [f"{name} fell back: {reason}" for name, reason in fell_back if reason]
    reusing = [(name, row) for name, row in named if row.get("contender") == "attach-reuse"]
    return lines + [
        f"{name}: no tokens were reused" for name, row in reusing if not all(row["reused_tokens"])
    ]


def parser() -> argparse.ArgumentParser:
    parser = benchmark_parser(__doc__)
    parser.add_argument(
        "--prompt-len", type=int, help="default: 512, or half of a context below 1024"
    )
    parser.add_argument(
        "--new-tokens", type=int, help="default: 256, or a quarter of a context below 1024"
    )
    parser.add_argument(
        "--plain-tokens", type=int, default=32, help="limit for plain `generate` (%(default)s)"
    )
    parser.add_argument(
        "--trials", type=int, default=24, help="%(default)s, one for each order of four contenders"
    )
    parser.add_argument(
        "--histories",
        type=int,
        nargs="+",
        help=f"default: those of {HISTORIES} that the model takes; 0: no chat",
    )
    parser.add_argument(
        "--turn-tokens", type=int, help="new tokens of a prompt; default: 64, fewer below 2048"
    )
    parser.add_argument(
        "--answer-tokens", type=int, help="default: 32, fewer for a context below 2048"
    )
    parser.add_argument(
        "--turns", type=int, default=6, help="%(default)s, one for each order of three contenders"
    )
    return parser


def chosen(args: argparse.Namespace) -> Workload:
    """The workload of the overhead; fills in the sizes of the chat."""
    context = context_length(args) or 1 << 20
    defaults = {"prompt_len": min(512, context // 2), "new_tokens": min(256, context // 4)}
    defaults |= {"turn_tokens": min(64, context // 32), "answer_tokens": min(32, context // 64)}
    for name, size in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, size)
    at_least(
        prompt_len=(args.prompt_len, 1), new_tokens=(args.new_tokens, 3), trials=(args.trials, 1)
    )
    at_least(
        plain_tokens=(args.plain_tokens, 3),
        turns=(args.turns, 1),
        turn_tokens=(args.turn_tokens, 1),
    )
    at_least(answer_tokens=(args.answer_tokens, 2))
    growth = args.turns * (args.turn_tokens + args.answer_tokens)
    if args.histories is None:
        args.histories = [n for n in HISTORIES if n + growth < context] or [context - growth - 1]
    at_least(histories=(min(args.histories), 0))
    if 0 in args.histories and len(args.histories) > 1:
        raise BadArgument("--histories 0 is no chat: pass it alone")
    args.histories = [history for history in args.histories if history]
    capacity = args.prompt_len + args.new_tokens
    check_workload_arguments(
        args, max([capacity, *(history + growth + 1 for history in args.histories)])
    )
    sizes = (args.prompt_len, args.new_tokens, args.batch_size, capacity, args.real_weights)
    return Workload(args.model, args.device, args.dtype, *sizes)


def main() -> int:
    return run_benchmark(parser(), measure, report, failed=lambda record: bool(problems(record)))


if __name__ == "__main__":
    sys.exit(main())
