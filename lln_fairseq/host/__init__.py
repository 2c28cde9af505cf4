"""All that repairs fairseq or asks things of it: patches, settings, errors, checkpoints."""
