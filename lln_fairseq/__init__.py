"""Linear Log-Normal attention for fairseq's RoBERTa (arXiv 2311.13541); also the fairseq user directory."""
