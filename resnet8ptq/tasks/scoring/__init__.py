"""Code that tasks share: metrics, scores, intervals, paired tests, and figures of results."""
