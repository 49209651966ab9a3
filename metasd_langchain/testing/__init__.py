"""Shipped test doubles and contracts: tiny models, scripted drafters, suites a new drafter or policy must pass."""
