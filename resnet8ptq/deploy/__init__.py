"""From a run to what runs elsewhere: a folder with the model and its check, a registered model."""
