"""The search for regions: order, growth by one node at a time, and regions that share a launch."""
