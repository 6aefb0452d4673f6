import torch

from trainer.model.hf_names import published_pieces

STEM = "model.layers.3.mlp.experts."


def test_experts_get_one_tensor_each_and_projection():
    whole_EMD = torch.arange(2 * 6 * 4).reshape(2, 6, 4)
    pieces = published_pieces(STEM + "gate_up_proj", (2, 6, 4))
    assert [piece.name.removeprefix(STEM) for piece in pieces] == [
        "0.gate_proj.weight",
        "0.up_proj.weight",
        "1.gate_proj.weight",
        "1.up_proj.weight",
    ]
    for piece in pieces:
        assert piece.cut(whole_EMD).shape == piece.shape
    assert torch.equal(pieces[2].cut(whole_EMD), whole_EMD[1, :3])
    assert torch.equal(pieces[3].cut(whole_EMD), whole_EMD[1, 3:])


def test_down_projections_are_cut_by_expert():
    whole_EDF = torch.arange(2 * 4 * 3).reshape(2, 4, 3)
    pieces = published_pieces(STEM + "down_proj", (2, 4, 3))
    assert [piece.name for piece in pieces] == [
        STEM + "0.down_proj.weight",
        STEM + "1.down_proj.weight",
    ]
    assert torch.equal(pieces[1].cut(whole_EDF), whole_EDF[1])


def test_everything_else_keeps_its_name():
    for name in ("model.layers.0.mlp.gate.weight", "model.layers.0.mlp.down_proj.weight"):
        (piece,) = published_pieces(name, (4, 3))
        assert (piece.name, piece.shape) == (name, (4, 3))
        assert torch.equal(piece.cut(torch.ones(4, 3)), torch.ones(4, 3))
