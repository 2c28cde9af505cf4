"""Programs of scripts/test_engines.sh, which compare lln_fairseq.engines with `predict` and `encode`."""
