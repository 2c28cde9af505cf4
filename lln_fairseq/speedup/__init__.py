"""`lln-fairseq speedup`: find the attention and the runtime in which a trained model is fastest and still good."""
