"""Reinforcement learning apart from model, data and loop: sampling, rewards, advantages.

Owns the engine's interface and the `local` engine (`engine.py`, `local.py`, `choice.py`), what a
completion is worth (`answers.py`, `rewards.py`, `scoring.py`, `advantages.py`) and the record of
a sample (`rollouts.py`). The policy losses are `trainer.losses.rl`; `trainer.loops.rl` joins all.
"""

from trainer.rl.rewards import Sample

__all__ = ["Sample"]
