"""TRL's GRPO: the weights change between two calls of `generate`, which sample."""

import copy
import re
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from hf_static_kv import attach, attachment, exact, selected_logprobs, served, token_logprobs
from hf_static_kv.batching import BatchManager
from hf_static_kv.testing import load_model
from tests.clients.conftest import ANSWER, DEVICE, QUESTION

datasets = pytest.importorskip(
    "datasets", reason="datasets is not installed: it is in the extra `clients`"
)
peft = pytest.importorskip("peft", reason="peft is not installed: it is in the extra `clients`")
trl = pytest.importorskip("trl", reason="trl is not installed: it is in the extra `clients`")
pytestmark = pytest.mark.clients
STEPS = 3
PROMPTS = [QUESTION, ANSWER, "KING: My", "Enter the NURSE and"]
LORA = {
    "r": 4,
    "lora_alpha": 32,
    "target_modules": ["q_proj", "k_proj", "v_proj"],
    "task_type": "CAUSAL_LM",
}
SETTINGS = {
    "plain": {},
    "checkpointed": {"gradient_checkpointing": True},
    "adapter": {"peft": True, "beta": 0.1},  # a reference without the adapter is in the loss
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1},
}


def train(name, folder, attach_settings=None, texts=PROMPTS, evaluations=0, **own):
    """Completions, losses and norms of a few steps; the weights after them; the attachment, or
    None.
    """
    trainer, completions = make_trainer(
        trl.GRPOTrainer, name, folder, attach_settings, texts, **own
    )
    trainer.train()
    [trainer.evaluate() for _ in range(evaluations)]
    losses = [
        (entry["loss"], entry["grad_norm"])
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
    weights = {key: weight.detach().clone() for key, weight in trainer.model.named_parameters()}
    return (
        completions,
        losses,
        weights,
        None if attach_settings is None else attachment(trainer.model),
    )


def make_trainer(kind, name, folder, attach_settings=None, texts=PROMPTS, **own):
    """A trainer, and a list that it appends the completions of each batch to."""
    model, tokenizer = load_model(name, device=DEVICE)
    if attach_settings is not None:
        attach(model, **attach_settings)
    completions = []

    def reward(completion_ids, **kwargs):
        completions.append(completion_ids)
        return [float(sum(token % 7 for token in ids)) for ids in completion_ids]

    torch.manual_seed(0)
    adapter = (
        {"peft_config": peft.LoraConfig(init_lora_weights=False, **LORA)}
        if own.pop("peft", False)
        else {}
    )
    given = {
        "bf16": False,
        "gradient_checkpointing": False,
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
    }
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
    trainer = kind(
        model=model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=prompts,
        eval_dataset=prompts,
        processing_class=tokenizer,
        **adapter,
    )
    return trainer, completions


@pytest.mark.parametrize("setting", SETTINGS)
def test_grpo_trains_alike(setting, tmp_path):
    completions, losses, weights, _ = train("llama", tmp_path, **SETTINGS[setting])
    *got, got_weights, info = train("llama", tmp_path, {}, **SETTINGS[setting])
    assert got == [completions, losses]
    assert all(torch.equal(weight, got_weights[key]) for key, weight in weights.items())
    # The loss of a first pass over completions is zero by its definition, where no reference is in
    # it.
    assert [norm > 0 for _, norm in losses] == [True] * STEPS
    assert info.calls == len(completions) >= STEPS
    assert info.hits == info.calls - 1


def test_a_prefix_is_reused_between_evaluations_and_not_after_a_step(tmp_path):
    same = {"texts": [QUESTION] * 4, "evaluations": 2}
    completions, losses, *_ = train("qwen3", tmp_path, **same)
    *got, _, info = train("qwen3", tmp_path, {"reuse_prefix": True}, **same)
    assert got == [completions, losses]
    # An evaluation is two calls. All rows have one prompt, and of the four calls the first computes
    # it.
    _, tokenizer = load_model("qwen3")
    assert info.calls == STEPS + 4
    assert info.reused_tokens == 3 * (len(tokenizer(QUESTION).input_ids) - 1)


@pytest.mark.parametrize("setting", ["plain", "checkpointed", "adapter"])
def test_continuous_batching(setting, tmp_path, monkeypatch):
    """The completions come from our manager. Each time it is asked for greedy tokens too: they are
    those of a copy of the model as it is then, which is not attached.
    """
    monkeypatch.setattr(served, "_DECODER_DEVICES", ("cpu", "cuda"))
    own = {**SETTINGS[setting], "use_transformers_continuous_batching": True}
    trainer, completions = make_trainer(trl.GRPOTrainer, "llama", tmp_path, {}, **own)
    model = trainer.model
    generate_batch = model.generate_batch
    prompts = trainer.processing_class(PROMPTS).input_ids
    greedy = GenerationConfig(do_sample=False, max_new_tokens=8, eos_token_id=-1, pad_token_id=0)
    asked = []

    def noting_generate_batch(inputs, **how):
        assert isinstance(model.init_continuous_batching(greedy), BatchManager)
        results = generate_batch(inputs, **how)
        assert not model.lm_head.training
        asked.append([tokens_of(generate_batch(prompts, greedy)), tokens_of(results)])
        plain = copy.deepcopy(model)
        assert asked[-1][0] == [alone(plain, ids, greedy) for ids in prompts]
        return results

    model.generate_batch = noting_generate_batch
    trainer.train()
    assert [tokens for _, tokens in asked] == completions
    assert len(completions) == STEPS
    assert len({str(tokens) for tokens, _ in asked}) > 1  # the weights have changed
    assert attachment(model).fallbacks == {}
    assert attachment(model).calls == sum(len(texts) for pair in asked for texts in pair)


def tokens_of(results):
    return [result.generated_tokens for result in results.values()]


def alone(model, ids, config):
    ids = torch.tensor([ids], device=DEVICE)
    mask = torch.ones_like(ids)
    output = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    return output[0, ids.shape[1] :].tolist()


def trainer_of_the_page():
    """The class that docs/exact.md shows."""
    page = (Path(__file__).parents[2] / "docs" / "exact.md").read_text()
    names = {"trl": trl, "token_logprobs": token_logprobs}
    exec(re.search(r"```py\n(class .*?)```", page, re.DOTALL)[1], names)
    return names["ExactTrainer"]


class NotingTrainer(trainer_of_the_page()):
    """Notes the log-probabilities of each sequence, sampled and trained on."""

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
    ):
        result = super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep
        )
        self.trained.append(by_sequence(input_ids, attention_mask, result[0]))
        return result

    def note_sampled(self):
        """TRL asks `generate` for tokens alone."""
        self.trained, self.sampled, generate = [], [], self.model.generate

        def noting_generate(input_ids, attention_mask, **kwargs):
            output = generate(
                input_ids=input_ids, attention_mask=attention_mask, **kwargs,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
            tokens, logits = (
                output.sequences[:, input_ids.shape[1] :],
                torch.stack(output.logits, dim=1),
            )
            logps = selected_logprobs(logits, tokens, self.temperature)
            mask = torch.nn.functional.pad(attention_mask, (0, tokens.shape[1]), value=1)
            self.sampled.append(by_sequence(output.sequences, mask, logps))
            return output.sequences

        self.model.generate = noting_generate


def by_sequence(sequences, mask, logps):
    """The trainer shuffles the batch rows."""
    rows = zip(sequences, mask, logps.detach(), strict=True)
    return {tuple(ids[seen == 1].tolist()): numbers.tolist() for ids, seen, numbers in rows}


@pytest.mark.parametrize("setting", ["plain", "checkpointed", "adapter"])
def test_sampled_logprobs_are_the_trainers(setting, tmp_path):
    """To the bit, at every step, over left-padded prompts of unlike lengths."""
    own = {**SETTINGS[setting], "beta": 0.0, "temperature": 0.9}
    trainer, _ = make_trainer(NotingTrainer, "llama", tmp_path, {}, **own)
    trainer.note_sampled()
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    with exact(trainer.model):
        trainer.train()
    assert len(trainer.sampled) == STEPS
    assert trainer.trained == trainer.sampled
    assert any(map(torch.ne, map(torch.sum, before), map(torch.sum, trainer.model.parameters())))


def test_without_exact_they_differ(tmp_path):
    """So that the check can fail."""
    trainer, _ = make_trainer(NotingTrainer, "llama", tmp_path, {}, beta=0.0, temperature=0.9)
    trainer.note_sampled()
    trainer.train()
    assert [step.keys() for step in trainer.trained] == [step.keys() for step in trainer.sampled]
    assert trainer.trained != trainer.sampled
