"""Checks of untrusted files, one module for each format, before a library reads them."""
