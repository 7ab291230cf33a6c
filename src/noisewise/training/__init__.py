"""Models, per-sample gradients and local DP-SGD."""
