"""Depthwise causal convolution with its activation."""

from .op import causal_conv1d as causal_conv1d, causal_conv1d_step as causal_conv1d_step
