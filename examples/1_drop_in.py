"""Pass a StaticContiguousCache to `generate`. The tokens are those of `use_cache=False`.

python examples/1_drop_in.py
python examples/1_drop_in.py --model Qwen/Qwen3-1.7B --device cuda
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_static_kv import StaticContiguousCache

parser = argparse.ArgumentParser()
parser.add_argument("--model", default=Path(__file__).parent / "models" / "llama")
parser.add_argument("--device", default="cpu")
args = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(args.model)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(args.device)
inputs = tokenizer("ROMEO:\nWhat light is this that", return_tensors="pt").to(args.device)
options = {"max_new_tokens": 40, "do_sample": False}

cache = StaticContiguousCache.from_model(model, max_cache_len=128)  # allocated now, and only once
tokens = model.generate(**inputs, past_key_values=cache, **options)
print(tokenizer.decode(tokens[0]))
print(f"{cache.seq_len} of {cache.max_cache_len} positions used")

# Without a cache every step computes the whole sequence.
uncached = model.generate(**inputs, use_cache=False, **options)
print("same tokens as without a cache:", torch.equal(tokens, uncached))

# To continue, pass the old tokens plus the new ones. Only the new ones are computed.
turn = tokenizer("\n\nJULIET:\n", return_tensors="pt").to(args.device)
longer = torch.cat([tokens, turn.input_ids], dim=1)
tokens = model.generate(longer, past_key_values=cache, **options)
print(f"after a second turn: {cache.seq_len} of {cache.max_cache_len} positions used")
cache.reset()  # before another prompt
