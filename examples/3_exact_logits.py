"""Inside `exact(model)` the logits of cached steps equal those of one uncached pass, bit for bit,
in bfloat16 too.

python examples/3_exact_logits.py
python examples/3_exact_logits.py --model Qwen/Qwen3-1.7B --device cuda
"""

import argparse
from contextlib import nullcontext
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_static_kv import StaticContiguousCache, exact

parser = argparse.ArgumentParser()
parser.add_argument(
    "--model", default=Path(__file__).parent / "models" / "gemma3", help="a folder or a hub id"
)
parser.add_argument("--device", default="cpu")
args = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(args.model)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).to(args.device)
input_ids = tokenizer("ROMEO:\nWhat light is this that", return_tensors="pt").input_ids.to(
    args.device
)

for name, context in (("outside exact", nullcontext()), ("inside exact", exact(model))):
    cache = StaticContiguousCache.from_model(model, max_cache_len=64)
    with context, torch.no_grad():
        uncached = model(input_ids, use_cache=False).logits  # [1, tokens, vocabulary], one pass
        steps = [model(token, past_key_values=cache).logits for token in input_ids.split(1, dim=1)]
    difference = (torch.cat(steps, dim=1) - uncached).abs().max().item()
    print(f"{name}: largest difference of logits {difference}")
