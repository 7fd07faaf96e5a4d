"""Stages 3 and 4 of 7: which block of the cache belongs to whom. Before it: ``scheduler``. After it: ``kernels``."""

from octavo.blocks.block_manager import BlockManager
from octavo.blocks.block_pool import BlockPool
from octavo.blocks.block_stats import BlockStats, SharingStats
from octavo.blocks.block_table import BlockTable, blocks_for

__all__ = ["BlockManager", "BlockPool", "BlockStats", "BlockTable", "SharingStats", "blocks_for"]
