"""The recipes: one run from its config to its result, and the analyses."""
