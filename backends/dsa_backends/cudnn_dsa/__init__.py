"""cuDNN frontend's sparse attention: backward, forward where it has one, indexer selection and indexer loss."""
