"""What a benchmark runs (a model, a prompt, a number of new tokens), and its command-line
arguments.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from processes import preload
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import model_type_to_module_name

from hf_static_kv.testing import (
    DEV_MODELS,
    FAMILIES,
    PARTS,
    dev_config,
    load_config,
    load_model,
    random_model,
)

SHAPES = {
    **DEV_MODELS,
    **FAMILIES,
    **PARTS,
}  # models that are built from their config, with random weights


class BadArgument(Exception):
    """An argument that the user must change. The message is one line."""


@dataclass(frozen=True)
class Workload:
    """One generation. `max_cache_len` is the capacity of a static cache."""

    model: str
    device: str
    dtype: str
    prompt_len: int
    new_tokens: int
    batch_size: int
    max_cache_len: int
    real_weights: bool = False
    padded: bool = False

    @property
    def has_random_weights(self) -> bool:
        return self.model in SHAPES and not self.real_weights

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def summary(self) -> dict[str, Any]:
        """What a record says of it when the sizes vary inside the run."""
        shown = {"model": self.model, "dtype": self.dtype, "batch_size": self.batch_size}
        return {**shown, "random_weights": self.has_random_weights}

    def build_model(self) -> PreTrainedModel:
        """The model on its device:

        a known shape with random weights, any other model with its weights.
        """
        quiet()
        dtype = getattr(torch, self.dtype)
        if self.has_random_weights:
            model = random_model(dev_config(self.model), device=self.device, dtype=dtype)
        else:
            model = self._load(dtype)
        # An end token outside the vocabulary: every run pays for the test, and none stops early.
        model.generation_config.eos_token_id = model.config.get_text_config().vocab_size
        model.generation_config.pad_token_id = 0
        return model

    def _load(self, dtype: torch.dtype) -> PreTrainedModel:
        try:
            model, _ = load_model(self.model, device=self.device, dtype=dtype)
        except ValueError as error:
            raise BadArgument(str(error)) from error
        return model

    def prompt(self, length: int | None = None) -> dict[str, torch.Tensor]:
        """`length` random tokens (default:

        `prompt_len`), the same for every contender; padded rows have fewer.
        """
        vocab_size = find_config(self.model, self.real_weights).get_text_config().vocab_size
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(
            vocab_size, (self.batch_size, length or self.prompt_len), generator=generator
        )
        mask = torch.ones_like(ids)
        for row in range(self.batch_size):
            mask[row, : self._padding(row, ids.shape[1])] = 0
        return {"input_ids": (ids * mask).to(self.device), "attention_mask": mask.to(self.device)}

    @property
    def mean_prompt_len(self) -> int:
        """Mean number of tokens of a batch row, left padding not counted."""
        paddings = [self._padding(row, self.prompt_len) for row in range(self.batch_size)]
        return self.prompt_len - sum(paddings) // self.batch_size

    def _padding(self, row: int, length: int) -> int:
        """Left padding of a batch row: none in the first, up to half of the length in the last."""
        return row * length // (2 * self.batch_size) if self.padded else 0


def find_config(model: str, real_weights: bool = False) -> PreTrainedConfig:
    """The model's config, or `BadArgument`."""
    if model in SHAPES and not real_weights:
        return dev_config(model)
    try:
        return load_config(model)
    except ValueError as error:
        raise BadArgument(str(error)) from error


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    gpu = torch.cuda.is_available()
    parser.add_argument(
        "--model",
        default="llama-3.2-1b" if gpu else "llama",
        help=f"a true shape with random weights ({', '.join(SHAPES)}), a miniature (llama, qwen3, gemma3), smollm2, "
        "a hub id, a folder or a GGUF file; default: %(default)s",
    )
    parser.add_argument(
        "--real-weights", action="store_true", help="load a dev model's weights instead"
    )
    parser.add_argument("--device", default="cuda" if gpu else "cpu", help="default: %(default)s")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="default: bfloat16 on a GPU, float32 on a CPU",
    )
    parser.add_argument("--batch-size", type=int, default=1)


def check_workload_arguments(args: argparse.Namespace, longest: int) -> None:
    """Fill in the dtype; refuse an absent device and a sequence that is longer than the model's
    context.
    """
    quiet()
    _check_device(args.device)
    config = find_config(args.model, args.real_weights)
    if config.is_encoder_decoder:
        raise BadArgument(
            f"{args.model} is an encoder-decoder; these benchmarks are for decoder-only models"
        )
    if args.batch_size < 1:
        raise BadArgument(f"--batch-size must be at least 1, got {args.batch_size}")
    context = context_length(args)
    if context is not None and longest > context:
        raise BadArgument(
            f"prompt and new tokens come to {longest} tokens: more than the {context} of "
            f"{args.model}'s context. Shorten one of them"
        )
    family = model_type_to_module_name(config.get_text_config().model_type)
    preload(f"transformers.models.{family}.modeling_{family}")
    args.dtype = args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float32")


def context_length(args: argparse.Namespace) -> int | None:
    """The longest sequence of the model; None where its config sets no limit."""
    config = find_config(args.model, args.real_weights).get_text_config()
    return getattr(config, "max_position_embeddings", None)


def _check_device(name: str) -> None:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise BadArgument(f"--device {name} is no device: use cpu, cuda or cuda:0") from error
    if device.type not in ("cpu", "cuda"):
        raise BadArgument(f"--device {name}: these benchmarks synchronize cpu and cuda only")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadArgument(
            f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices"
        )


def quiet() -> None:
    """Silence transformers' warnings and progress bars."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
