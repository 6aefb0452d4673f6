"""Ranks: the mesh, sharding policy, expert dispatch and gradient norm. Imports only the config.

Read `mesh.py` first.
"""

from trainer.parallel.mesh import build_mesh

__all__ = ["build_mesh"]
