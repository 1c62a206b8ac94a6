"""The restore flow: plan, read, check, place on devices."""
