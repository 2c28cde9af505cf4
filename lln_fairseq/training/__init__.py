"""What happens around the training loop of fairseq: resume, checks, logging, and the program `train`."""
