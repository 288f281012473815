"""What `attach(model)` costs over the explicit objects, and the first token of a turn of a chat.

    python benchmarks/bench_attach.py --model llama-3.2-1b --json attach.json
    python benchmarks/bench_attach.py --model llama --device cpu --trials 3 --histories 64 128 --turns 3

All contenders run in this process, in turns. The model has twins: instances that share its weights.
`detach` would free the pool and the captured steps: a twin stays attached, and the model never is.
  overhead   After a call for all N tokens and a call for one as warm-up, each trial is a call for
             one token (T1, the time to first token) and a call for N (TN): a token takes
             (TN - T1) / (N - 1). The overhead is that of `attach` over the explicit objects in the
             same trial. Plain `generate` makes `--plain-tokens` only. On a CPU the explicit object
             is the cache alone, because `attach` uses no decoder there.
  chat       The first call is a history of random tokens. Then each turn adds `--turn-tokens`
             random tokens, a call for one token is timed, and `attach(model, reuse_prefix=True)`
             answers with `--answer-tokens`. The others are timed on the same prompts, and answer
             nothing: they keep nothing for the next turn. The warm-up is a whole chat of the same
             lengths with other tokens: a new length costs more the first time.
Exit status 1 if a contender fell back on a GPU or reused no tokens in a chat, 2 for a bad argument.
"""

from __future__ import annotations

import argparse
import copy
import sys
from functools import partial
from typing import Any

import measure as timing
import torch
from contenders import CONTENDERS, NextKeywords
from measure import in_turns, shuffled, spread, token_ms
from outputs import at_least, benchmark_parser, run_benchmark
from records import Record, on_cpu
from tqdm import tqdm
from transformers import PreTrainedModel
from workload import BadArgument, Workload, build_workload, context_length, fill_lengths

from hf_static_kv import Attachment, GraphDecoder, attach

HISTORIES = [2048, 4096, 8192, 16384]


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

    def generate(self, ids: torch.Tensor, new_tokens: int) -> torch.Tensor:
        """The prompt and its new tokens. A cache is reset here, as its user would do."""
        prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        how = {"do_sample": False, "max_new_tokens": new_tokens, **self.next_keywords()}
        tokens: torch.Tensor = self.model.generate(**prompt, **how)
        return tokens

    def seconds(self, ids: torch.Tensor, new_tokens: int) -> float:
        return timing.seconds(lambda: self.generate(ids, new_tokens), str(self.model.device))

    def trial(self, ids: torch.Tensor, new_tokens: int) -> tuple[float, float]:
        """Seconds of a call for one token, and of a call for all."""
        return self.seconds(ids, 1), self.seconds(ids, new_tokens)

    @property
    def reused_tokens(self) -> int:
        return 0 if self.attachment is None else self.attachment.reused_tokens

    @property
    def fallback_reason(self) -> str | None:
        """Why the last call did not run as a captured step; None also if none was asked for."""
        asked = self.attachment or self.next_keywords().get("custom_generate")
        return getattr(asked, "fallback_reason", None)


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """Another instance of the model, with the same tensors as weights."""
    return copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})


def attached_twin(name: str, model: PreTrainedModel, **settings: Any) -> Side:
    instance = twin(model)
    return Side(name, instance, attachment=attach(instance, **settings))


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
    sides = {side.name: side for side in overhead_sides(model, workload)}
    ids = workload.prompt()["input_ids"]
    tokens = dict.fromkeys(sides, workload.new_tokens)
    tokens["dynamic"] = min(plain_tokens, workload.new_tokens)
    for name, side in sides.items():
        side.generate(ids, tokens[name])
        side.generate(ids, 1)
    calls = {name: partial(side.trial, ids, tokens[name]) for name, side in sides.items()}
    rows = []
    for name, trials_s in in_turns(calls, trials).items():
        row = {"name": name, "new_tokens": tokens[name], "trials_s": trials_s}
        row["fallback_reason"] = sides[name].fallback_reason
        rows.append(row | {"summary": summarize(row)})
    return {"contenders": rows, "overhead": compare(rows, "attach", next(iter(sides)))}


def decode_ms(row: Record) -> list[float]:
    return token_ms(row["trials_s"], row["new_tokens"])


def first_token_ms(row: Record) -> list[float]:
    return [first * 1e3 for first, _ in row["trials_s"]]


def summarize(row: Record) -> Record:
    return {"first_token_ms": spread(first_token_ms(row)), "decode_ms": spread(decode_ms(row))}


def compare(rows: list[Record], name: str, base: str) -> Record:
    """What one contender takes more than another in the same trial.

    The host's speed changes between trials.
    """
    ours, theirs = (next(row for row in rows if row["name"] == wanted) for wanted in (name, base))
    tokens = zip(decode_ms(ours), decode_ms(theirs), strict=True)
    first = zip(first_token_ms(ours), first_token_ms(theirs), strict=True)
    return {
        "of": name,
        "over": base,
        "token_percent": spread([100 * (one / other - 1) for one, other in tokens]),
        "first_token_ms": spread([one - other for one, other in first]),
    }


# --- the chat


def chat(sides: list[Side], history: int, seed: int, args: argparse.Namespace) -> list[Record]:
    """A row for each contender; the first of them answers."""
    generator = torch.Generator().manual_seed(seed)
    vocab_size = sides[0].model.config.get_text_config().vocab_size

    def random_ids(length: int) -> torch.Tensor:
        shape = (args.batch_size, length)
        return torch.randint(vocab_size, shape, generator=generator).to(args.device)

    seconds: dict[str, list[float]] = {side.name: [] for side in sides}
    reused: dict[str, list[int]] = {side.name: [] for side in sides}
    ids = random_ids(history)
    prompt_tokens = []
    for side in sides[1:]:
        side.generate(ids, 1)
    for turn in range(args.turns):
        answered = sides[0].generate(ids, args.answer_tokens)
        ids = torch.cat([answered, random_ids(args.turn_tokens)], dim=1)
        prompt_tokens.append(ids.shape[1])
        for side in shuffled(sides, turn):
            before = side.reused_tokens
            seconds[side.name].append(side.seconds(ids, 1))
            reused[side.name].append(side.reused_tokens - before)
    return [
        {
            "contender": side.name,
            "history": history,
            "prompt_tokens": prompt_tokens,
            "first_token_s": seconds[side.name],
            "reused_tokens": reused[side.name],
            "first_token_ms": spread([taken * 1e3 for taken in seconds[side.name]]),
            "fallback_reason": side.fallback_reason,
        }
        for side in sides
    ]


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
    sizes = ("trials", "turns", "turn_tokens", "answer_tokens")
    return {
        **workload.origin(),
        **{key: getattr(args, key) for key in sizes},
        **overhead(model, workload, args.plain_tokens, args.trials),
        "chat": chats(model, args),
    }


def problems(record: Record) -> list[str]:
    """Contenders that did not run as their name says."""
    rows = {row["name"]: row for row in record["contenders"]}
    rows |= {f"{row['contender']}, history {row['history']}": row for row in record["chat"]}
    lines = []
    for name, row in rows.items():
        if row["fallback_reason"] and not on_cpu(record):
            lines.append(f"{name} fell back: {row['fallback_reason']}")
        if row.get("contender") == "attach-reuse" and not all(row["reused_tokens"]):
            lines.append(f"{name}: no tokens were reused")
    return lines


def parser() -> argparse.ArgumentParser:
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("--plain-tokens", type=int, default=32, help="limit for plain `generate` (%(default)s)")
    add("--trials", type=int, default=24, help="%(default)s")
    fitting = f"those of {HISTORIES} that the model takes"
    add("--histories", type=int, nargs="+", help=f"default: {fitting}; 0: no chat")
    add("--turn-tokens", type=int, help="new tokens of a prompt; default: 64, fewer below 2048")
    add("--answer-tokens", type=int, help="default: 32, fewer for a context below 2048")
    add("--turns", type=int, default=6, help="%(default)s")
    return parser


def chosen(args: argparse.Namespace) -> Workload:
    """The workload of the overhead; fills in the sizes of the chat."""
    context = context_length(args) or 1 << 20
    fill_lengths(args)
    if args.turn_tokens is None:
        args.turn_tokens = min(64, context // 32)
    if args.answer_tokens is None:
        args.answer_tokens = min(32, context // 64)
    at_least(args, prompt_len=1, new_tokens=3, trials=1, plain_tokens=3)
    at_least(args, turns=1, turn_tokens=1, answer_tokens=2)
    growth = args.turns * (args.turn_tokens + args.answer_tokens)
    if args.histories is None:
        args.histories = [n for n in HISTORIES if n + growth < context] or [context - growth - 1]
    at_least(args, histories=0)
    if 0 in args.histories and len(args.histories) > 1:
        raise BadArgument("--histories 0 is no chat: pass it alone")
    args.histories = [history for history in args.histories if history]
    longest = max((history + growth + 1 for history in args.histories), default=0)
    return build_workload(args, longest)


def main() -> int:
    return run_benchmark(parser(), measure, problems)


if __name__ == "__main__":
    sys.exit(main())
