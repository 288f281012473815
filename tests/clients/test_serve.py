"""`python -m hf_static_kv serve`: transformers' own server in a process of its own, asked over HTTP."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A miniature with a chat template and room for a long prompt."""
    folder = tmp_path_factory.mktemp("served") / "llama"
    shutil.copytree(find_source("llama").location, folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    return folder


@pytest.fixture(scope="module")
def server(folder):
    """The address, and the file of its standard error, where each step of our cache is a line."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = ["serve", str(folder), "--port", str(port), "--device", DEVICE]
    log = folder.parent / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "hf_static_kv", *command],
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
        pieces = [chunk.choices[0].delta.content for chunk in answer if chunk.choices]
        assert len(pieces) > 3
        text = "".join(piece or "" for piece in pieces)
    else:
        text = answer.choices[0].message.content
    own_text, length = expected(folder, messages=messages)
    assert text == own_text
    assert f"hf_static_kv: step at 0: {length} new tokens" in server[1].read_text()
