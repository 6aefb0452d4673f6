"""Checkpoints: the whole state of a run, complete or absent, resharded on load.

Read `store.py` first; `start.py` is the start of another run from one.
"""

from trainer.checkpoint.config_changes import ConfigChange, compare_configs, refusal_message
from trainer.checkpoint.start import start_model
from trainer.checkpoint.store import CheckpointStore

__all__ = ["CheckpointStore", "ConfigChange", "compare_configs", "refusal_message", "start_model"]
