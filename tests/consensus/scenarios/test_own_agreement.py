"""An engine runs the suite over an agreement of its own, the one in the docstring of the suite."""

from __future__ import annotations

import re
from textwrap import dedent

from l3store.testing.consensus import suite

shown = "\n".join(re.findall(r"^(?: {4}.*)?$", suite.__doc__, re.MULTILINE))
names = {"__name__": __name__}
exec(dedent(shown), names)
TestWithBatches = names["TestWithBatches"]
