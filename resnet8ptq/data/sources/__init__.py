"""One module for each source of data, and what reads its files. `data.registry` lists them."""
