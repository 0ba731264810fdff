"""Values that every floor shares and that need no library: keys of content, forms of answers, extensions, chips."""
