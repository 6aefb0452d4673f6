"""Configs: pydantic models of every section. Imports no torch.

Read `sft.py` first (the whole of a run), then the section you need; `base.py` says what strict
means, `load.py` how files and flags become a config.
"""

from trainer.config.dump import dump_config
from trainer.config.load import load_config
from trainer.config.sft import RunConfig, SFTConfig

__all__ = ["RunConfig", "SFTConfig", "dump_config", "load_config"]
