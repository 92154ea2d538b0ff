"""Real servers on 127.0.0.1, for tests, benchmarks and a first try: ``l3store dev-server``.

Each starts in a folder of its own, keeps nothing outside it, and ends with the process that
started it. None is meant to serve a fleet.
"""
