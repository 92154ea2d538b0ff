"""L3Store: the storage tier (L3) for the KV cache of LLM inference engines.

Nothing heavy is imported here: ``import l3store`` loads no torch, numpy or rich.
Start with `l3store.registry.open` (a backend that is ready to use) and `l3store.abc`
(the contract that every backend keeps).
"""

__version__ = "0.1.0"
