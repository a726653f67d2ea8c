"""Samples and labels, and which of them calibrate, are held out or are scored."""
