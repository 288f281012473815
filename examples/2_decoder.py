"""Pass a GraphDecoder as `custom_generate`: on a GPU it captures one decode step as a CUDA graph
and replays it.

python examples/2_decoder.py
python examples/2_decoder.py --model Qwen/Qwen3-1.7B --device cuda
"""

import argparse
import time
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_static_kv import GraphDecoder, StaticContiguousCache

parser = argparse.ArgumentParser()
parser.add_argument("--model", default=Path(__file__).parent / "models" / "qwen3")
parser.add_argument("--device", default="cpu")
args = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(args.model)
model = AutoModelForCausalLM.from_pretrained(args.model).to(args.device)
inputs = tokenizer("ROMEO:\nWhat light is this that", return_tensors="pt").to(args.device)

cache = StaticContiguousCache.from_model(model, max_cache_len=256)
decoder = GraphDecoder()  # keep it: later calls replay what the first one captured
for call in ("first", "second"):
    cache.reset()
    start = time.perf_counter()
    options = {"past_key_values": cache, "custom_generate": decoder}
    tokens = model.generate(**inputs, **options, max_new_tokens=64)
    seconds = time.perf_counter() - start
    new_tokens = tokens.shape[1] - inputs["input_ids"].shape[1]
    print(f"{call} call: {new_tokens} tokens, {new_tokens / seconds:.0f} tokens/s")

print(tokenizer.decode(tokens[0]))
# A call that cannot be captured falls back to transformers' loop.
print("fallback reason:", decoder.fallback_reason)
