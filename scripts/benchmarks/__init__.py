"""Benchmarks of the time and memory of attentions, models and kernels: run `python -m scripts.benchmarks.NAME`."""
