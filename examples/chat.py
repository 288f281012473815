r"""Talk to a model in the terminal. `attach(model, reuse_prefix=True)`: each turn computes only
what is new in it.

    python examples/chat.py                                    # SmolLM2; it loads for half a minute
    python examples/chat.py --model llama --max-new-tokens 40  # no chat template: the model goes on writing
    python examples/chat.py --model Qwen/Qwen3-1.7B --device cuda --dtype bfloat16
    printf 'Hi\nWhy?\n' | python examples/chat.py --plain      # the same chat without attach, to compare
    python examples/chat.py --folder chats                     # /save NAME, and /load NAME in a later process

--model takes a short name, a hub id, a folder or a GGUF file. Exit status 2 for a bad argument.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
import transformers
from common import BadArgument, chat_as_one_text
from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from hf_static_kv import attach, attachment
from hf_static_kv.testing import load_model

with suppress(ImportError):  # Windows has none
    import readline  # noqa: F401  (it gives `input` the arrow keys and the earlier lines)

HELP = """/reset         a new chat; the system message stays
/system TEXT   another system message from the next turn on; without TEXT none
/save NAME     keep this chat, its keys and values too, in --folder
/load NAME     go on with a saved chat; none of it is computed again
/info          what attach holds for this model
/quit          the end, as Ctrl-D
Ctrl-C stops an answer. To say something that begins with a slash, put a space before it."""


class Answer(TextStreamer):
    """Prints the answer as it is made. Keeps its tokens, and the times of the call and of each
    token.

    Ctrl-C ends it as an end token would: an exception would lose what the cache holds. A second
    Ctrl-C raises one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.ids: list[int] = []
        self.is_stopped = False
        self.times = [time.perf_counter()]

    def put(self, value: torch.Tensor) -> None:
        is_prompt = self.next_tokens_are_prompt
        super().put(value)
        if not is_prompt:
            self.ids += value.tolist()
            self.times.append(time.perf_counter())

    def stop(self, *signal_and_frame: object) -> None:
        self.is_stopped = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def figures(self) -> str:
        if len(self.ids) < 2:
            return f"{len(self.ids)} tokens"
        first, rest = self.times[1] - self.times[0], self.times[-1] - self.times[1]
        return f"{(len(self.ids) - 1) / rest:.1f} tokens/s, first token after {first * 1e3:.0f} ms"


class Chat:
    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace
    ) -> None:
        self.model, self.tokenizer, self.args, self.system = model, tokenizer, args, args.system
        self.context = getattr(
            model.config.get_text_config(), "max_position_embeddings", sys.maxsize
        )
        self.reset()

    def reset(self) -> None:
        self.messages: list[dict[str, str]] = []
        self.ids: list[int] = []  # of the last prompt and its answer

    def encode(self, messages: list[dict[str, str]]) -> list[int]:
        """The tokens of the chat: earlier answers as they were generated, if the template has not
        changed their text.

        Their text encoded anew can have other tokens, and nothing after these would be reused. A
        template that changes earlier answers (removes spaces, or thoughts) means other tokens: then
        the whole chat is encoded.
        """
        system = [{"role": "system", "content": self.system}] if self.system else []
        text = self.tokenizer.apply_chat_template(
            [*system, *messages], add_generation_prompt=True, tokenize=False
        )
        new_text = text[len(self.tokenizer.decode(self.ids)) :]
        ids = self.ids + self.tokenizer.encode(new_text, add_special_tokens=False)
        is_unchanged = self.tokenizer.decode(ids) == text
        return ids if is_unchanged else self.tokenizer.encode(text, add_special_tokens=False)

    def reply(self, line: str) -> str:
        """Print the answer; returns its figures."""
        messages = [*self.messages, {"role": "user", "content": line}]
        prompt = self.encode(messages)
        limit = min(self.args.max_new_tokens, self.context - len(prompt))
        if limit < 1:
            raise BadArgument(
                f"the chat has {len(prompt)} tokens, the context {self.context}: /reset begins a "
                "new one"
            )
        before = self.reused_tokens()
        answer = self.generate(prompt, limit)
        self.ids = prompt + answer.ids
        text = self.tokenizer.decode(answer.ids, skip_special_tokens=True)
        self.messages = [*messages, {"role": "assistant", "content": text}]
        is_cut = len(answer.ids) == limit and answer.ids[-1] not in self.tokenizer.all_special_ids
        ending = (
            "; stopped" if answer.is_stopped else f"; cut after {limit} tokens" if is_cut else ""
        )
        # Of the last call all tokens but one can be reused: its last token was not computed.
        reused = self.reused_tokens() - before
        return (
            f"{answer.figures()}, prompt of {len(prompt)} tokens, {reused} of them reused{ending}"
        )

    def generate(self, prompt: list[int], limit: int) -> Answer:
        ids, heat = torch.tensor([prompt], device=self.model.device), self.args.temperature
        how = {"do_sample": True, "temperature": heat} if heat else {"do_sample": False}
        answer = Answer(self.tokenizer)
        how["stopping_criteria"] = [
            lambda ids, scores, **_: torch.full((1,), answer.is_stopped, device=ids.device)
        ]
        before = signal.signal(signal.SIGINT, answer.stop)
        try:
            mask = torch.ones_like(ids)
            self.model.generate(
                ids, attention_mask=mask, max_new_tokens=limit, streamer=answer, **how
            )
        except KeyboardInterrupt:
            answer.end()
        finally:
            signal.signal(signal.SIGINT, before)
        return answer

    def reused_tokens(self) -> int:
        return 0 if self.args.plain else attachment(self.model).reused_tokens

    def path(self, name: str) -> Path:
        """The file of a chat's text.

        Its keys and values are beside it, under a name that attach chooses.
        """
        if self.args.folder is None:
            raise BadArgument("chats are saved in a folder: start with --folder FOLDER")
        if not re.fullmatch(r"[\w-]+", name):
            raise BadArgument(f"a chat has a name of letters, digits, - and _, got {name!r}")
        return self.args.folder / f"{name}.json"

    def save(self, name: str) -> str:
        path, chat = (
            self.path(name),
            {"system": self.system, "messages": self.messages, "ids": self.ids},
        )
        if not self.ids:
            raise BadArgument("there is nothing to save yet")
        try:
            saved = attachment(self.model).save(torch.tensor([self.ids], device=self.model.device))
        except ValueError as error:
            raise BadArgument(str(error)) from error
        path.write_text(json.dumps(chat))
        return f"{path}: {len(self.ids)} tokens, {saved.stat().st_size / 1e6:.1f} MB of keys and values"

    def load(self, name: str) -> str:
        try:
            chat = json.loads(self.path(name).read_text())
            self.system, self.messages, self.ids = chat["system"], chat["messages"], chat["ids"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadArgument(f"no chat {name!r} can be loaded: {error}") from error
        return f"A chat of {len(self.messages) // 2} turns, {len(self.ids)} tokens."

    def obey(self, line: str) -> str:
        """What a command has to say."""
        name, _, text = line.strip().partition(" ")
        if name == "/reset":
            self.reset()
            return "A new chat."
        if name == "/system":
            self.system = text.strip()
            return f"System message: {self.system or 'none, or the default of the chat template'}"
        if name in ("/save", "/load"):
            return (self.save if name == "/save" else self.load)(text.strip())
        if name == "/info":
            return (
                "--plain: the model is not attached"
                if self.args.plain
                else str(attachment(self.model))
            )
        return HELP if name == "/help" else f"There is no command {name}: /help shows them"


def dim(text: str) -> str:
    return f"\033[2m{text}\033[0m" if sys.stdout.isatty() and "NO_COLOR" not in os.environ else text


def talk(chat: Chat) -> None:
    while True:
        try:
            line = input("> ")
            if not sys.stdin.isatty():
                print(line)  # piped: the output reads as a chat then
            if line.strip() == "/quit":
                return
            if line.startswith("/"):
                print(dim(chat.obey(line)))
            elif line.strip():
                print(dim(chat.reply(line.strip())), end="\n\n")
        except EOFError:
            return print()
        except KeyboardInterrupt:
            print(dim("\nCtrl-D or /quit ends the chat"))
        except (BadArgument, TemplateError) as error:
            print(f"chat.py: {error}")
        except torch.OutOfMemoryError:
            print("\nchat.py: out of memory: /reset, or a smaller --model or --dtype")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="smollm2", help="short name, hub id, folder or GGUF file"
    )
    parser.add_argument(
        "--system", default="", help="system message; default: that of the chat template, if any"
    )
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="above 0: sample; default: the likeliest tokens",
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, help="where /save and /load keep chats")
    parser.add_argument("--plain", action="store_true", help="without attach, to compare")
    args = parser.parse_args(argv)
    if args.max_new_tokens < 1 or args.temperature < 0:
        parser.error("--max-new-tokens must be at least 1, and --temperature at least 0")
    if args.plain and args.folder:
        parser.error("--plain keeps nothing: leave out --folder")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: this machine has no CUDA device")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print(dim(f"Loading {args.model} ..."), flush=True)
    try:
        model, tokenizer = load_model(
            args.model, device=args.device, dtype=getattr(torch, args.dtype)
        )
    except ValueError as error:
        print(f"chat.py: {error}", file=sys.stderr)
        return 2
    if not args.plain:
        attach(model, reuse_prefix=args.folder or True)
    if not tokenizer.chat_template:
        print(dim("No chat template: the model goes on writing after your line"))
        chat_as_one_text(tokenizer)
    print(dim("/help shows the commands, Ctrl-D ends the chat"))
    talk(Chat(model, tokenizer, args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
