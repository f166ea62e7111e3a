"""Depthwise convolutions, as the layers of MobileNetV1 have them."""
