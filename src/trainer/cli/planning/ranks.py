"""One rank of a planned run: its parameters, its optimizer state, its part in Muon's plan."""

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from trainer.cli.planning.parameters import local_numel
from trainer.config import RunConfig
from trainer.config.optim import AdamWConfig, DionConfig, MuonConfig, SGDConfig
from trainer.optim.bucketing import PlannedGroup, PlanOptions
from trainer.optim.groups import group_of
from trainer.optim.kernels.machine import Machine, assumed_machine
from trainer.optim.kernels.select import KernelChoice, choose_kernel
from trainer.optim.kernels.syrk import MINIMUM_VERSION
from trainer.optim.per_matrix_plan import plan_per_matrix
from trainer.optim.per_matrix_pricing import price_per_matrix
from trainer.optim.pipeline import NS_DTYPES
from trainer.optim.pipeline_memory import Passes
from trainer.optim.plan import Plan, build_plan
from trainer.optim.pricing import Price, price_plan
from trainer.optim.setup import plan_groups
from trainer.optim.spec import ParameterSpec
from trainer.parallel.devices import GPU

CAPABILITIES = {"h200": (9, 0), "h100": (9, 0), "a100": (8, 0), "b200": (10, 0)}


@dataclass(frozen=True)
class RankPlan:
    """What one rank holds and does."""

    rank: int
    specs: list[ParameterSpec]
    num_local: int
    state_bytes: int
    plan: Plan | None = None
    price: Price | None = None


def plan_rank(config: RunConfig, specs: list[ParameterSpec], rank: int, gpu: GPU) -> RankPlan:
    """Plan one rank.

    Raises:
        UserError: a parameter cannot be orthogonalized as it lies, or a kernel asked for by name
            does not run on the GPU.
    """
    num_local = sum(local_numel(spec) for spec in specs)
    match config.optim:
        case MuonConfig():
            groups = plan_groups(config.optim, specs)
            made, price = _plan_muon(config.optim, groups, gpu)
            return RankPlan(rank, specs, num_local, price.state_bytes, made, price)
        case DionConfig():
            adamw = sum(local_numel(s) for s in specs if group_of(s.name, s.shape) == "adamw")
            return RankPlan(rank, specs, num_local, 4 * (num_local + adamw))
        case AdamWConfig():
            return RankPlan(rank, specs, num_local, 8 * num_local)
        case SGDConfig():
            return RankPlan(rank, specs, num_local, 4 * num_local * (config.optim.momentum > 0))


def _machine_with(gpu: GPU) -> Machine:
    """Return a machine with that GPU and the packages of every kernel: the run will check."""
    return replace(
        assumed_machine(CAPABILITIES[gpu.name]),
        find_version=lambda _: MINIMUM_VERSION,
        import_module=_stand_in,
    )


def _stand_in(name: str) -> ModuleType:
    """Return what a kernel's gate looks for in its package, as the newest release has it."""
    module = ModuleType(name)

    def batched_tsyrk_ex(a: object, c: object, *, alpha: float, beta: float, out: object) -> None:
        raise AssertionError("kernels that are planned are never called")

    vars(module).update(batched_tsyrk_ex=batched_tsyrk_ex, tsyrk_ex=batched_tsyrk_ex)
    vars(module).update(HAS_TRITON_340=True)
    return module


def _plan_muon(config: MuonConfig, groups: list[PlannedGroup], gpu: GPU) -> tuple[Plan, Price]:
    """Plan and price with the kernels of a GPU that is not here."""
    machine = _machine_with(gpu)
    kernels: list[KernelChoice] = []

    def choose_kernel_of(shape: tuple[int, int, int]) -> KernelChoice:
        return choose_kernel(
            config.kernel,
            shape=shape,
            dtype=NS_DTYPES[config.ns_dtype],
            device=torch.device("cuda"),
            machine=machine,
        )

    def choose(shape: tuple[int, int, int]) -> tuple[str, str]:
        kernels.append(choose_kernel_of(shape))
        return kernels[-1].name, kernels[-1].reason

    options = PlanOptions(
        config.ns_dtype, config.replicate, config.max_stack_gib, config.split_gate_up
    )
    plan = build_plan(groups, options, choose)
    iteration: Any = {"steps": config.ns_steps, "coefficients": config.ns_coefficients}
    match config.impl:
        case "stacked":
            passes = Passes(is_cautious=config.cautious_wd)
            return plan, price_plan(plan, groups, kernels, **iteration, passes=passes)
        case "per_matrix":
            return plan_per_matrix(groups, options, choose), price_per_matrix(
                groups,
                choose_kernel_of,
                ns_dtype=config.ns_dtype,
                split_gate_up=config.split_gate_up,
                **iteration,
            )
