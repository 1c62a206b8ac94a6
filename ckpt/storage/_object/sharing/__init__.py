"""Server-side copies: the store itself copies objects that a step shares with the one before."""
