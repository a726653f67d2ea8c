"""Shared by the tasks: metrics, scores, intervals and paired tests, and the figures of classes."""
