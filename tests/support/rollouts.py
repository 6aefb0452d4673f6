"""Samples and rollouts made by hand."""

from trainer.rl.rewards import Sample
from trainer.rl.rollouts import Rollout


def make_sample(answer, reference="42", **changes):
    fields = {
        "question": "?",
        "reference": reference,
        "completion": f"it is {answer}",
        "answer": answer,
        "row": {"difficulty": 3},
        "where": "prompts.jsonl:1",
    }
    return Sample(**(fields | changes))


def make_rollout(number, prompt_length, length, *, is_truncated=False, old=False):
    ids = tuple(100 * number + i for i in range(prompt_length + length))
    log_probs = tuple(-(number + i / 8) for i in range(length))
    return Rollout(
        group=number,
        where=f"row {number}",
        question="",
        prompt="",
        completion="",
        answer=None,
        reference="",
        reward=0.0,
        scores={},
        is_pass=False,
        num_errors=0,
        advantage=number / 4,
        is_truncated=is_truncated,
        version=0,
        prompt_ids=ids[:prompt_length],
        ids=ids[prompt_length:],
        log_probs=log_probs,
        old_log_probs=tuple(value - 1 for value in log_probs) if old else None,
    )


ROLLOUTS = [make_rollout(1, 10, 4), make_rollout(2, 30, 9), make_rollout(3, 20, 1)]
ROLLOUTS += [make_rollout(4, 25, 6, is_truncated=True, old=True), make_rollout(5, 40, 20)]
