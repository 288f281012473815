"""README.md, CONTRIBUTING.md and docs/: code is true, links lead somewhere, listed messages exist,
pages stay short.
"""

import ast
import inspect
import re
import textwrap
from functools import cache
from pathlib import Path

import pytest
import torch

from hf_static_kv.program.rules import RULES

ROOT = Path(__file__).parents[1]
README, CONTRIBUTING = ROOT / "README.md", ROOT / "CONTRIBUTING.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
HUB_ID, MINIATURE = "Qwen/Qwen3-1.7B", str(ROOT / "examples" / "models" / "qwen3")


def code_blocks(page):
    blocks = re.findall(r"^ *```python\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for block in blocks]


def run_blocks(page, blocks):
    """Run the blocks in order in one namespace, with a trained miniature for the hub id and at most
    8 new tokens.
    """
    names = {}
    for block in blocks:
        code = block.replace(HUB_ID, MINIATURE)
        code = re.sub(r'(max_new_tokens(?:=|": ))\d+', r"\g<1>8", code)
        exec(compile(code, page.name, "exec"), names)
        assert "decoder" not in names or names["decoder"].fallback_reason is None
        yield names


@pytest.mark.parametrize(
    "page", [page for page in PAGES[1:] if code_blocks(page)], ids=lambda page: page.name
)
def test_the_code_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    blocks = code_blocks(page)
    assert len(list(run_blocks(page, blocks))) == len(blocks)


class TestReadme:
    def test_it_is_short(self):
        text = README.read_text()
        assert len(text.split()) <= 600
        assert "`make test`" in text

    def test_the_lines_that_users_copy(self, capsys):
        """The first block prints a text. The objects and exact give one sequence: a miniature in
        float32, greedily.
        """
        first, second = code_blocks(README)
        assert len([line for line in first.splitlines() if line]) <= 8
        list(run_blocks(README, [first]))
        assert capsys.readouterr().out.startswith("The key to a good cache is")
        runs = run_blocks(README, re.split(r"\n\n(?=cache.reset)", second))
        tokens = [names["tokens"] for names in runs]
        assert len(tokens) == 2
        assert torch.equal(*tokens)


class TestContributing:
    def test_the_rule_is_that_of_the_package(self):
        rule, _ = code_blocks(CONTRIBUTING)
        name = re.search(r"^def (\w+)", rule, re.MULTILINE)[1]
        assert rule == inspect.getsource(RULES[name].apply)

    def test_the_test_of_the_rule_runs(self):
        rule, test = code_blocks(CONTRIBUTING)
        names = {}
        exec(compile(test, CONTRIBUTING.name, "exec"), names)
        (function,) = (value for name, value in names.items() if name.startswith("test_"))
        assert re.search(rf"^def {function.__name__.removeprefix('test_')}\(", rule, re.MULTILINE)
        function()


def test_the_table_of_rules_has_them_all():
    """Rows are made from docstrings, by `make results`."""
    text = (ROOT / "docs" / "how-it-works.md").read_text()
    (table,) = re.findall(r"^\| rule .*\n\|---.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert re.findall(r"^\| `(\w+)` \| .* → .* \| (yes|no) \|$", table, re.MULTILINE) == [
        (name, "yes" if rule.keeps_bits else "no") for name, rule in RULES.items()
    ]


def test_the_glossary_is_short():
    rows = re.findall(r"^\| \*\*", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert 0 < len(rows) <= 15


@pytest.mark.parametrize("page", [*PAGES, CONTRIBUTING], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", page.read_text()):
        target = page.parent / link if link else page
        assert target.exists(), link
        headings = re.findall(r"^#+ (.*)", target.read_text(), re.MULTILINE) if anchor else []
        anchors = [
            re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings
        ]
        assert not anchor or anchor in anchors, f"{link}#{anchor}"


@cache
def package_messages():
    return list(_package_strings())


def _package_strings():
    """Every string of the package; a value that is put into one is a NUL."""
    for path in (ROOT / "hf_static_kv").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(
                    part.value if isinstance(part, ast.Constant) else "\0" for part in node.values
                )


def listed_messages():
    """The first column of the guide's tables of errors and reasons, '...' where a message has a
    value.
    """
    text = (ROOT / "docs" / "guide.md").read_text()
    for table in re.findall(
        r"^\| the (?:message|reason) begins with .*\n\|---.*\n((?:\|.*\n)+)", text, re.MULTILINE
    ):
        yield from re.findall(r"^\| `(.*?)` \|", table, re.MULTILINE)


MESSAGES = list(listed_messages())


def test_there_are_tables_of_messages():
    assert len(MESSAGES) > 20


@pytest.mark.parametrize("listed", MESSAGES)
def test_a_listed_message_is_in_the_package(listed):
    pattern = re.compile(r"[^.]*\0[^.]*".join(re.escape(part) for part in listed.split("...")))
    assert any(pattern.match(message) for message in package_messages())
