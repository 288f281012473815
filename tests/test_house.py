"""The shape of the code: imports run downward, functions fit a screen, the core needs no extras."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hf_static_kv"
# Reading order is import order: a file imports only from the ones before it, inside folders too.
READING_ORDER = {
    "": ["compat"],
    "cache": [
        "codes", "debug", "storage", "ranks", "values", "unserved", "layout", "request", "slots", "layer",
        "indexed", "states", "passes", "allocation", "samples", "identity", "fileidentity", "fileformat",
        "filepieces", "files", "cache", "rows", "blocks", "entry", "histories", "prefixes", "pool",
    ],
    "kernels": [
        "gradients", "launch_triton", "codes_triton", "positions_triton", "positions",
        "select_greedy_triton", "select_greedy", "drafts_triton", "drafts", "ban_tokens_triton", "ban_tokens",
        "sample_triton", "sample",
        "decode_attention_triton", "prompt_attention_triton", "rows_attention_triton",
        "coded_attention_triton", "decode_attention",
        "norm_triton", "norm",
        "rotary_triton", "rotary", "rope_attention_triton", "rope_attention",
        "linear_triton", "invariant_linear_triton", "invariant_linear", "fused_linear_triton",
        "joint_linear_triton", "packed", "packed_codes_triton",
        "packed_transposed_triton", "packed_triton", "linear",
        "experts_triton", "experts", "persistent_step", "persistent_weights", "persistent_macros",
        "persistent_step_cuda",
    ],
    ".": ["patching", "attention"],
    "program": [
        "preload", "shadow", "norms", "activations", "rotary", "experts", "quantised", "record", "rules",
        "persistent", "positions", "step", "takeover", "selecting", "drafting",
    ],
    "decoding": [
        "turns", "prepared", "call", "eligibility", "selection", "drafts", "tokens", "verification", "steps",
        "assistant", "speculation", "prompts", "seats", "loop", "decoder",
    ],
    "exactness": ["linears", "invariant_operations", "experts", "self_check", "exact", "logprobs"],
    "inspection": ["attention_trace", "step_recorder"],
    "..": ["batching", "served", "attaching", "testing", "__init__", "__main__"],
}  # fmt: skip
ORDER = [
    f"{folder.strip('.')}/{name}".lstrip("/")
    for folder, names in READING_ORDER.items()
    for name in names
]


def imports_of(source):
    """The files of this package that a source file imports, anywhere in it."""
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            path = "/".join(name.split(".")[1:])
            if name.startswith("hf_static_kv.") and path in ORDER:
                yield path


def upward_imports(path, source):
    return [other for other in imports_of(source) if ORDER.index(other) >= ORDER.index(path)]


def test_every_file_has_its_place():
    paths = (path.relative_to(PACKAGE).with_suffix("").as_posix() for path in PACKAGE.rglob("*.py"))
    assert sorted(path for path in paths if not path.endswith("/__init__")) == sorted(ORDER)


@pytest.mark.parametrize("path", ORDER)
def test_imports_run_downward(path):
    assert upward_imports(path, (PACKAGE / f"{path}.py").read_text()) == []


def test_an_upward_import_would_be_seen():
    source = "def f():\n    from hf_static_kv.cache.cache import StaticContiguousCache"
    assert upward_imports("cache/layer", source) == ["cache/cache"]
    assert upward_imports("cache/layer", "from hf_static_kv.cache import cache, storage") == [
        "cache/cache"
    ]


def long_functions(source):
    functions = (
        n
        for n in ast.walk(ast.parse(source))
        if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return [f.name for f in functions if f.end_lineno - f.lineno + 1 > 60]


def test_functions_fit_a_screen():
    assert long_functions("def f():\n" + "    pass\n" * 60) == ["f"]
    for path in PACKAGE.rglob("*.py"):
        assert long_functions(path.read_text()) == []


KNOW_NO_TRANSFORMERS = [
    PACKAGE / "cache" / "storage.py",
    PACKAGE / "cache" / "slots.py",
    *(PACKAGE / "kernels").glob("*.py"),
]


@pytest.mark.parametrize("path", KNOW_NO_TRANSFORMERS, ids=lambda p: p.stem)
def test_storage_and_kernels_know_no_transformers(path):
    assert "import transformers" not in (source := path.read_text())
    assert "from transformers" not in source


def test_the_core_imports_without_the_extras():
    """A fresh interpreter in which none of the optional packages can be found."""
    code = (
        "import sys\nfor name in ('datasets', 'evaluate', 'triton', 'matplotlib'):\n    "
        "sys.modules[name] = None\nimport hf_static_kv\nassert hf_static_kv.__all__ and "
        "all(hasattr(hf_static_kv, name) for name in hf_static_kv.__all__)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, cwd=PACKAGE.parent, timeout=120
    )
    assert result.returncode == 0, result.stderr


def test_every_folder_is_in_the_package():
    """An editable install would not notice one that is left out."""
    configuration = pytest.importorskip(
        "setuptools.config.pyprojecttoml", reason="setuptools is not installed"
    )
    settings = configuration.read_configuration(PACKAGE.parent / "pyproject.toml")["tool"][
        "setuptools"
    ]
    folders = {path.parent.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("*.py")}
    assert set(settings["packages"]) == {".".join(folder.parts) for folder in folders}


def test_every_source_of_a_kernel_is_in_the_package():
    configuration = pytest.importorskip(
        "setuptools.config.pyprojecttoml", reason="setuptools is not installed"
    )
    settings = configuration.read_configuration(PACKAGE.parent / "pyproject.toml")["tool"][
        "setuptools"
    ]
    patterns = settings["package-data"]["hf_static_kv"]
    packaged = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    sources = {path for suffix in ("*.cu", "*.cuh") for path in PACKAGE.rglob(suffix)}
    assert {path.suffix for path in sources} == {".cu", ".cuh"}
    assert sources <= packaged


def private_names(source):
    """Attributes and modules of other packages whose names begin with an underscore."""
    nodes = list(ast.walk(ast.parse(source)))
    for node in nodes:
        if (
            isinstance(node, ast.Attribute)
            and node.attr.startswith("_")
            and not node.attr.startswith("__")
        ):
            yield node.attr
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (
                part
                for part in node.module.split(".")
                if part.startswith("_") and part != "__future__"
            )


def own_names():
    """Names that the package defines itself: functions, classes, variables, attributes of `self`."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.Name):
                yield node.id
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and path.stem != "compat"
            ):
                yield node.attr


def test_private_names_of_other_packages_are_in_compat_alone():
    allowed = {
        *own_names(),
        "_getframe",
        "_current_frames",
        "_fields",
        "_replace",
    }  # the last four are Python's
    assert (
        set(private_names("import torch\ntorch._dynamo\nfrom torch.utils._pytree import tree_map"))
        - allowed
    )
    found = {
        path.name: set(private_names(path.read_text())) - allowed for path in PACKAGE.rglob("*.py")
    }
    assert {name: names for name, names in found.items() if names and name != "compat.py"} == {}
