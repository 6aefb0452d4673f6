"""The network: transformers' Qwen3 with our experts, built on a mesh by `setup_model`.

Knows nothing of data, losses or optimizers. Read `setup.py`, then `causal_lm.py` and `moe.py`.
"""

from trainer.model.outputs import TokenOutputs
from trainer.model.setup import setup_model

__all__ = ["TokenOutputs", "setup_model"]
