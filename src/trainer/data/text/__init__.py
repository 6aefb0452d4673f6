"""Pretraining data: documents of any source to full packs in one global order.

A source is opened (`sources`) and read page by page (`pages`; `files`, `compressed`, `parquet`,
`hub` and `trainer.data.shards`), its documents are tokenized (`encode`) and placed (`documents`),
packed (`queue`), and the sources' packs mixed in exact proportions (`mixture`, `stream`). Start
with `setup`.
"""
