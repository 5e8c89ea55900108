"""Thin adapters: how an engine's blocks meet the tiers. They hold no cache logic of their own."""
