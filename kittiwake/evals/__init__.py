"""Measures of a model's answers: one file a measure. They drive the public ``LLM`` and print nothing."""
