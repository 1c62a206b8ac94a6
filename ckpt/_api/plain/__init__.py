"""The plain calls, generated from the asyncio ones by tests/plain_face.py."""
