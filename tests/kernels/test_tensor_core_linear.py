"""Linear layers of 2 to 16 tokens on tensor cores. What they compute is tested on a GPU."""

import re
import shutil
import subprocess

import pytest
import torch

from hf_static_kv.kernels import launch_cuda
from hf_static_kv.kernels import tensor_core_linear_cuda as module
from hf_static_kv.kernels.linear import ACTIVATIONS, MAX_WEIGHTS, gated_linear, linears
from tests.kernels.test_step_kernels import error_bound, normal

HAS_KERNEL = not launch_cuda.refusal(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
needs_kernel = pytest.mark.skipif(not HAS_KERNEL, reason="needs compute capability 9.0")
HALF = [torch.bfloat16, torch.float16]
# One step; steps that the warps do not share evenly; all at once; wide rows.
DIMS = [32, 576, 2048, 8192]
TILES = [
    module.Tiles(1, 1, 8, 4, 2),
    module.Tiles(2, 1, 4, 2, 2),
    module.Tiles(2, 2, 4, 4, 2),
    module.Tiles(4, 4, 16, 2, 1),
    module.Tiles(4, 2, 3, 1, 1),
]


def of_dtype(shape, dtype, seed=0):
    return normal(*shape, dtype=torch.float32, seed=seed).to(dtype)


@needs_kernel
@pytest.mark.parametrize("tiles", TILES, ids=lambda tiles: "-".join(map(str, tiles)))
@pytest.mark.parametrize("sizes", [(7,), (33, 6, 2), (4400, 16)], ids=str)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(
    ("tokens", "dtype"), zip([2, 7, 8, 9, 16], [*HALF, *HALF, HALF[0]], strict=True)
)
def test_against_float64(tokens, dtype, dim, sizes, tiles, monkeypatch):
    monkeypatch.setattr(module, "tiles_of", lambda *shape: tiles)
    x, weights = of_dtype((tokens, dim), dtype), [of_dtype((size, dim), dtype) for size in sizes]
    biases = [of_dtype((size,), dtype) for size in sizes] if tokens % 2 == 0 else []
    assert module.is_served(x, weights)
    got, whole = linears(x, weights, biases), torch.cat(weights)
    bias = torch.cat(biases).double() if biases else 0
    assert (got.shape, got.dtype) == ((tokens, sum(sizes)), dtype)
    bound = error_bound(x, whole) + torch.finfo(dtype).eps * abs(bias)
    assert ((got.double() - x.double() @ whole.double().T - bias).abs() <= bound).all()


@needs_kernel
@pytest.mark.parametrize("tiles", TILES, ids=lambda tiles: "-".join(map(str, tiles)))
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("tokens", "dim"), [(2, 576), (8, 2048), (16, 96)])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_gates_are_of_these_sums(dtype, tokens, dim, activation, tiles, monkeypatch):
    """Every part rounds, so the formula differs by its exp alone."""
    monkeypatch.setattr(module, "tiles_of", lambda *shape: tiles)
    x, gate, up = (of_dtype((n, dim), dtype, seed=n) for n in (tokens, 37, 37))
    expected = ACTIVATIONS[activation](linears(x, [gate], [])) * linears(x, [up], [])
    how = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 1e-6}
    torch.testing.assert_close(gated_linear(x, gate, up, activation), expected, **how)


@needs_kernel
def test_a_graph_of_several_launches():
    """Each launch begins before the one that writes its input has ended."""
    weights = [of_dtype((2048, 2048), torch.bfloat16, seed=i) / 45 for i in range(12)]
    x = of_dtype((8, 2048), torch.bfloat16)

    def chain():
        y = x
        for weight in weights:
            y = linears(y, [weight], [])
            if not torch.cuda.is_current_stream_capturing():
                torch.cuda.synchronize()
        return y

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain()
    for seed in range(50):
        x.copy_(of_dtype((8, 2048), torch.bfloat16, seed=seed))
        graph.replay()
        assert torch.equal(got, chain())


# --- without a GPU


@pytest.fixture
def gpu(monkeypatch):
    """A device that has the kernel."""
    monkeypatch.setattr(launch_cuda, "refusal", lambda device: "")


def test_on_a_cpu_nothing_is_served():
    x, weight = torch.zeros(4, 64, dtype=torch.bfloat16), torch.zeros(8, 64, dtype=torch.bfloat16)
    assert not module.is_served(x, [weight])


@pytest.mark.usefixtures("gpu")
def test_which_layers_are_served():
    weight = torch.zeros(8, 64, dtype=torch.bfloat16)

    def served(tokens=4, weight=weight, dtype=torch.bfloat16):
        return module.is_served(torch.zeros(tokens, weight.shape[1], dtype=dtype), [weight])

    assert served()
    assert served(2)
    assert served(16)
    assert not served(1)
    assert not served(17)
    assert not served(dtype=torch.float32)
    assert not served(weight=torch.zeros(8, 48, dtype=torch.bfloat16))  # no whole steps
    assert not served(weight=torch.zeros(64, 64, dtype=torch.bfloat16).t())
    assert not served(weight=torch.zeros(1 + 8 * 64, dtype=torch.bfloat16)[1:].view(8, 64))


def test_the_source_uses_every_macro():
    source = module._SOURCE.read_text()
    macros = module._macros(TILES[0], torch.zeros(9, 96), 2, "silu", True)
    assert macros["TOKEN_TILES"] == 2
    assert not {name for name in macros if not re.search(rf"\b{name}\b", source)}


def test_arguments_are_the_struct_of_the_kernel():
    source = module._SOURCE.read_text()
    fields = {}
    for name in ("Weight", "Args"):
        struct = source.split(f"struct {name} {{")[1].split("};")[0]
        declared = re.sub("//.*", "", struct).split(";")
        parts = [part for line in declared for part in line.split(",") if part.strip()]
        fields[name] = [part.split()[-1].strip("*") for part in parts]
    assert fields["Weight"] == ["values", "bias", "rows"]
    assert fields["Args"] == [f"weights[{MAX_WEIGHTS}]", "x", "y", "tokens", "width"]
    x, y = torch.zeros(4, 64), torch.zeros(4, 13)
    weights, bias = [torch.zeros(8, 64), torch.zeros(5, 64)], [torch.zeros(8), torch.zeros(5)]
    args = list(module._arguments(x, y, weights, bias))
    at = [tensor.data_ptr() for tensor in (*weights, *bias, x, y)]
    assert args[:6] == [at[0], at[2], 8, at[1], at[3], 5]
    assert args[6:] == [0, 0, 0, at[4], at[5], 4, 13]


@pytest.mark.parametrize("tokens", [2, 16])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("dim", [*DIMS, 14336])
@pytest.mark.parametrize("size", [16, 2048, 16384, 128256])
def test_tiles_fit(size, dim, is_gated, tokens):
    tiles = module.tiles_of(dim, size, tokens, is_gated)
    assert tiles.row_tiles % tiles.cluster == 0
    assert tiles.min_blocks * tiles.warps * 32 <= 2048


@pytest.mark.skipif(not shutil.which("nvcc"), reason="there is no CUDA compiler")
@pytest.mark.parametrize("tiles", TILES[:4:3], ids=lambda tiles: "-".join(map(str, tiles)))
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_the_source_compiles(dtype, tiles, tmp_path):
    macros = module._macros(tiles, torch.zeros(9, 96, dtype=dtype), 2, "silu", True)
    flags = [f"-D{name}={value}" for name, value in macros.items()]
    out = ["-o", str(tmp_path / "kernel.cubin"), str(module._SOURCE)]
    command = ["nvcc", "-arch=sm_90a", "-std=c++17", "-cubin", *flags, *out]
    compiled = subprocess.run(command, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr
