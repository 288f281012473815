"""Record what each new token attends to, and which tokens it was chosen from.

python examples/4_attention_trace.py
python examples/4_attention_trace.py --model Qwen/Qwen3-1.7B --device cuda
"""

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_static_kv import StaticContiguousCache, StepRecorder, trace_attention

parser = argparse.ArgumentParser()
parser.add_argument("--model", default=Path(__file__).parent / "models" / "gemma3")
parser.add_argument("--device", default="cpu")
args = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(args.model)
model = AutoModelForCausalLM.from_pretrained(args.model).to(args.device)
inputs = tokenizer("ROMEO:\nWhat light is this that", return_tensors="pt").to(args.device)

cache = StaticContiguousCache.from_model(model, max_cache_len=64)
recorder = StepRecorder(best=2, tokenizer=tokenizer)
layer = model.config.num_hidden_layers - 1
with trace_attention(model, layers=[layer]) as trace:
    options = {"past_key_values": cache, "logits_processor": [recorder]}
    tokens = model.generate(**inputs, **options, max_new_tokens=12, do_sample=False)

attention = trace.matrix(layer).mean(dim=0)  # [heads, passes, positions] -> [passes, positions]
print(f"chosen from two candidates; most attended token in layer {layer}")
for step, weights in zip(recorder.steps(tokens)[0], attention, strict=True):
    candidates = ", ".join(f"{best['text']!r} {best['probability']:.0%}" for best in step["best"])
    most_attended = tokenizer.decode(tokens[0, weights.argmax()])
    print(f"{step['text']!r:12} {candidates:32} {most_attended!r} {weights.max():.0%}")
