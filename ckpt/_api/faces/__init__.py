"""What the asyncio face and the plain one need to be the same API twice."""
