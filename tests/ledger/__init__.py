"""The ledger: everything that users can see, each with a test that fails without it.

`ledger.csv` is the table and `surface` reads the same rows from the code; a test compares them.
`python -m tests.ledger` takes each thing away and looks whether its test fails.
"""
