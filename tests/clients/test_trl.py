"""TRL's GRPO: the weights change between two calls of `generate`, which sample."""

import pytest
import torch

from hf_static_kv import attach, attachment
from hf_static_kv.testing import load_model
from tests.clients.conftest import ANSWER, DEVICE, QUESTION

datasets = pytest.importorskip("datasets", reason="datasets is not installed: it is in the extra `clients`")
peft = pytest.importorskip("peft", reason="peft is not installed: it is in the extra `clients`")
trl = pytest.importorskip("trl", reason="trl is not installed: it is in the extra `clients`")
pytestmark = pytest.mark.clients
STEPS = 3
PROMPTS = [QUESTION, ANSWER, "KING: My", "Enter the NURSE and"]
LORA = {"r": 4, "lora_alpha": 32, "target_modules": ["q_proj", "k_proj", "v_proj"], "task_type": "CAUSAL_LM"}
SETTINGS = {
    "plain": {},
    "checkpointed": {"gradient_checkpointing": True},
    "adapter": {"peft": True, "beta": 0.1},  # a reference without the adapter is in the loss
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1},
}


def train(name, folder, attach_settings=None, texts=PROMPTS, evaluations=0, **own):
    """Completions, losses and norms of a few steps; the weights after them; the attachment, or None."""
    model, tokenizer = load_model(name, device=DEVICE)
    if attach_settings is not None:
        attach(model, **attach_settings)
    completions = []

    def reward(completion_ids, **kwargs):
        completions.append(completion_ids)
        return [float(sum(token % 7 for token in ids)) for ids in completion_ids]

    torch.manual_seed(0)
    adapter = {"peft_config": peft.LoraConfig(init_lora_weights=False, **LORA)} if own.pop("peft", False) else {}
    given = {"bf16": False, "gradient_checkpointing": False, "learning_rate": 0.01, "lr_scheduler_type": "constant"}
    arguments = trl.GRPOConfig(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        num_generations=2,
        max_completion_length=8,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=DEVICE == "cpu",
        seed=0,
        **given | own,
    )
    prompts = datasets.Dataset.from_list([{"prompt": prompt} for prompt in texts])
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=prompts,
        eval_dataset=prompts,
        processing_class=tokenizer,
        **adapter,
    )
    trainer.train()
    [trainer.evaluate() for _ in range(evaluations)]
    losses = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
    weights = {key: weight.detach().clone() for key, weight in trainer.model.named_parameters()}
    return completions, losses, weights, None if attach_settings is None else attachment(trainer.model)


@pytest.mark.parametrize("setting", SETTINGS)
def test_grpo_trains_alike(setting, tmp_path):
    completions, losses, weights, _ = train("llama", tmp_path, **SETTINGS[setting])
    *got, got_weights, info = train("llama", tmp_path, {}, **SETTINGS[setting])
    assert got == [completions, losses]
    assert all(torch.equal(weight, got_weights[key]) for key, weight in weights.items())
    # The loss of a first pass over completions is zero by its definition, where no reference is in it.
    assert [norm > 0 for _, norm in losses] == [True] * STEPS
    assert info.calls == len(completions) >= STEPS
    assert info.hits == info.calls - 1


def test_a_prefix_is_reused_between_evaluations_and_not_after_a_step(tmp_path):
    same = {"texts": [QUESTION] * 4, "evaluations": 2}
    completions, losses, *_ = train("qwen3", tmp_path, **same)
    *got, _, info = train("qwen3", tmp_path, {"reuse_prefix": True}, **same)
    assert got == [completions, losses]
    # An evaluation is two calls. All rows have one prompt, and of the four calls the first computes it.
    _, tokenizer = load_model("qwen3")
    assert info.calls == STEPS + 4
    assert info.reused_tokens == 3 * (len(tokenizer(QUESTION).input_ids) - 1)
