from math import prod

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.support.sharding import cut, distribute
from tests.support.threads import run_threads
from trainer.optim import Muon, MuonOptions
from trainer.optim.flight import StepInputs
from trainer.optim.state import local

# Powers of two, so that integer weights stay exact.
GROUP = {
    "lr": 0.5, "mu": 0.5, "weight_decay": 0.0, "nesterov": False, "flatten": False,
    "cautious_wd": False,
}  # fmt: skip


def signs_of_sums(stack_BMN) -> torch.Tensor:
    """Stand in for orthogonalization: exact, scale-free, and wrong on anything but whole matrices.

    An entry is the sign of its row's sum times that of its column's. Like orthogonalization it
    follows a permutation of rows or columns, which strided slabs are joined to.
    """
    sums_BMN = stack_BMN.double()
    signs_BMN = sums_BMN.sum(1, keepdim=True).sign() * sums_BMN.sum(2, keepdim=True).sign()
    return signs_BMN.to(stack_BMN.dtype)


def integers(shape, seed) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).float()


class Spy:
    """Counts what the step asks for."""

    def __init__(self) -> None:
        self.num_matrices = self.num_meanwhile = 0

    def orthogonalize(self, stack_BMN, kernel, *, is_normalized, targets) -> torch.Tensor:
        self.num_matrices += len(stack_BMN)
        return signs_of_sums(stack_BMN)

    def meanwhile(self) -> None:
        self.num_meanwhile += 1


def step(world, gates) -> tuple[int, list[bool], list[bool], bool]:
    """Take one step; return matrices seen, equality of weights and of momenta, and of counts."""
    sizes, placements, shapes, options = world
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b", "c")[: len(sizes)])
    full = [integers(shape, seed) for seed, shape in enumerate(shapes)]
    gradients = [integers(shape, 100 + seed) for seed, shape in enumerate(shapes)]
    parameters = [torch.nn.Parameter(distribute(w, mesh, placements)) for w in full]
    momenta = [distribute(w * 2, mesh, placements) for w in full]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = distribute(gradient, mesh, placements)
    optimizer = Muon(parameters, adjust_lr=None, options=MuonOptions(**options))
    stacked, spy = optimizer._stacked, Spy()
    stacked._orthogonalize = spy.orthogonalize
    with torch.no_grad():
        stacked.run(
            StepInputs(parameters, momenta.__getitem__, [GROUP], gates, None), spy.meanwhile
        )
    assert spy.num_meanwhile == 1
    right_weights, right_momenta = [], []
    for i, (weight, gradient, gate) in enumerate(zip(full, gradients, gates, strict=True)):
        momentum = weight * 2
        if gate is None or gate:
            momentum = momentum * 0.5 + gradient
            matrices_BMN = momentum.view(-1, *momentum.shape[-2:])
            weight = weight - 0.5 * signs_of_sums(matrices_BMN).view(weight.shape)
        shard = [cut(t, sizes, mesh.get_coordinate(), placements) for t in (weight, momentum)]
        right_weights.append(torch.equal(local(parameters[i].data), shard[0]))
        right_momenta.append(torch.equal(local(momenta[i]), shard[1]))
    has_right_count = optimizer._exchange.num_launched == optimizer.plan.num_exchanges()
    return spy.num_matrices, right_weights, right_momenta, has_right_count


@st.composite
def worlds(draw):
    sizes = draw(st.sampled_from([(1,), (2,), (3,), (5,), (2, 2), (2, 3), (1, 2, 2), (2, 2, 2)]))
    num_dims = draw(st.integers(2, 4))
    dims = st.integers(0, num_dims - 1)
    placement = st.one_of(
        st.just(Replicate()),
        dims.map(Shard),
        st.builds(lambda dim, factor: _StridedShard(dim, split_factor=factor), dims, dims),
    )
    placements = tuple(
        _StridedShard(p.dim, split_factor=2) if isinstance(p, _StridedShard) else p
        for p in (draw(placement) for _ in sizes)
    )
    shape = st.tuples(*[st.sampled_from([1, 2, 3, 5, 8])] * num_dims)
    shapes = draw(st.lists(shape, min_size=1, max_size=3)) * draw(st.integers(1, 2))
    options = {
        "ns_dtype": draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        "replicate": draw(st.sampled_from(["share", "repeat"])),
        "max_stack_gib": draw(st.sampled_from([2.0, 1e-7, 1e-6])),
    }
    return sizes, placements, shapes, options


def expected_matrices(world) -> int:
    """How many matrices all ranks together orthogonalize."""
    sizes, placements, shapes, options = world
    repeats = prod(
        size for size, p in zip(sizes, placements, strict=True) if isinstance(p, Replicate)
    )
    count = sum(prod(shape[:-2]) for shape in shapes)
    return count * (repeats if options["replicate"] == "repeat" else 1)


def is_refused(world) -> bool:
    """Whether several axes cut the matrices themselves, told from sizes and dims alone."""
    sizes, placements, shapes, _ = world
    num_stack_dims = len(shapes[0]) - 2
    cutting = [
        p
        for size, p in zip(sizes, placements, strict=True)
        if size > 1 and not isinstance(p, Replicate) and p.dim >= num_stack_dims
    ]
    return len(cutting) > 1


@settings(max_examples=50, deadline=None)
@given(world=worlds(), gate_choices=st.lists(st.sampled_from([None, True, False]), min_size=6))
def test_any_world_takes_the_step_of_one_process(world, gate_choices) -> None:
    assume(not is_refused(world))
    gates = [None if g is None else torch.tensor(g) for g in gate_choices[: len(world[2])]]
    outcomes = run_threads(prod(world[0]), step, world, gates)
    assert sum(num_matrices for num_matrices, *_ in outcomes) == expected_matrices(world)
    for _, weights, momenta, has_right_count in outcomes:
        assert all(weights)
        assert all(momenta)
        assert has_right_count


def transfers_during_orthogonalization() -> list[int]:
    """Return how many transfers are under way whenever a chunk is orthogonalized."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    parameters = [torch.nn.Parameter(distribute(torch.eye(8), mesh, (Shard(0),))) for _ in range(8)]
    for parameter in parameters:
        parameter.grad = distribute(torch.eye(8), mesh, (Shard(0),))
    options = MuonOptions(max_stack_gib=6 * 8 * 8 * 2 / 2**30)
    optimizer = Muon(parameters, options=options)
    exchange, stacked = optimizer._exchange, optimizer._stacked
    wait, counts, num_waited = exchange.wait, [], 0

    def count_wait(transfer) -> torch.Tensor:
        nonlocal num_waited
        num_waited += 1
        return wait(transfer)

    def count_under_way(stack_BMN, kernel, *, is_normalized, targets) -> torch.Tensor:
        counts.append(exchange.num_launched - num_waited)
        return stack_BMN

    exchange.wait, stacked._orthogonalize = count_wait, count_under_way
    optimizer.step()
    assert exchange.num_launched == num_waited == 2 * len(counts)
    return counts


def test_a_chunk_is_orthogonalized_while_its_neighbours_are_exchanged() -> None:
    # Of four chunks, each but the last has the next one coming in.
    for counts in run_threads(2, transfers_during_orthogonalization):
        assert len(counts) == 4
        assert min(counts[:-1]) >= 1
