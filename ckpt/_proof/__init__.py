"""What a run proves: which contract it is under, that its saves will fit, that steps repeat."""
