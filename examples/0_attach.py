"""Attach once: every later `generate` of the model uses the cache and, on a GPU, the CUDA graph.
Pipelines do too.

python examples/0_attach.py
python examples/0_attach.py --model Qwen/Qwen3-1.7B --device cuda
"""

import argparse
import time
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from hf_static_kv import attach, detach

parser = argparse.ArgumentParser()
parser.add_argument("--model", default=Path(__file__).parent / "models" / "llama")
parser.add_argument("--device", default="cpu")
args = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(args.model)
model = AutoModelForCausalLM.from_pretrained(args.model).to(args.device)
generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
prompt = "ROMEO:\nWhat light is this that"


def run(name: str) -> str:
    start = time.perf_counter()
    text = generator(prompt, max_new_tokens=64, do_sample=False)[0]["generated_text"]
    print(f"{name}: {time.perf_counter() - start:.2f} s")
    return text


before = run("transformers alone")
info = attach(model, reuse_prefix=True)  # the second call finds its prompt in the cache
texts = [run("first call after attach"), run("second call")]
print("the same text:", all(text == before for text in texts))
print(info)
detach(model)
