"""Code that tasks share: metrics, scores, intervals and paired tests, and the figures of
classes.
"""
