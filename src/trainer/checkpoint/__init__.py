"""Checkpoints: the whole state of a run, complete or absent, resharded on load.

Read `store.py` first.
"""

from trainer.checkpoint.config_changes import ConfigChange, compare_configs, refusal_message
from trainer.checkpoint.store import CheckpointStore

__all__ = ["CheckpointStore", "ConfigChange", "compare_configs", "refusal_message"]
