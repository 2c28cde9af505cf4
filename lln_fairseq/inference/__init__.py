"""Use of trained models: load a checkpoint, score it on a data set, and predict from text."""
