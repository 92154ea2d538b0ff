"""The scenario suite of the consensus core: what breaks simpler designs, as tests to inherit."""
