"""Users of examples/serve.py over HTTP: the time to the first token of an answer, and tokens a second
of all answers, as users grow.

    python benchmarks/bench_serve.py --model llama-3.2-1b --json serve.json --plot serve.png
    python benchmarks/bench_serve.py --model llama --device cpu --users 1 4 --baseline-users 1
    python benchmarks/bench_serve.py --read serve.json --plot serve.png  # measures nothing

The server is a thread of this process, the users are threads of another one. All users begin at once;
each asks `--questions` questions, one after the other, and reads the streamed answers. A case runs
five times with one question a user before it is measured: steps and prompts are captured then. Times
are the users', with HTTP in them. A token is a number in words, so that answers can be counted. The
baseline is the same server without `attach`, with `--baseline-tokens` new tokens an answer.
It needs fastapi and uvicorn, which the extra `examples` brings. On a machine without an index
PYTHONPATH may name a folder of `pip install --target`.
Exit status 1 if calls did not decode together on a GPU, 2 for a bad argument.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread
from typing import Any

from bench_first_token import twin
from measure import percentile
from outputs import at_least, benchmark_parser, run_benchmark
from picture import draw_users
from processes import FreshProcess
from records import Record, on_cpu
from tokenizers import Tokenizer, models, pre_tokenizers
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from workload import BadArgument, Workload, build_workload

from hf_static_kv import attachment, detach

_WARM_UP = 5
_EXAMPLES = Path(__file__).parents[1] / "examples"


class Users:
    """Clients of a server, in a process of their own: they take no time of its interpreter."""

    def __init__(self, port: int, vocab_size: int, prompt_len: int) -> None:
        self.port = port
        self.vocab_size = vocab_size
        self.prompt_len = prompt_len

    def ask(self, number: int, questions: int, new_tokens: int) -> Record:
        """So many users at once: seconds to each first token, and of everything."""

        def talk(user: int) -> list[float]:
            connection = HTTPConnection("127.0.0.1", self.port)
            return [self._answer(connection, new_tokens) for _ in range(questions)]

        with ThreadPoolExecutor(number) as users:
            start = time.perf_counter()
            first = [seconds for found in users.map(talk, range(number)) for seconds in found]
            return {"first_token_s": first, "seconds": time.perf_counter() - start}

    def _answer(self, connection: HTTPConnection, new_tokens: int) -> float:
        """Seconds to the first token of an answer, which is read to its end."""
        words = [str(random.randrange(self.vocab_size)) for _ in range(self.prompt_len)]
        question: Record = {"messages": [{"role": "user", "content": " ".join(words)}]}
        question |= {"max_tokens": new_tokens, "stream": True}
        start = time.perf_counter()
        head = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(question), head)
        response = connection.getresponse()
        first = response.readline()
        seconds = time.perf_counter() - start
        lines = [first, *response]
        events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
        if response.status != 200 or "error" in events[-1]:
            raise RuntimeError(f"status {response.status}: {lines[-1].decode()}")
        texts = [event["choices"][0]["delta"].get("content", "") for event in events]
        if (found := len("".join(texts).split())) != new_tokens:
            raise RuntimeError(f"an answer has {found} of {new_tokens} tokens")
        return seconds


def numbers_as_words(vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer for random weights: token 17 is the word "17"."""
    words = {str(number): number for number in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@contextmanager
def running(app: Any) -> Iterator[int]:
    """The port of a server, which ends with the block."""
    uvicorn = importlib.import_module("uvicorn")
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
    thread = Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def build_app(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> Any:
    """That of examples/serve.py. It is no package, and needs packages that not every machine has."""
    if str(_EXAMPLES) not in sys.path:
        sys.path.append(str(_EXAMPLES))
    try:
        serve = importlib.import_module("serve")
    except ImportError as error:
        raise BadArgument(f'{error}: run `pip install ".[examples]"`') from error
    return serve.build_app(model, tokenizer)


def case(users: FreshProcess, number: int, new_tokens: int, args: argparse.Namespace) -> Record:
    """The figures of so many users."""
    for _ in range(_WARM_UP):
        users.call("ask", number, 1, new_tokens)
    found = users.call("ask", number, args.questions, new_tokens)
    ms = [seconds * 1e3 for seconds in found["first_token_s"]]
    return {
        "users": number,
        "new_tokens": new_tokens,
        **found,
        "first_token_ms": {f"p{percent}": percentile(ms, percent) for percent in (50, 95)},
        "tokens_per_s": len(ms) * new_tokens / found["seconds"],
    }


def rows_of(
    name: str, model: PreTrainedModel, numbers: list[int], new_tokens: int, args: argparse.Namespace
) -> Iterator[Record]:
    """One contender, by users."""
    vocab_size = model.config.get_text_config().vocab_size
    app = build_app(model, numbers_as_words(vocab_size))
    decoder = attachment(model).decoder
    if name != "attach":
        detach(model)
    with running(app) as port:
        users = FreshProcess(Users, port, vocab_size, args.prompt_len)
        try:
            for number in tqdm(numbers, desc=name, disable=None, leave=False):
                row = {"name": name, **case(users, number, new_tokens, args)}
                yield {**row, "in_rows": sum(loop.num_tokens for loop in decoder.loops)}
        finally:
            users.close()


def measure(args: argparse.Namespace) -> Record:
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise BadArgument("--plot needs matplotlib: use --json here, and --read where it is")
    record: Record = json.loads(args.read.read_text()) if args.read else measured(args)
    if args.plot:
        draw_users(record, args.plot)
    return record


def measured(args: argparse.Namespace) -> Record:
    workload = chosen(args)
    model = workload.build_model()
    rows = [*rows_of("attach", twin(model), args.users, args.new_tokens, args)]
    rows += rows_of("dynamic", model, args.baseline_users, args.baseline_tokens, args)
    return {**workload.origin(), "questions": args.questions, "rows": rows}


def problems(record: Record) -> list[str]:
    ours = [row for row in record["rows"] if row["name"] == "attach" and row["users"] > 1]
    return [
        f"{row['users']} users: calls did not decode together"
        for row in ours
        if not row["in_rows"] and not on_cpu(record)
    ]


def parser() -> argparse.ArgumentParser:
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("--users", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="%(default)s")
    add("--baseline-users", type=int, nargs="*", default=[1, 8], help="%(default)s")
    add("--baseline-tokens", type=int, default=32, help="%(default)s")
    add("--questions", type=int, default=5, help="of each user (%(default)s)")
    add("--plot", type=Path, help="write a picture here; needs matplotlib")
    add("--read", type=Path, help="take the figures of this record")
    return parser


def chosen(args: argparse.Namespace) -> Workload:
    at_least(args, users=1, baseline_users=1, baseline_tokens=1, questions=1)
    return build_workload(args)


def main() -> int:
    return run_benchmark(parser(), measure, problems)


if __name__ == "__main__":
    sys.exit(main())
