"""A compiled model takes the cache as it takes `DynamicCache`:

in one graph, compiled no more often.
"""

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import DynamicCache

from hf_static_kv import StaticContiguousCache
from tests.conftest import toy_model

PROMPTS = (
    torch.tensor([[17, 93, 5, 64, 5, 88, 121, 40, 17, 93, 5]]),
    torch.tensor([[9, 9, 31, 60, 12, 101, 3]]),
)
BUILD = {
    "DynamicCache": lambda model: DynamicCache(config=model.config),
    "lazy": lambda model: StaticContiguousCache(model.config, 40),
    "from_model": lambda model: StaticContiguousCache.from_model(model, 40),
    "compact": lambda model: StaticContiguousCache.from_model(model, 40, sliding="compact"),
}


# A compiler takes seconds a layer: one of each kind.
FEW_LAYERS = {
    "llama": {"num_hidden_layers": 1},
    "gemma3": {"num_hidden_layers": 2, "sliding_window_pattern": 2},
}


def continued(model, ids, cache, steps=4):
    """The greedy tokens behind `ids`: a prefill and some decode steps."""
    tokens = []
    for _ in range(steps):
        ids = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
        tokens.append(ids.item())
    return tokens


def compiled_graphs(model, build, **options):
    """The tokens of two texts and the number of graphs that they took, each in one piece."""
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, fullgraph=True, **options)
    with torch.no_grad():
        tokens = [continued(compiled, ids, BUILD[build](model)) for ids in PROMPTS]
    return tokens, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("name", "build", "options"),
    [
        ("llama", "lazy", {"backend": "eager", "dynamic": True}),
        ("llama", "from_model", {"backend": "aot_eager"}),
        ("gemma3", "from_model", {"backend": "eager"}),
    ],
    ids=str,
)
def test_a_compiled_model_in_one_graph(name, build, options):
    model = toy_model(name, **FEW_LAYERS[name])
    with torch.no_grad():
        expected = [continued(model, ids, BUILD["DynamicCache"](model)) for ids in PROMPTS]
    tokens, graphs = compiled_graphs(model, build, **options)
    assert tokens == expected
    assert graphs <= 3


@pytest.mark.usefixtures("small_spare")
def test_compact_layers_that_move():
    """Eight slots:

    a prompt is longer, and the positions of the other one move. Each is a graph of its own.
    """
    model = toy_model("gemma3", **FEW_LAYERS["gemma3"], sliding_window=2)
    with torch.no_grad():
        expected = [continued(model, ids, BUILD["DynamicCache"](model)) for ids in PROMPTS]
    tokens, graphs = compiled_graphs(model, "compact", backend="eager")
    assert tokens == expected
    assert graphs <= 8


def test_dynamic_cache_takes_no_fewer_graphs():
    """What the bound above is set by."""
    assert (
        compiled_graphs(toy_model("llama", **FEW_LAYERS["llama"]), "DynamicCache", backend="eager")[
            1
        ]
        >= 3
    )


def test_a_cache_built_inside_a_compiled_model_serves_outside_it():
    """In inference mode too: the storage outlives the block."""
    model = toy_model("llama", **FEW_LAYERS["llama"])
    torch._dynamo.reset()
    cache = StaticContiguousCache(model.config, 40)
    with torch.inference_mode():
        compiled = continued(
            torch.compile(model, fullgraph=True, backend="eager"), PROMPTS[0], cache, steps=2
        )
    with torch.no_grad():
        eager = continued(model, torch.tensor([[compiled[-1]]]), cache, steps=3)
        assert compiled + eager == continued(
            model, PROMPTS[0], DynamicCache(config=model.config), steps=5
        )
