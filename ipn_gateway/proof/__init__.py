"""The proof: gateways that are killed under traffic, and a count of what was lost or doubled against the books of others."""
