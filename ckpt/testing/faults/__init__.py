"""File operations of this process that fail, are short, or wait, and a record of them."""
