"""The kernel of a whole step: what it takes, what it is compiled with, and what it computes."""

import math
import shutil
import subprocess
import sys
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from hf_static_kv import compat
from hf_static_kv.kernels import persistent_step_cuda, persistent_weights
from hf_static_kv.kernels.norm import LAYER_NORM, STYLES
from hf_static_kv.kernels.persistent_macros import exchanged_bytes, macros, used_shared_bytes
from hf_static_kv.kernels.persistent_step import check_plan, persistent_step_plain
from tests.kernels.step_plans import CASES, SMALL, copied, largest_error, random_plan

BLOCKS, SHARED = 132, 232448  # of an H200
NVCC = shutil.which("nvcc")
HAS_KERNEL = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
# L, H, I, NQ, NKV, D, V, and whether there are biases, norms of heads, and norms after each part.
SHAPES = {
    "llama-3.2-1b": ((16, 2048, 8192, 32, 8, 64, 128256), (False, False, False)),
    "qwen3-1.7b": ((28, 2048, 6144, 16, 8, 128, 151936), (False, True, False)),
    "gemma-3-1b": ((26, 1152, 6912, 4, 1, 256, 262144), (False, True, True)),
    "smollm2-135m": ((30, 576, 1536, 9, 3, 64, 49152), (False, False, False)),
    "llama-3.1-8b": ((32, 4096, 14336, 32, 8, 128, 128256), (False, False, False)),
}


# --- what the kernel takes


def with_layer(plan, number=0, **changed):
    layers = list(plan.layers)
    layers[number] = layers[number]._replace(**changed)
    return plan._replace(layers=layers)


def sized(**sizes):
    return random_plan(SMALL | sizes)


WIDER = {**SMALL, "H": 512}


@cache
def four_bits(scales="plain"):
    return random_plan(WIDER, packed=scales)


def one_packed(**changed):
    plan = four_bits()
    return with_layer(plan, o=plan.layers[0].o._replace(**changed))


def each_packed(**changed):
    return changed_in_each(four_bits(), changed)


def changed_in_each(plan, changed):
    names = ("q", "k", "v", "o", "gate", "up", "down")
    layers = [
        layer._replace(**{name: getattr(layer, name)._replace(**changed) for name in names})
        for layer in plan.layers
    ]
    return plan._replace(layers=layers)


@cache
def in_tiles(group=128):
    return random_plan(packed="tiles", group=group)


def each_tiled(**changed):
    return changed_in_each(in_tiles(), changed)


def one_tiled(**changed):
    return with_layer(in_tiles(), o=in_tiles().layers[0].o._replace(**changed))


def each_layer(**changed):
    plan = random_plan()
    return plan._replace(layers=[layer._replace(**changed) for layer in plan.layers])


def with_half_absmax(plan):
    weight = plan.layers[0].o
    return weight._replace(nested=weight.nested._replace(absmax=weight.nested.absmax.bfloat16()))


@cache
def eight_bits():
    return random_plan(WIDER, packed="bytes")


def in_eight_bits(**changed):
    return changed_in_each(eight_bits(), changed)


REFUSED = {
    "float32": (lambda: random_plan(dtype=torch.float32), "torch.bfloat16, not torch.float32"),
    "heads of 32": (lambda: sized(D=32), "a head is 32 wide"),
    "hidden size": (lambda: sized(H=252), "252 or 512 is no multiple of 8"),
    "intermediate size": (lambda: sized(I=500), "no multiple of 8"),
    "too wide": (lambda: sized(I=16384 + 8), "16392 wide"),
    "16 heads share one": (lambda: sized(NQ=16, NKV=1), "16 query heads share"),
    "uneven heads": (lambda: sized(NQ=3, NKV=2), "1.5 query heads share"),
    "activation": (lambda: random_plan(activation="gelu"), "no activation gelu"),
    "layer norm": (lambda: random_plan(style=LAYER_NORM), "no norm"),
    "two tokens": (
        lambda: random_plan()._replace(token=torch.zeros(2, dtype=torch.int64)),
        "one token of one batch row",
    ),
    "transposed": (
        lambda: with_layer(plan := random_plan(), o=plan.layers[0].o.t()),
        "not contiguous",
    ),
    "a narrower layer": (
        lambda: with_layer(plan := random_plan(), up=plan.layers[0].up[:256]),
        "layers differ",
    ),
    "a norm in one layer": (
        lambda: with_layer(plan := random_plan(), 1, post1=plan.norm),
        "layers differ",
    ),
    "not aligned": (
        lambda: with_layer(random_plan(), norm1=torch.ones(257, dtype=torch.bfloat16)[1:]),
        "16-byte aligned",
    ),
    "narrow table": (
        lambda: with_layer(plan := random_plan(), table=plan.layers[0].table[:, :64].contiguous()),
        "table has another shape",
    ),
    "int32": (
        lambda: with_layer(plan := random_plan(), slot=plan.layers[0].slot.int()),
        "torch.int64",
    ),
    "one weight of 16 bits": (
        lambda: with_layer(four_bits(), o=random_plan(WIDER).layers[0].o),
        "some weights are packed and some are not",
    ),
    "groups of bytes": (lambda: each_packed(layout="bytes"), "one scale for a row of bytes"),
    "a midpoint": (lambda: in_eight_bits(midpoint=8), "codes have a midpoint"),
    "half scales": (
        lambda: in_eight_bits(scales=torch.ones(512, 1, dtype=torch.float16)),
        "scales are torch.float16",
    ),
    "zeros of bytes": (lambda: in_eight_bits(zeros=torch.zeros(1)), "packed as bytes"),
    "one with zeros": (lambda: one_packed(zeros=torch.zeros(1)), "packed as high_first"),
    "weights of float16": (lambda: each_packed(dtype=torch.float16), "not torch.float16"),
    "one that is not nested": (
        lambda: with_layer(
            four_bits("nested"), o=four_bits("nested").layers[0].o._replace(nested=None)
        ),
        "only some scales are nested",
    ),
    "scales of scales in half": (
        lambda: with_layer(four_bits("nested"), o=with_half_absmax(four_bits("nested"))),
        "scales of scales are torch.bfloat16, torch.float32",
    ),
    "codes elsewhere": (
        lambda: one_packed(codes=four_bits().layers[0].o.codes.to("meta")),
        "several devices",
    ),
    "one midpoint": (
        lambda: with_layer(eight_bits(), o=eight_bits().layers[0].o._replace(midpoint=8)),
        "codes have a midpoint",
    ),
    "a bias of the query alone": (
        lambda: each_layer(q_bias=torch.zeros(256, dtype=torch.bfloat16)),
        "of q_bias, k_bias, v_bias only some are there",
    ),
    "a norm after attention alone": (
        lambda: each_layer(post1=torch.zeros(256, dtype=torch.bfloat16)),
        "of post1, post2 only some are there",
    ),
    "zeros": (lambda: each_packed(zeros=torch.zeros(1)), "packed as high_first"),
    "another order": (lambda: one_packed(layout="low_first"), "packed weights differ"),
    "groups of 32": (lambda: one_packed(group=32), "32.* weights share a scale: it takes 64"),
    "a factor": (lambda: one_packed(factor=2.0), "factor"),
    "another table": (lambda: one_packed(table=torch.zeros(16)), "tables differ"),
    "scales of columns": (
        lambda: one_packed(scales=four_bits().layers[0].o.scales.t().contiguous().t()),
        "scales are not contiguous",
    ),
    "scales in float16": (lambda: each_packed(scales=torch.zeros(8).half()), "torch.float16"),
    "some nested scales": (
        lambda: with_layer(four_bits(), o=four_bits("nested").layers[0].o),
        "scales are torch.float32, torch.uint8",
    ),
    "one weight of float16 scales": (
        lambda: one_packed(scales=four_bits().layers[0].o.scales.half()),
        "scales are torch.float16, torch.float32",
    ),
    "tiles of two words": (
        lambda: one_tiled(codes=in_tiles().layers[0].o.codes.view(32, 4, 32, 2)),
        r"tiles are \[\(32, 2\), \(32, 4\)\]: it takes whole ones of \(32, 4\)",
    ),
    "part of the tiles": (
        lambda: one_tiled(codes=in_tiles().layers[0].o.codes[:16]),
        "it takes whole ones",
    ),
    "tiles of other groups": (
        lambda: with_layer(in_tiles(), o=in_tiles(64).layers[0].o),
        r"\[64, 128\] weights share a scale",
    ),
    "tiles with groups of 16": (lambda: each_tiled(group=16), r"\[16\] weights share a scale"),
    "tiles without zeros": (lambda: one_tiled(zeros=None), "no pairs of torch.bfloat16"),
    "zeros that are not added": (lambda: one_tiled(added=False), "no pairs of torch.bfloat16"),
    "another midpoint": (lambda: one_tiled(midpoint=0), "no pairs of torch.bfloat16"),
    "tiles with a factor": (lambda: one_tiled(factor=2.0), "no pairs of torch.bfloat16"),
    "zeros elsewhere": (
        lambda: one_tiled(zeros=in_tiles().layers[0].o.zeros.clone()),
        "no pairs of torch.bfloat16",
    ),
    "scales of rows": (
        lambda: one_tiled(scales=in_tiles().layers[0].o.scales.contiguous()),
        "no pairs of torch.bfloat16",
    ),
    "half pairs": (
        lambda: one_tiled(
            scales=in_tiles().layers[0].o.scales.view(torch.float16),
            zeros=in_tiles().layers[0].o.zeros.view(torch.float16),
        ),
        "no pairs of torch.bfloat16",
    ),
    "few nested scales": (lambda: random_plan(packed="nested"), "no multiple of 65536"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernel_does_not_take(name):
    make, reason = REFUSED[name]
    with pytest.raises(ValueError, match=reason):
        check_plan(make())


@pytest.mark.parametrize("parts", [(False,) * 3, (True,) * 3])
def test_what_it_takes(parts):
    check_plan(random_plan(SMALL, *parts))
    check_plan(random_plan({**SMALL, "NQ": 16, "D": 256}))
    check_plan(four_bits())
    check_plan(four_bits("nested"))
    for group in (32, 64, 128, 256):
        check_plan(in_tiles(group))


# --- what it is compiled with


@pytest.mark.parametrize("name", SHAPES)
def test_every_dev_model_fits(name):
    numbers, parts = SHAPES[name]
    sizes = dict(zip(SMALL, numbers, strict=True))
    found = macros(random_plan(sizes, *parts, device="meta"), BLOCKS, SHARED)
    assert {key: found[key] for key in sizes} == sizes
    assert used_shared_bytes(found) <= SHARED
    assert found["SLOTS"] >= 4
    rows = {
        "QKV": (sizes["NQ"] + 2 * sizes["NKV"]) * sizes["D"], "O": sizes["H"], "GATE": sizes["I"],
        "DOWN": sizes["H"], "HEAD": sizes["V"],
    }  # fmt: skip
    widths = {"O": sizes["NQ"] * sizes["D"], "DOWN": sizes["I"]}
    for phase, number in rows.items():
        chunk, stage = found[f"C_{phase}"], found[f"RS_{phase}"]
        weights = 2 if phase == "GATE" else 1
        assert number % chunk == 0
        smaller, larger = sorted((chunk * weights, stage))
        assert larger % smaller == 0
        assert stage * widths.get(phase, sizes["H"]) * 2 <= found["STAGE"]
        busiest = math.ceil(number / chunk / BLOCKS) * chunk
        assert phase == "HEAD" or busiest * weights <= found["SUM_ROWS"]
    assert exchanged_bytes(found) == found["EXCHANGED_BYTES"]
    assert exchanged_bytes(found) < 1 << 25


@pytest.mark.parametrize("group", [32, 64, 128, 256])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.2-1b", "qwen3-1.7b"])
def test_tiles_fit(name, group):
    numbers, parts = SHAPES[name]
    sizes = dict(zip(SMALL, numbers, strict=True)) | {"L": 1}
    plan = random_plan(sizes, *parts, device="meta", packed="tiles", group=group)
    found = macros(plan, BLOCKS, SHARED)
    assert used_shared_bytes(found) <= SHARED
    assert found["SLOTS"] >= 8
    assert (found["FLIGHT_WAIT"], found["FLIGHT_STREAM"], found["STAGE"]) == (1, 6, 16384)
    assert found["STAGE"] % (32 * min(group, 128)) == 0  # whole spans
    assert found["STAGE"] >= 2 * sizes["H"]  # a row of the head
    for phase in ("QKV", "O", "GATE", "DOWN"):
        assert found[f"C_{phase}"] == 4


@pytest.mark.parametrize("scales", ["plain", "nested", "bytes"])
@pytest.mark.parametrize(
    "sizes", [(1, 6144, 16384, 48, 8, 128, 92544), (1, 512, 1024, 48, 8, 128, 999)]
)
def test_wide_packed_weights_fit(sizes, scales):
    """InternLM2-20B; and an attention far wider than the rest."""
    plan = random_plan(dict(zip(SMALL, sizes, strict=True)), device="meta", packed=scales)
    assert macros(plan, BLOCKS, SHARED)["SLOTS"] >= 3


@pytest.mark.parametrize("scales", ["plain", "nested", "bytes"])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.2-1b", "qwen3-1.7b"])
def test_packed_weights_fit(name, scales):
    numbers, parts = SHAPES[name]
    sizes = dict(zip(SMALL, numbers, strict=True)) | {"L": 1}
    found = macros(random_plan(sizes, *parts, device="meta", packed=scales), BLOCKS, SHARED)
    assert used_shared_bytes(found) <= SHARED
    assert found["SLOTS"] >= 3  # under way, multiplied, and one between
    for phase in ("QKV", "O", "GATE", "DOWN"):
        assert found[f"C_{phase}"] % 2 == 0  # pairs of rows
        assert found[f"RS_{phase}"] in (2, 4, 8, 16)


def test_scales_that_make_no_whole_copies(monkeypatch):
    monkeypatch.setattr(persistent_weights.Dense, "rows_at_once", lambda *sizes: 2)
    plan = random_plan({**SMALL, "H": 192}, packed="plain")  # two rows have 24 bytes of scales
    with pytest.raises(ValueError, match="rows of 192 columns make no whole copies"):
        macros(plan, 23, SHARED)


def test_options_become_macros():
    how = {"activation": "gelu_tanh", "style": STYLES[2], "embedding_scale": 16, "scale": 1}
    found = macros(random_plan(SMALL, True, True, True, **how), BLOCKS, SHARED)
    flags = ("ACTIVATION", "NORM_OFFSET", "HAS_QK_NORM", "HAS_POST_NORMS", "HAS_QKV_BIAS")
    assert [found[name] for name in flags] == [1] * 5
    assert found["EMBED_SCALE"] == "16.0f"
    assert found["SCALE"] == "1.0f"
    assert (found["EPS"], found["QK_EPS"]) == ("1e-06f", "1e-05f")
    plain = macros(random_plan(), BLOCKS, SHARED)
    assert [plain[name] for name in (*flags, "HAS_EMBED_SCALE")] == [0] * 6


def test_a_small_device_is_too_small():
    plan = random_plan()
    with pytest.raises(ValueError, match="20000 bytes on 132 multiprocessors"):
        macros(plan, BLOCKS, 20000)
    with pytest.raises(ValueError, match="rows are too many for 1 multi"):
        macros(plan, 1, SHARED)


def test_the_source_uses_every_macro():
    source = persistent_step_cuda.source()
    unused = {name for name in macros(random_plan(), BLOCKS, SHARED) if name not in source}
    assert not unused


# --- the launcher


def fake_bindings(compiled, driver_version=13000):
    """CUDA that compiles a source to its reverse."""

    def compile(program, count, options):
        compiled.append(program)
        return (1 if b"wrong" in program else 0,)

    def fill(program, cubin):
        return (0,)

    nvrtc = SimpleNamespace(
        nvrtcVersion=lambda: (0, 13, 0),
        nvrtcCreateProgram=lambda source, *rest: (0, source),
        nvrtcCompileProgram=compile,
        nvrtcGetCUBINSize=lambda program: (0, len(program)),
        nvrtcGetCUBIN=fill,
        nvrtcGetProgramLogSize=lambda program: (0, 5),
        nvrtcGetProgramLog=lambda program, log: (0,),
        nvrtcDestroyProgram=lambda program: (0,),
    )
    driver = SimpleNamespace(cuDriverGetVersion=lambda: (0, driver_version))
    return driver, nvrtc


@pytest.mark.skipif(not NVCC, reason="needs nvcc")
@pytest.mark.parametrize("name", ["biases", "gemma", "qwen", "nested scales", "int8", "tiles"])
def test_the_source_compiles(name, tmp_path):
    """For the GPU: what runs on a CPU has no hopper.cuh."""
    case = dict(CASES[name])
    sizes = case.pop("sizes", SMALL) | {"L": 1}
    found = macros(random_plan(sizes, device="meta", **case), BLOCKS, SHARED) | {"PROFILE": 1}
    file = tmp_path / "step.cu"
    file.write_text(persistent_step_cuda._defines(found) + persistent_step_cuda.source())
    options = ["-arch=sm_90a", "-std=c++17", "-cubin", "-o", tmp_path / "step.cubin"]
    result = subprocess.run([NVCC, *options, file], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """The sources that were compiled."""
    found = []
    monkeypatch.setattr(compat, "cuda_bindings", lambda: fake_bindings(found))
    monkeypatch.setattr(compat, "triton_cache_dir", lambda: tmp_path / "new")
    return found


def test_what_is_compiled_is_kept_on_disk(compiled, monkeypatch, tmp_path):
    for _ in range(2):
        assert len(persistent_step_cuda.kept_or_compiled("source")) == 6
    assert compiled == [b"source"]
    persistent_step_cuda.kept_or_compiled("another")
    assert len(compiled) == 2
    assert {path.suffix for path in (tmp_path / "new").iterdir()} == {".cubin"}
    other = fake_bindings(compiled, driver_version=13010)
    monkeypatch.setattr(compat, "cuda_bindings", lambda: other)
    persistent_step_cuda.kept_or_compiled("source")
    assert len(compiled) == 3


def test_a_disk_that_is_not_writable(compiled, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(compat, "triton_cache_dir", lambda: tmp_path / "file")
    for _ in range(2):
        persistent_step_cuda.kept_or_compiled("source")
    assert len(compiled) == 2


def test_without_a_place_on_disk_the_error_is_kept(compiled, monkeypatch):
    def fail():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(compat, "triton_cache_dir", fail)
    compilation = persistent_step_cuda._Compilation("")
    with pytest.raises(RuntimeError, match="home directory"):
        compilation.result()


def test_a_thread_compiles_and_keeps_its_error(compiled):
    right = persistent_step_cuda._Compilation("#define X 1\n")
    wrong = persistent_step_cuda._Compilation("wrong")
    assert right.result()
    assert right.is_ready
    assert compiled[0].startswith(b"#define X 1\n//") or compiled[1].startswith(b"#define X 1\n//")
    with pytest.raises(RuntimeError, match="NVRTC"):
        wrong.result()


# A process that ends while the compiler runs.
ENDS_EARLY = """
import ctypes, time
from hf_static_kv.kernels import persistent_step_cuda

def compile(source):
    ctypes.CDLL(None).usleep(300_000)  # without the interpreter, as NVRTC
    print("compiled")

persistent_step_cuda.kept_or_compiled = compile
persistent_step_cuda._compilation("")
print("the end of the program")
"""


def test_the_end_of_the_interpreter_waits_for_the_compiler():
    """Code that runs beside the end of a process may abort it: one of 40 did with NVRTC (CUDA 13.5)."""
    result = subprocess.run([sys.executable, "-c", ENDS_EARLY], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.split("\n") == ["the end of the program", "compiled", ""]


def test_a_status_is_an_error():
    assert persistent_step_cuda._checked((0,)) == ()
    assert persistent_step_cuda._checked((0, 5)) == 5
    assert persistent_step_cuda._checked((0, 5, 6)) == (5, 6)
    with pytest.raises(RuntimeError, match="CUDA: 2"):
        persistent_step_cuda._checked((2, None))


def test_the_table_of_layers_has_the_struct_of_the_kernel():
    plan = random_plan(SMALL, has_biases=True)
    table = persistent_step_cuda._table_of_layers(plan)
    source = persistent_step_cuda.source()
    struct = source[source.index("struct Layer {") :].split("}")[0].split("{")[1]
    declared = [line.strip() for line in struct.split(";") if line.strip()]
    names = [part.split()[-1].strip("*") for line in declared for part in line.split(",")]
    assert table.shape == (2, len(names))
    for layer, row in zip(plan.layers, table.tolist(), strict=True):
        for name, value in zip(names, row, strict=True):
            if name == "head_stride":
                assert value == layer.keys.stride(0)
            else:
                tensor = getattr(layer, name)
                assert value == (0 if tensor is None else tensor.data_ptr())


def test_on_a_cpu_no_kernel_serves():
    assert persistent_step_cuda.refusal(random_plan()) == "the device is no GPU of NVIDIA"


# --- what it computes


@pytest.mark.parametrize("name", CASES)
def test_the_reference(name):
    plan = random_plan(dtype=torch.float32, **CASES[name])
    before = copied(plan)
    assert largest_error(persistent_step_plain(plan), plan, before) <= 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_KERNEL, reason="the kernel runs on compute capability 9.0")
@pytest.mark.parametrize("name", CASES)
def test_the_kernel(name):
    """In bfloat16 and alike in each launch; the other tokens are left as they are."""
    plan = random_plan(device="cuda", **CASES[name])
    before = copied(plan)
    assert persistent_step_cuda.refusal(plan) == ""
    step = persistent_step_cuda.Build(plan).step()
    # Two layers round a dozen times, each by half of 2^-8.
    got = step().clone()
    assert largest_error(got, plan, before) <= 12 * 2**-9
    for own, old in zip(plan.layers, before.layers, strict=True):
        kept = torch.arange(own.keys.shape[1], device="cuda") != own.slot
        assert torch.equal(own.keys[:, kept], old.keys[:, kept])
        assert torch.equal(own.values[:, kept], old.values[:, kept])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()
    for _ in range(3):
        logits.zero_()
        graph.replay()
        assert torch.equal(logits, got)
    assert not step.has_failed()
    maxima, tokens = step.chunks
    largest = (got[0] == got.max()).nonzero()
    assert maxima.max() == got.max()
    assert tokens[maxima == maxima.max()].min() == largest[0]
