"""Published Qwen3-MoE tensor names: one tensor per expert and projection, where ours are fused.

Owns the mapping from a parameter of transformers' model to what a published checkpoint holds, and
nothing else; every other name is the same in both. Read `export.py` for writing them.
"""

from dataclasses import dataclass

from torch import Tensor

GATE_UP = ".mlp.experts.gate_up_proj"
DOWN = ".mlp.experts.down_proj"


@dataclass(frozen=True)
class Piece:
    """One published tensor as a part of a parameter.

    Attributes:
        name: Its published name.
        shape: Its shape.
        index: How it is cut from the parameter; empty for the whole.
    """

    name: str
    shape: tuple[int, ...]
    index: tuple[int | slice, ...] = ()

    def cut(self, whole: Tensor) -> Tensor:
        """Return this piece of the whole parameter, sharing its memory."""
        return whole[self.index] if self.index else whole


def published_pieces(name: str, shape: tuple[int, ...]) -> list[Piece]:
    """Return the published tensors that a parameter becomes.

    Args:
        name: Parameter name.
        shape: Its global shape; `[E, 2F, D]` or `[E, D, F]` for a stack of experts.
    """
    if name.endswith(GATE_UP):
        num_experts, double_F, D = shape
        F, stem = double_F // 2, name.removesuffix("gate_up_proj")
        return [
            Piece(f"{stem}{expert}.{half}_proj.weight", (F, D), (expert, rows))
            for expert in range(num_experts)
            for half, rows in (("gate", slice(0, F)), ("up", slice(F, 2 * F)))
        ]
    if name.endswith(DOWN):
        stem = name.removesuffix("down_proj")
        return [
            Piece(f"{stem}{expert}.down_proj.weight", shape[1:], (expert,))
            for expert in range(shape[0])
        ]
    return [Piece(name, shape)]
