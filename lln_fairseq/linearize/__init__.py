"""Replace the softmax attention of a trained encoder by a linear attention and train it to match."""
