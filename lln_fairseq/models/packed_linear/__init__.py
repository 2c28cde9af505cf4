"""Linear layers that a CPU computes in float32, bfloat16 or int8, in the fastest way that it has, for inference.

`precisions` has the ways of computing them, `choice` times these on the processor at hand, `layer` is the layer with a
packed copy of its weights, and `pack` prepares a model.
"""
