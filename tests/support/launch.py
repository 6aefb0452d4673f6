"""Starts a Python program as several ranks, as torchrun would, without its minutes of grace."""

import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist


@dataclass(frozen=True)
class Ended:
    """How one rank's process ended."""

    status: int
    out: str
    err: str


def launch_ranks(
    world_size: int, code: str, *args: str, timeout_s: float = 240.0, has_launcher: bool = True
) -> list[Ended]:
    """Run `python -c code args` as every rank of a world; return how each ended, by rank.

    Args:
        world_size: Number of ranks.
        code: The program.
        args: Its arguments.
        timeout_s: Of each rank.
        has_launcher: Whether the store where ranks meet is the launcher's and outlives them all, as
            under torchrun; else rank 0 has it, as under SLURM, and it ends with rank 0.

    Raises:
        subprocess.TimeoutExpired: a rank hangs.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    port = store.port if has_launcher else _free_port()
    shared = {
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": str(has_launcher),
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            _start(Path(folder), code, args, {**shared, "RANK": str(r), "LOCAL_RANK": str(r)})
            for r in range(world_size)
        ]
        try:
            return [
                Ended(process.wait(timeout_s), out.read_text(), err.read_text())
                for process, out, err in ranks
            ]
        finally:
            for process, _, err in ranks:
                if process.poll() is None:
                    print(f"still running; its stderr:\n{err.read_text()}")
                process.kill()
                process.wait()


def _free_port() -> int:
    """Return a port that nobody uses now; another program may take it before rank 0 does."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def _start(
    folder: Path, code: str, args: tuple[str, ...], environment: dict[str, str]
) -> tuple[subprocess.Popen[bytes], Path, Path]:
    """Start one rank; files take its output, since a full pipe would stop it."""
    out, err = (folder / f"{name}{environment['RANK']}" for name in ("out", "err"))
    with out.open("wb") as out_file, err.open("wb") as err_file:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *args],
            env={**os.environ, **environment},
            stdout=out_file,
            stderr=err_file,
        )
    return process, out, err
