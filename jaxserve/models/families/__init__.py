"""A module per family: the adapter of its config.json and the table of its weights. Registry: `models.family`."""
