"""Every kernel once under NVIDIA's compute-sanitizer, at small odd sizes: `make sanitize` on a GPU.

python -m tests.kernels.sanitize             memcheck and racecheck, and a record of both
python -m tests.kernels.sanitize --kernels   the kernels alone: what the sanitizer runs

memcheck finds accesses outside of a tensor: without torch's caching allocator each tensor is an
allocation of its own. racecheck finds threads of a block that race for shared memory. It does not see
that a warp has read packed weights when one of its lanes says so: of the kernel of a whole step only
memcheck runs these.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.provenance import provenance
from hf_static_kv.cache.codes import encoded
from hf_static_kv.kernels import (
    ban_tokens_triton,
    coded_attention_triton,
    decode_attention_triton,
    drafts_triton,
    experts_triton,
    fused_linear_triton,
    invariant_linear_triton,
    joint_linear_triton,
    launch_triton,
    linear_triton,
    norm_triton,
    packed_triton,
    positions_triton,
    prompt_attention_triton,
    rope_attention_triton,
    rotary_triton,
    rows_attention_triton,
    sample_triton,
    select_greedy_triton,
)
from hf_static_kv.kernels.drafts import DraftedPass, DraftState
from hf_static_kv.kernels.norm import LAYER_NORM, STYLES, Norm
from hf_static_kv.kernels.persistent_step_cuda import Build, refusal
from hf_static_kv.kernels.sample import Processors
from hf_static_kv.kernels.select_greedy import GreedyState
from tests.kernels.step_plans import CASES, random_plan
from tests.quantised_layers import FORMATS, Made

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks" / "results" / "sanitizer.json"
TOOLS = ("memcheck", "racecheck")
WHOLE_STEP = "persistent_step"  # in CUDA C++, not in Triton; it runs on a compute capability of 9.0
SECONDS = 600  # for one tool
_FOUND = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kernels", action="store_true", help="run the kernels, and print their names"
    )
    parser.add_argument("--tool", choices=TOOLS, action="append", help="one of the tools only")
    parser.add_argument("--json", type=Path, default=RECORD)
    args = parser.parse_args()
    if args.kernels:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        print("kernels:", *run_kernels(device, args.tool != ["racecheck"]))
        return 0
    if not torch.cuda.is_available():
        print("The sanitizer needs an NVIDIA GPU.")
        return 2
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print(
            "compute-sanitizer was not found: add the bin folder of the CUDA toolkit to the "
            "PATH, or set CUDA_HOME."
        )
        return 2
    defined = defined_kernels()
    with ThreadPoolExecutor() as pool:  # the tools at once: each takes a minute or two
        runs = list(pool.map(partial(run_tool, sanitizer, defined), args.tool or TOOLS))
    record = {"config": {"defined": sorted(defined)}, "runs": runs, **provenance("cuda")}
    record["command"] = (
        "python -m tests.kernels.sanitize"  # as a module, `argv` has a path of this machine
    )
    args.json.write_text(json.dumps(record, indent=1) + "\n")
    for run in runs:
        print(
            f"{run['tool']}: {len(run['kernels'])} kernels, {run['errors']} errors, "
            f"{run['seconds']:.0f} s"
        )
    return int(any(run["errors"] != 0 or run["missing"] or run["exit_code"] for run in runs))


def find_sanitizer() -> str | None:
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=f"{home}/bin"
    )


def run_tool(sanitizer: str, defined: set[str], tool: str) -> dict[str, Any]:
    """The kernels under one tool: what it found, None for errors if it said nothing."""
    # cuda.bindings asks the driver for functions that it may not have: no error of a kernel.
    options = ["--report-api-errors", "no"] if tool == "memcheck" else []
    python = [sys.executable, "-m", "tests.kernels.sanitize", "--kernels", "--tool", tool]
    command = [sanitizer, "--tool", tool, *options, *python]
    environment = dict(os.environ)
    if tool == "memcheck":
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    started = time.monotonic()
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    output = result.stdout + result.stderr
    found = [int(one or other) for one, other in _FOUND.findall(output)]
    names = re.search(r"^kernels: (.*)$", output, re.MULTILINE)
    kernels = names[1].split() if names else []
    if result.returncode or any(found) or not found:
        print(output[-4000:])
    return {
        "tool": tool,
        "version": version_of(sanitizer),
        "command": " ".join(["compute-sanitizer", "--tool", tool, *options, "python", *python[1:]]),
        "kernels": kernels,
        "missing": sorted(defined - set(kernels)),
        "errors": sum(found) if found else None,
        "exit_code": result.returncode,
        "seconds": round(time.monotonic() - started, 1),
    }


def version_of(sanitizer: str) -> str:
    output = subprocess.run([sanitizer, "--version"], capture_output=True, text=True).stdout
    return next((line.strip() for line in output.splitlines() if "Version" in line), output.strip())


def defined_kernels() -> set[str]:
    """The names that launchers launch."""
    names = set()
    for path in (ROOT / "hf_static_kv" / "kernels").glob("*_triton.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "launch":
                names.add(node.args[0].id)
    return names


# --- the kernels


def run_kernels(device: str, has_packed_steps: bool = True) -> list[str]:
    """Launch every kernel on this device and return the names of those that ran."""
    names: dict[str, None] = {}
    own = launch_triton.launch

    def launch(kernel: Any, *args: Any, **options: Any) -> None:
        names[kernel.__name__] = None
        own(kernel, *args, **options)

    modules = [module for name, module in sys.modules.items() if _launches(name, module)]
    patches = [patch.object(module, "launch", launch) for module in modules]
    if device == "cpu":  # Triton's interpreter takes 10 ms for a block
        patches += [
            patch.object(module, "_NUM_CHUNKS", 2)
            for module in (sample_triton, select_greedy_triton)
        ]
    for one in patches:
        one.start()
    others = run_experts, run_attention, run_norms, run_rotary, run_step, run_sampling
    try:
        with torch.device(device), torch.no_grad():
            # Triton's interpreter multiplies bfloat16 as integers. Some kernels are for two bytes
            # alone.
            run_linears(torch.bfloat16 if device == "cuda" else torch.float16)
            run_linears(torch.float32)
            run_packed(torch.float16, device)
            for run in others:
                run(torch.bfloat16 if device == "cuda" else torch.float32)
            if device == "cuda":
                run_whole_steps(names, has_packed_steps)
                torch.cuda.synchronize()
    finally:
        for one in patches:
            one.stop()
    return list(names)


def _launches(name: str, module: Any) -> bool:
    return (
        name.startswith("hf_static_kv.kernels.")
        and name.endswith("_triton")
        and hasattr(module, "launch")
    )


def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def run_linears(dtype: torch.dtype) -> None:
    x, gate, up, bias = (
        normal(*shape, dtype=dtype) for shape in ((1, 72), (37, 72), (37, 72), (37,))
    )
    linear_triton.linears_triton(x, [gate, up], [bias, bias])
    linear_triton.linears_triton(x, [gate, up], [], "gelu_tanh")
    norm, output = (x[0].clone(), 1e-5, (0.0, True, False), None), normal(1, 37, dtype=dtype)
    linear_triton.fused_linears_triton(x, [gate], [bias], norm, "relu", False, output)
    linear_triton.fused_linears_triton(x, [gate, up], [bias, bias], norm, "gelu", True, output)
    transposed = [weight.t().contiguous().t() for weight in (gate, up)]
    linear_triton.fused_linears_triton(x, transposed[:1], [bias], None, "relu", False, output)
    linear_triton.linears_triton(x, transposed, [])
    if dtype != torch.float32:
        of_few = fused_linear_triton.fused_linears_of_few_triton
        for tokens in (3, 8):
            some, added = normal(tokens, 72, dtype=dtype), normal(tokens, 37, dtype=dtype)
            of_few(some, [gate, up], [bias, bias], norm, "gelu", True, added)
            of_few(some, [gate, up], [], norm)
            of_few(some, [gate], [bias], None, "relu", False, added)
    for tokens in (17, 64):
        some = normal(tokens, 72, dtype=dtype)
        joint_linear_triton.joint_linears_triton(some, [gate, up], [bias, bias])
        joint_linear_triton.joint_linears_triton(some, [gate, up], [], "silu")
        joint_linear_triton.linear_parts_triton(some, gate, 2)
    for tokens in (3, 11, 140):
        many = normal(tokens, 72, dtype=dtype)
        invariant_linear_triton.invariant_linears_triton(many, [gate], [bias])
        invariant_linear_triton.invariant_linears_triton(many, [gate, up], [], "silu")
        experts = torch.arange(tokens) % 3
        invariant_linear_triton.expert_linear_triton(
            many, normal(3, 37, 72, dtype=dtype), experts, None
        )
    invariant_linear_triton.invariant_sum_triton(torch.randn(3, 77))
    linear_triton.activated_product_triton(gate, up, "gelu")


def run_packed(dtype: torch.dtype, device: str) -> None:
    """Every format; rows that no tile divides, and words of a row that fill no tile."""
    for name in FORMATS:
        with torch.device("cpu"):  # of its generator
            weights = [Made(name, 24, 384, dtype, device, seed).packed for seed in (0, 1)]
        x, residual = normal(1, 384, dtype=dtype) / 16, normal(1, 24, dtype=dtype)
        norm, bias = (x[0].clone(), 1e-5, (0.0, True, False), None), normal(24, dtype=dtype)
        linears = packed_triton.packed_linears_triton
        linears(x, weights[:1], [bias], norm, "relu", False, residual)
        linears(x, weights, [], None, "silu", True)
        for tokens in (3, 11):
            some = normal(tokens, 384, dtype=dtype) / 16
            linears(some, weights, [bias, bias])
            linears(some, weights, [], None, "silu", True)


def run_whole_steps(names: dict[str, None], has_packed: bool) -> None:
    """Two steps, each of which clears the values that the blocks exchange in the other."""
    packed = ("four bits", "nested scales", "int8", "tiles") if has_packed else ()
    for name in ("biases", "gemma", "window", *packed):
        plan = random_plan(device="cuda", **CASES[name])
        if refusal(plan):
            return
        step = Build(plan).step()
        for _ in range(2):
            step()
        if step.has_failed():
            raise RuntimeError(f"a block has waited in vain: {name}")
        names[WHOLE_STEP] = None


def run_experts(dtype: torch.dtype) -> None:
    x, logits = normal(2, 72, dtype=dtype), normal(2, 5, dtype=dtype)
    weights, index = experts_triton.route_triton(logits, 3, (True, True, False))
    gate_up, down = normal(5, 2 * 24, 72, dtype=dtype), normal(5, 72, 24, dtype=dtype)
    experts_triton.experts_triton(x, index, weights, gate_up, down, "silu")


def run_attention(dtype: torch.dtype) -> None:
    """One row begins at its first position and one in the middle; both end at the last slot."""
    batch, heads, kv_heads, slots, dim = 2, 6, 2, 75, 24
    keys, values = (normal(batch, kv_heads, slots, dim, dtype=dtype) for _ in range(2))
    query = normal(batch, heads, 1, dim, dtype=dtype)
    spans = torch.tensor([[[0, 0, slots]], [[20, 31, slots]]])
    coded = encoded(keys), encoded(values)
    attend = decode_attention_triton.decode_attention_triton
    for in_order in (False, True):
        attend(query, keys, values, spans, None, 0.2, slots, spans_ready=True, in_order=in_order)
    attend(query, *coded, spans, None, 0.2, slots, spans_ready=True)
    # Longer than a tile: the last one begins before the end of the one before it.
    long = [encoded(normal(batch, kv_heads, 2 * slots, dim, dtype=dtype)) for _ in range(2)]
    for is_split in (False, True):
        coded_attention_triton.coded_attention_triton(
            query, *long, 2 * spans, 0.2, 2 * slots, is_split=is_split
        )
    seen, weights = torch.ones(batch, slots, dtype=torch.bool), torch.empty(batch, heads, slots)
    attend(query, keys, values, spans, seen, 0.2, slots, weights=weights)
    several = normal(batch, heads, 3, dim, dtype=dtype)
    ends = torch.tensor([slots - 2, slots - 1, slots])
    begins = torch.tensor([0, 5, 9])
    spans = torch.stack([torch.zeros_like(ends), begins, ends], dim=-1).repeat(batch, 1, 1)
    attend(several, keys, values, spans, None, 0.2, slots)
    prompt, sinks = normal(batch, heads, 19, dim, dtype=dtype), normal(heads, dtype=dtype)
    for rows in (query, several):
        own = spans[:, : rows.shape[2]]
        rows_attention_triton.rows_attention_triton(rows, keys, values, own, 0.2, 50.0, sinks)
        for is_split in (False, True):
            coded_attention_triton.coded_attention_triton(
                rows, *coded, own, 0.2, slots, 50.0, sinks, is_split=is_split
            )
    ends = torch.arange(slots - 18, slots + 1)
    spans_of_prompt = torch.stack(
        [torch.zeros_like(ends), torch.zeros_like(ends), ends], dim=-1
    ).repeat(batch, 1, 1)
    for in_order in (False, True):
        prompt_attention_triton.prompt_attention_triton(
            prompt, keys, values, spans_of_prompt, 0.2, 50.0, sinks, in_order
        )
    prompt_attention_triton.prompt_attention_triton(
        prompt, *coded, spans_of_prompt, 0.2, None, None, False
    )


def run_norms(dtype: torch.dtype) -> None:
    x = normal(3, 77, dtype=dtype)
    norms = [Norm(x[0].clone(), 1e-5, style) for style in STYLES]
    norm_triton.norm_triton(x, None, norms[0], None)
    norm_triton.norm_triton(x, x.clone(), norms[0], None)
    norm_triton.norm_triton(x, x.clone(), norms[0], norms[2])
    norm_triton.norm_triton(x, normal(3, 3, 77, dtype=torch.float32), norms[0], norms[2])
    norm_triton.norm_triton(x, x.clone(), Norm(x[0].clone(), 1e-5, LAYER_NORM, x[1].clone()), None)


def run_rotary(dtype: torch.dtype) -> None:
    states, angles = normal(2, 4, 5, 24, dtype=dtype), normal(2, 5, 24, dtype=dtype)
    rotary_triton.rotary_triton(states, states[:, :2].clone(), angles, angles)
    last = torch.tensor([[12], [7]])
    keys, values = (normal(2, 2, 13, 24, dtype=dtype) for _ in range(2))
    heads = (
        normal(2, 1, 8 * 24, dtype=dtype)
        .unflatten(-1, (8, 24))
        .transpose(1, 2)
        .split([4, 2, 2], dim=1)
    )
    spans = torch.tensor([[[0, 0, 13]], [[2, 3, 8]]])
    for style in (None, STYLES[0], STYLES[2]):
        angle = normal(1, 1, 24, dtype=dtype)
        norm = None if style is None else Norm(angle[0, 0].clone(), 1e-6, style)
        ready = style is not None
        for storage in ((keys, values), (encoded(keys), encoded(values))):
            rotary_triton.rotate_and_write_triton(
                *heads, angle, angle, *storage, last, norm, norm, ready
            )
        rope_attention_triton.rope_attention_triton(
            *heads, angle, angle, keys, values, last, norm, norm, spans, 0.2, None, None
        )
        # Several tokens in an instance: a number that 8 does not divide, and some have no slot.
        many = [part.expand(2, -1, 19, -1).contiguous() for part in heads]
        slots = torch.arange(19).expand(2, 19).contiguous()
        angles = angle.expand(1, 19, 24).contiguous()
        for storage in ((keys, values), (encoded(keys), encoded(values))):
            rotary_triton.rotate_and_write_triton(
                *many, angles, angles, *storage, slots, norm, norm
            )


def run_step(dtype: torch.dtype) -> None:
    keys, values = (normal(2, 3, 13, 24, dtype=dtype) for _ in range(2))
    new = normal(2, 3, 1, 24, dtype=dtype)
    positions_triton.write_tokens_triton(keys, values, new, new, torch.tensor([[12], [3]]))
    lengths, starts, offset = torch.tensor([11, 5]), torch.tensor([0, 3]), torch.tensor([0])
    counts = torch.tensor([2, 1])
    windows, chunks = torch.tensor([1 << 40, 4, 1 << 40]), torch.tensor([1 << 40, 1 << 40, 5])
    slots = torch.zeros(2, 2, dtype=torch.int64)
    spans = torch.zeros(2, 3, 2, 4, dtype=torch.int64)[..., :3]
    ids = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2, 2, dtype=torch.int64)
    place = positions_triton.place_tokens_triton
    place(lengths, starts, counts, offset, windows, chunks, slots, spans, *ids, True)
    place(lengths, starts, counts, offset, windows, chunks, slots, spans, None, None, False)
    state = greedy_state()
    select_greedy_triton.select_greedy_triton(normal(2, 777, dtype=dtype), lengths, *state)
    logits, least = normal(2, 777, dtype=dtype), torch.tensor([9, 9])
    ban_tokens_triton.ban_tokens_triton(logits, lengths, state.sequences, state.eos, least, 3)
    select_greedy_triton.most_likely_triton(normal(3, 777, dtype=dtype))
    run_drafts()


def run_drafts() -> None:
    """A row at the capacity, and one whose lengths stand before its text, as in a trial."""
    for lengths in ([13, 2], [12, -5]):
        zeros = torch.zeros(2, dtype=torch.int64)
        tokens, drafts = (torch.zeros(2, n, dtype=torch.int64) for n in (4, 3))
        state = DraftState(
            capacity=13,
            selection=greedy_state(),
            lengths=torch.tensor(lengths),
            ends=zeros.clone(),
            first=zeros.clone(),
            drafts=drafts,
            found=zeros + 9,
            rate=torch.zeros(2),
            report=torch.zeros(3, 2, dtype=torch.int64),
        )
        counts = zeros + 4
        drafted = DraftedPass(tokens + 1, tokens, counts)
        for size, passed in ((2, drafted), (0, drafted), (2, None), (0, None)):
            drafts_triton.end_pass_triton(state, size, passed, 0.125, 10**6)
        drafts_triton.place_drafts_triton(state, tokens, counts)
        for newest in (tokens, tokens[:, :1].contiguous()):
            own = newest, counts, zeros.clone()
            drafts_triton.place_for_assistant_triton(state, *own, 13)
        drafts_triton.append_draft_triton(state, zeros)


def greedy_state() -> GreedyState:
    return GreedyState(
        sequences=torch.randint(0, 777, (2, 14)),
        token=torch.zeros(2, 1, dtype=torch.int64),
        unfinished=torch.ones(2, 1, dtype=torch.bool),
        eos=torch.tensor([[5, 6] + [-1] * 14] * 2),
        pad=torch.tensor([0, 0]),
        is_over=torch.tensor(False),
        last=torch.tensor([14, 14]),
        counts=torch.tensor([0, 0]),
        report=torch.tensor([0, 0]),
    )


def run_sampling(dtype: torch.dtype) -> None:
    logits, noise = normal(2, 777, dtype=dtype), torch.rand(2, 777).add_(1e-3)
    real = {
        name: torch.tensor([value] * 2, dtype=torch.float64) for name, value in _NUMBERS.items()
    }
    numbers = (
        *(real["temperature"], torch.tensor([7, 7]), real["top_p"]),
        *(real["min_p"], real["penalty"], torch.tensor([9, 9])),
    )
    for kinds in (Processors(), Processors(*[True] * 6), Processors(top_p=True)):
        at = torch.tensor([5, 9])
        sample_triton.select_sampled_triton(logits, noise, at, greedy_state(), kinds, *numbers)


_NUMBERS = {"temperature": 0.8, "top_p": 0.9, "min_p": 0.02, "penalty": 1.2}


if __name__ == "__main__":
    sys.exit(main())
