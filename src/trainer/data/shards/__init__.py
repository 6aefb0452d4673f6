"""Token shards: documents as ids on disk, written once in parallel and memory-mapped on read.

A folder holds `manifest.json` (`manifest`), the tokenizer, and per shard the ids of its documents
and where each ends. `writer` makes one, `reader` reads it.
"""
