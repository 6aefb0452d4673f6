"""A trainer for Qwen3-style mixture-of-experts models around a distributed Muon optimizer.

Shape suffixes, one meaning each in the whole project (`x_TD` is tokens by model width):

    T  tokens, flattened over packs     P  packs (sequences of fixed length) in a micro-batch
    S  sequence length of a pack        D  model width
    F  expert hidden width              E  experts
    K  experts per token                H  attention heads
    V  vocabulary                       B  matrices in a batch (a stack)
    M  rows of a matrix                 N  columns of a matrix

A shard keeps the letters and gains the prefix `local_`.

Importing this package, or `trainer.config`, does not import torch.
"""
