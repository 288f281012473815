"""The kernel of a whole step for many steps: caches are filled and used again, and another process
computes on the same GPU for part of the time. The tokens are those of the first calls.

python -m tests.fuzz.one_kernel --steps 200000
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import torch
from transformers import LlamaConfig

from hf_static_kv import GraphDecoder, StaticContiguousCache
from hf_static_kv.program.takeover import takeover_of
from hf_static_kv.testing import random_model

CAPACITY = 1024
PROMPTS = (5, 64, 300, 511)
OTHER = """
import time, torch
a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
end = time.monotonic() + {seconds}
while time.monotonic() < end:
    for _ in range(20):
        a = (a @ a).clamp(-1, 1)
    torch.cuda.synchronize()
"""


def build(layers: int) -> torch.nn.Module:
    """Layers of Llama-3.2-1B, which the kernel serves, with few words."""
    config = LlamaConfig(
        vocab_size=4096, hidden_size=2048, intermediate_size=8192, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, head_dim=64, tie_word_embeddings=True,
        max_position_embeddings=CAPACITY,
    )  # fmt: skip
    return random_model(config).to("cuda", torch.bfloat16)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--other-seconds", type=float, default=10)
    args = parser.parse_args()
    model = build(args.layers)
    decoder, cache = (
        GraphDecoder(persistent=True),
        StaticContiguousCache.from_model(model, CAPACITY),
    )

    def run(length: int) -> torch.Tensor:
        cache.reset()
        ids = torch.arange(3, 3 + length, device="cuda")[None]
        how = {"max_new_tokens": CAPACITY - length, "do_sample": False, "eos_token_id": None}
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache,
            custom_generate=decoder, pad_token_id=0, **how,
        )  # fmt: skip

    run(5)
    time.sleep(20)  # the kernel is compiled
    run(5)
    (step,) = (step for kinds in decoder.steps.by_cache.values() for step in kinds.values())
    takeover = takeover_of(step)
    if takeover is None or takeover.kernel is None:
        print("no kernel:", takeover and takeover.reason)
        return 1
    for (
        length
    ) in PROMPTS:  # the second call captures the pass of the prompt, which rounds otherwise
        run(length)
        run(length)
    expected = {length: run(length) for length in PROMPTS}
    steps = calls = wrong = 0
    other = None
    begun = time.monotonic()
    while steps < args.steps:
        if other is None and steps > args.steps // 4:
            code = OTHER.format(seconds=args.other_seconds)
            other = subprocess.Popen([sys.executable, "-c", code])
        length = PROMPTS[calls % len(PROMPTS)]
        wrong += not torch.equal(run(length), expected[length])
        steps += CAPACITY - length - 1
        calls += 1
    seconds = time.monotonic() - begun
    if other is not None:
        other.wait()
    serves = takeover.kernel is not None
    print(f"{steps} steps, {calls} calls, {seconds:.0f} s, the kernel serves: {serves}")
    print(f"faults: {wrong + (not serves)}")
    return int(bool(wrong) or not serves)


if __name__ == "__main__":
    sys.exit(main())
