"""The frameworks that quantize; each writes an artifact and runs it."""
