"""How much device memory a training step takes, moment by moment: for `trainer plan`.

Owns the moments at which the model's side of a step peaks, and what exists at each. What autograd
keeps is `activations.py`'s count; the optimizer's own temporaries come from
`trainer.optim.pricing`. Routing is taken as even.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from transformers import Qwen3MoeConfig

from trainer.cli.planning.activations import FP32_BYTES, Activations, Shape, count_activations
from trainer.cli.planning.parameters import LayerUnits, Unit, gather_units
from trainer.model.architecture import QwenConfig
from trainer.model.flops import is_moe_layer
from trainer.optim.spec import ParameterSpec

MIB, GIB = 2**20, 2**30
USABLE = 0.92
"""Part of a GPU's memory that tensors may take: the rest is CUDA's, NCCL's and fragmentation."""


@dataclass(frozen=True)
class Moment:
    """Bytes beside weights and optimizer state at one moment of forward and backward.

    Attributes:
        name: When that is.
        gradients: Sharded gradients that exist by then.
        gathered: Weights gathered for computing, prefetched ones included.
        reduced: Unsharded gradients and the buffers that reduce them.
        activations: Kept for the backward.
        passing: Logits of a chunk, or rows on their way to experts and back.
    """

    name: str
    gradients: int
    gathered: int
    reduced: int
    activations: int
    passing: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.gradients + self.gathered + self.reduced + self.activations + self.passing


@dataclass(frozen=True)
class StepMemory:
    """Bytes on one rank while a step runs.

    Attributes:
        weights: fp32 masters, held throughout.
        state: Of the optimizer, held throughout.
        worst: The moment of forward and backward that takes most.
        gradients: All of this rank's, as the optimizer finds them.
        optimizer: Temporaries of the optimizer's step.
    """

    weights: int
    state: int
    worst: Moment
    gradients: int
    optimizer: int

    @property
    def model_peak(self) -> int:
        """The most during forward and backward."""
        return self.weights + self.state + self.worst.total

    @property
    def optimizer_peak(self) -> int:
        """The most during the optimizer's step."""
        return self.weights + self.state + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        """The most during a step."""
        return max(self.model_peak, self.optimizer_peak)


def step_memory(
    hf_config: QwenConfig,
    specs: Sequence[ParameterSpec],
    shape: Shape,
    *,
    num_local: int,
    state_bytes: int,
    optimizer_bytes: int,
) -> StepMemory:
    """Count a step's memory on one rank.

    Args:
        hf_config: The network.
        specs: Its parameters on this rank.
        shape: The micro-batch.
        num_local: Elements of all parameters on this rank.
        state_bytes: Of the optimizer's state.
        optimizer_bytes: Of the optimizer's temporaries.
    """
    moments = _moments(hf_config, specs, shape)
    return StepMemory(
        weights=num_local * FP32_BYTES,
        state=state_bytes,
        worst=max(moments, key=lambda moment: moment.total),
        gradients=num_local * FP32_BYTES,
        optimizer=optimizer_bytes,
    )


def _moments(
    hf_config: QwenConfig, specs: Sequence[ParameterSpec], shape: Shape
) -> Iterator[Moment]:
    """Yield the moments that may be the worst, in order.

    Where a step has several micro-batches, it is the second: gradients of the first are held.
    """
    ends, layers = gather_units(specs)
    kept = count_activations(hf_config, shape)
    accumulates = shape.num_micro_batches > 1
    held = 0 if not accumulates else sum(_shard_bytes(unit) for unit in _all_units(ends, layers))
    # FSDP keeps the input of a reduction until the next one, the last one's into the next forward.
    waiting = ends.numel * FP32_BYTES if accumulates else 0
    head_grad = hf_config.vocab_size * hf_config.hidden_size * shape.compute_bytes
    yield _loss_moment(hf_config, shape, ends, layers, kept, held, waiting)
    for index in reversed(range(len(layers))):
        backward = _LayerBackward(index, ends, layers, kept, shape, held, head_grad)
        rows = _passing_rows(hf_config, index, shape)
        yield from backward.moments(rows, waiting)
        waiting = layers[index].dense.numel * FP32_BYTES
        held += 0 if accumulates else sum(_shard_bytes(unit) for unit in layers[index].units)
    yield Moment(
        "the last reduction",
        gradients=held,
        gathered=0,
        reduced=_reduction_bytes(ends, shape),
        activations=0,
        passing=0,
    )


def _all_units(ends: Unit, layers: Sequence[LayerUnits]) -> list[Unit]:
    return [ends, *(unit for layer in layers for unit in layer.units)]


def _shard_bytes(unit: Unit) -> int:
    return -(-unit.numel // unit.num_shards) * FP32_BYTES


def _reduction_bytes(unit: Unit, shape: Shape) -> int:
    """Return the most while a unit's gradients are reduced.

    The gradients with their fp32 copy in the order of the shards, then that copy with its sum.
    """
    copy = unit.numel * FP32_BYTES
    return copy + max(unit.numel * shape.compute_bytes, _shard_bytes(unit))


def _loss_moment(
    hf_config: QwenConfig,
    shape: Shape,
    ends: Unit,
    layers: Sequence[LayerUnits],
    kept: Activations,
    held: int,
    waiting: int,
) -> Moment:
    """Return the moment when all activations exist and the log-probs' backward runs."""
    gathered = ends.numel + (sum(layer.numel for layer in layers) if shape.keeps_gathered else 0)
    return Moment(
        "the backward of the loss",
        gradients=held,
        gathered=gathered * shape.compute_bytes,
        reduced=waiting + _head_gradient_bytes(hf_config, shape),
        activations=kept.after_forward,
        passing=logits_bytes(hf_config, shape),
    )


def _head_gradient_bytes(hf_config: QwenConfig, shape: Shape) -> int:
    """Return the bytes of the output projection's gradient while it adds up over chunks.

    A chunk's part as it is computed, and where there are several their sum in fp32.
    """
    numel = hf_config.vocab_size * hf_config.hidden_size
    return numel * (shape.compute_bytes + (FP32_BYTES if shape.num_chunks > 1 else 0))


@dataclass(frozen=True)
class _LayerBackward:
    """The backward of one layer, with what it finds.

    Attributes:
        index: Of the layer.
        ends: The unit of embeddings and output projection, which stays gathered.
        layers: The units of all layers.
        kept: The activations.
        shape: The micro-batch.
        held: Bytes of sharded gradients.
        head_grad: Bytes of the output projection's gradient, reduced only at the end.
    """

    index: int
    ends: Unit
    layers: Sequence[LayerUnits]
    kept: Activations
    shape: Shape
    held: int
    head_grad: int

    def moments(self, rows: int, waiting: int) -> Iterator[Moment]:
        """Yield: the MLP's backward begins; it is done, and its gradients wait; the layer's end.

        Args:
            rows: Bytes in passing while the MLP's backward begins.
            waiting: Bytes of the latest reduction's input, kept until the next.
        """
        layer, size = self.layers[self.index], self.shape.compute_bytes
        activations = self.kept.layers[self.index]
        before = self.kept.before_layer(self.index)
        begin = Moment(
            f"the backward of layer {self.index}",
            gradients=self.held,
            gathered=self._gathered(layer.numel),
            reduced=self.head_grad + waiting,
            activations=before + activations.mlp + activations.rest,
            passing=rows,
        )
        after_mlp = replace(begin, activations=before + activations.rest, passing=0)
        yield begin
        if layer.experts is None:
            reduced = self.head_grad + waiting + layer.dense.numel * size
            yield replace(after_mlp, reduced=reduced)
        else:
            reduced = self.head_grad + _reduction_bytes(layer.experts, self.shape)
            gathered = self._gathered(layer.dense.numel)
            yield replace(after_mlp, reduced=reduced, gathered=gathered)
        yield replace(
            after_mlp,
            gathered=self._gathered(0),
            reduced=self.head_grad + _reduction_bytes(layer.dense, self.shape),
            activations=before,
        )

    def _gathered(self, num_here: int) -> int:
        """Return bytes gathered while `num_here` elements of this layer are."""
        earlier = self.layers[: self.index]
        if self.shape.keeps_gathered:
            ahead = sum(layer.numel for layer in earlier)
        else:
            # The layer before is gathered meanwhile, unless this rank has all of it.
            units = [unit for layer in earlier[-1:] for unit in layer.units]
            ahead = sum(unit.numel for unit in units if unit.num_shards > 1)
        return (self.ends.numel + num_here + ahead) * self.shape.compute_bytes


def logits_bytes(hf_config: QwenConfig, shape: Shape) -> int:
    """Return the bytes of logits that exist at once on a GPU, where one kernel does a chunk.

    A chunk's logits and their gradient.
    """
    rows = min(shape.logits_chunk_tokens, shape.num_tokens)
    return 2 * rows * hf_config.vocab_size * shape.compute_bytes


def _passing_rows(hf_config: QwenConfig, layer: int, shape: Shape) -> int:
    """Return the bytes in passing while a layer's MLP begins its backward."""
    size = shape.compute_bytes
    match hf_config:
        case Qwen3MoeConfig() if is_moe_layer(hf_config, layer):
            # Gradients of the results, and times the results; rows received, if sent elsewhere.
            num_copies = 3 if shape.is_dispatched else 2
            copies = num_copies * hf_config.num_experts_per_tok
            per_token = (copies + 2) * hf_config.hidden_size * size
        case _:
            hidden = hf_config.intermediate_size
            assert hidden is not None, "a dense layer has a width"
            # Gradients of the product and of both factors; of the residual stream.
            per_token = (3 * hidden + 2 * hf_config.hidden_size) * size
    return shape.num_tokens * per_token
