"""`examples/serve_ray.py` with two replicas on a CPU: a chat goes back to its replica, which computes
its new tokens only.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from http.client import HTTPConnection
from pathlib import Path

import pytest

from hf_static_kv.testing import load_model

pytest.importorskip("ray.serve", reason="ray is not installed: it is in the extra `clients`")
pytestmark = pytest.mark.clients
ROOT = Path(__file__).parents[2]
SECONDS = 120
PATH = "/v1/chat/completions"
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The port, and the file of its output, where each step of our cache is a line."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("ray") / "log"
    script = [sys.executable, "examples/serve_ray.py", "--port", str(port), "--rows", "4"]
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "HF_STATIC_KV_DEBUG": "1"}
    env = {**os.environ, **quiet, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with log.open("w") as file:
        process = subprocess.Popen(script, cwd=ROOT, env=env, stdout=file, stderr=file)
    try:
        wait_until(lambda: process.poll() is not None or "is ready at" in log.read_text())
        assert process.poll() is None, log.read_text()
        yield port, log
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=SECONDS)


def wait_until(condition):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def ask(port, session, path, body=None):
    connection = HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    head = {"Content-Type": "application/json", "x-session-id": session}
    connection.request("POST" if body else "GET", path, json.dumps(body) if body else None, head)
    response = connection.getresponse()
    assert response.status == 200
    return json.load(response)


def sessions_by_replica(port):
    """A session of each of the two replicas."""
    found = {}
    for number in range(64):
        found.setdefault(ask(port, f"session {number}", "/replica"), f"session {number}")
    return found


def user(text):
    return {"role": "user", "content": text}


def generated(chat):
    """What `generate` answers without our cache, and the tokens of the chat."""
    model, tokenizer = load_model("llama")
    text = "".join(f"{message['content']}\n" for message in chat)
    ids = tokenizer(text, return_tensors="pt").input_ids
    tokens = model.generate(ids, do_sample=False, max_new_tokens=NEW_TOKENS)
    return tokenizer.decode(tokens[0, ids.shape[1] :]), ids.shape[1]


def test_a_chat_stays_on_its_replica_and_reuses_its_prefix(server):
    port, _ = server
    sessions = sessions_by_replica(port)
    assert len(sessions) == 2
    for replica, session in sessions.items():
        chat = [user("ROMEO:\nWhat light is this that")]
        lengths = []
        for line in ("Why, my lord?", "And then?"):
            answer = ask(port, session, PATH, {"messages": chat, "max_tokens": NEW_TOKENS})
            message = answer["choices"][0]["message"]
            text, length = generated(chat)
            assert message == {"role": "assistant", "content": text}
            chat += [message, user(line)]
            lengths.append(length)
        assert ask(port, session, "/stats")["reused_tokens"] >= lengths[0]
        assert ask(port, session, "/replica") == replica


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_leaves_ends_its_call(server, is_streamed):
    port, log = server

    def steps():
        return log.read_text().count("step at")

    before = steps()
    body = {"messages": [user("ROMEO:")], "max_tokens": 500, "stream": is_streamed}
    leaving = HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    leaving.request("POST", PATH, json.dumps(body), {"Content-Type": "application/json"})
    wait_until(lambda: steps() > before)
    leaving.close()
    at_rest = -1
    while at_rest != steps():
        at_rest = steps()
        time.sleep(1)
    assert at_rest - before < 400
