"""The search for regions: the order of products, growth by one node at a time, and what forbids a step."""
