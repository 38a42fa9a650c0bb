"""The long-lived loops of push: one instance at a time loads settled rows and sends them (spec §4.5)."""
