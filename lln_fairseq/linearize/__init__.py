"""Turn a trained softmax encoder into one with a linear attention."""
