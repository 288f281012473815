"""`python -m hf_static_kv serve`: transformers' own server in a process of its own, asked over HTTP."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_static_kv
from hf_static_kv.testing import find_source
from tests.clients.conftest import CHAT_TEMPLATE, DEVICE, QUESTION

pytest.importorskip("fastapi", reason="fastapi is not installed: it is in the extra `clients`")
openai = pytest.importorskip(
    "openai", reason="openai is not installed: it is in the extra `clients`"
)
pytestmark = pytest.mark.clients
NEW_TOKENS = 8
LONG = f"{QUESTION} " * 64  # from 512 tokens on a CPU uses our cache too
SECONDS = 120  # to start
USERS = 6
# The command, where requests decode together on a CPU too. A line for each request that has ended:
# its id, its tokens, the tokens that rows have had, and why calls fell back.
TELLING = """
import sys
from hf_static_kv import served, attachment
from hf_static_kv.__main__ import main

class Manager(served.BatchManager):
    def _run(self, request):
        super()._run(request)
        in_rows = sum(loop.num_tokens for loop in self._decoder.loops)
        reasons = dict(attachment(self.model).fallbacks)
        number = len(request.tokens)
        sys.stdout.write(f"ended: {request.request_id} {number} {in_rows} {reasons}\\n")
        sys.stdout.flush()

served.BatchManager = Manager
served._DECODER_DEVICES = ("cpu", "cuda")
served._MIN_PROMPT_ON_CPU = 0
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A miniature with a chat template and room for a long prompt."""
    folder = tmp_path_factory.mktemp("served") / "llama"
    shutil.copytree(find_source("llama").location, folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    return folder


@contextmanager
def running(folder, log, program, *options):
    """The address of a server, and the file of what it prints."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = ["serve", str(folder), "--port", str(port), "--device", DEVICE, *options]
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *program, *command],
            cwd=Path(hf_static_kv.__file__).parents[1],
            env={**os.environ, "HF_STATIC_KV_DEBUG": "1"},
            stdout=file,
            stderr=file,
        )
    try:
        wait_for(f"http://localhost:{port}/health", process, log)
        yield f"http://localhost:{port}/v1", log
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
    assert "Application shutdown complete" in log.read_text()


@pytest.fixture(scope="module")
def server(folder):
    """Each step of our cache is a line that it prints."""
    with running(folder, folder.parent / "log", ["-m", "hf_static_kv"]) as server:
        yield server


@pytest.fixture(scope="module")
def batching_server(folder):
    log = folder.parent / "log of batching"
    with running(folder, log, ["-c", TELLING], "--continuous-batching") as server:
        yield server


def wait_for(address, process, log):
    for _ in range(SECONDS * 5):
        assert process.poll() is None, log.read_text()
        try:
            return urllib.request.urlopen(address).read()
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(log.read_text())


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server[0], api_key="none") as client:
        yield client


def expected(folder, text=None, messages=None):
    """The text of `generate` without our cache."""
    model = AutoModelForCausalLM.from_pretrained(folder, device_map=DEVICE)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if messages:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt").input_ids.to(DEVICE)
    tokens = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    return tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True), ids.shape[1]


def text_of(stream):
    """The pieces of a streamed chat."""
    deltas = (chunk.choices[0].delta for chunk in stream if chunk.choices)
    return (delta.content for delta in deltas if delta.content)


@pytest.mark.parametrize("text", [QUESTION, LONG], ids=["short", "long"])
def test_a_completion(text, client, server, folder):
    answer = client.completions.create(
        model=str(folder), prompt=text, max_tokens=NEW_TOKENS, temperature=0
    )
    own_text, length = expected(folder, text)
    assert answer.choices[0].text == own_text
    is_served = DEVICE != "cpu" or length >= 512
    assert (f"hf_static_kv: step at 0: {length} new tokens" in server[1].read_text()) == is_served


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_chat(stream, client, server, folder):
    messages = [{"role": "user", "content": f"{LONG}, {stream}"}]
    answer = client.chat.completions.create(
        model=str(folder),
        messages=messages,
        max_tokens=NEW_TOKENS,
        temperature=0,
        stream=stream,
    )
    if stream:
        pieces = list(text_of(answer))
        assert len(pieces) > 3
        text = "".join(pieces)
    else:
        text = answer.choices[0].message.content
    own_text, length = expected(folder, messages=messages)
    assert text == own_text
    assert f"hf_static_kv: step at 0: {length} new tokens" in server[1].read_text()


class TestContinuousBatching:
    """The requests are those of our manager, and decode together."""

    @pytest.fixture
    def client(self, batching_server):
        with openai.OpenAI(base_url=batching_server[0], api_key="none", max_retries=0) as client:
            yield client

    @pytest.fixture
    def ask(self, client, folder):
        """A chat whose request has a given id."""

        def ask(request_id, messages, **how):
            how = {"max_tokens": NEW_TOKENS, "temperature": 0, **how}
            own_id = {"x-request-id": request_id}
            return client.chat.completions.create(
                model=str(folder), messages=messages, extra_headers=own_id, **how
            )

        return ask

    @staticmethod
    def ended(log, request_id):
        """The tokens of a request, those that rows have had until then, and the fallbacks."""
        line = rf"ended: {request_id} (\d+) (\d+) (.*)\n"
        for _ in range(SECONDS * 5):
            if found := re.search(line, log.read_text()):
                return int(found[1]), int(found[2]), found[3]
            time.sleep(0.2)
        raise TimeoutError(log.read_text())

    @pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
    def test_several_users_at_once(self, stream, ask, batching_server, folder):
        chats = [
            [{"role": "user", "content": f"{QUESTION} {'Yes. ' * number}{stream}"}]
            for number in range(USERS)
        ]

        def answer(number):
            got = ask(f"{stream}-{number}", chats[number], stream=stream)
            if not stream:
                assert got.usage.completion_tokens == NEW_TOKENS
                return got.choices[0].message.content
            return "".join(text_of(got))

        with ThreadPoolExecutor(USERS) as threads:
            answers = list(threads.map(answer, range(USERS)))
        assert answers == [expected(folder, messages=chat)[0] for chat in chats]
        ends = [self.ended(batching_server[1], f"{stream}-{number}") for number in range(USERS)]
        assert [number for number, *_ in ends] == [NEW_TOKENS] * USERS
        assert max(in_rows for _, in_rows, _ in ends) >= USERS
        assert {reasons for *_, reasons in ends} == {"{}"}

    def test_a_completion(self, client, batching_server, folder):
        answer = client.completions.create(
            model=str(folder),
            prompt=QUESTION,
            max_tokens=NEW_TOKENS,
            temperature=0,
            extra_headers={"x-request-id": "completion"},
        )
        assert answer.choices[0].text == expected(folder, QUESTION)[0]
        assert self.ended(batching_server[1], "completion")[0] == NEW_TOKENS

    def test_one_token(self, ask, folder):
        """It may be there before the server listens."""
        chat = [{"role": "user", "content": QUESTION}]
        for number in range(5):
            pieces = list(ask(f"one-{number}", chat, max_tokens=1, stream=True))
            assert pieces[-1].choices[0].finish_reason == "length"

    def test_a_client_that_leaves(self, ask, batching_server, folder):
        """Its request ends, and other users get their answers."""
        chat = [{"role": "user", "content": QUESTION}]
        stream = ask("leaver", chat, max_tokens=1500, stream=True)
        pieces = text_of(stream)
        assert next(pieces)
        answer = ask("beside", chat)
        stream.close()
        assert self.ended(batching_server[1], "leaver")[0] < 1500
        assert answer.choices[0].message.content == expected(folder, messages=chat)[0]
        assert ask("after", chat).choices[0].message.content == answer.choices[0].message.content
