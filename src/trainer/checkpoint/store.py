"""Saving and loading the whole state of a run.

`CheckpointStore` is what a loop holds: it decides when a write runs in the background and which
step is meant. A save is `snapshot.py`, then `writer.py`; a load is `reader.py`. Names lie with
`folder.py`, tensors with `state.py`, the JSON part with `manifest.py`.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainer.checkpoint.background import BackgroundWrite
from trainer.checkpoint.folder import free_mib, recover
from trainer.checkpoint.manifest import Manifest, read_manifest
from trainer.checkpoint.reader import load_into, log_what_differs, open_checkpoint
from trainer.checkpoint.snapshot import capture, copy_to_host
from trainer.checkpoint.writer import CheckpointWriter
from trainer.errors import UserError
from trainer.parallel.agreement import Ranks
from trainer.saved_steps import list_steps, step_folder

logger = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of one run, under `root/step_N`.

    Construct it on every rank, after the process group exists; every method but `steps` and
    `latest` is collective over all ranks.

    Args:
        root: The folder of checkpoints; made by the first save.
        keep_last: How many of the newest to keep; None: all.
        keep_every: Besides these, keep steps divisible by this; None: none.
        asynchronous: Copy the state to host memory and write it in the background.
        tokenizer: Saved beside the model's config, for `trainer export`.

    Collective: creates a gloo group (all ranks), then one broadcast.

    Example:
        store = CheckpointStore(Path("outputs/run/checkpoints"), keep_last=2)
        if (step := store.latest()) is not None:
            progress = store.load(step, model, optimizer)
        store.save(step, model, optimizer, {"data": stream.state_dict()})
        store.wait()
    """

    def __init__(
        self,
        root: Path,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        asynchronous: bool = False,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.root = root
        self._asynchronous = asynchronous
        self._ranks = Ranks.with_own_group()
        self._writer = CheckpointWriter(root, self._ranks, keep_last, keep_every, tokenizer)
        self._background = BackgroundWrite()
        self._held_step: int | None = None
        """The step whose state is already on the disk or on its way there."""
        self._ranks.on_first(lambda: recover(root), OSError)

    def steps(self) -> list[int]:
        """Return the steps that have a complete checkpoint, ascending; no other rank is asked."""
        return list_steps(self.root)

    def latest(self) -> int | None:
        """Return the highest step that has a complete checkpoint, by number."""
        return max(self.steps(), default=None)

    def save(
        self, step: int, model: PreTrainedModel, optimizer: Optimizer, progress: dict[str, Any]
    ) -> None:
        """Save the state after `step`; a second save of the same step does nothing.

        Asynchronous saves return once the state is copied to host memory; their failure is raised
        by the next `save` or `wait`.

        Args:
            step: The step just finished.
            model: The live model.
            optimizer: Its optimizer.
            progress: The loop's own state: plain JSON values, the same on every rank.

        Raises:
            RuntimeError: the model is not finite, `progress` is not plain JSON, or some rank could
                not write; the same on every rank, with nothing left behind, earlier checkpoints and
                live state as they were.

        Collective: all ranks, over the store's own group.
        """
        self.wait()
        if step == self._held_step:
            return
        try:
            snapshot = capture(step, model, optimizer, progress, self._ranks)
            if self._asynchronous:
                snapshot = copy_to_host(snapshot, self._ranks)
        except RuntimeError as failure:
            raise self._not_saved(step, failure) from None
        self._held_step = step
        if self._asynchronous:
            self._background.start(lambda: self._writer.write(snapshot))
        else:
            self._settle(lambda: self._writer.write(snapshot))

    def wait(self) -> None:
        """Wait until the last save is durable; call it before the process ends.

        Raises:
            RuntimeError: it failed, on every rank.

        Collective: none of its own; the write it waits for is.
        """
        self._settle(self._background.wait)

    def _settle(self, finish_write: Callable[[], None]) -> None:
        try:
            finish_write()
        except RuntimeError as failure:
            step, self._held_step = self._held_step, None
            raise self._not_saved(step, failure) from None

    def read_progress(self, step: int) -> dict[str, Any]:
        """Return what the loop saved with `step`, before anything is loaded.

        Raises:
            UserError: there is no complete checkpoint of that step; on every rank.

        Collective: all ranks, over the store's own group.
        """
        return self._ranks.together(lambda: self._manifest_of(step)).progress

    def load(self, step: int, model: PreTrainedModel, optimizer: Optimizer) -> dict[str, Any]:
        """Load a checkpoint in place and return its progress.

        Everything is checked by name before the first tensor is overwritten. Group settings of the
        optimizer stay the run's own.

        Args:
            step: The same on every rank.
            model: The live model, sharded in any way.
            optimizer: Its optimizer; of the class that was saved, or of one with the same state.

        Raises:
            UserError: there is no such checkpoint, it is damaged or unsafe, or it does not fit the
                model or the optimizer; on every rank, nothing overwritten.
            RuntimeError: some rank failed to read; on every rank.

        Collective: all ranks, over the store's own group.
        """
        self.wait()
        checkpoint = self._ranks.together(lambda: open_checkpoint(self._existing(step)))
        load_into(checkpoint, model, optimizer, self._ranks)
        log_what_differs(checkpoint.manifest, self._ranks)
        if self._ranks.is_first:
            logger.info("resumed from %s", step_folder(self.root, step))
        self._held_step = step
        return checkpoint.manifest.progress

    def _manifest_of(self, step: int) -> Manifest:
        folder = self._existing(step)
        manifest = read_manifest(folder)
        if manifest.step != step:
            raise UserError(
                f"{folder} holds the checkpoint of step {manifest.step}: steps are found by the "
                f"name of their folder; rename it to {step_folder(self.root, manifest.step).name}"
            )
        return manifest

    def _existing(self, step: int) -> Path:
        if step not in self.steps():
            raise UserError(
                f"ckpt.resume={step}: {self.root} has no complete checkpoint of that step; choose "
                f"one of {self.steps()}, or 'latest'"
            )
        return step_folder(self.root, step)

    def _not_saved(self, step: int | None, failure: RuntimeError) -> RuntimeError:
        if self._ranks.is_first:  # torch's own errors do not say that a disk is full
            logger.error("%.1f MiB are free in %s", free_mib(self.root), self.root)
        latest = self.latest()
        kept = "no checkpoint yet" if latest is None else f"step_{latest} is the latest"
        return RuntimeError(
            f"step_{step} could not be saved in {self.root}: {failure}; the training state is "
            f"untouched and {kept}: mend the cause, then resume"
        )
