"""Reading DCP folders without running what they hold.

torch.distributed.checkpoint unpickles `.metadata` and every entry that is not a tensor. Here the
index is read by an unpickler that knows the few classes an index consists of, and anything but
tensors is refused; tensor payloads are read by `torch.load(weights_only=True)`.
Read `state.py` for what is done with them.
"""

import pickle
import warnings
from enum import EnumMeta
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from trainer.errors import UserError
from trainer.saved_steps import INDEX

_INDEX_CLASSES = {
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
}
_DTYPES = {
    str(value).removeprefix("torch.")
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


class _IndexUnpickler(pickle.Unpickler):
    """Builds the classes of a DCP index and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _INDEX_CLASSES or (module == "torch" and name in _DTYPES):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member_of
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index of tensors needs")


def _member_of(kind: object, name: str) -> Any:
    """Return an enum's member: Python before 3.11.4 pickles one as a `getattr` of its class."""
    if not isinstance(kind, EnumMeta) or name not in kind.__members__:
        raise pickle.UnpicklingError(
            "it names builtins.getattr of something else than an enum's member, which no index of "
            "tensors needs"
        )
    return kind[name]


def read_index(folder: Path) -> Metadata:
    """Read the index of a DCP folder: tensors only, all inside the folder.

    Raises:
        UserError: the index is missing or damaged, names code, holds an entry that is not a tensor,
            or points outside the folder.
    """
    path = folder / INDEX
    try:
        with path.open("rb") as file:
            index = _IndexUnpickler(file).load()
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError) as e:
        raise UserError(
            f"{path} is not read: {e}; only checkpoints written by this trainer or plain DCP "
            "tensors load"
        ) from e
    if not isinstance(index, Metadata):
        raise UserError(f"{path} holds a {type(index).__name__}, not an index of tensors")
    _refuse_all_but_tensors(path, index)
    return index


def _refuse_all_but_tensors(path: Path, index: Metadata) -> None:
    for name, entry in index.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise UserError(
                f"{path}: entry {name!r} is pickled bytes, not a tensor: reading it could run "
                "code; save it again with this trainer"
            )
    for info in (index.storage_data or {}).values():
        name = info.relative_path
        if not isinstance(name, str) or Path(name).name != name or info.transform_descriptors:
            raise UserError(f"{path}: {name!r} is not a plain file of the checkpoint's folder")


def tensor_entries(index: Metadata, prefix: str) -> dict[str, TensorStorageMetadata]:
    """Return the tensors whose names start with `prefix`, under their full names."""
    return {
        name: entry
        for name, entry in index.state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }


class TensorReader(dcp.FileSystemReader):
    """DCP's reader over an index that `read_index` has already read and checked."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(str(folder))
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the checked index; DCP's own version would unpickle the file."""
        return self._index


def read_tensor(folder: Path, index: Metadata, name: str) -> Tensor:
    """Read one tensor whole on the host, without ranks."""
    entry = tensor_entries(index, name)[name]
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype)}
    with warnings.catch_warnings():
        # It warns that no process group exists, which is what is asked for here.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, storage_reader=TensorReader(folder, index), no_dist=True)
    return state[name]
