"""The round loop, its executors, checkpoints and results."""
