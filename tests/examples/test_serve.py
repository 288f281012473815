"""`examples/serve.py`, asked over HTTP by many users at the same time: the answers of plain
`generate`, rows that are free when a client leaves, errors that say what to change.

The decoder's rows run on a CPU here.
"""

import importlib
import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from threading import Thread

import pytest

from hf_static_kv import attachment, detach
from hf_static_kv.testing import load_model
from tests.examples.test_scripts import ROOT

IN_EXTRA = "is not installed: it is in the extra `{}`"
pytest.importorskip("fastapi", reason=f"fastapi {IN_EXTRA.format('examples')}")
uvicorn = pytest.importorskip("uvicorn", reason=f"uvicorn {IN_EXTRA.format('examples')}")
httpx = pytest.importorskip("httpx", reason=f"httpx {IN_EXTRA.format('dev')}")

SPEAKERS = ("ROMEO", "JULIET", "KING RICHARD", "First Citizen")
# Sixteen users: what they say, and how many tokens they ask for.
ASKED = [(f"{SPEAKERS[user % 4]}:\nNow {'my lord ' * user}", 5 + user % 8) for user in range(16)]
LONG = ("ROMEO:", 80)
PATH = "/v1/chat/completions"
SECONDS = 60


@pytest.fixture(scope="module")
def served():
    """The module, a model and its tokenizer, and what `generate` alone answers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        patch.setattr("hf_static_kv.served._DECODER_DEVICES", ("cpu", "cuda"))
        patch.setattr("hf_static_kv.served._MIN_PROMPT_ON_CPU", 0)
        serve = importlib.import_module("serve")
        model, tokenizer = load_model("llama")
        answers = {}
        for text, max_tokens in [*ASKED, LONG]:
            ids = tokenizer(f"{text}\n", return_tensors="pt").input_ids
            tokens = model.generate(ids, do_sample=False, max_new_tokens=max_tokens)
            assert tokens.shape[1] == ids.shape[1] + max_tokens  # no end token came
            answers[text, max_tokens] = tokenizer.decode(tokens[0, ids.shape[1] :])
        yield serve, model, tokenizer, answers


@pytest.fixture(scope="module")
def client(served, request):
    """A client of a server with so many rows."""
    serve, model, tokenizer, _ = served
    app = serve.build_app(model, tokenizer, max_rows=getattr(request, "param", 64))
    with running(app) as address, httpx.Client(base_url=address, timeout=SECONDS) as client:
        yield client
    detach(model)


@contextmanager
def running(app):
    """The address of a server, which ends with the block."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
    thread = Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield "http://127.0.0.1:{1}".format(*server.servers[0].sockets[0].getsockname())
    finally:
        server.should_exit = True
        thread.join(SECONDS)
        assert not thread.is_alive()


def wait_until(condition):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def question(text, max_tokens, **more):
    return {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, **more}


def stream(client, *asked):
    return client.stream("POST", PATH, json=question(*asked, stream=True))


def events(response):
    lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
    return (json.loads(line) for line in lines if line != "[DONE]")


def read(response):
    """The text of a stream, and why it ended."""
    choices = [event["choices"][0] for event in events(response)]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    return text, choices[-1]["finish_reason"]


def tokens_of_passes(model):
    """Tokens that calls of several threads have got together."""
    return attachment(model).decoder.loop_of(model).num_tokens


def test_sixteen_users_at_once_get_the_answers_of_generate(served, client):
    _, model, _, answers = served

    def ask(asked):
        with stream(client, *asked) as response:
            return read(response)

    with ThreadPoolExecutor(len(ASKED)) as users:
        found = dict(zip(ASKED, users.map(ask, ASKED), strict=True))
    assert found == {asked: (answers[asked], "length") for asked in ASKED}
    assert tokens_of_passes(model) > 0  # they decoded together
    assert client.get("/stats").json()["rows"] == 0


@pytest.mark.parametrize("client", [2], indirect=True)
@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_leaves_frees_its_row_and_disturbs_nobody(served, client, is_streamed):
    """There are two rows: the third user gets the one of the client that has left."""
    _, model, _, answers = served
    before = tokens_of_passes(model)
    with stream(client, *LONG) as staying:
        leaving = HTTPConnection(client.base_url.host, client.base_url.port, timeout=SECONDS)
        body = json.dumps(question(*LONG, stream=is_streamed))
        leaving.request("POST", PATH, body, {"Content-Type": "application/json"})
        wait_until(lambda: client.get("/stats").json()["rows"] == 2)
        leaving.close()
        with stream(client, *ASKED[0]) as third:
            assert read(third)[0] == answers[ASKED[0]]
        assert read(staying)[0] == answers[LONG]
    wait_until(lambda: client.get("/stats").json()["rows"] == 0)
    # The call that nobody reads has not gone on to its end.
    assert tokens_of_passes(model) - before < 1.7 * LONG[1] + ASKED[0][1]


def test_a_whole_answer(served, client):
    asked = ASKED[3]
    answer = client.post(PATH, json=question(*asked, model="any")).json()
    message = {"role": "assistant", "content": served[-1][asked]}
    assert answer["choices"] == [{"index": 0, "message": message, "finish_reason": "length"}]
    sampled = client.post(PATH, json=question(*asked, temperature=0.9))
    assert sampled.status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (question("ROMEO:", 600), 400, "more than the context of 512"),
        (question("my lord " * 600, 8), 400, "Shorten one of them"),
        (question("ROMEO:", 0), 422, "greater than or equal to 1"),
        (question("ROMEO:", 8, temperature=-1), 422, "greater than or equal to 0"),
        ({"messages": []}, 422, "at least 1 item"),
        ({"messages": [{"role": "user"}]}, 422, "content"),
    ],
)
def test_a_bad_request_is_told_what_to_change(client, body, status, words):
    response = client.post(PATH, json=body)
    assert response.status_code == status
    assert words in response.text


def test_messages_that_the_chat_template_refuses(served, client, monkeypatch):
    monkeypatch.setattr(served[2], "chat_template", "{{ raise_exception('no system') }}")
    response = client.post(PATH, json=question(*ASKED[0]))
    assert response.status_code == 400
    message = "The chat template refuses the messages: no system"
    assert response.json() == {"error": {"message": message}}


def test_an_error_of_a_call_reaches_its_client(served, client, monkeypatch):
    def fail(**arguments):
        raise RuntimeError("no memory")

    monkeypatch.setattr(served[1], "generate", fail)
    with stream(client, *ASKED[0]) as response:
        assert list(events(response)) == [{"error": {"message": "no memory"}}]
    assert client.post(PATH, json=question(*ASKED[0])).status_code == 500
