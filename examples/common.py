"""What the larger programs here share: prompts, inputs, and the head of a JSON record."""

from __future__ import annotations

import argparse
import platform
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROMPTS = Path(__file__).parent / "data" / "prompts.jsonl"
ONE_TEXT = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


class BadArgument(Exception):
    """An argument that the user must change. The message is one line."""


def server_parser() -> argparse.ArgumentParser:
    """The arguments of the chat servers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="llama", help="a short name, a hub id or a folder")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=int, default=64, help="calls that decode together")
    parser.add_argument("--port", type=int, default=8000)
    return parser


def read_prompts(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The user's prompt, or those of examples/data/prompts.jsonl that suit the model."""
    if args.prompt is not None:
        return [args.prompt]
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    kind = "chat" if tokenizer.chat_template else "play"
    lines = Dataset.from_json(str(PROMPTS), keep_in_memory=True)
    return [line["prompt"] for line in lines if line["kind"] == kind]


def encode(
    prompt: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    args: argparse.Namespace,
) -> dict:
    """The model's inputs; the prompt becomes a chat message where the tokenizer has a chat
    template.
    """
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=not tokenizer.chat_template)
    length, context = (
        encoded["input_ids"].shape[1],
        model.config.get_text_config().max_position_embeddings,
    )
    if length == 0:
        raise BadArgument("the prompt is empty: give at least one word")
    if length + args.max_new_tokens > context:
        raise BadArgument(
            f"the prompt has {length} tokens and --max-new-tokens is {args.max_new_tokens}: more "
            f"than the context of {context}. Shorten one of them"
        )
    return {key: encoded[key].to(args.device) for key in ("input_ids", "attention_mask")}


def chat_as_one_text(tokenizer: PreTrainedTokenizerBase) -> None:
    """Without a chat template a chat is one text: a line of the user, what the model writes after
    it, the next line.
    """
    if not tokenizer.chat_template:
        beginning = tokenizer.decode(tokenizer.encode(""))  # its first token, if it has one
        tokenizer.chat_template = beginning + ONE_TEXT


def environment(device: str) -> dict[str, Any]:
    """Where, when and with what a record was made."""
    return {
        "hardware": torch.cuda.get_device_name(device)
        if device.startswith("cuda")
        else platform.machine(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "command": " ".join(["python", *sys.argv]),
    }
