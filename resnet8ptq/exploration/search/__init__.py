"""The search for settings: the steps that it tries, their order, and advice before any run."""
