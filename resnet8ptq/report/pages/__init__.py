"""The pages of a report and their figures: Markdown, HTML, and the run pages of MLflow."""
