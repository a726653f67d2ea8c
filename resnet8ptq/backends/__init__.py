"""The frameworks that quantize: each writes an artifact and loads it again."""
