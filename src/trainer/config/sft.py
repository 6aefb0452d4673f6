"""The whole config of `trainer sft`."""

from typing import Self

from pydantic import model_validator

from trainer.config.base import Bool, Count, PathText, Section, Seed
from trainer.config.data import BatchConfig, DataConfig, IntervalConfig, ValConfig
from trainer.config.model import ModelConfig, MoEArchitecture
from trainer.config.optim import MuonConfig, OptimConfig
from trainer.config.parallel import ParallelConfig
from trainer.config.run import CheckpointConfig, ProfileConfig, WandbConfig
from trainer.config.scheduler import ConstantConfig, SchedulerConfig, phases


class RunConfig(Section):
    """What every kind of run has."""

    output_dir: PathText
    """The run's folder; new, or that of the run to resume."""
    max_steps: Count
    """Steps of the whole run, those before a resume included."""
    seed: Seed = 0
    """Of random weights, the order of the data and every random generator."""
    deterministic: Bool | None = None
    """Deterministic algorithms; unset: on a CPU yes, on a GPU no."""
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    optim: OptimConfig = MuonConfig()
    scheduler: SchedulerConfig = ConstantConfig()
    ckpt: CheckpointConfig = CheckpointConfig()
    wandb: WandbConfig = WandbConfig()
    profile: ProfileConfig = ProfileConfig()

    @model_validator(mode="after")
    def _ep_fits_the_experts(self) -> Self:
        architecture, ep = self.model.architecture, self.parallel.ep
        match architecture:
            case MoEArchitecture(num_experts=num_experts) if num_experts % ep:
                raise ValueError(
                    f"parallel.ep={ep} does not divide model.architecture.num_experts="
                    f"{num_experts}: every rank of the ep axis holds the same number of experts; "
                    "choose an ep that divides it"
                )
            case None | MoEArchitecture():
                pass
            case _ if ep > 1:
                raise ValueError(
                    f"parallel.ep={ep} with a dense model: there are no experts to split; "
                    "set parallel.ep = 1"
                )
        return self

    @model_validator(mode="after")
    def _schedule_fits(self) -> Self:
        phases(self.scheduler, self.max_steps)
        return self

    @model_validator(mode="after")
    def _resumes_inside_the_run(self) -> Self:
        match self.ckpt.resume:
            case int(step) if step > self.max_steps:
                raise ValueError(
                    f"ckpt.resume={step} with max_steps={self.max_steps}: the run ends before the "
                    "step it resumes from; raise max_steps, or resume from an earlier step"
                )
            case _:
                return self

    @model_validator(mode="after")
    def _profiled_steps_are_in_the_run(self) -> Self:
        chosen = {
            "trace_steps": self.profile.trace_steps,
            "memory_steps": self.profile.memory_steps,
        }
        for name, steps in chosen.items():
            if max(steps, default=0) > self.max_steps:
                raise ValueError(
                    f"profile.{name}={list(steps)} with max_steps={self.max_steps}: the run has no "
                    "such step; remove it or raise max_steps"
                )
        return self


class SupervisedConfig(RunConfig):
    """A run on packed text with a validation set: what SFT and pretraining share."""

    data: BatchConfig
    val: IntervalConfig = IntervalConfig()


class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning."""

    data: DataConfig
    val: ValConfig = ValConfig()
