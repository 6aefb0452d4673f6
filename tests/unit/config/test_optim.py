import pytest
from pydantic import ValidationError

from trainer.config.optim import SGDConfig


def test_nesterov_needs_momentum() -> None:
    assert SGDConfig(momentum=0.9, nesterov=True).nesterov
    with pytest.raises(ValidationError, match="nesterov=true with momentum=0"):
        SGDConfig(nesterov=True)
