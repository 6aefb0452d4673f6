"""The loop of reinforcement learning: sample, step, log, evaluate, save.

Read `run.py` first, then `collect.py` (from prompts to rollouts) and `policy.py` (from rollouts to
an optimizer step); `prompts.py`, `judge.py` and `batches.py` make what these take.
"""

from trainer.loops.rl.run import run_rl

__all__ = ["run_rl"]
