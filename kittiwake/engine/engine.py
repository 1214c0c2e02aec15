"""The engine: requests in and out at any time, one step a call."""
