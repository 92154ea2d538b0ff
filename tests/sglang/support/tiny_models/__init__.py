"""The one model architecture that the tests serve: importing all of sglang's takes ten seconds."""
