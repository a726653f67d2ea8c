"""Tests, in folders as the packages that they test; `helpers` is what they share."""
