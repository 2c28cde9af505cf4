"""Use of trained models: load a checkpoint, score it on a data set, and predict from text."""

from lln_fairseq import register

# Before any module of this package imports fairseq. A spawned process that receives a model imports this first.
register()
