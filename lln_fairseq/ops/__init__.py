"""Attention as functions of tensors. This package imports only torch; its backends also use Triton and C."""
