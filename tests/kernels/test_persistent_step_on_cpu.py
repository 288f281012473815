"""The kernel of a whole step on a CPU, by cuda_on_cpu.h: all its blocks run at once, in a seeded order.

A wait for what nobody writes ends in the kernel's own error, or nothing runs any more. So a step that
ends has no cycle, and each of its waits has a writer; the faults below show that such a wait is seen.
"""

import ctypes
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch

from hf_static_kv.kernels import persistent_macros, persistent_step_cuda, persistent_weights
from hf_static_kv.kernels.persistent_macros import macros, used_shared_bytes
from hf_static_kv.kernels.persistent_step import persistent_step_plain
from tests.kernels.step_plans import CASES, SMALL, copied, largest_error, random_plan

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")

SHARED = 200_000
TILES = persistent_step_cuda._SOURCE.with_name("persistent_tiles.cuh")
ENDED, ALL_WAIT = 0, 1  # `Outcome` of cuda_on_cpu.h
SIZES = {**SMALL, "H": 128, "I": 256, "V": 500}  # a block of 132 has fewer rows
RUN = """
static const Args* launched;
extern "C" int run(const Args* args, unsigned seed) {
  launched = args;
  return machine::run([] { persistent_step(*launched); }, BLOCKS, CONSUMERS + 32, SHARED_BYTES, seed);
}
"""


def plan_of(name, **own):
    case = dict(CASES[name])
    sizes = case.pop("sizes", SMALL) | own
    changed = {key: value for key, value in sizes.items() if SMALL[key] != value}
    least = {"H": 256, "I": 512} if "packed" in case else {}
    return random_plan({**SIZES, **least, **changed}, **case)


@cache
def compiled(folder, defines, fault):
    """`run` of this source, with (old, new) of each fault."""
    source = persistent_step_cuda._SOURCE.read_text()
    source = source.replace('#include "hopper.cuh"', '#include "cuda_on_cpu.h"')
    if fault:
        old, new = fault
        if old not in source:
            source = source.replace('#include "persistent_tiles.cuh"', TILES.read_text())
        assert source.count(old) == 1
        source = source.replace(old, new)
    file = folder / f"{abs(hash((defines, fault)))}.cc"
    file.write_text(defines + source + RUN)
    library = file.with_suffix(".so")
    folders = [f"-I{Path(path).parent}" for path in (__file__, persistent_step_cuda.__file__)]
    options = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC", *folders]
    subprocess.run(["g++", *options, "-o", library, file], check=True)
    return ctypes.CDLL(library).run


class Step:
    """The kernel of a plan, launched with a seed."""

    def __init__(self, plan, folder, fault=None):
        self.plan = plan  # its tensors are read
        least = 7 if plan.sizes["D"] > 64 else 3
        self.macros = found = macros(plan, max(least, plan.sizes["I"] // 100), SHARED)
        defines = found | {"SHARED_BYTES": used_shared_bytes(found)}
        self.run = compiled(folder, persistent_step_cuda._defines(defines), fault)
        self.memory = persistent_step_cuda.Memory(plan, found)

    def __call__(self, seed):
        outcome = self.run(self.memory.args, seed)
        return outcome, int(self.memory.error), self.memory.logits.clone()


def use_stages_of(size, monkeypatch):
    """With tiles, and for the head, which has weights in bfloat16."""
    monkeypatch.setattr(persistent_weights, "_STAGE_OF_TILES", size)
    monkeypatch.setattr(persistent_weights, "_STAGE", size)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("step")


@pytest.mark.parametrize("name", [name for name in CASES if name != "nine heads"])
def test_a_step(name, folder):
    """In bfloat16, and alike in each order of its threads; the other tokens are left as they are."""
    plan = plan_of(name)
    before = copied(plan)
    step = Step(plan, folder)
    outcome, error, logits = step(seed=0)
    assert (outcome, error) == (ENDED, 0)
    assert largest_error(logits, plan, before) <= 12 * 2**-9  # as in test_persistent_step.py
    for own, old in zip(plan.layers, before.layers, strict=True):
        kept = torch.arange(own.keys.shape[1]) != own.slot
        assert torch.equal(own.keys[:, kept], old.keys[:, kept])
        assert torch.equal(own.values[:, kept], old.values[:, kept])
    for seed in range(1, 4):
        outcome, error, again = step(seed)
        assert (outcome, error) == (ENDED, 0)
        assert torch.equal(again, logits)


@pytest.mark.parametrize(
    ("name", "width"), [("four bits", 1536), ("nested scales", 2048), ("int8", 1536)]
)
def test_two_stages_of_long_rows_are_multiplied_at_once(name, width, folder, monkeypatch):
    """A block with an odd number of them has the last one alone."""
    kind = persistent_weights.Bytes if name == "int8" else persistent_weights.FourBits
    monkeypatch.setattr(kind, "rows_of_hidden", 4)
    monkeypatch.setattr(kind, "rows_multiplied", 4)
    monkeypatch.setattr(persistent_weights.Dense, "rows_at_once", lambda *sizes: 2)
    plan = plan_of(name, I=width)
    before = copied(plan)
    step = Step(plan, folder)
    assert step.macros["RS_DOWN"] == step.macros["C_DOWN"] == 2  # a chunk is a stage
    assert plan.sizes["H"] // 2 % step.macros["BLOCKS"]  # so some have one more than others
    outcome, error, logits = step(seed=0)
    assert (outcome, error) == (ENDED, 0)
    assert largest_error(logits, plan, before) <= 12 * 2**-9
    assert torch.equal(step(seed=1)[2], logits)


def test_all_stages_of_one_product_have_a_slot(folder, monkeypatch):
    """Three slots, and rows so long that a stage has two: four stages at once would wait for ever."""
    plan = plan_of("four bits", I=1536)
    monkeypatch.setitem(globals(), "SHARED", 102_000)
    before = copied(plan)
    step = Step(plan, folder)
    assert (step.macros["SLOTS"], step.macros["RS_DOWN"]) == (3, 2)
    outcome, error, logits = step(seed=0)
    assert (outcome, error) == (ENDED, 0)
    assert largest_error(logits, plan, before) <= 12 * 2**-9


@pytest.mark.parametrize("spans", [1, 2, 4, 16])
def test_tiles_in_stages_of_several_spans(spans, folder, monkeypatch):
    """Eight warps share nine spans: one warp has two of them, in one stage or in two."""
    use_stages_of(1024 * spans, monkeypatch)
    plan = plan_of("tiles, groups of 32", I=2304, L=1)
    before = copied(plan)
    step = Step(plan, folder)
    assert step.macros["STAGE"] == 1024 * spans
    outcome, error, logits = step(seed=0)
    assert (outcome, error) == (ENDED, 0)
    assert largest_error(logits, plan, before) <= 12 * 2**-9
    assert torch.equal(step(seed=1)[2], logits)


def first_of_largest(step):
    """The token that `select_token` finds in the chunks."""
    maxima, tokens = step.memory.chunks
    return int(tokens[maxima == maxima.max()].min())


@pytest.mark.parametrize("head", ["random", "ties", "-inf", "nan"])
def test_the_largest_logit_of_each_block(head, folder):
    """The first of equals, as `argmax`; of NaN alone it is the last token."""
    plan = plan_of("plain")
    step = Step(plan, folder)
    maxima, tokens = step.memory.chunks
    assert maxima.shape == tokens.shape == (1, 4)  # of three blocks
    if head == "ties":
        plan.head.copy_(plan.head[3:4].clone())
    elif head != "random":  # all logits are 1000 x or more, then that times an infinite number
        plan.head.zero_()[:, 0] = 1.0
        plan.norm[0] = 1000.0
        _, _, logits = step(seed=0)
        plan.head[:, 0] = -3e38 * logits[0, 0].sign() if head == "-inf" else torch.nan
    outcome, error, logits = step(seed=1)
    assert (outcome, error) == (ENDED, 0)
    if head == "nan":
        assert logits.isnan().all()
        assert first_of_largest(step) == plan.sizes["V"] - 1
    else:
        assert float(maxima.max()) == float(logits.max())
        assert first_of_largest(step) == int(logits.argmax())


def test_steps_of_other_tokens(folder):
    """What an earlier step has published is gone when a step begins."""
    plan = plan_of("plain")
    step = Step(plan, folder)
    for seed, token in enumerate([3, 400, 3, 77]):
        plan.token.fill_(token)
        expected = persistent_step_plain(copied(plan))
        outcome, error, logits = step(seed)
        assert (outcome, error) == (ENDED, 0)
        difference = (logits - expected).abs().max() / expected.abs().max()
        assert difference <= 24 * 2**-9  # both have rounded


# What is changed in the source, and how a launch ends.
FAULTS = {
    "a value that nobody writes": (
        "if (C == 4) tell8(",
        "if (C == 4 && row != 8) tell8(",
    ),
    "a cycle": (
        "b, own - LAYER_BYTES + AT_DOWN",
        "b, own + AT_DOWN",
    ),
    "a slot that is never free": (
        "begin(full + SLOTS + i, WARPS);",
        "begin(full + SLOTS + i, WARPS + 1);",
    ),
    "a copy that nobody begins": (
        "    if (b.failed) return -1;",
        "    if (b.failed || issued == 9) return -1;",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_wait_in_vain_ends_with_an_error(name, folder):
    _, error, _ = Step(plan_of("plain"), folder, FAULTS[name])(seed=0)
    assert error == 1


RACES = {
    "weights that are not there yet": (
        "    b.wait(b.full + slot, parity);\n    const",
        "    const",
    ),
    "sums of warps that are not there yet": (
        "*b.flight = FLIGHT_WAIT;\n  b.all_consumers();",
        "*b.flight = FLIGHT_WAIT;",
    ),
    "sums that are not read yet": (
        "    sums = other_sums, other_sums = s;\n",
        "",
    ),
    "a slot that is filled too early": (
        "begin(full + SLOTS + i, WARPS);",
        "begin(full + SLOTS + i, 1);",
    ),
    "a layer that others still read": (
        "    const u64 word = b.word_of_layer(l + 1);\n",
        "    const u64 word = b.word_of_layer(l + 1);\n    b.write_layer(l + 1, word);\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RACES)
def test_a_race_changes_logits(name, folder):
    # Four warps have inputs of the last phase of a layer, and one has inputs of the next.
    plan = plan_of("plain", I=1024) if "sums" in name else plan_of("gemma", I=1024, L=3)
    right = Step(plan, folder)(seed=0)[2]
    step = Step(plan, folder, RACES[name])
    ends = (step(seed) for seed in range(24))
    assert any(error or not torch.equal(logits, right) for _, error, logits in ends)


RACES_OF_TILES = {
    "codes that are not there yet": (
        "    b.wait(b.full + slot, (t / SLOTS) & 1);\n    u32 words",
        "    u32 words",
    ),
    "a stage that is filled too early": ("? WARPS - users + 1 : 1", "? WARPS : 0"),
    "inputs that are not there yet": (
        "  b.all_consumers();\n  if (IS_LONG && !b.thread) *b.flight = FLIGHT_STREAM;\n  stream_units",
        "  stream_units",
    ),
    "sums of warps that are not there yet": (
        "  b.all_consumers();\n  if (b.thread < 2 * share.count)",
        "  if (b.thread < 2 * share.count)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RACES_OF_TILES)
def test_a_race_with_tiles_changes_logits(name, folder, monkeypatch):
    use_stages_of(2048, monkeypatch)
    monkeypatch.setattr(persistent_macros, "_MAX_BARRIERS", 10)  # so that slots are filled again
    plan = plan_of("tiles, groups of 32", I=1536, L=1)
    outcome, error, right = Step(plan, folder)(seed=0)
    assert (outcome, error) == (ENDED, 0)
    step = Step(plan, folder, RACES_OF_TILES[name])
    ends = (step(seed) for seed in range(8))
    assert any(error or not torch.equal(logits, right) for _, error, logits in ends)


def test_a_stage_that_is_taken_for_the_one_before(folder, monkeypatch):
    """With four slots, where a warp's next stage is eight later: why the kernel asks for more slots."""
    use_stages_of(2048, monkeypatch)
    monkeypatch.setattr(persistent_macros, "_MAX_BARRIERS", 4)
    plan = plan_of("tiles, groups of 32", I=1536, L=1)
    with pytest.raises(ValueError, match="too few for it"):
        Step(plan, folder)
    monkeypatch.setattr(persistent_weights.Tiles, "stages_between", lambda *sizes: 0)
    unchecked = "static_assert(SLOTS >= SETS", "static_assert(true || SLOTS >= SETS"
    assert Step(plan, folder, unchecked)(seed=1)[1] == 1


def test_barriers_that_nobody_leaves(folder):
    fault = "b.all_consumers();\n    factor", "if (b.lane) b.all_consumers();\n    factor"
    outcome, _, _ = Step(plan_of("gemma"), folder, fault)(seed=0)
    assert outcome == ALL_WAIT
