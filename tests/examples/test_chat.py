"""`examples/chat.py` with its lines piped in: the answers of plain `generate`, and no token
computed twice.
"""

import importlib
import io
import json
import os
import re
import shutil
import signal
from types import SimpleNamespace

import pytest

from tests.examples.test_scripts import ROOT

CHATML = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}[end]\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
FIGURES = (
    r"\d+\.\d tokens/s, first token after \d+ ms, prompt of (\d+) tokens, (\d+) of them reused"
)


@pytest.fixture
def chat(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("chat")


@pytest.fixture
def say(chat, monkeypatch, capsys):
    """Run a chat of these lines."""

    def run(lines, *options, model="llama", max_new_tokens=12):
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
        status = chat.main(
            ["--model", str(model), "--max-new-tokens", str(max_new_tokens), *options]
        )
        printed = capsys.readouterr()
        figures = [tuple(map(int, found)) for found in re.findall(FIGURES, printed.out)]
        text = re.sub(FIGURES, "FIGURES", printed.out)
        return SimpleNamespace(status=status, text=text, figures=figures, err=printed.err)

    return run


@pytest.fixture
def templated(tmp_path):
    """A miniature with this chat template."""

    def build(template):
        folder = shutil.copytree(ROOT / "examples" / "models" / "llama", tmp_path / "model")
        (folder / "chat_template.jinja").write_text(template)
        return folder

    return build


@pytest.mark.parametrize("model", ["llama", "qwen3", "gemma3"])
def test_the_answers_are_those_without_attach_and_earlier_turns_are_reused(say, model):
    lines = ["ROMEO: What light?", "JULIET: It is the east", "ROMEO: Speak", "/reset", "Once more"]
    ours, plain = say(lines, model=model), say(lines, "--plain", model=model)
    assert (ours.status, ours.err) == (0, "")
    assert ours.text == plain.text
    assert [length for length, _ in ours.figures] == [length for length, _ in plain.figures]
    assert [reused for _, reused in plain.figures] == [0, 0, 0, 0]
    (first, none), (second, reused), (_, more), (_, after_reset) = ours.figures
    assert none == after_reset == 0
    # The last of the 12 new tokens was not computed.
    assert (reused, more) == (
        first + 11,
        second + 11,
    )


def test_what_is_printed_when_piped(say):
    result = say(
        ["ROMEO: Hi", "", "/info", "/wat", "/system Speak low", "/system", " /quit", "never read"]
    )
    assert "\033" not in result.text
    before, after = result.text.split("> ROMEO: Hi\n")
    assert before == (
        "Loading llama ...\nNo chat template: the model goes on writing after your line\n"
        "/help shows the commands, Ctrl-D ends the chat\n"
    )
    assert after.split("FIGURES; cut after 12 tokens\n\n")[1].splitlines() == [
        "> ",
        "> /info",
        "Attachment(calls=1, hits=0, reused_tokens=0, caches=[1 x 256 tokens], 786,432 bytes, "
        "captured_steps=0, captured_prompts=0, fallbacks={'there are no graphs on cpu': 1})",
        "> /wat",
        "There is no command /wat: /help shows them",
        "> /system Speak low",
        "System message: Speak low",
        "> /system",
        "System message: none, or the default of the chat template",
        ">  /quit",
    ]
    assert "/system TEXT" in say(["/help"]).text
    assert "--plain: the model is not attached" in say(["/info"], "--plain").text


def test_a_chat_longer_than_the_context_says_so_and_can_begin_anew(say, templated):
    model = templated(CHATML)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 48}))
    result = say(["a", "b", "/reset", "c"], model=model, max_new_tokens=60)
    (length, _), _ = result.figures
    refusal = r"chat.py: the chat has \d+ tokens, the context 48: /reset begins a new one"
    expected = (
        rf"FIGURES; cut after {48 - length} tokens\n\n> b\n{refusal}\n> /reset\nA new chat.\n> c\n"
    )
    assert re.search(expected, result.text), result.text


def test_with_a_chat_template(say, templated):
    model = templated(CHATML)
    lines = ["Hello", "And then?", "/system Be brief", "Why?"]
    ours, plain = say(lines, model=model), say(lines, "--plain", model=model)
    assert ours.text == plain.text
    assert "No chat template" not in ours.text
    (first, _), (_, second_reused), (_, third_reused) = ours.figures
    assert second_reused == first + 11
    assert third_reused < first  # another system message is another prefix


def test_a_template_that_changes_earlier_answers_is_obeyed(chat, say, templated, monkeypatch):
    changing = CHATML.replace("m['content']", "m['content'] | replace('e', 'E')")
    prompts, generate = [], chat.Chat.generate

    def recorded(self, ids, limit):
        prompts.append(self.tokenizer.decode(ids))
        return generate(self, ids, limit)

    monkeypatch.setattr(chat.Chat, "generate", recorded)
    say(["Hello", "Then"], model=templated(changing))
    assert re.fullmatch(
        r"\[user\]HEllo\[end\]\n\[assistant\][^e]+\[end\]\n\[user\]ThEn\[end\]\n\[assistant\]",
        prompts[1],
    )


def test_a_template_that_refuses_is_quoted_in_a_line(say, templated):
    model = templated("{{ raise_exception('System role not supported') }}")
    assert "> Hi\nchat.py: System role not supported\n> " in say(["Hi"], model=model).text


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_stops_the_answer_and_keeps_the_chat(chat, say, monkeypatch, times):
    put = chat.Answer.put

    def interrupted(self, value):
        put(self, value)
        if len(self.ids) == 3 and not self.is_stopped:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(chat.Answer, "put", interrupted)
    before = signal.getsignal(signal.SIGINT)
    result = say(["Hello", "Go on", "And"])
    (first, _), (second, reused), _ = result.figures
    assert result.text.count("FIGURES") == 3
    assert second > first + 3  # what was said so far is in the history
    # transformers 5.22 asks the criteria before it gives a token to the streamer: one more token
    # comes.
    assert reused in ((first + 2, first + 3) if times == 1 else (0,))
    assert signal.getsignal(signal.SIGINT) is before


def test_a_saved_chat_goes_on_in_another_run(say, tmp_path):
    lines, folder = (
        ["ROMEO: What light?", "JULIET: It is the east"],
        ("--folder", str(tmp_path / "chats")),
    )
    whole = say([*lines, "ROMEO: Speak"])
    first = say([*lines, "/save night"], *folder)
    assert re.search(r"night.json: \d+ tokens, \d\.\d MB of keys and values\n", first.text)
    second = say(["/load night", "ROMEO: Speak"], *folder)
    assert "A chat of 2 turns, " in second.text
    assert second.text.split("> ROMEO: Speak\n")[1] == whole.text.split("> ROMEO: Speak\n")[1]
    assert second.figures == whole.figures[2:]  # as many tokens reused as in one process


def test_what_cannot_be_saved_or_loaded_is_said_in_a_line(say, tmp_path):
    folder = ("--folder", str(tmp_path))
    (tmp_path / "bad.json").write_text("[1]")
    text = say(["/save a", "/load a", "/load bad", "/save ../a", "/load"], *folder).text
    assert "> /save a\nchat.py: there is nothing to save yet\n" in text
    assert re.search(r"> /load a\nchat.py: no chat 'a' can be loaded: .*No such file", text)
    assert "> /load bad\nchat.py: no chat 'bad' can be loaded: " in text
    assert text.count("chat.py: a chat has a name of letters, digits, - and _") == 2
    assert (
        "chat.py: chats are saved in a folder: start with --folder FOLDER" in say(["/save a"]).text
    )


def test_sampling(say):
    assert len(say(["Hello"], "--temperature", "0.8").figures) == 1


def test_a_bad_argument_is_refused_in_a_line(chat, say, capsys):
    result = say([], model="nowhere")
    assert result.status == 2
    assert re.fullmatch(r"chat.py: 'nowhere' is no folder, no hub id .*\n", result.err)
    with pytest.raises(SystemExit, match="2"):
        chat.parse_args(["--temperature", "-1"])
    assert capsys.readouterr().err.endswith(
        "--max-new-tokens must be at least 1, and --temperature at least 0\n"
    )
