"""The search for regions: their order, growth by one node at a time, and what forbids a step."""
