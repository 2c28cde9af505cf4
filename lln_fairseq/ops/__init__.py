"""Attention as functions of tensors. Imports torch (and triton, where it is used) and nothing else."""
