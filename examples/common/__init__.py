"""What examples/ and experiments/ share: options, signals, checkpoints, the trainer, images."""
