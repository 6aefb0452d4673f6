"""The command: from words to a report; no ranks, no GPU, no network.

Owns options and the choice of ranks to plan. What a rank holds and does is `ranks.py`'s, the lines
are `text.py`'s.
"""

import os

import torch
from transformers import Qwen3MoeConfig

from trainer.cli.planning.parameters import describe_rank, global_shapes
from trainer.cli.planning.ranks import plan_rank
from trainer.cli.planning.text import memory_lines, optimizer_lines
from trainer.config import RunConfig, load_config
from trainer.config.parallel import ParallelConfig
from trainer.errors import UserError
from trainer.model.architecture import inline_config, resolve_architecture
from trainer.model.setup import check_ep
from trainer.parallel.devices import GPU, GPUS
from trainer.parallel.mesh import resolve_sizes

USAGE = """\
usage: trainer plan sft|rl|pretrain @ FILE.toml [--world-size N] [--gpu NAME] [--section.field …]

Prints who orthogonalizes what and with which kernel, memory per rank, exchange bytes and FLOPs.
--world-size: ranks in all; left out, what parallel.dp_replicate x parallel.dp_shard says.
--gpu: one of """ + ", ".join(gpu.name for gpu in GPUS)

MAX_WORLD_SIZE = 2**16

MAX_PRICED_RANKS = 16
"""In larger worlds only the first and the last ranks are priced: the fullest and the emptiest."""


def plan(cls: type[RunConfig], args: list[str]) -> None:
    """Run `trainer plan`.

    Raises:
        UserError: the config or an option is wrong, or the model's shapes cannot be read here.
    """
    if "--help" in args or "-h" in args:
        print(USAGE)
        return
    own, rest = _take_options(args, ("world-size", "gpu"))
    config, notes = load_config(cls, rest)
    gpu = _find_gpu(own.get("gpu", "h200"))
    world_size = _world_size(own.get("world-size"), config.parallel)
    print("".join(f"note: {note}\n" for note in notes) + report(config, world_size, gpu))


def report(config: RunConfig, world_size: int, gpu: GPU) -> str:
    """Return the whole report.

    Args:
        config: Of the run.
        world_size: Ranks in all.
        gpu: What each rank would have.

    Raises:
        UserError: the mesh does not fit, a kernel or a placement is refused.
    """
    architecture = config.model.architecture
    # Shapes given inline are taken as they are: a hub name would need the network to be compared.
    hf_config = inline_config(architecture) if architecture else resolve_architecture(config.model)
    sizes = resolve_sizes(config.parallel, world_size)
    check_ep(hf_config.num_experts if isinstance(hf_config, Qwen3MoeConfig) else 0, sizes.ep)
    shapes = global_shapes(hf_config)
    ranks = [
        plan_rank(config, describe_rank(shapes, sizes, rank), rank, gpu)
        for rank in _ranks_to_plan(world_size)
    ]
    total = sum(torch.Size(shape).numel() for shape in shapes.values())
    lines = [
        f"{total / 1e9:.3f} B parameters over {world_size} ranks: dp_replicate "
        f"{sizes.dp_replicate} x dp_shard {sizes.dp_shard} (dp_shard_mod_ep "
        f"{sizes.dp_shard_mod_ep} x ep {sizes.ep}), as on {gpu.name.upper()}",
        "",
        *memory_lines(config, hf_config, ranks, gpu, world_size),
        "",
        *optimizer_lines(config.optim, ranks, gpu),
    ]
    return "\n".join(lines)


def _take_options(args: list[str], names: tuple[str, ...]) -> tuple[dict[str, str], list[str]]:
    """Part the plan's own options from the words of the config.

    Raises:
        UserError: an option without a value.
    """
    own: dict[str, str] = {}
    rest: list[str] = []
    remaining = iter(args)
    for word in remaining:
        name, equals, value = word.removeprefix("--").replace("_", "-").partition("=")
        if not (word.startswith("--") and name in names):
            rest.append(word)
            continue
        own[name] = value if equals else next(remaining, "")
        if not own[name] or own[name].startswith("--"):
            raise UserError(f"--{name} is given without a value; see trainer plan --help")
    return own, rest


def _find_gpu(name: str) -> GPU:
    found = next((gpu for gpu in GPUS if gpu.name == name.lower()), None)
    if found is None:
        known = ", ".join(gpu.name for gpu in GPUS)
        raise UserError(f"--gpu {name}: not known; choose one of {known}")
    return found


def _world_size(text: str | None, parallel: ParallelConfig) -> int:
    name = "--world-size" if text is not None else "WORLD_SIZE"
    text = text if text is not None else os.environ.get(name)
    if text is None:
        shard = parallel.dp_shard if parallel.dp_shard > 0 else parallel.ep
        return parallel.dp_replicate * shard
    if not text.isdecimal() or not 1 <= int(text) <= MAX_WORLD_SIZE:
        raise UserError(
            f"{name} {text}: must be a number of ranks, at least 1, at most {MAX_WORLD_SIZE}"
        )
    return int(text)


def _ranks_to_plan(world_size: int) -> list[int]:
    if world_size <= MAX_PRICED_RANKS:
        return list(range(world_size))
    half = MAX_PRICED_RANKS // 2
    return [*range(half), *range(world_size - half, world_size)]
