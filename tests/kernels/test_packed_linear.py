"""The kernel in CUDA C++ for weights of four bits: on a GPU, and run by threads of a CPU."""

import ctypes
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch

from hf_static_kv.kernels import launch_cuda
from hf_static_kv.kernels import packed_linear_cuda as module
from hf_static_kv.kernels.linear import ACTIVATIONS, Linear, activate, fused_linears
from hf_static_kv.kernels.norm import STYLES, Norm
from tests.quantised_layers import FORMATS, Made

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_KERNEL = not launch_cuda.refusal(torch.device(DEVICE))
needs_kernel = pytest.mark.skipif(not HAS_KERNEL, reason="needs compute capability 9.0")
DTYPE = torch.bfloat16
EPS, SINGLE = torch.finfo(DTYPE).eps, torch.finfo(torch.float32).eps
SERVED = ["blocks", "nested blocks", "small blocks", "int4 groups", "int4 tiles", "wide int4 tiles"]


def made(name, rows, columns, seed=0, device=DEVICE):
    one = Made(name, rows, columns, DTYPE, device, seed)
    if one.packed.zeros is not None:  # as packages have them
        scales, zeros = one.packed.scales.to(DTYPE), one.packed.zeros.to(DTYPE)
        one = Made(name, rows, columns, DTYPE, device, seed, scales.cpu(), zeros.cpu())
    return one


def normal(*shape, seed=0, device=DEVICE):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(device, DTYPE)


def sums(x, weights, norm=None, bias=0.0):
    """norm(x) w^T + b in float64, and how far the kernel may be from it.

    The values of codes are rounded to bfloat16, and so are inputs times the weight of a norm.
    """
    states = x.double()
    if norm is not None:
        factor = torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + norm.eps)
        states = states * factor * (norm.style.offset + norm.weight.double())
    whole = torch.cat([weight.exact for weight in weights])
    largest = torch.cat([weight.largest for weight in weights])
    exact = states @ whole.T + bias
    terms = states.abs() @ largest.T + (bias.abs() if torch.is_tensor(bias) else 0.0)
    roundings = 1 if norm is None else 2
    bound = (roundings * EPS / 2 + (2 * x.shape[-1] + 32) * SINGLE) * terms + EPS * exact.abs()
    return exact, bound


# --- on a GPU


@needs_kernel
@pytest.mark.parametrize("style", [None, STYLES[0], STYLES[2]], ids=str)
@pytest.mark.parametrize(
    ("name", "columns", "sizes"),
    [
        *((name, 384, (40, 8, 24)) for name in SERVED),
        ("blocks", 4096, (4096, 1024, 1024)),
        ("nested blocks", 14336, (2048,)),
        ("wide int4 tiles", 2048, (8192, 512)),
    ],
)
def test_against_float64(name, columns, sizes, style):
    weights = [made(name, rows, columns, i) for i, rows in enumerate(sizes)]
    packed, x = [weight.packed for weight in weights], 3 * normal(1, columns)
    biases = [normal(rows) for rows in sizes] if style is None else []
    norm = None if style is None else Norm(normal(columns, seed=7), 1e-5, style)
    assert module.is_served(x, packed)
    exact, bound = sums(x, weights, norm, torch.cat(biases).double() if biases else 0.0)
    got = fused_linears(x, Linear(packed, biases, norm))
    assert (got.dtype, got.shape) == (DTYPE, exact.shape)
    assert ((got.double() - exact).abs() <= bound).all()
    for _ in range(3):  # one order of each sum
        assert torch.equal(fused_linears(x, Linear(packed, biases, norm)), got)


@needs_kernel
@pytest.mark.parametrize(
    ("name", "activation", "rows"),
    [("blocks", activation, 24) for activation in ("", *ACTIVATIONS)]
    + [("nested blocks", "silu", 5000), ("int4 tiles", "gelu", 5000)],
)
def test_what_follows_the_sum(name, activation, rows):
    weights = [made(name, rows, 1024, seed).packed for seed in (0, 1)]
    x, residual = normal(1, 1024) / 16, normal(1, rows)
    gate, up = (fused_linears(x, Linear([weight], [])) for weight in weights)
    expected = residual + (activate(gate, activation) if activation else gate) * up
    got = fused_linears(x, Linear(weights, [], None, activation, True, residual))
    # Two ways to compute exp, erf and tanh: 2 eps of what is rounded next, three times.
    bound = 8 * EPS * (residual.abs() + (gate * up).abs() + gate.abs())
    assert ((got - expected).abs() <= bound).all()


@needs_kernel
def test_a_graph_of_several_launches():
    """Each launch begins before the one that writes its input has ended."""
    layers = [
        Linear(
            [made("nested blocks", 1024, 1024, seed).packed],
            [],
            Norm(normal(1024), 1e-5, STYLES[0]),
        )
        for seed in range(6)
    ]
    x = normal(1, 1024)

    def chain(waits=False):
        y = x
        for layer in layers:
            y = fused_linears(y, layer._replace(residual=y))
            if waits:
                torch.cuda.synchronize()
        return y

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain()
    for seed in range(30):
        x.copy_(normal(1, 1024, seed=seed))
        graph.replay()
        assert torch.equal(got, chain(waits=True))


# --- on a CPU


@cache
def compiled(folder, macros):
    library = folder / f"{abs(hash(macros))}.so"
    flags = [f"-D{name}={value}" for name, value in macros]
    source = (
        f'#include "{Path(__file__).with_name("cuda_on_cpu.h")}"\n#include "{module._SOURCE}"\n'
    )
    source += 'extern "C" void run(const Args* args, int blocks) {\n'
    source += "  launch([=] { packed_linear(*args); }, blocks, THREADS);\n}\n"
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-pthread", "-x", "c++", "-"]
    subprocess.run([*command, *flags, "-o", library], input=source, text=True, check=True)
    return ctypes.CDLL(str(library))


def on_cpu(folder, x, weights, biases=(), norm=None, activation="", is_gated=False, residual=None):
    y = x.new_full((1, sum(w.rows for w in weights[: 1 if is_gated else None])), torch.nan)
    macros = module._macros(
        weights, bool(biases), norm is not None, activation, is_gated, residual is not None
    )
    macros["SHARED_BYTES_OF_HOST"] = module._shared_bytes(macros)
    tiles = module._tiles(weights, is_gated)
    inputs = [x, norm and norm.weight, residual]
    args = module._arguments(weights, biases, inputs, y, tiles, norm)
    compiled(folder, tuple(macros.items())).run(ctypes.byref(args), min(2, tiles))
    return y


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kernels")


needs_compiler = pytest.mark.skipif(
    not shutil.which("g++") or torch.cuda.is_available(), reason="needs g++, and no GPU"
)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "columns", "sizes"),
    [
        ("nested blocks", 384, (40, 7, 24)),  # fewer steps than warps; the last tile is not full
        ("blocks", 1280, (16,)),  # steps that the warps do not share evenly
        ("int4 groups", 128, (20,)),
        ("blocks", 256, (320,)),  # more tiles of a block than it has warps
        ("int4 tiles", 256, (24, 16)),
        ("wide int4 tiles", 1152, (40,)),
    ],
)
def test_on_a_cpu_against_float64(folder, name, columns, sizes):
    weights = [made(name, rows, columns, i, "cpu") for i, rows in enumerate(sizes)]
    packed, x = [weight.packed for weight in weights], 3 * normal(1, columns, device="cpu")
    norm = Norm(normal(columns, seed=7, device="cpu"), 1e-5, STYLES[2]) if len(sizes) > 1 else None
    exact, bound = sums(x, weights, norm)
    got = on_cpu(folder, x, packed, (), norm)
    assert ((got.double() - exact).abs() <= bound).all()


@needs_compiler
def test_on_a_cpu_what_follows_the_sum(folder):
    weights = [made("nested blocks", 21, 256, seed, "cpu").packed for seed in (0, 1)]
    x, residual = normal(1, 256, device="cpu") / 16, normal(1, 21, device="cpu")
    biases = [normal(21, seed=i, device="cpu") for i in (1, 2)]
    both = on_cpu(folder, x, weights, biases)
    gate, up = both.chunk(2, dim=-1)
    got = on_cpu(folder, x, weights, biases, None, "silu", True, residual)
    torch.testing.assert_close(got, residual + activate(gate, "silu") * up, rtol=4 * EPS, atol=1e-6)


# --- without a kernel


def test_on_a_cpu_nothing_is_served():
    assert not module.is_served(
        normal(1, 256, device="cpu"), [made("blocks", 8, 256, 0, "cpu").packed]
    )


def test_which_weights_are_served(monkeypatch):
    monkeypatch.setattr(launch_cuda, "refusal", lambda device: "")

    def served(name="blocks", tokens=1, columns=256, dtype=DTYPE, **changed):
        packed = made(name, 8, columns, 0, "cpu").packed._replace(**changed)
        return module.is_served(torch.zeros(tokens, columns, dtype=dtype), [packed])

    assert {name for name in FORMATS if served(name)} == set(SERVED)
    assert not served(tokens=2)
    assert not served(dtype=torch.float16)
    assert not served(columns=192)
    codes = made("blocks", 8, 256, 0, "cpu").packed.codes
    assert not served(codes=torch.cat([codes[:4], codes])[4:])


def test_the_source_uses_every_macro():
    source = module._SOURCE.read_text()
    macros = module._macros(
        [made("blocks", 8, 256, 0, "cpu").packed], False, False, "", False, False
    )
    assert not {name for name in macros if not re.search(rf"\b{name}\b", source)}


def test_arguments_are_the_struct_of_the_kernel():
    source = module._SOURCE.read_text()
    fields = {}
    for name in ("Weight", "Args"):
        struct = source.split(f"struct {name} {{")[1].split("};")[0]
        declared = re.sub("//.*", "", struct).split(";")
        parts = [part for line in declared for part in line.split(",") if part.strip()]
        fields[name] = [part.split()[-1].strip("*") for part in parts]
    assert fields["Weight"] == [
        "codes", "scales", "zeros", "nested", "absmax", "offset", "bias", "rows", "row_stride",
        "group_stride",
    ]  # fmt: skip
    assert fields["Args"] == [
        f"weights[{module._MAX_WEIGHTS}]", "table", "x", "norm", "residual", "y", "tiles",
        "midpoint", "factor", "eps", "norm_offset",
    ]  # fmt: skip
    weight, x, y = made("nested blocks", 8, 256, 0, "cpu").packed, torch.zeros(256), torch.zeros(8)
    norm = Norm(torch.ones(256), 0.5, STYLES[2])
    args = list(module._arguments([weight], [y], [x, norm.weight, y], y, 1, norm))
    tensors = [weight.codes, weight.scales, None, *weight.nested, y]
    at = [0 if one is None else one.data_ptr() for one in tensors]
    assert args[:10] == [*at, 8, 4, 1]
    assert args[10:30] == [0] * 20
    at = [one.data_ptr() for one in (weight.table, x, norm.weight, y, y)]
    assert args[30:] == [*at, 1, 0x3F80000000000000, 0x3F8000003F000000]


@pytest.mark.skipif(not shutil.which("nvcc"), reason="there is no CUDA compiler")
@pytest.mark.parametrize("name", ["nested blocks", "wide int4 tiles"])
def test_the_source_compiles(name, tmp_path):
    weights = [made(name, 16, 256, i, "cpu").packed for i in range(2)]
    macros = module._macros(weights, True, True, "silu", True, True)
    macros["SHARED_BYTES_OF_HOST"] = module._shared_bytes(macros)
    flags = [f"-D{name}={value}" for name, value in macros.items()]
    out = ["-o", str(tmp_path / "kernel.cubin"), str(module._SOURCE)]
    command = ["nvcc", "-arch=sm_90a", "-std=c++17", "-cubin", *flags, *out]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
