"""Measures of a model's speed. A case is checked for exact bits before it is timed."""
