"""Fixtures of the tests of the web page. One browser for each file."""

from page_parts import browser, page

__all__ = ["browser", "page"]
