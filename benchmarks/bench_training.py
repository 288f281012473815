"""Log-probabilities of a generation against a training pass, gradients, and the training step.

    python benchmarks/bench_training.py --model llama-3.2-1b --dtype bfloat16 --json training.json
    python benchmarks/bench_training.py --model qwen3-30b-a3b-8l-16e --json training-experts.json
    python benchmarks/bench_training.py --model llama --device cpu --new-tokens 8 --train-len 16

Each without and inside `exact`:
  differences   `GraphDecoder` samples from left-padded prompts. A pass with gradients over the same
                sequences, with more padding, gives log-probabilities of the same tokens: the
                largest difference over the whole vocabulary, and the largest |ratio - 1| of the
                probabilities of the sampled tokens.
  gradients     The relative error of the gradient of all parameters, against a copy in float64, for
                8 pairs of sequences. Of the copy, only what transformers computes in float32 in
                every dtype (norms, routers) is not in float64.
  steps         Milliseconds of forward and backward pass over `--batch-size` sequences, 5 trials in
                turns after one for warming up. `labels`: the model's own loss. `token_logprobs`:
                our function, which computes the logits again in the backward pass.
Exit status 1 if a difference inside `exact` is not zero, 2 for a bad argument.
"""

from __future__ import annotations

import argparse
import copy
import sys
from typing import Any

import torch
import torch.nn.functional as F
from measure import SIDES, cost_of_exact, decoded_logits, inside, on_both_sides, seconds, spread
from outputs import at_least, benchmark_parser, run_benchmark
from records import Record, differs_inside_exact
from tqdm import tqdm
from transformers import PreTrainedModel
from workload import Workload, build_workload, fill_lengths

from hf_static_kv import selected_logprobs, token_logprobs

TRIALS = 5
MORE_PADDING = 37
GRADIENT_DRAWS = 8
GRADIENT_ROWS = 2
GRADIENT_LENGTH = 256
CASES = ("labels", "token_logprobs")


def training_logits(
    model: Any, sequences: torch.Tensor, mask: torch.Tensor, new_tokens: int
) -> torch.Tensor:
    """The logits of the new tokens, [B, n, V], from a pass with gradients over more padding."""
    mask = F.pad(F.pad(mask, (0, new_tokens), value=1), (MORE_PADDING, 0))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    sequences = F.pad(sequences, (MORE_PADDING, 0))
    keywords = {"attention_mask": mask, "position_ids": positions, "use_cache": False}
    logits: torch.Tensor = model(sequences, **keywords, logits_to_keep=new_tokens + 1).logits
    return logits[:, :-1].detach()


def differences(model: PreTrainedModel, workload: Workload) -> dict[str, float]:
    """The largest over all new tokens, one batch row after the other: a vocabulary is large."""
    prompt = workload.prompt()
    how = {"do_sample": True, "top_k": 0}
    sequences, sampled = decoded_logits(model, prompt, workload.new_tokens, **how)
    trained = training_logits(model, sequences, prompt["attention_mask"], workload.new_tokens)
    largest = []
    ratios = []
    for row, tokens in enumerate(sequences[:, -workload.new_tokens :]):
        both = [logits[row].float() for logits in (sampled, trained)]
        largest.append((both[0].log_softmax(-1) - both[1].log_softmax(-1)).abs().max().item())
        one, other = (selected_logprobs(logits, tokens) for logits in both)
        ratios.append(((other - one).exp() - 1).abs().max().item())
    return {"log-probability": max(largest), "ratio": max(ratios)}


def gradient(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of each parameter, on the model's device."""
    model.zero_grad()
    token_logprobs(model, ids).mean().backward()
    found = {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def relative_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    error = sum((found[name].double() - expected[name]).square().sum().item() for name in expected)
    return (error / sum(gradient.square().sum().item() for gradient in expected.values())) ** 0.5


def gradient_errors(
    model: PreTrainedModel, draws: list[torch.Tensor]
) -> dict[str, dict[str, float]]:
    reference: Any = copy.deepcopy(model).double()
    reference.set_experts_implementation("eager")  # the others do not compute in float64
    errors: dict[str, list[float]] = {side: [] for side in SIDES}
    for ids in tqdm(draws, disable=None, leave=False):
        expected = gradient(reference, ids)
        for side in SIDES:
            with inside(model, side):
                errors[side].append(relative_error(gradient(model, ids), expected))
    return {side: spread(found) for side, found in errors.items()}


class Steps:
    """Forward and backward pass with each loss: milliseconds, and memory at the peak."""

    def __init__(self, model: PreTrainedModel, ids: torch.Tensor) -> None:
        self.model: Any = model
        self.ids = ids

    def labels(self) -> None:
        self.model(self.ids, labels=self.ids, use_cache=False).loss.backward()

    def token_logprobs(self) -> None:
        token_logprobs(self.model, self.ids).mean().neg().backward()

    def ms(self) -> dict[str, float]:
        found = {}
        for name in CASES:
            self.model.zero_grad()
            found[name] = seconds(getattr(self, name), str(self.ids.device)) * 1e3
        return found

    def gib(self) -> dict[str, float]:
        """GiB of GPU memory, weights and gradients included."""
        found = {}
        for name in CASES if self.ids.is_cuda else ():
            self.model.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            getattr(self, name)()
            found[name] = torch.cuda.max_memory_allocated() / 2**30
        return found


def steps(model: PreTrainedModel, ids: torch.Tensor) -> Record:
    """Times of both sides in turns, then their peaks of memory."""
    of_model = Steps(model, ids)
    ms = cost_of_exact(model, of_model.ms, TRIALS)
    return {"ms": ms, "gib": on_both_sides(model, of_model.gib)}


def measure(args: argparse.Namespace) -> Record:
    workload = chosen(args)
    model = workload.build_model().train()
    record = {**workload.origin(), "trials": TRIALS}
    record["workload"]["train_len"] = args.train_len
    record["differences"] = on_both_sides(model, lambda: differences(model, workload))
    vocab_size = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randint(vocab_size, shape, generator=generator).to(workload.device)

    length = min(args.train_len, GRADIENT_LENGTH)
    draws = [drawn(GRADIENT_ROWS, length) for _ in range(GRADIENT_DRAWS)]
    record["gradient_errors"] = gradient_errors(model, draws)
    return record | steps(model, drawn(workload.batch_size, args.train_len))


def parser() -> argparse.ArgumentParser:
    parser = benchmark_parser(__doc__)
    parser.set_defaults(batch_size=8)
    words = "tokens of a sequence in the timed step (%(default)s)"
    parser.add_argument("--train-len", type=int, default=1024, help=words)
    return parser


def chosen(args: argparse.Namespace) -> Workload:
    at_least(args, prompt_len=8, new_tokens=2, train_len=2)
    fill_lengths(args)
    padded = args.prompt_len + args.new_tokens + MORE_PADDING
    return build_workload(args, longest=max(padded, args.train_len), padded=True)


def main() -> int:
    return run_benchmark(parser(), measure, differs_inside_exact)


if __name__ == "__main__":
    sys.exit(main())
