"""What the programs in examples/ share: options, signals, checkpoints, the training loop."""
