"""``mooncake://``: pages in the memory of a fleet, by Mooncake's transfer engine.

options   what the URL and the environment say
library   the wheel, loaded quietly
line      a connection that tells at once that the master is gone
client    one guarded client of the library for all stores of this process
memory    addresses, and what was registered
small     marker, lengths and descriptors
pages     multi-buffer reads and writes
admin     the master's admin port: listing
backend   the contract
"""

from l3store.backends.mooncake.backend import MooncakeBackend
from l3store.backends.mooncake.options import MooncakeOptions

__all__ = ["MooncakeBackend", "MooncakeOptions"]
