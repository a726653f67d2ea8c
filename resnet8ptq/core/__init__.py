"""Cache, files, errors, text, machine and console: code that is independent of networks."""
