"""The calls without a manager, in the form in which both faces run them on an engine's loop."""
