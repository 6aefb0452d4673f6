from trainer.optim.agreement import Agreement, plan_agreements
from trainer.optim.spec import AxisPlacement, MeshSpec, ParameterSpec

R, S0 = AxisPlacement(), AxisPlacement(0)
DENSE = MeshSpec(("dp_replicate", "dp_shard"), (2, 4), (1, 3))
EXPERT = MeshSpec(("dp_replicate", "dp_shard_mod_ep", "ep"), (2, 2, 2), (1, 1, 1))


def spec(mesh, placements) -> ParameterSpec:
    return ParameterSpec("w", (8, 8), "float32", mesh, placements)


def test_meshes_over_the_same_ranks_agree_in_one_reduction_and_copies_by_axes() -> None:
    found = plan_agreements(
        [
            spec(DENSE, (R, S0)),
            spec(EXPERT, (R, S0, S0)),
            spec(None, ()),
            spec(DENSE, (R, R)),
            spec(DENSE, (R, S0)),
        ]
    )
    assert found.meshes == (Agreement(DENSE, (0, 1), (0, 1, 3, 4)),)
    assert found.copies == (
        Agreement(DENSE, (0,), (0, 4)),
        Agreement(EXPERT, (0,), (1,)),
        Agreement(DENSE, (0, 1), (3,)),
    )
    assert len(found) == 4


def test_other_ranks_agree_apart() -> None:
    elsewhere = MeshSpec(("dp_shard",), (4,), (0,), members=1)
    found = plan_agreements([spec(DENSE, (S0, S0)), spec(elsewhere, (S0,))])
    assert [agreement.parameters for agreement in found.meshes] == [(0,), (1,)]
    assert found.copies == ()


def test_one_rank_has_nobody_to_agree_with() -> None:
    alone = MeshSpec(("dp_replicate", "dp_shard"), (1, 1), (0, 0))
    assert len(plan_agreements([spec(alone, (R, S0)), spec(None, ())])) == 0


def test_axes_of_one_rank_hold_no_copies() -> None:
    mesh = MeshSpec(("dp_replicate", "dp_shard"), (1, 4), (0, 2))
    assert plan_agreements([spec(mesh, (R, S0))]).copies == ()
