"""The answers of a chat for a program with an event loop: `generate` runs in a thread, its text arrives
in the loop.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Coroutine
from threading import Thread
from typing import Any

import torch
from common import BadArgument
from jinja2 import TemplateError
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer


def encode(
    messages: list[dict[str, str]],
    max_new_tokens: int,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, torch.Tensor]:
    """The model's inputs; `BadArgument` if the chat does not fit the template or the context."""
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise BadArgument(f"The chat template refuses the messages: {error}") from error
    encoded = tokenizer(text, add_special_tokens=False, return_tensors="pt").to(model.device)
    length = encoded["input_ids"].shape[1]
    context = getattr(model.config.get_text_config(), "max_position_embeddings", sys.maxsize)
    if length == 0:
        raise BadArgument("The prompt is empty: give at least one word.")
    if length + max_new_tokens > context:
        raise BadArgument(
            f"The prompt has {length} tokens and max_tokens is {max_new_tokens}: more than the "
            f"context of {context}. Shorten one of them."
        )
    return {key: encoded[key] for key in ("input_ids", "attention_mask")}


_PAUSE = 0.02  # seconds between two pieces of an answer: each takes the server's time


class ClientLeft(Exception):
    """Raised by a streamer, it ends `generate`."""


class Answer(BaseStreamer):
    """A text that grows in the thread of its call. The event loop reads it.

    answer = Answer(tokenizer, max_new_tokens=40)
    answer.start(model, **inputs)
    async for text in answer.texts():
        ...
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int) -> None:
        self.tokenizer = tokenizer.backend_tokenizer
        self.max_new_tokens = max_new_tokens
        # `TextStreamer` would decode the whole line again for each token, and wait for a space.
        self.decoder = DecodeStream(skip_special_tokens=True)
        self.loop = asyncio.get_running_loop()
        self.has_news = asyncio.Event()
        self.is_told = False  # that there are some
        self.text = ""
        self.num_tokens = 0
        self.is_over = False
        self.is_left = False
        self.error: Exception | None = None

    def start(self, model: PreTrainedModel, **arguments: Any) -> None:
        # The threads of `asyncio.to_thread` are few: calls would wait for one.
        Thread(target=self._run, args=(model, arguments), daemon=True).start()

    def end_after(self, event: Coroutine[Any, Any, Any]) -> None:
        """End the call when this coroutine returns."""

        async def wait() -> None:
            await event
            self.is_left = True

        self.waiting = asyncio.create_task(wait())  # kept: the event loop holds no tasks

    @property
    def finish_reason(self) -> str:
        """In OpenAI's words."""
        return "length" if self.num_tokens == self.max_new_tokens else "stop"

    async def texts(self) -> AsyncIterator[str]:
        """What is new since the last text: the first token, then what comes in 20 ms.

        Raises the error of the call, if there was one, at the end. A reader that stops before ends
        the call.
        """
        num_read = 0
        is_over = False
        try:
            while not is_over:
                await self.has_news.wait()
                self.has_news.clear()
                self.is_told = False
                is_over = self.is_over  # read before the text, which may grow meanwhile
                text = self.text[num_read:]
                num_read += len(text)
                if text:
                    yield text
                    await asyncio.sleep(0 if is_over else _PAUSE)
        finally:
            self.is_left = True
        if self.error is not None:
            raise self.error

    # --- in the thread of the call

    def _run(self, model: PreTrainedModel, arguments: dict[str, Any]) -> None:
        try:
            model.generate(**arguments, max_new_tokens=self.max_new_tokens, streamer=self)
        except ClientLeft:
            pass
        except Exception as error:
            self.error = error
        self.is_over = True
        self._tell()

    def put(self, value: torch.Tensor) -> None:
        if self.is_left:
            raise ClientLeft
        if value.ndim == 1:  # the prompt has two dimensions
            self.num_tokens += 1
            self.text += self.decoder.step(self.tokenizer, value.item()) or ""
            self._tell()

    def end(self) -> None:
        """`_run` tells the end, after an error too."""

    def _tell(self) -> None:
        if not self.is_told:
            self.is_told = True
            self.loop.call_soon_threadsafe(self.has_news.set)
