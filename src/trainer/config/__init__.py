"""Configs: pydantic models of every section. Imports no torch.

Read `sft.py` first (the whole of a run), then the section you need; `base.py` says what strict means.
"""

from trainer.config.sft import RunConfig, SFTConfig

__all__ = ["RunConfig", "SFTConfig"]
