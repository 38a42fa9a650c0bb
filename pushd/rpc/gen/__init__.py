"""Generated from protos/ by `just protos`; do not edit."""
