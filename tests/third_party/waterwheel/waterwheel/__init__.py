"""A scheduling policy that lives outside Headrace."""
