"""How fast and how large: attentions, models, kernels. Run as `python -m scripts.benchmarks.NAME`."""
