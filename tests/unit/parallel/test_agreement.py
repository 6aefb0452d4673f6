import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.meshes import one_rank_mesh
from trainer.errors import UserError
from trainer.parallel.agreement import Ranks


@pytest.fixture(autouse=True)
def _group():
    with one_rank_mesh():
        yield


def answers(ranks: Ranks, *given: str | None) -> Ranks:
    """Let `ranks` hear these answers, as if each came from a rank of its own."""
    ranks.size = len(given)
    ranks.is_any = lambda _: any(answer is not None for answer in given)
    ranks.gather = lambda _: list(given)
    return ranks


def test_no_error_agrees_without_a_word_on_the_wire():
    ranks = Ranks()
    ranks.gather = lambda _: pytest.fail("messages were gathered though there is none")
    ranks.agree(None)


@pytest.mark.parametrize(
    ("backends", "device"), [("cpu:gloo,cuda:nccl", "cpu"), ("cuda:nccl", "cuda")], ids=str
)
def test_a_flag_lies_where_the_group_can_reduce_it(monkeypatch, backends, device):
    made: list[str] = []
    monkeypatch.setattr(dist, "get_backend_config", lambda _: backends)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(
        torch, "tensor", lambda fact, dtype, device: made.append(device) or np.int32(fact)
    )
    assert Ranks().is_any(True)
    assert made == [device]


def test_error_is_raised_in_the_kind_asked_for():
    with pytest.raises(UserError, match=r"^bad value$"):
        Ranks().agree("bad value", UserError)


def test_one_rank_s_error_is_named_with_its_rank():
    with pytest.raises(RuntimeError, match=r"^rank 1: disk full$"):
        answers(Ranks(), None, "disk full").agree(None)


def test_errors_are_grouped_by_what_they_say():
    with pytest.raises(RuntimeError, match=r"^rank 0, 2: full; rank 3: read-only$"):
        answers(Ranks(), "full", None, "full", "read-only").agree("full")


def test_same_error_everywhere_is_one_message():
    with pytest.raises(RuntimeError, match=r"^no such file$"):
        answers(Ranks(), *["no such file"] * 4).agree("no such file")


def test_first_rank_s_result_and_failure_reach_all():
    ranks = Ranks.with_own_group()
    assert ranks.on_first(lambda: 7) == 7

    def fail() -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        ranks.on_first(fail, OSError)


def test_what_runs_together_gives_every_rank_its_own_result():
    assert Ranks().together(lambda: 7) == 7


def test_a_users_error_of_another_rank_is_raised_here_too():
    ranks = answers(Ranks(), None, "data.source.path='x' does not exist")
    with pytest.raises(UserError, match=r"^rank 1: data\.source\.path='x' does not exist$"):
        ranks.together(lambda: 7)


def test_other_failures_are_not_dressed_as_a_users_error():
    def fail() -> None:
        raise KeyError("ours")

    with pytest.raises(KeyError, match="ours"):
        Ranks().together(fail)
