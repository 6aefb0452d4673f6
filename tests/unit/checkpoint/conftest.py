from collections.abc import Iterator

import pytest
from torch.distributed.device_mesh import DeviceMesh

from tests.support.meshes import one_rank_mesh


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with one_rank_mesh() as mesh:
        yield mesh
