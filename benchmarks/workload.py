"""What a benchmark runs (a model, a prompt, a number of new tokens), and its command-line
arguments.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from processes import preload
from provenance import provenance
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import model_type_to_module_name

from hf_static_kv import testing
from hf_static_kv.testing import dev_config

# Models that are built from their config, with random weights.
SHAPES = {**testing.DEV_MODELS, **testing.FAMILIES, **testing.PARTS}


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
    padded: bool = False

    @property
    def has_random_weights(self) -> bool:
        return self.model in SHAPES

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def origin(self) -> dict[str, Any]:
        """How a record begins: where it was made, and of what."""
        return {
            **provenance(self.device),
            "workload": asdict(self),
            "random_weights": self.has_random_weights,
        }

    def build_model(self) -> PreTrainedModel:
        """The model on its device. A known shape has random weights, any other model its own."""
        quiet()
        dtype = getattr(torch, self.dtype)
        if self.has_random_weights:
            model = testing.random_model(dev_config(self.model), device=self.device, dtype=dtype)
        else:
            model = self._load(dtype)
        # An end token outside the vocabulary: every run pays for the test, and none stops early.
        model.generation_config.eos_token_id = model.config.get_text_config().vocab_size
        model.generation_config.pad_token_id = 0
        return model

    def _load(self, dtype: torch.dtype) -> PreTrainedModel:
        try:
            model, _ = testing.load_model(self.model, device=self.device, dtype=dtype)
        except ValueError as error:
            raise BadArgument(str(error)) from error
        return model

    def prompt(self, length: int | None = None) -> dict[str, torch.Tensor]:
        """Random tokens, the same for every contender; padded rows have fewer.

        `length` is `prompt_len` by default.
        """
        vocab_size = find_config(self.model).get_text_config().vocab_size
        generator = torch.Generator().manual_seed(0)
        shape = (self.batch_size, length or self.prompt_len)
        ids = torch.randint(vocab_size, shape, generator=generator)
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


def find_config(model: str) -> PreTrainedConfig:
    """The model's config, or `BadArgument`."""
    if model in SHAPES:
        return dev_config(model)
    try:
        return testing.load_config(model)
    except ValueError as error:
        raise BadArgument(str(error)) from error


def add_workload_arguments(parser: argparse.ArgumentParser, lengths: bool) -> None:
    """Those of the model; with `lengths` also those of the prompt and of the new tokens."""
    gpu = torch.cuda.is_available()
    parser.add_argument(
        "--model",
        default="llama-3.2-1b" if gpu else "llama",
        help=f"a true shape with random weights ({', '.join(SHAPES)}), a miniature (llama, qwen3, "
        "gemma3), smollm2, a hub id, a folder or a GGUF file; default: %(default)s",
    )
    parser.add_argument("--device", default="cuda" if gpu else "cpu", help="default: %(default)s")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="default: bfloat16 on a GPU, float32 on a CPU",
    )
    parser.add_argument("--batch-size", type=int, default=1)
    if lengths:
        words = "default: {}, or a {} of a context below 1024"
        parser.add_argument("--prompt-len", type=int, help=words.format(512, "half"))
        parser.add_argument("--new-tokens", type=int, help=words.format(256, "quarter"))


def fill_lengths(args: argparse.Namespace) -> None:
    """Set the prompt and the new tokens to their defaults if they are not given."""
    context = context_length(args) or 1024
    if args.prompt_len is None:
        args.prompt_len = min(512, context // 2)
    if args.new_tokens is None:
        args.new_tokens = min(256, context // 4)


def build_workload(
    args: argparse.Namespace, longest: int = 0, capacity: int | None = None, padded: bool = False
) -> Workload:
    """The workload of these arguments, or `BadArgument`.

    `longest` is the longest sequence that the script makes, if that is not prompt and new tokens.
    """
    quiet()
    _check_device(args.device)
    config = find_config(args.model)
    if config.is_encoder_decoder:
        raise BadArgument(
            f"{args.model} is an encoder-decoder; these benchmarks are for decoder-only models"
        )
    if args.batch_size < 1:
        raise BadArgument(f"--batch-size must be at least 1, got {args.batch_size}")
    fill_lengths(args)
    needed = args.prompt_len + args.new_tokens
    _check_length(args, max(longest, needed))
    if capacity is not None and capacity < needed:
        raise BadArgument(
            f"--max-cache-len {capacity} is less than {args.prompt_len} + {args.new_tokens} tokens"
        )
    family = model_type_to_module_name(config.get_text_config().model_type)
    preload(f"transformers.models.{family}.modeling_{family}")
    dtype = args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float32")
    sizes = (args.prompt_len, args.new_tokens, args.batch_size, capacity or needed)
    return Workload(args.model, args.device, dtype, *sizes, padded)


def _check_length(args: argparse.Namespace, longest: int) -> None:
    context = context_length(args)
    if context is not None and longest > context:
        raise BadArgument(
            f"prompt and new tokens come to {longest} tokens: more than the {context} of "
            f"{args.model}'s context. Shorten one of them"
        )


def context_length(args: argparse.Namespace) -> int | None:
    """The longest sequence of the model; None if its config sets no limit."""
    config = find_config(args.model).get_text_config()
    return getattr(config, "max_position_embeddings", None)


def _check_device(name: str) -> None:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise BadArgument(f"--device {name} is no device: use cpu, cuda or cuda:0") from error
    if device.type not in ("cpu", "cuda"):
        raise BadArgument(f"--device {name}: these benchmarks synchronize cpu and cuda only")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise BadArgument(f"--device {name}: this machine has {count} CUDA devices")


def quiet() -> None:
    """Silence transformers' warnings and progress bars."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
