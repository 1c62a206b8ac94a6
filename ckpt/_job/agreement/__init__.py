"""How the processes of a job agree: operations that they do together, and what ends them."""
