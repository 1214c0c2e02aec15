"""Text on its way in and out: tokenizers, incremental decoding, stop strings. Knows no model."""
