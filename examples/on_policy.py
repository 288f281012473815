"""GRPO on a toy task, without and inside `exact`: the importance ratio of an on-policy update
should be 1.

    python examples/on_policy.py --plot on_policy.png            # float32 on a CPU, some minutes
    python examples/on_policy.py --device cuda --plot on_policy.png                        # bfloat16

A miniature learns to end its lines in a letter. Each update samples completions in groups of one
prompt and takes one step of the optimizer on them. A completion's advantage is its reward minus the
mean of its group, in units of the group's spread. The weights do not change between sampling and
training, so the ratio of a token's two probabilities should be 1. Ordinary passes round
differently, and it is not. Inside `exact` it is 1 for every token.

docs/exact.md has a picture. On a CPU an update in bfloat16 takes minutes. Both runs learn alike
until rounding changes a sampled token; from there on they are two runs with different luck.

Printed for each update: the mean reward (the share of lines that end in the letter), the largest
|ratio - 1| over the sampled tokens, and the largest Kullback-Leibler divergence of the two
distributions of a token; then a summary. Exit status 1 when a ratio inside `exact` is not 1, 2 for
a bad argument.
"""

from __future__ import annotations

import argparse
import json
import math
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
SIDES = {False: "without exact", True: "inside exact"}
PROMPTS = ["ROMEO:\n", "KING HENRY:\n", "First Citizen:\n", "JULIET:\nMy"]
PUNCTUATION = " ,.;:!?'-"


def reward(text: str, letter: str) -> float:
    """The share of the complete lines that end in the letter, punctuation aside; 0 without a
    complete line.
    """
    lines = [line.rstrip(PUNCTUATION) for line in text.split("\n")[:-1]]
    ends = [line[-1].lower() for line in lines if line]
    return ends.count(letter) / len(ends) if ends else 0.0


def sample(
    model: Any, inputs: dict[str, torch.Tensor], new_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
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


class Optimizer:
    """AdamW on float32 copies of the weights: half precision would lose small steps."""

    def __init__(self, model: Any, learning_rate: float) -> None:
        self.weights = list(model.parameters())
        self.copies = [weight.detach().float().clone() for weight in self.weights]
        self.adam = torch.optim.AdamW(self.copies, lr=learning_rate, weight_decay=0.0)

    @torch.no_grad()
    def step(self) -> None:
        for weight, copy in zip(self.weights, self.copies, strict=True):
            copy.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.copies, 1.0)
        self.adam.step()
        for weight, copy in zip(self.weights, self.copies, strict=True):
            weight.copy_(copy)


def update(
    model: Any, tokenizer: Any, optimizer: Optimizer, inputs: dict[str, torch.Tensor], args: Any
) -> Result:
    """One sample and one step of the optimizer."""
    prompt_len = inputs["input_ids"].shape[1]
    sequences, sampled = sample(model, inputs, args.max_new_tokens)
    tokens = sequences[:, prompt_len:]
    rewards = torch.tensor(
        [reward(text, args.letter) for text in tokenizer.batch_decode(tokens)], device=tokens.device
    )
    groups = rewards.view(-1, args.group)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    trained = training_logits(model, sequences, inputs["attention_mask"])
    difference = selected_logprobs(trained, tokens) - selected_logprobs(sampled, tokens)
    ratios = difference.exp()
    loss = -(ratios * advantages.view(-1, 1)).mean()
    loss.backward()
    optimizer.step()
    largest = (ratios.detach() - 1).abs().max().item()
    return {
        "reward": rewards.mean().item(),
        "ratio": largest,
        "divergence": divergence(sampled, trained),
    }


def train(is_exact: bool, args: argparse.Namespace) -> list[Result]:
    """All updates of one run; both runs begin with the same weights and the same seed."""
    model, tokenizer = load_model(args.model, device=args.device, dtype=getattr(torch, args.dtype))
    prompts = [prompt for prompt in PROMPTS for _ in range(args.group)]
    inputs = dict(
        tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(args.device)
    )
    attach(model.train())
    optimizer = Optimizer(model, args.learning_rate)
    torch.manual_seed(args.seed)
    results = []
    with exact(model) if is_exact else nullcontext():
        for number in range(1, args.updates + 1):
            results.append(
                {
                    "exact": is_exact,
                    "update": number,
                    **update(model, tokenizer, optimizer, inputs, args),
                }
            )
            print(row(results[-1]), flush=True)
    return results


HEAD = (
    "| `exact` | update | reward | largest \\|ratio - 1\\| | largest divergence |\n"
    + "|---" * 5
    + "|"
)


def row(result: Result) -> str:
    numbers = " | ".join(
        "0" if value == 0 else f"{value:.1e}" for value in (result["ratio"], result["divergence"])
    )
    where = "inside" if result["exact"] else "without"
    return f"| {where} | {result['update']} | {result['reward']:.2f} | {numbers} |"


def summary(results: list[Result]) -> str:
    """Of both runs: the reward at the beginning and at the end, and the largest |ratio - 1| of all."""
    lines = []
    for is_exact, side in SIDES.items():
        own = [r for r in results if r["exact"] == is_exact]
        ratio = max(r["ratio"] for r in own)
        rewards = f"reward {own[0]['reward']:.2f} -> {own[-1]['reward']:.2f}"
        lines.append(
            f"{side}: {rewards}, largest |ratio - 1| of all updates "
            f"{'0' if ratio == 0 else f'{ratio:.1e}'}"
        )
    return "\n".join(lines)


def draw(results: list[Result], args: argparse.Namespace) -> None:
    """The largest |ratio - 1| of each update, and the reward, of both runs."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, SymmetricalLogLocator

    figure, (ratios, rewards) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    positive = [r["ratio"] for r in results if r["ratio"] > 0] or [1e-6]
    for (is_exact, side), color in zip(SIDES.items(), ("tab:orange", "tab:blue"), strict=True):
        own = [r for r in results if r["exact"] == is_exact]
        updates = [r["update"] for r in own]
        ratios.plot(updates, [r["ratio"] for r in own], ".-", color=color, label=side)
        rewards.plot(updates, [r["reward"] for r in own], ".-", color=color, label=side)
    decade = 10.0 ** math.floor(math.log10(min(positive)))  # below it the axis is linear, down to 0
    ratios.set_yscale("symlog", linthresh=decade)
    ratios.set_ylim(-decade / 5, 20 * max(positive))
    ratios.yaxis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=decade))
    ratios.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: "0" if value == 0 else f"{value:.0e}")
    )
    ratios.set(xlabel="update", title=f"largest |ratio - 1| over the sampled tokens, {args.dtype}")
    rewards.set(
        xlabel="update",
        ylim=(0, 1.2),
        yticks=[0, 0.25, 0.5, 0.75, 1],
        title=f"reward: share of lines that end in '{args.letter}'",
    )
    for axis in (ratios, rewards):
        axis.legend(frameon=False, loc="upper left", ncols=2)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(args.plot, dpi=130)
    plt.close(figure)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MINIATURES, default="llama", help="default: %(default)s")
    parser.add_argument("--letter", default="e", help="default: %(default)s")
    parser.add_argument("--updates", type=int, default=30, help="default: %(default)s")
    parser.add_argument(
        "--group",
        type=int,
        default=8,
        help="completions of each of 4 prompts; default: %(default)s",
    )
    parser.add_argument("--max-new-tokens", type=int, default=24, help="default: %(default)s")
    parser.add_argument("--learning-rate", type=float, default=5e-4, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if gpu else "cpu", help="default: %(default)s")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="default: bfloat16 on a GPU, float32 on a CPU",
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--plot", type=Path, help="draw the ratios and the rewards here")
    args = parser.parse_args(argv)
    args.dtype = args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float32")
    return args


def check(args: argparse.Namespace) -> None:
    for name, least in (("updates", 1), ("group", 2), ("max_new_tokens", 2)):
        if getattr(args, name) < least:
            raise BadArgument(
                f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}"
            )
    if len(args.letter) != 1 or not args.letter.islower():
        raise BadArgument(f"--letter must be one small letter, got {args.letter!r}")


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        check(args)
        print(HEAD)
        results = [result for is_exact in SIDES for result in train(is_exact, args)]
    except (BadArgument, ValueError) as error:
        print(f"on_policy.py: {error}", file=sys.stderr)
        return 2
    print(f"\n{summary(results)}")
    if args.json:
        record = {**environment(args.device), "dtype": args.dtype, "results": results}
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    if args.plot:
        draw(results, args)
    return 0 if all(result["ratio"] == 0 for result in results if result["exact"]) else 1


if __name__ == "__main__":
    sys.exit(main())
