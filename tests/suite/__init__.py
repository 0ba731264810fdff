"""How the suite itself runs: what it keeps between runs, in which order it runs, what it tells of failures and costs.

Each file is a plugin of pytest that `tests/conftest.py` names. Nothing here changes what a test asserts.
"""
