"""Log-probabilities of a generation against those of a training pass, gradients, and the time of a
training step.

    python benchmarks/bench_training.py --model llama-3.2-1b --dtype bfloat16 --json training.json
    python benchmarks/bench_training.py --model qwen3-30b-a3b-8l-16e --json training-experts.json
    python benchmarks/bench_training.py --model llama --device cpu --prompt-len 16 --new-tokens 8 --train-len 16

Each without and inside `exact`:
  differences   `GraphDecoder` samples from left-padded prompts. A pass with gradients over the same sequences, with
                more padding, gives log-probabilities of the same tokens: the largest difference over the whole
                vocabulary, and the largest |ratio - 1| of the probabilities of the sampled tokens.
  gradients     The relative error of the gradient of all parameters over two sequences, against a copy in float64: the
                median (minimum to maximum) of 8 pairs of sequences. Of the copy, only what transformers computes in
                float32 in every dtype (norms, routers) is not in float64.
  steps         Milliseconds of forward and backward pass over `--batch-size` sequences of `--train-len` tokens, in
                turns; the median (minimum to maximum) of 5 trials after one for warming up. `labels`: the model's own
                loss. `token_logprobs`: our function, which computes the logits again in the backward pass.
Exit status 1 when a difference inside `exact` is not zero, 2 for a bad argument.
"""

from __future__ import annotations

import argparse
import copy
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tables
import torch
import torch.nn.functional as F
from measure import seconds, spread
from outputs import at_least, benchmark_parser, run_benchmark
from provenance import provenance
from record_figures import conditions, differs_inside_exact
from tqdm import tqdm
from transformers import PreTrainedModel
from workload import BadArgument, Workload, check_workload_arguments

from hf_static_kv import (
    GraphDecoder,
    StaticContiguousCache,
    exact,
    selected_logprobs,
    token_logprobs,
)

Record = dict[str, Any]
TRIALS = 5
SIDES = ("usual", "exact")
MORE_PADDING = 37
GRADIENT_DRAWS, GRADIENT_ROWS, GRADIENT_LENGTH = 8, 2, 256


def _side(model: PreTrainedModel, name: str) -> AbstractContextManager[None]:
    return exact(model) if name == "exact" else nullcontext()


def sample(model: Any, workload: Workload) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences [B, T] and the logits that their new tokens were sampled from, [B, n, V]."""
    cache, decoder = (
        StaticContiguousCache.from_model(model, workload.max_cache_len, workload.batch_size),
        GraphDecoder(),
    )
    output = model.generate(
        **workload.prompt(),
        past_key_values=cache,
        custom_generate=decoder,
        max_new_tokens=workload.new_tokens,
        do_sample=True,
        top_k=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    if decoder.fallback_reason is not None:
        raise BadArgument(f"GraphDecoder falls back on this model: {decoder.fallback_reason}")
    return output.sequences, torch.stack(output.logits, dim=1)


def training_logits(
    model: Any, sequences: torch.Tensor, mask: torch.Tensor, new_tokens: int
) -> torch.Tensor:
    """The logits of the new tokens, [B, n, V], from a pass with gradients over more padding."""
    mask = F.pad(F.pad(mask, (0, new_tokens), value=1), (MORE_PADDING, 0))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    sequences = F.pad(sequences, (MORE_PADDING, 0))
    keywords = {"attention_mask": mask, "position_ids": positions, "use_cache": False}
    logits: torch.Tensor = (
        model(sequences, **keywords, logits_to_keep=new_tokens + 1).logits[:, :-1].detach()
    )
    return logits


def differences(model: PreTrainedModel, workload: Workload) -> dict[str, float]:
    """The largest over all new tokens, one batch row after the other: a vocabulary is large."""
    sequences, sampled = sample(model, workload)
    trained = training_logits(
        model, sequences, workload.prompt()["attention_mask"], workload.new_tokens
    )
    largest, ratios = [], []
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
            with _side(model, side):
                errors[side].append(relative_error(gradient(model, ids), expected))
    return {side: spread(found) for side, found in errors.items()}


class Steps:
    """Milliseconds of forward and backward pass, and the memory that a step needs at its peak, of
    one trial.
    """

    def __init__(self, model: PreTrainedModel, ids: torch.Tensor) -> None:
        self.model: Any = model
        self.ids, self.device = ids, str(ids.device)

    def labels(self) -> None:
        self.model(self.ids, labels=self.ids, use_cache=False).loss.backward()

    def token_logprobs(self) -> None:
        token_logprobs(self.model, self.ids).mean().neg().backward()

    def trial(self) -> dict[str, float]:
        ms = {}
        for name in ("labels", "token_logprobs"):
            self.model.zero_grad()
            ms[name] = seconds(getattr(self, name), self.device) * 1e3
        return ms

    def gib(self) -> dict[str, float]:
        """GiB of GPU memory at the peak of a step, weights and gradients included."""
        peaks = {}
        for name in ("labels", "token_logprobs") if self.ids.is_cuda else ():
            self.model.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            getattr(self, name)()
            peaks[name] = torch.cuda.max_memory_allocated() / 2**30
        return peaks


def steps(model: PreTrainedModel, ids: torch.Tensor) -> Record:
    """Both sides in turns, each with its spread over the trials; the peaks of memory after them."""
    of_model = Steps(model, ids)
    trials: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for _ in tqdm(range(TRIALS + 1), disable=None, leave=False):
        for side in SIDES:
            with _side(model, side):
                trials[side].append(of_model.trial())
    warm = {side: rows[1:] for side, rows in trials.items()}
    ms = {
        side: {name: spread([row[name] for row in rows]) for name in rows[0]}
        for side, rows in warm.items()
    }
    gib = {}
    for side in SIDES:
        with _side(model, side):
            gib[side] = of_model.gib()
    model.zero_grad()
    return {"ms": ms, "gib": gib}


def measure(args: argparse.Namespace) -> Record:
    workload = chosen(args)
    model, found = workload.build_model().train(), {}
    for side in SIDES:
        with _side(model, side):
            found[side] = differences(model, workload)
    vocab_size, generator = (
        model.config.get_text_config().vocab_size,
        torch.Generator().manual_seed(0),
    )

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randint(vocab_size, shape, generator=generator).to(workload.device)

    length = min(args.train_len, GRADIENT_LENGTH)
    errors = gradient_errors(model, [drawn(GRADIENT_ROWS, length) for _ in range(GRADIENT_DRAWS)])
    ids = drawn(workload.batch_size, args.train_len)
    names = ("model", "dtype", "batch_size", "prompt_len", "new_tokens")
    shown = {key: getattr(workload, key) for key in names} | {"train_len": args.train_len}
    record = {**provenance(workload.device), "workload": shown, "trials": TRIALS}
    return {**record, "differences": found, "gradient_errors": errors, **steps(model, ids)}


def report(record: Record) -> str:
    return f"{conditions(record)}\n\n{tables.TRAINING}\n\n{tables.training([record], spread=True)}"


def parser() -> argparse.ArgumentParser:
    parser = benchmark_parser(__doc__)
    parser.set_defaults(batch_size=8)
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument(
        "--train-len", type=int, default=1024, help="tokens of a sequence in the timed step"
    )
    return parser


def chosen(args: argparse.Namespace) -> Workload:
    at_least(
        prompt_len=(args.prompt_len, 8),
        new_tokens=(args.new_tokens, 2),
        train_len=(args.train_len, 2),
    )
    capacity = args.prompt_len + args.new_tokens
    check_workload_arguments(args, max(capacity + MORE_PADDING, args.train_len))
    sizes = (args.prompt_len, args.new_tokens, args.batch_size, capacity, args.real_weights)
    return Workload(args.model, args.device, args.dtype, *sizes, padded=True)


def main() -> int:
    return run_benchmark(parser(), measure, report, failed=differs_inside_exact)


if __name__ == "__main__":
    sys.exit(main())
