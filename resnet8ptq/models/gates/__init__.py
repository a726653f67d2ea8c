"""One module for each file format: what is refused before a library reads it."""
