"""The shape of the code: imports run downward, functions fit a screen, the core needs no extras."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hf_static_kv"
# Reading order is import order: a file imports only from the ones before it.
READING_ORDER = [
    "debug",
    "storage",
    "support",
    "callers",
    "layout",
    "layer",
    "allocation",
    "request",
    "cache",
    "kernels",
    "attention",
    "patching",
    "fusion",
    "fingerprint",
    "loading",
    "step",
    "steps",
    "generation",
    "run",
    "trial",
    "decode",
    "row_operations",
    "wrappers",
    "exact",
    "trace",
    "testing",
    "__init__",
]


def imports_of(source):
    """The modules of this package that a source file imports, anywhere in it."""
    for node in ast.walk(ast.parse(source)):
        names = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        yield from (name.split(".")[1] for name in names if name.startswith("hf_static_kv."))


def upward_imports(name, source):
    return [other for other in imports_of(source) if READING_ORDER.index(other) >= READING_ORDER.index(name)]


def test_every_file_has_its_place():
    rooms = [path for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    assert sorted(path.stem for path in rooms) == sorted(READING_ORDER)


@pytest.mark.parametrize("name", READING_ORDER)
def test_imports_run_downward(name):
    files = [PACKAGE / f"{name}.py"] if (PACKAGE / f"{name}.py").exists() else list((PACKAGE / name).glob("*.py"))
    assert files
    for path in files:
        inner = [other for other in upward_imports(name, path.read_text()) if other != name or path.parent == PACKAGE]
        assert inner == []


def test_an_upward_import_would_be_seen():
    assert upward_imports("layer", "def f():\n    from hf_static_kv.cache.cache import StaticContiguousCache") == [
        "cache"
    ]


def long_functions(source):
    functions = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return [f.name for f in functions if f.end_lineno - f.lineno + 1 > 60]


def test_functions_fit_a_screen():
    assert long_functions("def f():\n" + "    pass\n" * 60) == ["f"]
    for path in PACKAGE.rglob("*.py"):
        assert long_functions(path.read_text()) == []


@pytest.mark.parametrize("path", [PACKAGE / "storage.py", *(PACKAGE / "kernels").glob("*.py")], ids=lambda p: p.stem)
def test_storage_and_kernels_know_no_transformers(path):
    assert "import transformers" not in (source := path.read_text())
    assert "from transformers" not in source


def test_the_core_imports_without_the_extras():
    """A fresh interpreter in which none of the optional packages can be found."""
    code = (
        "import sys\n"
        "for name in ('datasets', 'evaluate', 'triton', 'matplotlib'):\n"
        "    sys.modules[name] = None\n"
        "import hf_static_kv\n"
        "assert hf_static_kv.__all__ and all(hasattr(hf_static_kv, name) for name in hf_static_kv.__all__)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=PACKAGE.parent, timeout=120)
    assert result.returncode == 0, result.stderr


def test_every_folder_is_in_the_package():
    """An editable install would not notice one that is left out."""
    configuration = pytest.importorskip("setuptools.config.pyprojecttoml", reason="setuptools is not installed")
    settings = configuration.read_configuration(PACKAGE.parent / "pyproject.toml")["tool"]["setuptools"]
    folders = {path.parent.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("*.py")}
    assert set(settings["packages"]) == {".".join(folder.parts) for folder in folders}
