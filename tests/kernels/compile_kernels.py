"""Compiles every kernel for a GPU that need not be there, as its launcher would launch it:
`compile_kernels.py 89`.

Prints for each the bytes of shared memory that a program of it takes. A script, since Triton
decides at its import whether kernels are compiled or interpreted.
"""

import sys
from contextlib import ExitStack
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_static_kv.kernels import (
    ban_tokens_triton,
    coded_attention_triton,
    decode_attention_triton,
    drafts_triton,
    experts_triton,
    fused_linear_triton,
    invariant_linear_triton,
    joint_linear_triton,
    linear_triton,
    norm_triton,
    packed_transposed_triton,
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
from hf_static_kv.kernels.packed import Nested, Packed
from hf_static_kv.kernels.sample import Processors
from hf_static_kv.kernels.select_greedy import GreedyState

LAUNCHERS = [module for name, module in list(globals().items()) if name.endswith("_triton")]
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int8: "*i8",
}
POINTERS |= {torch.bool: "*i1", torch.int32: "*i32", torch.float64: "*fp64"}
POINTERS |= {torch.uint8: "*u8", torch.int8: "*i8"}
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "launch_pdl")


def compile_for(capability, kernel, args, options):
    """As Triton specialises it: what is 1 or named a constexpr is a constant, what 16 divides is
    known to be so.
    """
    pdl = capability >= 90
    constants = {k: v for k, v in options.items() if k not in _OPTIONS} | {"PDL": pdl}
    types, aligned = {}, {}
    for i, (name, value) in enumerate(zip(kernel.arg_names, args, strict=False)):
        if isinstance(value, torch.Tensor):
            types[name] = POINTERS[value.dtype]
            aligned[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            types[name] = "fp32"
        elif value == 1:
            constants[name] = value
        else:
            types[name] = "i32"
            if value % 16 == 0:
                aligned[(i,)] = [["tt.divisibility", 16]]
    types |= dict.fromkeys(constants, "constexpr")
    at = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, {name: types[name] for name in kernel.arg_names}, at, aligned)
    chosen = {k: v for k, v in options.items() if k in _OPTIONS} | (
        {"launch_pdl": True} if pdl else {}
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=chosen)
    print(kernel.__name__, compiled.metadata.shared, flush=True)


def launch_linears(dtype):
    x, gate, up = (torch.empty(n, 512, dtype=dtype) for n in (1, 300, 300))
    large, bias = torch.empty(5000, 512, dtype=dtype), torch.empty(300, dtype=dtype)
    linear_triton.linears_triton(x, [gate, up], [bias, bias])
    linear_triton.linears_triton(x, [gate, up], [], "gelu_tanh")
    norm, output = (x[0], 1e-5, (0.0, True, False), None), torch.empty(1, 300, dtype=dtype)
    linear_triton.fused_linears_triton(x, [gate], [bias], norm, "relu", False, output)
    linear_triton.fused_linears_triton(x, [gate, up], [bias, bias], norm, "gelu", True, output)
    transposed = [weight.t().contiguous().t() for weight in (gate, up, large)]
    linear_triton.fused_linears_triton(x, transposed[:1], [bias], None, "relu", False, output)
    linear_triton.linears_triton(x, transposed, [])
    linear_triton.linears_triton(x[:, :50], [weight[:, :50] for weight in transposed[:1]], [bias])
    long = torch.empty(1, 2048, dtype=dtype)
    linear_triton.linears_triton(long, [long], [])  # more than one tile
    for tokens in (x.expand(8, -1), x.expand(16, -1), x.expand(100, -1), x.expand(300, -1)):
        invariant_linear_triton.invariant_linears_triton(tokens, [gate], [bias])
        invariant_linear_triton.invariant_linears_triton(tokens, [large], [])
        invariant_linear_triton.invariant_linears_triton(tokens, [gate, up], [], "silu")
    of_few = fused_linear_triton.fused_linears_of_few_triton
    for tokens in (x.expand(2, -1), long.expand(8, -1)) if dtype != torch.float32 else ():
        dim = tokens.shape[1]
        wide, its_norm = torch.empty(300, dim, dtype=dtype), (tokens[0], *norm[1:])
        of_few(tokens, [wide] * 3, [bias] * 3, its_norm)
        of_few(tokens, [wide] * 2, [bias] * 2, its_norm, "silu", True)
        of_few(tokens, [wide], [], None, "gelu", False, output.expand(len(tokens), -1))
    # In float32 a library computes so many tokens.
    for tokens in (x.expand(32, -1), x.expand(64, -1)) if dtype != torch.float32 else ():
        joint_linear_triton.joint_linears_triton(tokens, [gate, up], [bias, bias])
        joint_linear_triton.joint_linears_triton(tokens, [gate, up], [], "silu")
        joint_linear_triton.linear_parts_triton(tokens, gate, 2)


def packed_weights(dtype):
    """A weight [512, 2048] of each format."""
    shape = 512, 2048, dtype
    codes, int8 = (
        torch.empty(512, n, dtype=kind) for n, kind in ((1024, torch.uint8), (2048, torch.int8))
    )
    table, absmax = torch.empty(16), torch.empty(512, 32)
    nested = Nested(torch.empty(256), torch.empty(64), torch.tensor(0.5))
    pairs = torch.empty(16, 512, 2, dtype=dtype)
    both = pairs[..., 0].t(), pairs[..., 1].t()
    yield Packed(codes, "high_first", *shape, 64, absmax, table)
    yield Packed(codes, "high_first", *shape, 64, absmax.to(torch.uint8), table, nested=nested)
    yield Packed(int8, "bytes", *shape, 2048, absmax[:, :1], factor=1 / 127)
    halves = codes.view(256, 2048)
    yield Packed(halves, "halves", *shape, 128, both[0], zeros=both[1])
    yield Packed(
        codes.view(torch.int32), "tiles", *shape, 128, both[0], None, 8, zeros=both[1], added=True
    )
    scales, zeros = torch.empty(16, 512, dtype=torch.half).t(), torch.empty(16, 64).int()
    yield Packed(codes.view(torch.int32).view(256, 512), "gptq", *shape, 128, scales, zeros=zeros)
    yield Packed(codes.view(torch.int32).view(2048, 64), "awq", *shape, 128, scales, zeros=zeros)


def launch_packed(dtype):
    """As on a GPU: entries of a table are in the lanes of a warp."""
    x, bias = torch.empty(1, 2048, dtype=dtype), torch.empty(512, dtype=dtype)
    norm, y = (x[0], 1e-5, (0.0, True, False), None), torch.empty(1, 512, dtype=dtype)
    modules = packed_triton, packed_transposed_triton
    with ExitStack() as patches:
        for module in modules:
            patches.enter_context(patch.object(module, "runs_ptx", lambda x: True))
        for weight in packed_weights(dtype):
            linears = packed_triton.packed_linears_triton
            linears(x, [weight] * 3, [bias] * 3)
            linears(x, [weight], [], norm, "relu", False, y)
            linears(x, [weight] * 2, [], None, "silu", True)
            linears(x.expand(4, -1), [weight] * 3, [bias] * 3)
            linears(x.expand(16, -1), [weight] * 2, [], None, "silu", True)


def launch_experts(dtype, k):
    x, logits = torch.empty(1, 512, dtype=dtype), torch.empty(1, 60, dtype=dtype)
    weights, index = experts_triton.route_triton(logits, k, (k > 4, k > 4, False))
    gate_up, down = torch.empty(4, 2 * 96, 512, dtype=dtype), torch.empty(4, 512, 96, dtype=dtype)
    experts_triton.experts_triton(x, index, weights, gate_up, down, "silu")


def launch_attention(dtype, dim, heads):
    keys, query = (
        torch.empty(1, 4, 400, dim, dtype=dtype),
        torch.empty(1, heads, 1, dim, dtype=dtype),
    )
    spans = torch.zeros(1, 2, 1, 4, dtype=torch.int64)[:, 1, :, :3]  # of a layer of a captured pass
    attend = decode_attention_triton.decode_attention_triton
    for in_order in (False, True):
        attend(query, keys, keys, spans, None, 0.1, 400, spans_ready=True, in_order=in_order)
    prompt, sinks = torch.empty(1, heads, 40, dim, dtype=dtype), torch.empty(heads, dtype=dtype)
    spans_of_prompt = torch.zeros(1, 40, 3, dtype=torch.int64)
    for in_order in (False, True):
        prompt_attention_triton.prompt_attention_triton(
            prompt, keys, keys, spans_of_prompt, 0.1, 50.0, sinks, in_order
        )
    rows_attention_triton.rows_attention_triton(query, keys, keys, spans, 0.1, 50.0, sinks)
    weights, seen = torch.empty(1, heads, 400), torch.ones(1, 400, dtype=torch.bool)
    attend(
        query, keys, keys, torch.zeros(1, 1, 3, dtype=torch.int64), seen, 0.1, 400, weights=weights
    )
    several = torch.empty(1, heads, 5, dim, dtype=dtype)
    attend(several, keys, keys, torch.zeros(1, 5, 3, dtype=torch.int64), None, 0.1, 400)
    coded = torch.empty(1, 4, 403, dim + 4, dtype=torch.int8)
    attend(query, coded, coded, spans, None, 0.1, 400, spans_ready=True)
    with patch.object(coded_attention_triton, "_runs_ptx", lambda x: True):
        for is_split in (False, True) if dtype != torch.float32 else ():
            coded_attention_triton.coded_attention_triton(
                query, coded, coded, spans, 0.1, 400, None, None, True, is_split
            )
    prompt_attention_triton.prompt_attention_triton(
        prompt, coded, coded, spans_of_prompt, 0.1, None, None, False
    )


def launch_small(dtype):
    x, states, number = (
        torch.empty(1, 512, dtype=dtype),
        torch.empty(1, 4, 40, 64, dtype=dtype),
        torch.zeros(1).long(),
    )
    norms = [Norm(x[0], 1e-5, style) for style in STYLES]
    norm_triton.norm_triton(x, x, norms[0], None)
    norm_triton.norm_triton(x, x, norms[0], norms[2])
    norm_triton.norm_triton(x, torch.empty(3, *x.shape), norms[0], norms[2])
    norm_triton.norm_triton(x, x, Norm(x[0], 1e-5, LAYER_NORM, x[0]), None)
    invariant_linear_triton.invariant_sum_triton(torch.empty(3, 512))
    rotary_triton.rotary_triton(states, states[:, :2], states[:, 0], states[:, 0])
    keys, new = torch.empty(1, 4, 400, 64, dtype=dtype), states[:, :, :1]
    positions_triton.write_tokens_triton(keys, keys, new, new, number[:, None])
    launch_rotate_and_write(dtype, 64, None)
    launch_rotate_and_write(dtype, 128, STYLES[0])
    launch_rotate_and_write(dtype, 256, STYLES[2])
    launch_rotate_and_write(dtype, 256, STYLES[2], tokens=40)
    linear_triton.activated_product_triton(x, x, "silu")
    column = torch.zeros(2, 1).long()
    spans = torch.zeros(2, 5, 1, 4).long()[..., :3]
    row, layers = column[:, 0], torch.ones(5).long()
    for_ids = row, column.clone()
    place = positions_triton.place_tokens_triton
    place(row, row.clone(), row.clone(), number, layers, layers, column, spans, *for_ids, True)
    place(row, row.clone(), row.clone(), number, layers, layers, column, spans, None, None, False)
    ends = torch.zeros(2, 16).long()
    state = column, column, column.bool(), ends, row, torch.tensor(False), row, row, row
    select_greedy_triton.select_greedy_triton(torch.empty(2, 9000, dtype=dtype), row, *state)
    select_greedy_triton.most_likely_triton(torch.empty(2, 9000, dtype=dtype))
    launch_drafts(GreedyState(*state))
    ban_tokens_triton.ban_tokens_triton(
        torch.empty(2, 9000, dtype=dtype), row, column, ends, row, 3
    )
    launch_sampling(dtype, state)


def launch_drafts(selection):
    row, tokens = torch.zeros(2).long(), torch.zeros(2, 9).long()
    ours = row, row, row, tokens[:, 1:].contiguous(), row, row.float(), torch.zeros(3, 2).long()
    state = DraftState(400, selection, *ours)
    for size in (0, 2, 16):
        drafts_triton.end_pass_triton(state, size, None, 0.125, 10**6)
        drafts_triton.end_pass_triton(state, size, DraftedPass(tokens, tokens, row), 0.125, 10**6)
    drafts_triton.place_drafts_triton(state, tokens, row)
    for number in (1, 2, 32):
        newest = torch.zeros(2, number).long()
        drafts_triton.place_for_assistant_triton(state, newest, row, row, 400)
    drafts_triton.append_draft_triton(state, row)


def launch_sampling(dtype, state):
    number, real, logits = (
        torch.zeros(2).long(),
        torch.ones(2).double(),
        torch.empty(2, 130000, dtype=dtype),
    )
    numbers = real, number, real, real, real, number
    for chosen in (Processors(), Processors(*[True] * 6), Processors(top_p=True)):
        noise = torch.empty(2, 130000)
        sample_triton.select_sampled_triton(
            logits, noise, number, GreedyState(*state), chosen, *numbers
        )


def launch_rotate_and_write(dtype, dim, style, tokens=1):
    """The heads of a joint projection of two batch rows; with a norm the angles are ready."""
    heads = (
        torch.empty(2, tokens, 8 * dim, dtype=dtype)
        .unflatten(-1, (8, dim))
        .transpose(1, 2)
        .split([4, 2, 2], dim=1)
    )
    angles = torch.empty(1, tokens, dim, dtype=dtype)
    norm = None if style is None else Norm(angles[0, 0], 1e-6, style)
    how = torch.zeros(2, tokens).long(), norm, norm, style is not None
    keys = torch.empty(2, 2, 400, dim, dtype=dtype)
    coded = torch.empty(2, 2, 403, dim + 4, dtype=torch.int8)
    for storage in (keys, coded):
        rotary_triton.rotate_and_write_triton(*heads, angles, angles, storage, storage, *how)
    spans = torch.zeros(2, 2, tokens, 4, dtype=torch.int64)[:, 1, :, :3]
    if 2 * tokens <= rope_attention_triton.MAX_QUERIES:
        rope_attention_triton.rope_attention_triton(
            *heads, angles, angles, keys, keys, *how[:3], spans, 0.1, 50.0, None
        )


if __name__ == "__main__":
    capability = int(sys.argv[1])

    def launch(kernel, grid, *args, **options):
        compile_for(capability, kernel, args, options)

    for module in LAUNCHERS:
        patch.object(module, "launch", launch).start()
    launch_linears(torch.bfloat16)
    launch_packed(torch.bfloat16)
    launch_experts(torch.bfloat16, 8)
    launch_attention(torch.bfloat16, 64, 32)
    if capability >= 90:
        launch_small(torch.bfloat16)
    else:  # what asks most of the shared memory
        launch_linears(torch.float32)
        launch_experts(torch.float32, 3)
        launch_attention(torch.bfloat16, 256, 4)
        launch_attention(torch.float32, 256, 4)
