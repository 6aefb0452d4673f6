"""Saving and loading the whole state of a run.

`CheckpointStore` is what a loop holds. A save is: capture (tensors by name, JSON), agree that the
model is finite, write beside, make durable, rename, prune. A load is: choose the step together,
check everything by name, then read in place. Owns the order of these and the agreement of ranks;
see `folder.py` for names, `state.py` for tensors, `manifest.py` for the JSON, `safe_load.py` for
what is refused.
"""

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim import Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainer.checkpoint.background import BackgroundWrite
from trainer.checkpoint.folder import list_steps, prune, recover, step_folder
from trainer.checkpoint.manifest import (
    Manifest,
    OptimizerRecord,
    check_files,
    file_sizes,
    read_manifest,
    write_manifest,
)
from trainer.checkpoint.match import architecture_of, find_mismatch
from trainer.checkpoint.rng import restore_rng, rng_state
from trainer.checkpoint.safe_load import read_index, tensor_entries
from trainer.checkpoint.shards import Shards, read_shards, write_shards
from trainer.checkpoint.state import (
    RNG,
    all_shards,
    apply_optimizer,
    model_tensors,
    record_optimizer,
    view_optimizer,
)
from trainer.durable import beside, publish, start_folder
from trainer.errors import UserError
from trainer.model.finite import non_finite_names
from trainer.model.hf_files import write_companions
from trainer.parallel.agreement import Ranks

logger = logging.getLogger(__name__)

HF_FOLDER = "hf"
"""Inside a checkpoint: `config.json` and tokenizer, which `trainer export` copies."""


@dataclass(frozen=True)
class Snapshot:
    """Everything that one checkpoint will hold, on this rank."""

    step: int
    shards: Shards
    optimizer: OptimizerRecord
    progress: dict[str, Any]
    model: PreTrainedModel


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
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._asynchronous = asynchronous
        self._tokenizer = tokenizer
        self._ranks = Ranks.with_own_group()
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
            RuntimeError: the model is not finite, or some rank could not write; the same on every
                rank, with nothing left behind, earlier checkpoints and live state as they were.

        Collective: all ranks, over the store's own group.
        """
        self.wait()
        if step == self._held_step:
            return
        self._refuse_non_finite(step, model)
        snapshot = self._capture(step, model, optimizer, progress)
        if self._asynchronous:
            self._background.start(lambda: self._write(snapshot))
        else:
            self._write(snapshot)
        self._held_step = step

    def wait(self) -> None:
        """Wait until the last save is durable; call it before the process ends.

        Raises:
            RuntimeError: it failed, on every rank.
        """
        try:
            self._background.wait()
        except RuntimeError:
            self._held_step = None
            raise

    def read_progress(self, step: int) -> dict[str, Any]:
        """Return what the loop saved with `step`, before anything is loaded.

        Raises:
            UserError: there is no complete checkpoint of that step; on every rank.
        """
        return self._agreed(lambda: read_manifest(self._existing(step))).progress

    def load(
        self, which: int | Literal["latest"], model: PreTrainedModel, optimizer: Optimizer
    ) -> dict[str, Any] | None:
        """Load a checkpoint in place and return its progress, or None if `latest` finds none.

        Everything is checked by name before the first tensor is overwritten. Group settings of the
        optimizer stay the run's own.

        Args:
            which: A step, or "latest".
            model: The live model, sharded in any way.
            optimizer: Its optimizer, of the class that was saved.

        Raises:
            UserError: there is no such checkpoint, it is damaged or unsafe, or it does not fit the
                model or the optimizer; on every rank, nothing overwritten.
            RuntimeError: some rank failed to read; on every rank.

        Collective: all ranks, over the store's own group.
        """
        self.wait()
        step = self._ranks.on_first(lambda: self.latest() if which == "latest" else int(which))
        if step is None:
            self._log("no checkpoint in %s: starting fresh", self.root)
            return None
        folder = self._agreed(lambda: self._existing(step))
        manifest, index = self._agreed(lambda: _open(folder))
        self._read(folder, manifest, index, model, optimizer)
        self._log_what_differs(step, manifest)
        self._held_step = step
        return manifest.progress

    def _existing(self, step: int) -> Path:
        if step not in self.steps():
            raise UserError(
                f"ckpt.resume={step}: {self.root} has no complete checkpoint of that step; choose "
                f"one of {self.steps()}, or 'latest'"
            )
        return step_folder(self.root, step)

    def _agreed(self, read: Callable[[], Any]) -> Any:
        """Run `read` on every rank; a UserError on any is raised on all."""
        result, error = None, None
        try:
            result = read()
        except UserError as refusal:
            error = str(refusal)
        self._ranks.agree(error, UserError)
        return result

    def _read(
        self,
        folder: Path,
        manifest: Manifest,
        index: Metadata,
        model: PreTrainedModel,
        optimizer: Optimizer,
    ) -> None:
        view = view_optimizer(model, optimizer)
        rng = self._room_for_rng(manifest, index)
        shards = all_shards(model, view, rng, self._ranks.rank)
        mismatch = find_mismatch(optimizer, view, shards, index, manifest, model.config)
        message = None if mismatch is None else f"{folder} does not fit this run: {mismatch}"
        self._ranks.agree(message, UserError)
        try:
            read_shards(folder, index, shards, self._ranks.group)
        except CheckpointException as failure:
            raise RuntimeError(f"{folder} could not be read: {_causes(failure)}") from None
        apply_optimizer(optimizer, view, manifest.optimizer)
        if rng:
            restore_rng(rng)

    def _room_for_rng(self, manifest: Manifest, index: Metadata) -> dict[str, torch.Tensor]:
        """Return room for this rank's generators; empty if another number of ranks wrote them."""
        if manifest.world_size != self._ranks.size:
            return {}
        prefix = f"{RNG}{self._ranks.rank}."
        return {
            key.removeprefix(prefix): torch.empty(entry.size, dtype=torch.uint8)
            for key, entry in tensor_entries(index, prefix).items()
        }

    def _log_what_differs(self, step: int, manifest: Manifest) -> None:
        self._log("resumed from %s", step_folder(self.root, step))
        if manifest.world_size != self._ranks.size:
            self._log(
                "world size %d -> %d: sums are associated otherwise, and the random generators "
                "start from the seed",
                manifest.world_size,
                self._ranks.size,
            )
        if manifest.num_threads != torch.get_num_threads():
            self._log(
                "threads a rank %d -> %d: sums are associated otherwise",
                manifest.num_threads,
                torch.get_num_threads(),
            )
        if newer := [other for other in self.steps() if other > step]:
            self._log(
                "checkpoints of later steps %s stay, and 'latest' means them until this run has "
                "passed them: remove them if they are not wanted",
                newer,
            )

    def _log(self, message: str, *values: object) -> None:
        if self._ranks.is_first:
            logger.warning(message, *values)

    def _refuse_non_finite(self, step: int, model: PreTrainedModel) -> None:
        names = non_finite_names(model_tensors(model))
        self._ranks.agree(
            f"step_{step} is not saved: {names[0]} holds values that are not finite"
            f"{self._still_there()}"
            if names
            else None
        )

    def _capture(
        self, step: int, model: PreTrainedModel, optimizer: Optimizer, progress: dict[str, Any]
    ) -> Snapshot:
        view = view_optimizer(model, optimizer)
        shards = all_shards(model, view, rng_state(), self._ranks.rank)
        error = None
        if self._asynchronous:
            try:
                shards = {key: shard.copy_to_host() for key, shard in shards.items()}
            except (RuntimeError, MemoryError) as failure:
                error = f"step_{step} is not saved: no room for a copy on the host: {failure}"
        self._ranks.agree(error)
        record = record_optimizer(optimizer, view)
        # Through JSON: what is not plain fails here, on every rank, and later changes stay out.
        json.dumps(asdict(record), allow_nan=False)
        plain = json.loads(json.dumps(progress, allow_nan=False))
        return Snapshot(step, shards, record, plain, model)

    def _write(self, snapshot: Snapshot) -> None:
        """Write, make durable, name, prune; on failure remove what was written."""
        final = step_folder(self.root, snapshot.step)
        try:
            self._ranks.on_first(lambda: start_folder(final), OSError)
            write_shards(beside(final), snapshot.shards, self._ranks.group)
            self._ranks.on_first(lambda: self._complete(final, snapshot), OSError)
        except (OSError, CheckpointException) as failure:
            if self._ranks.is_first:
                shutil.rmtree(beside(final), ignore_errors=True)
            raise RuntimeError(
                f"step_{snapshot.step} could not be saved in {self.root}: {_causes(failure)}"
                f"{self._still_there()}"
            ) from None
        if self._ranks.is_first:
            self._prune(snapshot.step)

    def _complete(self, final: Path, snapshot: Snapshot) -> None:
        """Add the JSON part to the written tensors and give the folder its name (rank 0)."""
        partial = beside(final)
        companions = partial / HF_FOLDER
        companions.mkdir()
        write_companions(snapshot.model.config, self._tokenizer, companions)
        manifest = Manifest(
            step=snapshot.step,
            world_size=self._ranks.size,
            num_threads=torch.get_num_threads(),
            torch=torch.__version__,
            architecture=architecture_of(snapshot.model.config),
            optimizer=snapshot.optimizer,
            progress=snapshot.progress,
            files=file_sizes(partial),
        )
        write_manifest(partial, manifest)
        publish(final)

    def _prune(self, newest: int) -> None:
        try:
            prune(self.root, newest, self._keep_last, self._keep_every)
        except OSError as failure:
            # The new checkpoint is durable; what is left too many is no reason to end the run.
            logger.warning("older checkpoints in %s could not be removed: %s", self.root, failure)

    def _still_there(self) -> str:
        latest = self.latest()
        kept = "no checkpoint yet" if latest is None else f"step_{latest} is the latest"
        return f"; the training state is untouched and {kept}: mend the cause, then resume"


def _open(folder: Path) -> tuple[Manifest, Metadata]:
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    return manifest, read_index(folder)


def _causes(failure: BaseException) -> str:
    """Return what went wrong, with the ranks it went wrong on."""
    if not isinstance(failure, CheckpointException):
        return f"rank 0: {failure}"
    return "; ".join(f"rank {rank}: {cause[0]}" for rank, cause in failure.failures.items())
