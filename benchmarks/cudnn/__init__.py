"""cuDNN's own interface to recurrent networks: functions, descriptors and calls."""
