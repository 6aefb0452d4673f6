"""The optimizers. Start with `setup.py`, then `muon.py`, `plan.py` and `pipeline.py`.

Knows named parameters, their meshes and its config; nothing of models, data or loops.
"""

from trainer.optim.muon import Muon
from trainer.optim.newton_schulz import newton_schulz, newton_schulz_symmetric
from trainer.optim.options import MuonOptions
from trainer.optim.setup import setup_optimizer

__all__ = ["Muon", "MuonOptions", "newton_schulz", "newton_schulz_symmetric", "setup_optimizer"]
