"""Draft heads trained on a frozen target: `jaxserve train-draft`, and the demo model's own heads.
"""
