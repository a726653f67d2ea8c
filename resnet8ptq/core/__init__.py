"""Cache, files, errors, text, machine, console and other code that runs no network."""
