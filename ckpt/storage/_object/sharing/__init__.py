"""Objects of a step that the next one shares: copied by the store itself, without a byte sent."""
