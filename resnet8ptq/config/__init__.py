"""The settings of a run: their schema, their ranges, and loading them."""
