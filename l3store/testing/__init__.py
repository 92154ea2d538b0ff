"""The conformance suite: whoever writes a backend or a naming scheme proves it with this.

Needs the extra ``conformance`` (pytest, hypothesis).

- `l3store.testing.backend.BackendSuite`: subclass it in a test module, give a URL and two helpers,
  run pytest. docs/write-a-backend.md goes through it.
- `l3store.testing.topology`: does a naming scheme ever give two contents one name?
"""
