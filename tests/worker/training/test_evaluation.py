"""Scores are those of the transformers library, whatever stays in memory and in one batch."""

import pytest
import torch
from helpers.worker.llama_models import QWEN, random_fragments
from helpers.worker.trained_models import BPE, BYTES, bpe_file, make_trained_model

from barnraise.errors import StateError, TextError
from barnraise.protocol.evaluation import ChoiceTask, TaskScore
from barnraise.swap.precision import units_to_float
from barnraise.swap.sampler import Continuation, Sampler
from barnraise.text.prompt_codec import PromptCodec
from barnraise.training import evaluation
from barnraise.training.evaluation import answer_tasks, encode_tasks, read_score, save_score
from barnraise.training.model_files.hugging_face_export import export_hugging_face

pytestmark = [pytest.mark.xdist_group("transformers"), pytest.mark.filterwarnings("ignore")]
KINDS = {"bytes": (BYTES, None), "bpe": (BPE, bpe_file())}
TASKS = [
    ChoiceTask("The barn", ("is raised", "was", "Öfen"), 0),
    ChoiceTask("x = [1,", ("2]", "\tyes", "three"), 2),
    ChoiceTask("大家! ", ("No", "together.", "a b c"), 1),
]


@pytest.fixture(scope="module", params=KINDS)
def trained(request):
    return make_trained_model(*KINDS[request.param])


def open_sampler(trained, resident_bytes: int = 0) -> Sampler:
    tensors = trained.tensors
    return Sampler(
        trained.model, lambda index: units_to_float(tensors[f"anchor.{index}"]), resident_bytes
    )


def answer(trained, sampler: Sampler) -> list[int]:
    codec = PromptCodec(trained.tokenizer, trained.model.vocabulary)
    texts = encode_tasks(TASKS, codec, trained.model.context)
    return list(answer_tasks(sampler, TASKS, texts, trained.model))


def test_scores_and_answers_are_those_of_transformers(trained, tmp_path):
    """The reference is the library's: its tokenizer, its weights as exported, and its logits."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export_hugging_face(tmp_path, trained)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    codec = PromptCodec(trained.tokenizer, trained.model.vocabulary)
    texts = encode_tasks(TASKS, codec, trained.model.context)
    answers = []
    for task, continuations in zip(TASKS, texts, strict=True):
        question = task.question.rstrip()
        context = tokenizer(question)["input_ids"]
        expected = []
        for choice in task.choices:
            joint = choice if choice[0].isspace() else " " + choice
            tokens = tokenizer(question + joint)["input_ids"]
            with torch.no_grad():
                logits = model(torch.tensor([tokens])).logits[0].double()
            places = range(len(context), len(tokens))
            probabilities = torch.log_softmax(logits, -1)
            expected.append(sum(float(probabilities[n - 1, tokens[n]]) for n in places))
        for resident_bytes in (0, 1 << 30):
            scores = open_sampler(trained, resident_bytes).score(continuations)
            assert scores == pytest.approx(expected, abs=1e-4)
        lengths = [len(choice.encode()) for choice in task.choices]
        means = [score / length for score, length in zip(expected, lengths, strict=True)]
        answers.append(means.index(max(means)))
    assert answer(trained, open_sampler(trained)) == answers


def test_batches_change_no_answer_and_read_the_weights_once_each(trained, monkeypatch):
    whole = answer(trained, open_sampler(trained))
    monkeypatch.setattr(evaluation, "BATCH_BYTES", 1)
    loads = []
    sampler = Sampler(
        trained.model,
        lambda index: loads.append(index) or units_to_float(trained.tensors[f"anchor.{index}"]),
    )
    assert answer(trained, sampler) == whole
    assert loads.count(1) == len(TASKS), "one task a batch"


def test_models_of_another_architecture_are_scored():
    flats = random_fragments(QWEN)
    tokens = [5, 9, 77, 200, 3]
    together = Sampler(QWEN, flats.__getitem__).score([Continuation(tokens, 2)])
    apart = Sampler(QWEN, flats.__getitem__).score(
        [Continuation(tokens[:4], 1), Continuation(tokens, 1)]
    )
    assert sum(apart) == pytest.approx(together[0], abs=1e-4)


def test_task_longer_than_the_context_is_a_sentence(trained):
    codec = PromptCodec(trained.tokenizer, trained.model.vocabulary)
    long = [TASKS[0], ChoiceTask("word " * trained.model.context, ("a", "b"), 0)]
    with pytest.raises(TextError, match=r"task 2 has .* and the model reads at most"):
        encode_tasks(long, codec, trained.model.context)


def test_diverged_weights_give_no_score():
    size = {f.index: f.size for f in BYTES.fragments()}
    sampler = Sampler(BYTES, lambda index: torch.full((size[index],), float("nan")))
    with pytest.raises(StateError, match="diverged"):
        sampler.score([Continuation([1, 2], 1)])


def test_last_score_is_stored_and_a_damaged_one_is_none(tmp_path):
    assert read_score(tmp_path) is None
    score = TaskScore(tasks="a" * 64, tokens=500, correct=3, count=4)
    save_score(tmp_path, score)
    assert read_score(tmp_path) == score
    (tmp_path / evaluation.SCORE_FILE).write_text("{")
    assert read_score(tmp_path) is None
