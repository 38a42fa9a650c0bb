"""pushd: a self-hosted backend for end-to-end encrypted messaging whose speciality is push."""

__version__ = "0.1.0"
