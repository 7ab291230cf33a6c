"""A plain PyTorch app for Flower."""
