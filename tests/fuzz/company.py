"""Calls of several threads on one attached model, each compared with the same call alone, in float32.

python -m tests.fuzz.company --histories 1000            seeds 0 to 999
python -m tests.fuzz.company --seed 1234 --histories 1   one history again

What happens depends on the timing of threads: a history may need some replays.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from hf_static_kv import attach, detach, served
from hf_static_kv.decoding.tokens import Tokens
from hf_static_kv.decoding.turns import turns_of
from tests.conftest import shared_toy_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODELS = ("llama", "gemma3", "gpt2", "qwen3", "mixtral", "phi3", "llama4")
KINDS = (
    "greedy", "greedy", "greedy", "sampled", "sampled", "stream", "stream", "ended", "criteria",
    "processors", "fails", "goes away", "batch", "kept", "ngram", "least", "beams", "one token",
)  # fmt: skip
SECONDS = 120  # after which a call is lost


class Stop(Exception):
    pass


class Streamer(BaseStreamer):
    """Keeps what it is given; waits a little, or goes away after some tokens."""

    def __init__(self, rng: random.Random, goes_away: bool) -> None:
        self.values: list[int] = []
        self.left = rng.randrange(1, 9) if goes_away else None
        self.delay = rng.choice([0, 0, 0.001])

    def put(self, value: torch.Tensor) -> None:
        self.values += value.flatten().tolist()
        time.sleep(self.delay)
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                raise Stop

    def end(self) -> None:
        pass


class StopsAt(StoppingCriteria):
    def __init__(self, length: int, fails: bool) -> None:
        self.length = length
        self.fails = fails

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        is_over = input_ids.shape[1] >= self.length
        if is_over and self.fails:
            raise Stop
        return torch.full((len(input_ids),), is_over, device=input_ids.device)


class Shifts(LogitsProcessor):
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores.roll(int(input_ids[0, -1]), dims=-1)


@dataclass
class Caller:
    """One call, and what became of it."""

    kind: str
    ids: torch.Tensor
    seed: int
    how: dict[str, Any]
    delay: float
    expected: Any = None
    got: Any = None
    error: BaseException | None = None
    joined: list[tuple[torch.Tensor, int]] = field(default_factory=list)  # generator, length

    def arguments(self) -> dict[str, Any]:
        """Each call needs objects of its own."""
        rng = random.Random(self.seed)
        length = self.ids.shape[1]
        own: dict[str, Any] = {}
        if self.kind in ("stream", "goes away"):
            own["streamer"] = Streamer(rng, self.kind == "goes away")
        if self.kind in ("criteria", "fails"):
            own["stopping_criteria"] = [
                StopsAt(length + rng.randrange(1, 12), self.kind == "fails")
            ]
        if self.kind == "processors":
            own["logits_processor"] = [Shifts()]
        return {**self.how, **own}

    def run(self, model: Any) -> None:
        time.sleep(self.delay)
        _CALLER.own = self
        try:
            self.got = sequences(model.generate(self.ids, **self.arguments()))
        except BaseException as error:
            self.error = error


_CALLER = threading.local()


def sequences(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.sequences


def draw(rng: random.Random, names: tuple[str, ...], before: torch.Tensor) -> Caller:
    """A call whose prompt is new, or goes on after the tokens [n] `before`."""
    kind = rng.choice(names)
    rows = 2 if kind == "batch" else 1
    length = rng.choice([1, 2, 5, 12, 30])
    ids = torch.tensor([[rng.randrange(3, 120) for _ in range(length)] for _ in range(rows)])
    if rng.random() < 0.5:
        ids = torch.cat([before.cpu().expand(rows, -1), ids], dim=1)
    if DEVICE == "cuda" and ids.shape[1] % 64 == 1:
        # There SDPA's memory-efficient kernel is wrong if KV heads are repeated and the mask slides
        # (torch 2.11, H200): the call alone would give other tokens.
        ids = torch.cat([ids, ids[:, :1]], dim=1)
    how: dict[str, Any] = {
        "max_new_tokens": 1 if kind == "one token" else rng.choice([2, 6, 15, 40]),
        "do_sample": kind == "sampled",
        "pad_token_id": 0,
        "eos_token_id": list(range(100, 116)) if kind == "ended" or rng.random() < 0.2 else None,
    }
    if length > 2 and rng.random() < 0.2:
        mask = torch.ones_like(ids)
        mask[0, :2] = 0
        how["attention_mask"] = mask.to(DEVICE)
    else:
        how["attention_mask"] = torch.ones_like(ids, device=DEVICE)
    if kind == "sampled":
        some = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02}
        how |= {name: value for name, value in some.items() if rng.random() < 0.5}
        how["top_k"] = how.get("top_k", 0)
    more = {
        "kept": {"return_dict_in_generate": True},
        "ngram": {"no_repeat_ngram_size": 2},
        "least": {"eos_token_id": list(range(100, 116)), "min_new_tokens": 6},
        "beams": {"num_beams": 2},
    }
    delay = rng.choice([0.0, 0.0, 0.002, 0.01, 0.03])
    return Caller(kind, ids.to(DEVICE), rng.randrange(1 << 30), how | more.get(kind, {}), delay)


def draw_chat(
    rng: random.Random, names: tuple[str, ...], common: torch.Tensor, number: int, plain: Any
) -> list[Caller]:
    """Calls of a thread, with what they must give; a prompt may go on after the answer before."""
    callers: list[Caller] = []
    before = common
    for _ in range(number):
        caller = draw(rng, names, before)
        alone = copy.copy(caller)
        alone.delay = 0
        if caller.kind != "sampled":
            alone.run(plain)
            caller.expected = alone.got
        callers.append(caller)
        before = common if caller.expected is None else caller.expected[0]
        if len(before) > 150:
            before = common
    return callers


def run_history(seed: int, names: tuple[str, ...] = KINDS) -> tuple[list[str], Counter[str]]:
    """What is wrong in one history, and how many calls of each kind it had."""
    rng = random.Random(seed)
    plain = shared_toy_model(rng.choice(MODELS), device=DEVICE)
    model = copy.copy(plain)
    common = torch.tensor([rng.randrange(3, 120) for _ in range(rng.choice([5, 20, 50]))])
    numbers = [rng.randrange(1, 4) for _ in range(rng.randrange(2, 7))]  # of calls of a thread
    callers = [draw_chat(rng, names, common, number, plain) for number in numbers]
    info = attach(model, reuse_prefix=rng.random() < 0.5, max_rows=rng.choice([1, 2, 3, 8, 64]))
    torch.manual_seed(seed)
    threads = [threading.Thread(target=run_all, args=(row, model), daemon=True) for row in callers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    wrong = ["a call was lost"] if any(thread.is_alive() for thread in threads) else []
    for caller in (own for row in callers for own in row):
        wrong += wrong_about(caller, plain)
    wrong += left_behind(info, model)
    detach(model)
    kinds = Counter(
        caller.kind + " joined" * bool(caller.joined) for row in callers for caller in row
    )
    return [f"seed {seed}: {what}" for what in wrong], kinds


def run_all(callers: list[Caller], model: Any) -> None:
    for caller in callers:
        caller.run(model)


def wrong_about(caller: Caller, plain: Any) -> list[str]:
    what = f"{caller.kind} of {caller.ids.shape[1]} tokens, {caller.how}"
    if caller.kind in ("fails", "goes away") and isinstance(caller.error, Stop):
        return []
    if caller.error is not None:
        return [f"{what}: {''.join(traceback.format_exception(caller.error))}"]
    if caller.kind != "sampled":
        if caller.expected is None or torch.equal(caller.got, caller.expected):
            return []
        return [f"{what}: {caller.got.tolist()}, alone {caller.expected.tolist()}"]
    for state, length in caller.joined:
        begun = caller.got[:, :length]
        left = caller.ids.shape[1] + caller.how["max_new_tokens"] - length
        how = {**caller.how, "max_new_tokens": left}
        more = torch.ones_like(begun[:, caller.ids.shape[1] :])
        how["attention_mask"] = torch.cat([how["attention_mask"], more], dim=1)
        with torch.random.fork_rng([0] if DEVICE == "cuda" else []):
            (torch.cuda.set_rng_state if DEVICE == "cuda" else torch.set_rng_state)(state)
            expected = plain.generate(begun, **how)
        if not torch.equal(caller.got, expected):
            return [f"{what}: {caller.got.tolist()}, alone {expected.tolist()}"]
    return []


def left_behind(info: Any, model: Any) -> list[str]:
    loop, deadline = info.decoder.loop_of(model), time.monotonic() + 10
    while (loop.num_rows or loop._thread is not None) and time.monotonic() < deadline:
        time.sleep(0.001)
    wrong = [f"{loop.num_rows} rows are still taken"] if loop.num_rows else []
    wrong += ["a thread has the turn"] if turns_of(model)._owner is not None else []
    wrong += ["somebody waits"] if turns_of(model)._waiting else []
    return wrong + (["a cache is in use"] if info.pool.in_use else [])


def note_generators(original: Any) -> Any:
    def join_others(tokens: Tokens, is_first: bool) -> None:
        original(tokens, is_first)
        own = getattr(_CALLER, "own", None)
        if own is not None and tokens.config.do_sample:
            own.joined.append((tokens.generator.get_state(), tokens.length))

    return join_others


def run_seeds(
    seeds: range, seconds: float | None, run: Callable[[int], tuple[list[str], Counter[str]]]
) -> int:
    """Run a case for each seed, until the time is over; print what is wrong. The exit status."""
    started = time.monotonic()
    faults: list[str] = []
    kinds: Counter[str] = Counter()
    done = 0
    for seed in seeds:
        if seconds and time.monotonic() > started + seconds:
            break
        wrong, own = run(seed)
        kinds += own
        done += 1
        for what in wrong:
            print(what, flush=True)
        faults += wrong
    print(f"{done} seeds in {time.monotonic() - started:.0f} s")
    print(", ".join(f"{kind} {number}" for kind, number in sorted(kinds.items())))
    print(f"faults: {len(faults)}")
    return 1 if faults else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--histories", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first history")
    parser.add_argument("--seconds", type=float, help="start no more histories after this time")
    args = parser.parse_args()
    served._MIN_PROMPT_ON_CPU = 0
    served._DECODER_DEVICES = ("cpu", "cuda")
    Tokens.join_others = note_generators(Tokens.join_others)
    return run_seeds(range(args.seed, args.seed + args.histories), args.seconds, run_history)


if __name__ == "__main__":
    sys.exit(main())
