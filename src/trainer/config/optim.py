"""The `optim` section: one of Muon, AdamW, SGD, or the real dion.Muon for A/B runs."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

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
    """Peak learning rate; `scheduler` multiplies it by a factor."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled: weights shrink by `lr * weight_decay` a step."""
    max_norm: PositiveFloat | None = 1.0
    """Global gradient norm above which gradients are scaled down; unset: never."""
    max_skipped_steps: Count = 10
    """Non-finite steps in a row that end the run."""


class DionMuonSection(OptimizerSection):
    """The hyperparameters that ours shares with dion.Muon."""

    lr: NonNegativeFloat = 0.02
    mu: OpenFraction = 0.95
    """Momentum: `m = mu * m + gradient`."""
    nesterov: Bool = False
    """Orthogonalize `mu * m + gradient` rather than `m`."""
    betas1: OpenFraction = 0.9
    """Of the AdamW group: decay of the mean of gradients."""
    betas2: OpenFraction = 0.95
    """Of the AdamW group: decay of the mean of squares."""
    epsilon: PositiveFloat = 1e-8
    """Of the AdamW group: added to the root of the mean of squares."""
    cautious_wd: Bool = False
    """Decay only entries whose update has their sign."""
    flatten: Bool = False
    """Take a weight of three or more dims as one matrix, not as a batch; never experts."""
    adjust_lr: Literal["rms_norm", "spectral_norm"] | None = "rms_norm"
    """Scale of an update: 0.2 * sqrt(max(rows, cols)), sqrt(rows / cols), or 1 (None)."""
    adamw_lr: NonNegativeFloat | None = None
    """Learning rate of the AdamW group; unset: `lr`."""


class MuonConfig(DionMuonSection):
    """Our Muon."""

    type: Literal["muon"] = "muon"
    impl: Literal["stacked", "per_matrix"] = "stacked"
    """stacked: same-shape matrices in one batch; per_matrix: one by one, the reference."""
    kernel: Literal["auto", "dense", "symmetric", "gram", "syrk"] = "auto"
    """auto chooses per shape and says why; one asked for by name runs or is refused."""
    ns_steps: Count = 5
    """Newton-Schulz iterations; beyond the table of coefficients its last row repeats."""
    ns_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Of the iteration and of what is sent for it."""
    ns_coefficients: (
        Literal["quintic", "polar_express", "keller_jordan"]
        | Annotated[tuple[CoefficientRow, ...], Field(min_length=1)]
    ) = "quintic"
    """A table by name, or rows of a, b, c for `a X + (b A + c A A) X`, A = X X^T."""
    replicate: Literal["share", "repeat"] = "share"
    """Whether replicas share the matrices among them or each does all."""
    max_stack_gib: PositiveFloat = 2.0
    """The most that a stack takes while it is orthogonalized, temporaries included."""
    split_gate_up: Bool = False
    """Orthogonalize gate and up each on their own rather than as one fused matrix."""
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

    @model_validator(mode="after")
    def _has_momentum_to_look_ahead_by(self) -> Self:
        if self.nesterov and not self.momentum:
            raise ValueError(
                "nesterov=true with momentum=0: there is no momentum to look ahead by; set "
                "momentum above 0, or nesterov=false"
            )
        return self


OptimConfig = Annotated[
    MuonConfig | AdamWConfig | SGDConfig | DionConfig, Field(discriminator="type")
]
