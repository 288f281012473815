"""Teach a miniature to end its lines in a given letter, on samples of its own, outside and inside `exact`.

    python examples/on_policy.py --plot on_policy.png                       # a few minutes on a CPU, in float32
    python examples/on_policy.py --device cuda                              # in bfloat16

Each update samples completions in groups of one prompt. A completion's advantage is its reward minus the mean of its
group, in units of the group's spread. Its tokens are weighted by the ratio of two probabilities: in the training pass
and when they were sampled (GRPO, one update for each sample). The weights are the same in both, so every ratio should
be 1. It is, inside `exact`. Outside, generation and training round differently: on a CPU the largest |ratio - 1| is
about 5e-6 in float32 and 5e-2 in bfloat16, which is much slower there.

Printed for each update: the mean reward (the share of lines that end in the letter), the largest |ratio - 1| over the
sampled tokens, and the largest Kullback-Leibler divergence of the two distributions of a token. Exit status 1 when a
ratio inside `exact` is not 1, 2 for a bad argument.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from common import BadArgument, environment

from hf_static_kv import attach, exact, selected_logprobs
from hf_static_kv.testing import MINIATURES, load_model

Result = dict[str, Any]
PROMPTS = ["ROMEO:\n", "KING HENRY:\n", "First Citizen:\n", "JULIET:\nMy"]
PUNCTUATION = " ,.;:!?'-"


def reward(text: str, letter: str) -> float:
    """The share of the complete lines that end in the letter, punctuation aside; 0 without a complete line."""
    lines = [line.rstrip(PUNCTUATION) for line in text.split("\n")[:-1]]
    ends = [line[-1].lower() for line in lines if line]
    return ends.count(letter) / len(ends) if ends else 0.0


def sample(model: Any, inputs: dict[str, torch.Tensor], new_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences [B, T] and the logits that their new tokens were sampled from, [B, n, V]."""
    output = model.generate(
        **inputs,
        do_sample=True,
        top_k=0,
        max_new_tokens=new_tokens,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return output.sequences, torch.stack(output.logits, dim=1)


def training_logits(model: Any, sequences: torch.Tensor, prompt_mask: torch.Tensor) -> torch.Tensor:
    """The logits of the new tokens, [B, n, V], from one pass with gradients."""
    prompt_len = prompt_mask.shape[1]
    mask = F.pad(prompt_mask, (0, sequences.shape[1] - prompt_len), value=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(sequences, attention_mask=mask, position_ids=positions, use_cache=False).logits
    return logits[:, prompt_len - 1 : -1].float()


def divergence(sampled: torch.Tensor, trained: torch.Tensor) -> float:
    """The largest KL(sampled || trained) over the tokens, of logits [B, n, V]."""
    sampled, trained = (logits.double().log_softmax(-1) for logits in (sampled, trained.detach()))
    return (sampled.exp() * (sampled - trained)).sum(-1).abs().max().item()


def update(model: Any, tokenizer: Any, optimizer: Any, inputs: dict[str, torch.Tensor], args: Any) -> Result:
    """One sample and one step of the optimizer."""
    prompt_len = inputs["input_ids"].shape[1]
    sequences, sampled = sample(model, inputs, args.max_new_tokens)
    tokens = sequences[:, prompt_len:]
    rewards = torch.tensor([reward(text, args.letter) for text in tokenizer.batch_decode(tokens)], device=tokens.device)
    groups = rewards.view(-1, args.group)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    trained = training_logits(model, sequences, inputs["attention_mask"])
    difference = selected_logprobs(trained, tokens) - selected_logprobs(sampled, tokens)
    optimizer.zero_grad()
    loss = -(difference.exp() * advantages.view(-1, 1)).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    ratio = (difference.detach().exp() - 1).abs().max().item()
    return {"reward": rewards.mean().item(), "ratio": ratio, "divergence": divergence(sampled, trained)}


def train(is_exact: bool, args: argparse.Namespace) -> list[Result]:
    """All updates of one run; both runs begin with the same weights and the same seed."""
    model, tokenizer = load_model(args.model, device=args.device, dtype=getattr(torch, args.dtype))
    prompts = [prompt for prompt in PROMPTS for _ in range(args.group)]
    inputs = dict(tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(args.device))
    attach(model.train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    torch.manual_seed(args.seed)
    results = []
    with exact(model) if is_exact else nullcontext():
        for number in range(1, args.updates + 1):
            results.append({"exact": is_exact, "update": number, **update(model, tokenizer, optimizer, inputs, args)})
            print(row(results[-1]), flush=True)
    return results


HEAD = "| `exact` | update | reward | largest \\|ratio - 1\\| | largest divergence |\n" + "|---" * 5 + "|"


def row(result: Result) -> str:
    numbers = " | ".join("0" if value == 0 else f"{value:.1e}" for value in (result["ratio"], result["divergence"]))
    side = "inside" if result["exact"] else "outside"
    return f"| {side} | {result['update']} | {result['reward']:.2f} | {numbers} |"


def draw(results: list[Result], args: argparse.Namespace) -> None:
    """The largest |ratio - 1| of each update, and the reward, of both runs."""
    import matplotlib.pyplot as plt

    figure, (ratios, rewards) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    least = min((r["ratio"] for r in results if r["ratio"] > 0), default=1e-6)
    for is_exact, color in ((False, "tab:orange"), (True, "tab:blue")):
        own, name = [r for r in results if r["exact"] == is_exact], "inside exact" if is_exact else "outside"
        updates = [r["update"] for r in own]
        ratios.plot(updates, [r["ratio"] for r in own], ".-", color=color, label=name)
        rewards.plot(updates, [r["reward"] for r in own], ".-", color=color, label=name)
    ratios.set_yscale("symlog", linthresh=least / 2)
    ratios.set_ylim(bottom=-least / 10)
    ratios.set(xlabel="update", title=f"largest |ratio - 1| over the sampled tokens, {args.dtype}")
    rewards.set(xlabel="update", ylim=(0, 1.05), title=f"share of lines that end in '{args.letter}'")
    for axis in (ratios, rewards):
        axis.legend(frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(args.plot, dpi=130)
    plt.close(figure)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MINIATURES, default="llama", help="default: %(default)s")
    parser.add_argument("--letter", default="e", help="default: %(default)s")
    parser.add_argument("--updates", type=int, default=30, help="default: %(default)s")
    parser.add_argument("--group", type=int, default=8, help="completions of each of 4 prompts; default: %(default)s")
    parser.add_argument("--max-new-tokens", type=int, default=24, help="default: %(default)s")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if gpu else "cpu", help="default: %(default)s")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--plot", type=Path, help="draw the ratios and the rewards here")
    args = parser.parse_args(argv)
    args.dtype = args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float32")
    return args


def check(args: argparse.Namespace) -> None:
    for name, least in (("updates", 1), ("group", 2), ("max_new_tokens", 2)):
        if getattr(args, name) < least:
            raise BadArgument(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")
    if len(args.letter) != 1 or not args.letter.islower():
        raise BadArgument(f"--letter must be one small letter, got {args.letter!r}")


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        check(args)
        print(HEAD)
        results = [result for is_exact in (False, True) for result in train(is_exact, args)]
    except (BadArgument, ValueError) as error:
        print(f"on_policy.py: {error}", file=sys.stderr)
        return 2
    if args.json:
        record = {**environment(args.device), "dtype": args.dtype, "results": results}
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    if args.plot:
        draw(results, args)
    return 0 if all(result["ratio"] == 0 for result in results if result["exact"]) else 1


if __name__ == "__main__":
    sys.exit(main())
