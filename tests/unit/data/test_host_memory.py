"""Numbers with zeros too many are told before memory runs out, and no others."""

import pytest

from trainer.config.data import BatchConfig
from trainer.data import host_memory
from trainer.data.host_memory import check_packs, host_bytes
from trainer.errors import UserError


@pytest.fixture(autouse=True)
def _a_small_host(monkeypatch) -> None:
    monkeypatch.setattr(host_memory, "host_bytes", lambda: 20 * 1024 * 100)


def test_what_fits_is_let_through() -> None:
    check_packs(BatchConfig(seq_len=1024, batch_size=100, micro_batch_size=10**12))


def test_a_batch_that_cannot_fit_is_refused_with_the_largest_that_does() -> None:
    message = r"data\.batch_size=101: a step's packs of 1024 tokens .* stay well below 100$"
    with pytest.raises(UserError, match=message):
        check_packs(BatchConfig(seq_len=1024, batch_size=101))


def test_a_pack_that_cannot_fit_is_refused_by_its_length() -> None:
    with pytest.raises(UserError, match=r"data\.seq_len=1000000000: .* stay well below 102400$"):
        check_packs(BatchConfig(seq_len=10**9, batch_size=1))


def test_the_memory_of_this_machine_is_known(monkeypatch) -> None:
    monkeypatch.undo()
    assert 2**28 < host_bytes() < 2**50
