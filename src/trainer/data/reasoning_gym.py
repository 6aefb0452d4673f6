"""Items of reasoning-gym tasks as rows.

Owns the text of the question (`template`, `system`). A split is an index range of one seed: item i
of a seed is item i - 1 of the next, so two seeds overlap. `sources.py` opens these.
"""

import difflib
from collections.abc import Mapping
from typing import Any

from trainer.config.data import ReasoningGymSource
from trainer.data.rows import BadRow
from trainer.errors import UserError


class ReasoningGymRows:
    """Items of a reasoning-gym task as one question and one answer each.

    `task` is the reasoning-gym data set, which also scores answers; `item(i)` its i-th item here.
    """

    def __init__(self, config: ReasoningGymSource, field: str) -> None:
        self._config = config
        self._field = field
        self.task = _create_task(config, field)

    def __len__(self) -> int:
        return self._config.size

    def item(self, index: int) -> dict[str, Any]:
        """Return the item as reasoning-gym gives it (`question`, `answer`, `metadata`)."""
        return self.task[self._config.start + index]

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        item = self.item(index)
        if item["answer"] is None:
            raise BadRow("no_answer", "the task gives no answer to this item: use another task")
        answer = {"role": "assistant", "content": str(item["answer"])}
        return {"messages": [*self.question(item), answer]}

    def question(self, item: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the turns before an item's answer.

        Raises:
            UserError: the template names a field that the task does not give.
        """
        fields = {**item["metadata"], "question": item["question"]}
        try:
            question = self._config.template.format(**fields)
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise UserError(
                f"{self._field}.template={self._config.template!r} cannot be filled in "
                f"({error!r}): the fields of task {self._config.task} are {sorted(fields)}"
            ) from None
        system = self._config.system
        turns = [] if system is None else [{"role": "system", "content": system}]
        return [*turns, {"role": "user", "content": question}]

    def where(self, index: int) -> str:
        """Return task, seed and item."""
        return f"{self._config.task}(seed={self._config.seed}): item {self._config.start + index}"


def _create_task(source: ReasoningGymSource, field: str) -> Any:
    from reasoning_gym.factory import DATASETS, create_dataset

    if source.task not in DATASETS:
        close = difflib.get_close_matches(source.task, DATASETS, n=3)
        raise UserError(
            f"{field}.task={source.task!r} is no reasoning-gym task"
            + (f": did you mean {' or '.join(close)}?" if close else "")
        )
    try:
        return create_dataset(
            source.task, size=source.start + source.size, seed=source.seed, **source.params
        )
    except (TypeError, AssertionError, ValueError) as error:
        raise UserError(
            f"{field}.params={source.params!r} are refused by task {source.task}: {error}"
        ) from error
