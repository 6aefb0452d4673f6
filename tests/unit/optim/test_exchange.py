import weakref

import torch
import torch.distributed as dist

from tests.support.threads import run_threads
from trainer.optim.exchange import Exchange
from trainer.optim.timing import PhaseTimer

CPU = torch.device("cpu")
# Elements from rank (row) to rank (column): uneven, some none.
SIZES = [[3, 0, 1], [2, 2, 0], [0, 5, 4]]


def message(sender, receiver) -> torch.Tensor:
    return 100.0 * sender + 10.0 * receiver + torch.arange(SIZES[sender][receiver])


def all_to_all():
    rank, timer = dist.get_rank(), PhaseTimer(CPU)
    exchange = Exchange(CPU, timer)
    transfer = exchange.launch_all_to_all(
        torch.cat([message(rank, to) for to in range(3)]),
        SIZES[rank],
        [SIZES[sender][rank] for sender in range(3)],
        dist.group.WORLD,
    )
    received = exchange.wait(transfer)
    timer.end_step()
    times = timer.last_step.read()
    assert times["optim/exchange_ms"] >= times["optim/exchange_exposed_ms"] > 0
    return received.tolist(), exchange.num_launched


def test_every_part_reaches_its_rank_in_the_order_of_senders() -> None:
    for rank, (received, num_launched) in enumerate(run_threads(3, all_to_all)):
        assert received == torch.cat([message(sender, rank) for sender in range(3)]).tolist()
        assert num_launched == 1


def gather():
    exchange = Exchange(CPU, PhaseTimer(CPU))
    part = torch.arange(2.0) + 10 * dist.get_rank()
    return exchange.wait(exchange.launch_all_gather(part, dist.group.WORLD)).tolist()


def test_parts_are_gathered_in_the_order_of_ranks() -> None:
    assert run_threads(3, gather) == [[0, 1, 10, 11, 20, 21]] * 3


def is_send_buffer_kept():
    exchange = Exchange(CPU, PhaseTimer(CPU))
    send = torch.ones(2)
    alive = weakref.ref(send)
    transfer = exchange.launch_all_to_all(send, [2], [2], dist.group.WORLD)
    del send
    was_kept = alive() is not None
    exchange.wait(transfer)
    del transfer
    return was_kept, alive() is None


def test_a_transfer_keeps_what_it_sends_and_no_longer() -> None:
    assert run_threads(1, is_send_buffer_kept) == [(True, True)]
