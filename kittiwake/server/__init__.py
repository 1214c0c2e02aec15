"""The engine behind HTTP: processes, transport, the API."""
