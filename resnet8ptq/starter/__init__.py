"""The first files of a project of one's own."""
