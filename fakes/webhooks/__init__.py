"""An HTTPS receiver of webhooks that does what it is told to, records what it gets and verifies signatures."""
