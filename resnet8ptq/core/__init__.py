"""Cache, files, errors, text, machine and console; knows nothing of networks."""
