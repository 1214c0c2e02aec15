"""Checkpoints: bytes on disk → named tensors, and bundles. Knows no model family; runs no code from a file."""
