"""The `optim` section: one of Muon, AdamW, SGD, or the real dion.Muon for A/B runs."""

from typing import Annotated, Literal

from pydantic import Field

from trainer.config.base import (
    Bool,
    Count,
    CountOrZero,
    Float,
    NonNegativeFloat,
    OpenFraction,
    PositiveFloat,
    Section,
)

CoefficientRow = tuple[Float, Float, Float]


class OptimizerSection(Section):
    """What every optimizer takes."""

    lr: NonNegativeFloat
    weight_decay: NonNegativeFloat = 0.01
    max_norm: PositiveFloat | None = 1.0
    """Global gradient norm above which gradients are scaled down; unset: never."""
    max_skipped_steps: Count = 10
    """Non-finite steps in a row that end the run."""


class DionMuonSection(OptimizerSection):
    """The hyperparameters that ours shares with dion.Muon."""

    lr: NonNegativeFloat = 0.02
    mu: OpenFraction = 0.95
    nesterov: Bool = False
    betas1: OpenFraction = 0.9
    betas2: OpenFraction = 0.95
    epsilon: PositiveFloat = 1e-8
    cautious_wd: Bool = False
    flatten: Bool = False
    adjust_lr: Literal["rms_norm", "spectral_norm"] | None = "rms_norm"
    adamw_lr: NonNegativeFloat | None = None
    """Learning rate of the AdamW group; unset: `lr`."""


class MuonConfig(DionMuonSection):
    """Our Muon."""

    type: Literal["muon"] = "muon"
    impl: Literal["stacked", "per_matrix"] = "stacked"
    kernel: Literal["auto", "dense", "symmetric", "gram", "syrk"] = "auto"
    ns_steps: Count = 5
    ns_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    ns_coefficients: (
        Literal["quintic", "polar_express", "keller_jordan"]
        | Annotated[tuple[CoefficientRow, ...], Field(min_length=1)]
    ) = "quintic"
    replicate: Literal["share", "repeat"] = "share"
    max_stack_gib: PositiveFloat = 2.0
    """The most that a stack takes while it is orthogonalized, temporaries included."""
    split_gate_up: Bool = False
    stats_interval: CountOrZero = 0
    """Log each group's update RMS and spectral norm every n steps; 0: never."""


class DionConfig(DionMuonSection):
    """The real dion.Muon, for A/B runs (extra `dion`)."""

    type: Literal["dion"] = "dion"
    use_polar_express: Bool = False
    use_triton: Bool = False
    use_gram_newton_schulz: Bool = False


class AdamWConfig(OptimizerSection):
    """torch.optim.AdamW."""

    type: Literal["adamw"] = "adamw"
    lr: NonNegativeFloat = 1e-3
    betas1: OpenFraction = 0.9
    betas2: OpenFraction = 0.95
    epsilon: PositiveFloat = 1e-8


class SGDConfig(OptimizerSection):
    """torch.optim.SGD."""

    type: Literal["sgd"] = "sgd"
    lr: NonNegativeFloat = 0.1
    weight_decay: NonNegativeFloat = 0.0
    momentum: OpenFraction = 0.0
    nesterov: Bool = False


OptimConfig = Annotated[
    MuonConfig | AdamWConfig | SGDConfig | DionConfig, Field(discriminator="type")
]
