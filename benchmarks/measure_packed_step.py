"""One kernel for a step with weights of four bits: microseconds a step, and its phases.

python benchmarks/measure_packed_step.py llama-3.1-8b llama-3.2-1b --scales nested plain
"""

import argparse

import torch

from hf_static_kv.kernels.packed import NESTED_GROUP, Nested, Packed
from hf_static_kv.kernels.persistent_step_cuda import Build, refusal
from tests.kernels.step_plans import SMALL, random_plan, table_of
from tests.kernels.test_persistent_step import SHAPES

GROUP = 64


def packed(rows, columns, is_nested):
    """Random codes and scales: nothing is computed of a weight that is not there."""
    codes = torch.randint(0, 256, (rows * columns // 2,), dtype=torch.uint8, device="cuda")
    shape = rows, columns // GROUP
    scales = torch.rand(shape, device="cuda") * 2e-2
    nested = None
    if is_nested:
        scales = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
        absmax = torch.rand(-(-scales.numel() // NESTED_GROUP), device="cuda") * 1e-2
        offset = torch.tensor(1e-2, device="cuda")
        nested = Nested(torch.linspace(-1, 1, 256, device="cuda"), absmax, offset)
    table = table_of(codes.device)
    how = codes, "high_first", rows, columns, torch.bfloat16, GROUP, scales, table
    return Packed(*how, nested=nested)


def plan_of(name, is_nested, length):
    numbers, parts = SHAPES[name]
    sizes = dict(zip(SMALL, numbers, strict=True))
    plan = random_plan(sizes, *parts, device="meta", slots=length + 8, length=length)

    def made(part):
        if not isinstance(part, torch.Tensor):
            return part
        if part.dtype == torch.int64:
            return None
        return torch.randn(part.shape, dtype=part.dtype, device="cuda") * 0.02

    numbers = {"dtype": torch.int64, "device": "cuda"}
    slot = torch.tensor([length], **numbers)
    span = torch.tensor([0, 0, length + 1], **numbers)
    layers = []
    for layer in plan.layers:
        own = {key: made(part) for key, part in layer._asdict().items()}
        for key in ("q", "k", "v", "o", "gate", "up", "down"):
            own[key] = packed(*getattr(layer, key).shape, is_nested)
        layers.append(layer._replace(**{**own, "slot": slot, "span": span}))
    return plan._replace(
        layers=layers, embedding=made(plan.embedding), norm=made(plan.norm), head=made(plan.head),
        token=torch.tensor([[7]], **numbers), position=slot[None],
    )  # fmt: skip


def microseconds(step, steps=200):
    graph = torch.cuda.CUDAGraph()
    step()
    with torch.cuda.graph(graph):
        step()
    for _ in range(20):
        graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(steps):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1000 / steps


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", choices=list(SHAPES))
    parser.add_argument("--scales", nargs="+", default=["nested", "plain"])
    parser.add_argument("--length", type=int, default=640)
    args = parser.parse_args()
    for name in args.models:
        for scales in args.scales:
            plan = plan_of(name, scales == "nested", args.length)
            if reason := refusal(plan):
                print(name, scales, reason)
                continue
            step = Build(plan).step()
            took = microseconds(step)
            print(f"{name} {scales}: {took:.0f} us, {1e6 / took:.0f} tokens/s", step.has_failed())
            marked = Build(plan, has_marks=True).step()
            microseconds(marked, 20)
            marks = marked.marks[:, :-1, :11].double()  # [blocks, layers, marks]
            phases = (marks[..., 1:] - marks[..., :-1]).mean(dim=(0, 1)) * len(plan.layers)
            print("   cycles by phase / 1000:", [round(x / 1000) for x in phases.tolist()])


if __name__ == "__main__":
    main()
