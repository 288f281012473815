"""Calls with drafted tokens, each compared with the same call without a cache, in float32.

python -m tests.fuzz.drafts --cases 2000              seeds 0 to 1999
python -m tests.fuzz.drafts --seed 1234 --cases 1     one case again

A case is a chat of one to three calls on one cache: greedy or seeded, batches, padding, windows, compact
layers, end tokens, streamers. Text comes again, so that drafts are right now and then.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from functools import cache
from typing import Any

import torch

from hf_static_kv import GraphDecoder, StaticContiguousCache
from hf_static_kv.decoding import decoder as decoder_module
from hf_static_kv.decoding import speculation
from hf_static_kv.decoding.assistant import Assistant
from tests.conftest import ARCHITECTURES, Collect, shared_toy_model, toy_model
from tests.decoding.conftest import OWN_ATTENTION
from tests.fuzz.company import run_seeds
from tests.fuzz.runner import assistant_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAPACITY = 160
_PAYS = speculation._PAYS


@cache
def model_of(name: str, vocabulary: int) -> Any:
    if vocabulary == 128:
        return shared_toy_model(name, OWN_ATTENTION[name], DEVICE)
    return toy_model(name, OWN_ATTENTION[name], vocab_size=vocabulary).to(DEVICE)


def draw_text(rng: random.Random, rows: int, vocabulary: int) -> torch.Tensor:
    """Rows of few tokens, or of phrases that come again."""
    length = rng.randrange(2, 30)
    if rng.random() < 0.3:
        few = rng.randrange(1, min(5, vocabulary - 3))
        ids = [[3 + rng.randrange(few) for _ in range(length)] for _ in range(rows)]
    else:
        phrase = [
            [rng.randrange(3, vocabulary) for _ in range(rng.randrange(2, 8))] for _ in range(rows)
        ]
        ids = [(own * length)[:length] for own in phrase]
    return torch.tensor(ids, device=DEVICE)


def draw_call(rng: random.Random, vocabulary: int) -> dict[str, Any]:
    how: dict[str, Any] = {
        "max_new_tokens": rng.choice([1, 2, 3, 8, 15, 30, 40]),
        "do_sample": rng.random() < 0.4,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    if rng.random() < 0.4:
        how["eos_token_id"] = rng.sample(
            range(3, vocabulary), min(vocabulary // 7, rng.choice([2, 6, 16]))
        )
    if how["do_sample"]:
        some = {"temperature": rng.choice([0.4, 1.5, 4.0]), "top_p": 0.8, "min_p": 0.03}
        how |= {name: value for name, value in some.items() if rng.random() < 0.5}
        how["top_k"] = rng.choice([0, 2, 5, 50])
    if rng.random() < 0.1:
        how["repetition_penalty"] = 1.3
    if rng.random() < 0.1 and how["eos_token_id"]:
        how["min_new_tokens"] = 3
    return how


def draw_drafts(rng: random.Random, model: Any) -> dict[str, Any]:
    if rng.random() < 0.4:
        return {"assistant_model": assistant_of(model) if rng.random() < 0.8 else model}
    drafts = {"prompt_lookup_num_tokens": rng.randrange(1, 11)}
    if rng.random() < 0.3:
        drafts["max_matching_ngram_size"] = rng.randrange(1, 5)
    return drafts


class CheapAssistant(Assistant):
    """Drafts pay, as if it were a small model."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.cost = 0.01


def run_case(seed: int) -> tuple[list[str], Counter[str]]:
    """What is wrong in one chat, and how many calls of each kind it had."""
    counts: Counter[str] = Counter()
    rng = random.Random(seed)
    vocabulary = rng.choice([8, 128])  # of few tokens more drafts are right
    model = model_of(rng.choice(list(ARCHITECTURES)), vocabulary)
    speculation._PAYS = rng.choice([0.0, 0.0, 0.05, _PAYS])  # from always to seldom
    speculation._COST = rng.choice([0.5, 1.25])
    speculation._PASSES_WITHOUT = rng.choice([2, 24])
    rows = rng.choice([1, 1, 2, 3])
    sliding = rng.choice(["full", "compact"])
    own_cache = StaticContiguousCache(model.config, CAPACITY, sliding=sliding)
    decoder = GraphDecoder()
    ids = draw_text(rng, rows, vocabulary)
    mask = torch.ones_like(ids)
    if rows > 1 and rng.random() < 0.5:
        mask[0, : rng.randrange(ids.shape[1])] = 0
    wrong = []
    for turn in range(rng.randrange(1, 4)):
        how = draw_call(rng, vocabulary)
        if ids.shape[1] + how["max_new_tokens"] > CAPACITY:
            break
        drafts = draw_drafts(rng, model)
        streamer = {"streamer": Collect()} if rows == 1 and rng.random() < 0.3 else {}
        ours = {"past_key_values": own_cache, "custom_generate": decoder, **drafts, **streamer}
        torch.manual_seed(seed)
        expected = model.generate(ids, attention_mask=mask, use_cache=False, **how)
        torch.manual_seed(seed)
        before = decoder.accepted.passes
        got = model.generate(ids, attention_mask=mask, **ours, **how)
        kind = "sampled" if how["do_sample"] else "greedy"
        counts[f"{kind}, {'drafts' if decoder.accepted.passes > before else 'none'}"] += 1
        counts["accepted"] += decoder.accepted.tokens
        decoder.accepted.tokens = 0
        if not torch.equal(got, expected):
            wrong.append(
                f"turn {turn}, {how}, {list(drafts)}: {got.tolist()}, not {expected.tolist()}"
            )
            break
        if streamer and streamer["streamer"].tokens != got[0].tolist():
            wrong.append(f"turn {turn}: the streamer was given {streamer['streamer'].tokens}")
        more = draw_text(rng, rows, vocabulary)
        ids = torch.cat([got, more], dim=1)
        # What follows an end is seen by the next turn, too.
        mask = torch.cat([mask, torch.ones_like(ids[:, mask.shape[1] :])], dim=1)
    return [f"seed {seed}: {what}" for what in wrong], counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--seconds", type=float, help="start no more cases after this time")
    args = parser.parse_args()
    decoder_module.Assistant = CheapAssistant  # type: ignore[misc]
    # Of 64 n + 1 tokens it is wrong (torch 2.11, H200), and passes without a cache have them.
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    return run_seeds(range(args.seed, args.seed + args.cases), args.seconds, run_case)


if __name__ == "__main__":
    sys.exit(main())
