"""docs/promises.md: every promise names a test, every test is there, and every page has its
promises.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "promises.md"
WITHOUT_PROMISES = {"glossary.md", "promises.md"}
ROW = re.compile(r"^\| (?!---|promise \|)(?P<promise>.+?) \|(?P<tests>.*)\|$", re.MULTILINE)
LINK = re.compile(r"\[`([^`]+)`\]\(\.\./tests/([^)]+)\)")

# (promise, tests), each test as path and link
ROWS = [
    (row["promise"], LINK.findall(row["tests"]))
    for row in ROW.finditer(re.sub(r"\|---.*", "", PAGE.read_text()))
]


@cache
def names_in(path):
    """The names of all tests in a file, those of a class as `Class::test`; read and not run."""

    def names(body, prefix=""):
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from names(node.body, f"{prefix}{node.name}::")
            elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield prefix + node.name

    return set(names(ast.parse((ROOT / "tests" / path).read_text()).body))


def test_there_are_promises():
    assert len(ROWS) > 100
    assert len({promise for promise, _ in ROWS}) == len(ROWS)


@pytest.mark.parametrize(("promise", "tests"), ROWS, ids=[promise[:60] for promise, _ in ROWS])
def test_a_promise_has_a_test(promise, tests):
    assert promise.endswith("."), "a promise is a sentence"
    assert tests, "a promise names a test"
    for name, link in tests:
        path, _, test = name.partition("::")
        assert path == link
        assert test in names_in(path), f"{name} is not there"


def test_every_page_has_promises():
    linked = re.findall(r"^\[\S+\]\((\S+)\)$", PAGE.read_text(), re.MULTILINE)
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - WITHOUT_PROMISES
    assert set(linked) == {"../README.md", *pages}


def test_a_row_without_a_test_would_be_seen():
    rows = ROW.findall(
        "| promise | test |\n| It is fast. |  |\n| It is right. | "
        "[`a.py::test_b`](../tests/a.py) |\n"
    )
    assert [LINK.findall(tests) for _, tests in rows] == [[], [("a.py::test_b", "a.py")]]
    assert "test_a_row_without_a_test_would_be_seen" in names_in("test_promises.py")
    assert "test_another" not in names_in("test_promises.py")
