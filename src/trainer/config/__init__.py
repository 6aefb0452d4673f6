"""Configs: pydantic models of every section. Imports no torch.

Read `sft.py` first (the whole of a run), then the section you need; `base.py` says what strict
means, `load.py` how files and flags become a config.
"""

from trainer.config.dump import dump_config
from trainer.config.load import load_config
from trainer.config.pretrain import PretrainConfig
from trainer.config.rl import RLConfig
from trainer.config.sft import RunConfig, SFTConfig, SupervisedConfig

__all__ = [
    "PretrainConfig",
    "RLConfig",
    "RunConfig",
    "SFTConfig",
    "SupervisedConfig",
    "dump_config",
    "load_config",
]
