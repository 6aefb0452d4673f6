"""Between live tensors and DCP: a rank's box of each tensor, written and read in place.

Owns the adapter that lets torch.distributed.checkpoint save and reshard tensors from their boxes
(`trainer.parallel.boxes`), whatever their placements. Only plain tensors reach the files.
Read `state.py` for which tensors.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from trainer.checkpoint.safe_load import TensorReader
from trainer.parallel.boxes import Box, local_box, local_part

COPY_AHEAD_BYTES = 10_000_000


@dataclass(frozen=True)
class LocalShard:
    """One rank's part of a tensor.

    Attributes:
        local: The values that this rank holds; loading writes into them.
        shape: Global shape.
        box: Where `local` lies in the global tensor.
    """

    local: Tensor
    shape: torch.Size
    box: Box

    @classmethod
    def of(cls, tensor: Tensor) -> "LocalShard":
        """Return the part of a DTensor or plain tensor that this rank holds, sharing memory."""
        return cls(local_part(tensor), tensor.shape, local_box(tensor))

    def copy_to_host(self) -> "LocalShard":
        """Return the same part in host memory of its own."""
        return LocalShard(self.local.to("cpu", copy=True), self.shape, self.box)

    def size(self) -> torch.Size:
        """Return the global shape, under the name that DCP asks for."""
        return self.shape

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [] if self.box.is_empty else [self._chunk()]

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        if self.box.is_empty:
            return []
        data = TensorWriteData(
            chunk=self._chunk(),
            properties=TensorProperties(dtype=self.local.dtype),
            size=self.shape,
        )
        index = MetadataIndex(name, self.box.offsets)
        return [WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)]

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.box.offsets), torch.Size(self.box.sizes))


Shards = dict[str, LocalShard]


class _SavePlanner(dcp.DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].local


class _LoadPlanner(dcp.DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        # The default would replace what is not a tensor by None.
        self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].local


def write_shards(folder: Path, shards: Shards, group: dist.ProcessGroup | None) -> None:
    """Write every rank's shards into `folder`, each box once, flushed to the disk.

    Raises:
        CheckpointException: some rank failed to plan or write; the same on every rank.

    Collective: all ranks of `group`.
    """
    on_gpu = any(shard.local.is_cuda for shard in shards.values())
    writer = dcp.FileSystemWriter(
        str(folder),
        sync_files=True,
        # Copying ahead opens a stream on the thread's current GPU, which on a background thread is
        # GPU 0 for every rank; copies on the host need none.
        per_thread_copy_ahead=COPY_AHEAD_BYTES if on_gpu else 0,
    )
    dcp.save(
        dict(shards),
        storage_writer=writer,
        planner=_SavePlanner(),
        process_group=group,
    )


def read_shards(
    folder: Path, index: Metadata, shards: Shards, group: dist.ProcessGroup | None
) -> None:
    """Fill the shards in place from a checkpoint that may have been split in another way.

    Raises:
        CheckpointException: some rank failed to read; the same on every rank.

    Collective: all ranks of `group`.
    """
    dcp.load(
        dict(shards),
        storage_reader=TensorReader(folder, index),
        planner=_LoadPlanner(),
        process_group=group,
    )


def describe_failure(failure: BaseException) -> str:
    """Return what went wrong, with the ranks it went wrong on; a plain error is rank 0's."""
    if not isinstance(failure, dcp.CheckpointException):
        return f"rank 0: {failure}"
    return "; ".join(f"rank {rank}: {cause[0]}" for rank, cause in failure.failures.items())
