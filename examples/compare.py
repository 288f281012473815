"""The same tokens with and without the cache, on toy models of three architectures with random weights.

    python examples/compare.py [--max-new-tokens 64]

Exit status 1 when any tokens differ.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from hf_static_kv import StaticContiguousCache
from hf_static_kv.testing import TINY_DEV_MODELS, random_model, tiny_config

MODES = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "temperature": 0.7}}


def timed_generate(model, ids, **kwargs):
    torch.manual_seed(42)
    start = time.perf_counter()
    tokens = model.generate(ids, eos_token_id=None, **kwargs)
    return tokens, time.perf_counter() - start


def compare(name: str, max_new_tokens: int) -> bool:
    """Print one line for each mode of one model; True when all tokens are equal."""
    model = random_model(tiny_config(name, initializer_range=0.3))
    ids = torch.randint(3, model.config.vocab_size, (1, 24), generator=torch.Generator().manual_seed(0))
    all_equal = True
    for mode, options in MODES.items():
        options = {"max_new_tokens": max_new_tokens, "attention_mask": torch.ones_like(ids), **options}
        without, slow = timed_generate(model, ids, use_cache=False, **options)
        cache = StaticContiguousCache.from_model(model, ids.shape[1] + max_new_tokens)
        cached, fast = timed_generate(model, ids, past_key_values=cache, **options)
        equal = torch.equal(without, cached)
        all_equal &= equal
        print(
            f"{name:8} {mode:8} {'equal' if equal else 'DIFFERENT':10} {max_new_tokens / slow:8.0f} "
            f"{max_new_tokens / fast:8.0f} {slow / fast:8.1f}x {cache.memory_bytes:>10,}"
        )
    return all_equal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    args = parser.parse_args()
    if args.max_new_tokens < 1:
        parser.error(f"--max-new-tokens must be at least 1, got {args.max_new_tokens}")
    print(f"{'model':8} {'mode':8} {'tokens':10} {'no cache':>8} {'cached':>8} {'speed-up':>9} {'bytes':>10}")
    print(f"{'':28} {'tokens/s':>8} {'tokens/s':>8}")
    results = [compare(name, args.max_new_tokens) for name in TINY_DEV_MODELS]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
