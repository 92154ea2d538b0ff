"""The conformance suite for backends and naming schemes; see docs/write-a-backend.md."""
