"""The save flow: plan, stage, write, publish."""
