"""lm-eval-harness: a local generation task, in batches of several sizes."""

from pathlib import Path

import pytest

from tests.clients.conftest import same_with_attach

datasets = pytest.importorskip(
    "datasets", reason="datasets is not installed: it is in the extra `clients`"
)
lm_eval = pytest.importorskip(
    "lm_eval", reason="lm-eval is not installed: it is in the extra `clients`"
)
pytestmark = pytest.mark.clients
FOLDER, NUM_QUESTIONS, MAX_BATCH = Path(__file__).parent, 7, 4
# More than half of each prompt: below that a prompt does not take another one's cache.
INSTRUCTION = (
    "A play in verse, in five acts. Answer with the next line of the scene, and with nothing else. "
    * 3
)


@pytest.fixture
def evaluate(monkeypatch, tmp_path):
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.chdir(FOLDER)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    tasks = TaskManager(include_path=str(FOLDER), include_defaults=False)

    def run(model, tokenizer, batch_size, **how):
        # "auto" begins with `max_batch_size` rows of the model's full length; 64 of them take long
        # on a CPU.
        lm = HFLM(
            pretrained=model, tokenizer=tokenizer, batch_size=batch_size, max_batch_size=MAX_BATCH
        )
        results = lm_eval.simple_evaluate(
            lm, tasks=["verses"], task_manager=tasks, bootstrap_iters=0, **how
        )
        answers = {sample["doc_id"]: sample["resps"] for sample in results["samples"]["verses"]}
        return answers, results["results"]["verses"]["exact_match,none"]

    return run


@pytest.mark.parametrize("miniature", ["llama", "gemma3"], indirect=True)
@pytest.mark.parametrize("batch_size", [1, 2, 5, "auto"])
def test_the_same_answers(miniature, evaluate, batch_size):
    model, tokenizer = miniature
    (answers, _), info = same_with_attach(model, lambda: evaluate(model, tokenizer, batch_size))
    assert len(answers) == NUM_QUESTIONS
    assert all(answers.values())
    calls = -(-NUM_QUESTIONS // (MAX_BATCH if batch_size == "auto" else batch_size))
    assert (info.calls, info.hits) == (calls, calls - 1)


@pytest.mark.parametrize("miniature", ["qwen3"], indirect=True)
def test_sampled_answers_and_a_reused_prefix(miniature, evaluate):
    model, tokenizer = miniature
    how = {
        "system_instruction": INSTRUCTION,
        "gen_kwargs": "do_sample=True,temperature=0.9,top_p=0.9",
    }
    _, info = same_with_attach(
        model, lambda: evaluate(model, tokenizer, 1, **how), reuse_prefix=True
    )
    shared = len(tokenizer(INSTRUCTION.strip()).input_ids)
    assert (info.calls, info.hits) == (NUM_QUESTIONS, NUM_QUESTIONS - 1)
    assert info.reused_tokens >= (NUM_QUESTIONS - 1) * shared
